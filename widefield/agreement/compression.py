"""Gradients in fewer bytes, and what that leaves out, which the worker adds to its next gradient.

    fp16    halves, of numbers times a power of two by which the largest is near 2^15: exact to 1 in 2,048
    int8    whole numbers from -127 to 127, times the largest number of each block / 127       Dettmers 2016, arXiv:1511.04561
    topk    the largest numbers alone, with their places            Aji and Heafield 2017, arXiv:1704.05021; Stich et al. 2018,
                                                                    arXiv:1809.07599
    error feedback: what was left out is added to the next gradient, so that nothing is lost but later
                                                                    Seide et al. 2014; Karimireddy et al. 2019, arXiv:1901.09847

`pack` makes bytes of a flat tensor and `unpack` numbers of bytes, both on the CPU; `packed_bytes` says how many, from sizes
alone.  What was sent so far and what is left over are together the sum of all gradients, but for rounding.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

EXPONENT = 15
"""Of the power of two below which the largest number lies as a half, which can hold 65,504."""
LEVELS = 127
LEAST_EXPONENT = -100
"""Numbers below 2^-100 are not scaled up further, so that the scale is one of float32 too."""
_SCALE_BYTES = 8
_PLACES = 2**31
"""Numbers up to which a place takes four bytes."""


@dataclass(frozen=True)
class Compression:
    """share: of topk, of the numbers that are sent, one at least.  block: of int8, numbers that have one scale."""

    kind: Literal["fp16", "int8", "topk"]
    share: float = 0.01
    block: int = 1024

    def __post_init__(self) -> None:
        """ValueError: no such kind; a share or a block that is none."""
        if self.kind not in ("fp16", "int8", "topk"):
            raise ValueError(f"a compression of the kind {self.kind!r}; take fp16, int8 or topk")
        if not 0 < self.share <= 1:
            raise ValueError(f"topk that sends a share of {self.share} of the numbers; take one above 0, up to 1, as 0.01")
        if self.block < 1:
            raise ValueError(f"int8 with a scale for each {self.block} numbers; take a block of 1 or more, as 1024")

    def sent(self, numel: int) -> int:
        """How many of so many numbers topk sends.

        >>> Compression("topk", share=0.01).sent(1250)
        13
        """
        return min(numel, max(1, math.ceil(self.share * numel)))


def packed_bytes(numel: int, itemsize: int, options: Compression) -> int:
    """The bytes of `numel` numbers of `itemsize` bytes each once they are packed.

    >>> [packed_bytes(1250, 4, Compression(kind)) for kind in ("fp16", "int8", "topk")]
    [2508, 1258, 104]
    """
    if options.kind == "fp16":
        return 2 * numel + _SCALE_BYTES
    if options.kind == "int8":
        return numel + -(-numel // options.block) * _scale_dtype(itemsize).itemsize
    return options.sent(numel) * (_place_dtype(numel).itemsize + itemsize)


def _scale_dtype(itemsize: int) -> torch.dtype:
    """Of numbers of so many bytes: one in which every quotient of them is."""
    return torch.float64 if itemsize == 8 else torch.float32


def _place_dtype(numel: int) -> torch.dtype:
    return torch.int32 if numel <= _PLACES else torch.int64


def pack(values: Tensor, options: Compression) -> Tensor:
    """(bytes,) of uint8.  values: (P,) of a floating dtype.  ValueError: one is NaN or infinite, which bytes could hide."""
    if not bool(torch.isfinite(values).all()):
        count = int((~torch.isfinite(values)).sum())
        raise ValueError(f"{count:,} of {values.numel():,} numbers are NaN or infinite, and are not compressed")
    return {"fp16": _pack_halves, "int8": _pack_bytes, "topk": _pack_largest}[options.kind](values, options)


def unpack(packed: Tensor, numel: int, dtype: torch.dtype, options: Compression) -> Tensor:
    """(P,) in `dtype`.  numel, dtype: of what was packed.  ValueError: another number of bytes."""
    wanted = packed_bytes(numel, dtype.itemsize, options)
    if packed.numel() != wanted:
        raise ValueError(
            f"{packed.numel():,} bytes for {numel:,} numbers in {dtype} by {options.kind}, which take {wanted:,}; both ends of "
            "a message need the same options"
        )
    return {"fp16": _unpack_halves, "int8": _unpack_bytes, "topk": _unpack_largest}[options.kind](packed, numel, dtype, options)


def _bytes_of(*parts: Tensor) -> Tensor:
    return torch.cat([part.contiguous().view(torch.uint8) for part in parts])


def _read(packed: Tensor, start: int, count: int, dtype: torch.dtype) -> Tensor:
    """`count` numbers from byte `start` on, which need not lie at a multiple of their size."""
    return packed[start : start + count * dtype.itemsize].clone().view(dtype)


def _wide(values: Tensor) -> Tensor:
    """In a dtype in which scales fit."""
    return values if values.element_size() >= 4 else values.float()


def _pack_halves(values: Tensor, options: Compression) -> Tensor:
    largest = float(values.abs().max()) if values.numel() else 0.0
    scale = 2.0 ** (EXPONENT - max(LEAST_EXPONENT, math.frexp(largest)[1]))
    return _bytes_of(torch.tensor([scale], dtype=torch.float64), (_wide(values) * scale).half())


def _unpack_halves(packed: Tensor, numel: int, dtype: torch.dtype, options: Compression) -> Tensor:
    scale = float(_read(packed, 0, 1, torch.float64))
    return (_wide(_read(packed, _SCALE_BYTES, numel, torch.float16).to(dtype)) / scale).to(dtype)


def _pack_bytes(values: Tensor, options: Compression) -> Tensor:
    blocks = -(-values.numel() // options.block)
    wide = values.to(_scale_dtype(values.element_size()))
    padded = torch.nn.functional.pad(wide, (0, blocks * options.block - values.numel())).view(blocks, options.block)
    scales = padded.abs().amax(1) / LEVELS if blocks else padded.new_zeros(0)
    levels = padded / torch.where(scales > 0, scales, 1)[:, None]
    return _bytes_of(scales, levels.round().clamp(-LEVELS, LEVELS).to(torch.int8).flatten()[: values.numel()])


def _unpack_bytes(packed: Tensor, numel: int, dtype: torch.dtype, options: Compression) -> Tensor:
    kind, blocks = _scale_dtype(dtype.itemsize), -(-numel // options.block)
    scales = _read(packed, 0, blocks, kind)
    levels = _read(packed, blocks * kind.itemsize, numel, torch.int8).to(kind)
    return (levels * scales.repeat_interleave(options.block)[:numel]).to(dtype)


def _pack_largest(values: Tensor, options: Compression) -> Tensor:
    places = values.abs().topk(options.sent(values.numel()), sorted=False).indices.sort().values
    return _bytes_of(places.to(_place_dtype(values.numel())), values[places])


def _unpack_largest(packed: Tensor, numel: int, dtype: torch.dtype, options: Compression) -> Tensor:
    count, kind = options.sent(numel), _place_dtype(numel)
    places = _read(packed, 0, count, kind).long()
    return torch.zeros(numel, dtype=dtype).index_copy_(0, places, _read(packed, count * kind.itemsize, count, dtype))


@dataclass
class ErrorFeedback:
    """Of one worker: packs its gradients, and keeps what that leaves out.  left: (P,) in float32 or float64; None at first."""

    options: Compression
    left: Tensor | None = None

    def pack(self, gradient: Tensor) -> tuple[Tensor, Tensor]:
        """(the bytes to send, the numbers that they are).  ValueError: a number is NaN or infinite, and nothing is changed."""
        whole = _wide(gradient) if self.left is None else gradient + self.left
        packed = pack(whole.to(gradient.dtype), self.options)
        sent = unpack(packed, gradient.numel(), gradient.dtype, self.options)
        self.left = whole - sent
        return packed, sent
