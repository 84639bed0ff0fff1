"""Padding, forward and backward: constant, reflect, replicate and circular.

Only tiles at the border of the whole get padding.  The output's cuts are the input's, shifted.  A negative side crops.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from widefield.geometry.box import Box, full_box, is_empty, size_of
from widefield.geometry.interval import Interval
from widefield.geometry.layout import Cut, Cuts
from widefield.geometry.window import Adjoint, Border, Shift, border
from widefield.rules import LocalBoxes, Meta, Read, Run, Tile, Windowed, case, rule
from widefield.tiled.overrides import BELOW, override
from widefield.tiled.tensor import TiledTensor

aten = torch.ops.aten

Sides = dict[int, tuple[int, int]]
"""The pixels to add before and after, for each dim that is padded."""


def _sides(image: Meta, pad: Sequence[int]) -> Sides:
    """F.pad's argument, which lists the last dim first, by dim.  ValueError: a dim would have fewer than no pixels."""
    pairs = {image.ndim - 1 - n: (pad[2 * n], pad[2 * n + 1]) for n in range(len(pad) // 2)}
    sides = {dim: pair for dim, pair in pairs.items() if pair != (0, 0)}
    for dim, (before, after) in sides.items():
        if image.shape[dim] + before + after < 0:
            raise ValueError(
                f"padding by ({before}, {after}) px leaves less than nothing of {image.shape[dim]} px of dim {dim}"
            )
    return sides


def _padded(shape: Sequence[int], sides: Sides) -> tuple[int, ...]:
    return tuple(extent + sum(sides.get(dim, (0, 0))) for dim, extent in enumerate(shape))


def _argument(pairs: Sequence[tuple[int, int]]) -> list[int]:
    """F.pad's argument, which lists the last dim first, from pairs in the order of dims."""
    return [number for pair in reversed(pairs) for number in pair]


# ---------------------------------------------------------------------------------------------- constant


@rule(aten.constant_pad_nd.default)
def constant_pad(image: Meta, pad, value=0) -> Windowed:
    """Torch's backward of it is the same operation with negated sides."""
    sides = _sides(image, pad)
    shape = _padded(image.shape, sides)

    def prepare(part: LocalBoxes) -> Run:
        read, write = part.reads[0], part.write
        if is_empty(read):
            return lambda tile: tile.new_full(size_of(write), value)
        pairs = []
        for dim, (tile, to) in enumerate(zip(read, write, strict=True)):
            before = sides.get(dim, (0, 0))[0]
            pairs.append((tile.start + before - to.start, to.stop - tile.stop - before))
        pads = _argument(pairs)
        return lambda tile: aten.constant_pad_nd.default(tile, pads, value)  # new memory, even where there is nothing to pad

    reach = {dim: Shift(-before, shape[dim]) for dim, (before, _) in sides.items()}
    return Windowed([Read(image, reach)], [Tile(shape)], prepare)


# ---------------------------------------------------------------------------------------------- reflection, replication


def _borders(image: Meta, pad: Sequence[int], kind: str) -> dict[int, Border]:
    sides = _sides(image, pad)
    most = {"reflect": -1, "replicate": None, "circular": 0}[kind]
    for dim, (before, after) in sides.items():
        extent = image.shape[dim]
        if extent < 1 or (most is not None and max(before, after) > extent + most):
            raise ValueError(
                f"{kind} padding by ({before}, {after}) px reaches beyond dim {dim}, {extent} px long; it may have at most "
                f"{max(0, extent + (most or 0))} px per side; use a larger image or less padding"
            )
        if min(before, after) <= -extent:  # what is left would consist of padding alone
            raise NotImplementedError(
                f"{kind} padding by ({before}, {after}) px cuts away all {extent} px of dim {dim}; take the edge by a slice"
            )
    return {dim: border(kind, extent=image.shape[dim], before=b, after=a) for dim, (b, a) in sides.items()}


def _mirror_pad(kind: str, pad_of: Any, image: Meta, padding) -> Windowed:
    """The rule of reflection_pad and replication_pad: by torch's operation where padding the tile alone gives the output."""
    borders = _borders(image, padding, kind)
    lead = image.ndim - len(padding) // 2

    def prepare(part: LocalBoxes) -> Run:
        read, write = part.reads[0], part.write
        pads = _own_pads(borders, kind, read, write)
        if pads is None:
            return partial(_filled, borders=borders, read=read, write=write)
        if not any(any(pair) for pair in pads):
            return torch.clone
        numbers = _argument(pads[lead:])
        return lambda tile: pad_of(tile, numbers)

    shape = _padded(image.shape, _sides(image, padding))
    return Windowed([Read(image, borders)], [Tile(shape)], prepare)


def _own_pads(borders: dict[int, Border], kind: str, read: Box, write: Box) -> list[tuple[int, int]] | None:
    """Per dim, the padding of the tile alone that gives the output; None where no padding does."""
    pads = []
    for dim, (tile, to) in enumerate(zip(read, write, strict=True)):
        before = borders[dim].before if dim in borders else 0
        pair = (tile.start + before - to.start, to.stop - before - tile.stop)
        most = len(tile) - 1 if kind == "reflect" else max(pair)
        if dim in borders and (min(pair) < 0 or max(pair) > most or not _is_body(borders[dim], tile, to)):
            return None
        pads.append(pair)
    return pads


def _is_body(of_dim: Border, tile: Interval, to: Interval) -> bool:
    """Whether the tile's pixels `tile` are exactly those that the output `to` has unpadded, so padding reads among them."""
    body = next((run for run in of_dim.runs if run.step == 1), None)
    return body is not None and len(tile) > 0 and body.input_read_by(to) == tile


def _filled(tile: Tensor, borders: dict[int, Border], read: Box, write: Box) -> Tensor:
    """The output box `write` from the box `read`, one dim after another, joined from its runs."""
    for dim, of_dim in borders.items():
        parts = []
        for run in of_dim.runs:
            pixels = run.input_read_by(write[dim])
            if len(pixels):
                part = tile.narrow(dim, pixels.start - read[dim].start, len(pixels))
                parts.append(_in_output_order(part, dim, run.step, len(run.output & write[dim])))
        tile = torch.cat(parts, dim)
    return tile


def _in_output_order(part: Tensor, dim: int, step: int, count: int) -> Tensor:
    """The pixels of a run in the output's order: reversed for step -1, repeated for step 0."""
    if step == 0:
        return part.expand(*part.shape[:dim], count, *part.shape[dim + 1 :])
    return part.flip(dim) if step < 0 else part


def _mirror_pad_backward(kind: str, backward_of: Any, grad: Meta, image: Meta, padding) -> Windowed:
    borders = _borders(image, padding, kind)
    lead = image.ndim - len(padding) // 2

    def prepare(part: LocalBoxes) -> Run:
        read, write = part.reads[0], part.write
        pads = _own_pads_back(borders, kind, image.shape, read, write)
        if pads is None:
            return lambda grad, tile: _gradient_of(grad, borders, read, write)
        if not any(any(pair) for pair in pads):
            return lambda grad, tile: grad.clone()
        numbers = _argument(pads[lead:])
        return lambda grad, tile: backward_of(grad, tile, numbers)

    reach = {dim: Adjoint(of_dim, image.shape[dim]) for dim, of_dim in borders.items()}
    return Windowed([Read(grad, reach), Read(image)], [Tile(image.shape, image.cuts)], prepare)


def _own_pads_back(borders: dict[int, Border], kind: str, shape, read: Box, write: Box) -> list[tuple[int, int]] | None:
    """Per dim, the padding of the tile alone whose output is exactly the gradient's box; None where there is none."""
    pads = []
    for dim, (tile, to) in enumerate(zip(read, write, strict=True)):
        if dim not in borders:
            pads.append((0, 0))
            continue
        before = borders[dim].before
        after = borders[dim].count - shape[dim] - before
        pair = (before if to.start == 0 else 0, after if to.stop == shape[dim] else 0)
        expected = Interval(to.start + before - pair[0], to.stop + before + pair[1])
        most = len(to) - 1 if kind == "reflect" else max(pair)
        if tile != expected or min(pair) < 0 or max(pair) > most or len(to) == 0:
            return None
        pads.append(pair)
    return pads


def _gradient_of(grad: Tensor, borders: dict[int, Border], read: Box, write: Box) -> Tensor:
    """The gradient of the box `write`: one dim after another, the runs' gradients are added to the pixels they read."""
    for dim, of_dim in borders.items():
        size = list(grad.shape)
        size[dim] = len(write[dim])
        out = grad.new_zeros(size)
        for run in of_dim.runs:
            outputs = run.output_reading(write[dim])
            if len(outputs):
                part = grad.narrow(dim, outputs.start - read[dim].start, len(outputs))
                _add_back(out, part, dim, run.step, run.input_read_by(outputs), write[dim])
        grad = out
    return grad


def _add_back(out: Tensor, part: Tensor, dim: int, step: int, pixels: Interval, write: Interval) -> None:
    """Add the gradient of a run's outputs to the pixels that they read."""
    part = part.sum(dim, keepdim=True) if step == 0 else part.flip(dim) if step < 0 else part
    out.narrow(dim, pixels.start - write.start, len(pixels)).add_(part)


for _dims in (1, 2, 3):
    for _kind, _name in (("reflect", "reflection_pad"), ("replicate", "replication_pad")):
        _pad = getattr(aten, f"{_name}{_dims}d").default
        _back = getattr(aten, f"{_name}{_dims}d_backward").default
        rule(_pad)(partial(_mirror_pad, _kind, _pad))
        rule(_back)(partial(_mirror_pad_backward, _kind, _back))


# ---------------------------------------------------------------------------------------------- circular


@torch.library.custom_op("widefield::circular_pad", mutates_args=())
def _circular_pad(image: Tensor, dim: int, before: int, after: int) -> Tensor:
    of_dim = border("circular", extent=image.shape[dim], before=before, after=after)
    return _filled(image, {dim: of_dim}, full_box(image.shape), full_box(_padded(image.shape, {dim: (before, after)})))


@torch.library.custom_op("widefield::circular_pad_backward", mutates_args=())
def _circular_pad_backward(grad: Tensor, dim: int, before: int, after: int) -> Tensor:
    shape = _padded(grad.shape, {dim: (-before, -after)})
    of_dim = border("circular", extent=shape[dim], before=before, after=after)
    return _gradient_of(grad, {dim: of_dim}, full_box(grad.shape), full_box(shape))


@_circular_pad.register_fake
def _(image, dim, before, after):
    return image.new_empty(_padded(image.shape, {dim: (before, after)}))


@_circular_pad_backward.register_fake
def _(grad, dim, before, after):
    return grad.new_empty(_padded(grad.shape, {dim: (-before, -after)}))


def _remember(ctx: Any, inputs: tuple, output: Tensor) -> None:
    ctx.sides = inputs[1:]


_circular_pad.register_autograd(
    lambda ctx, grad: (torch.ops.widefield.circular_pad_backward(grad, *ctx.sides), None, None, None), setup_context=_remember
)
_circular_pad_backward.register_autograd(  # each is the other's adjoint
    lambda ctx, grad: (torch.ops.widefield.circular_pad(grad, *ctx.sides), None, None, None), setup_context=_remember
)


@rule(torch.ops.widefield.circular_pad.default)
def circular_pad(image: Meta, dim: int, before: int, after: int) -> Windowed:
    """Pads one dim.  Each run is a read of its own, for one interval that contains both ends would be the whole dim."""
    of_dim = border("circular", extent=image.shape[dim], before=before, after=after)
    shape = _padded(image.shape, {dim: (before, after)})
    reads = [Read(image, {dim: run}) for run in of_dim.runs]

    def prepare(part: LocalBoxes) -> Run:
        used = [n for n, box in enumerate(part.reads) if not is_empty(box)]
        return lambda *tiles: torch.cat([tiles[n] for n in used], dim).contiguous()  # row-major, as torch's result always is

    return Windowed(reads, [Tile(shape, _shifted(image, dim, of_dim.cut_of))], prepare)


@rule(torch.ops.widefield.circular_pad_backward.default)
def circular_pad_backward(grad: Meta, dim: int, before: int, after: int) -> Windowed:
    shape = _padded(grad.shape, {dim: (-before, -after)})
    of_dim = border("circular", extent=shape[dim], before=before, after=after)

    def prepare(part: LocalBoxes) -> Run:
        write, size = part.write[dim], size_of(part.write)
        used = []
        for n, run in enumerate(of_dim.runs):
            outputs = run.output_reading(write)
            if len(outputs):
                used.append((n, run.input_read_by(outputs)))

        def add(*grads: Tensor) -> Tensor:
            out = grads[0].new_zeros(size)
            for n, pixels in used:
                _add_back(out, grads[n], dim, 1, pixels, write)
            return out

        return add

    reads = [Read(grad, {dim: Adjoint(run, shape[dim])}) for run in of_dim.runs]
    return Windowed(reads, [Tile(shape, _shifted(grad, dim, Shift(before, shape[dim]).cut_of))], prepare)


def _shifted(meta: Meta, dim: int, cut_of: Any) -> Cuts:
    """The cuts of the output: the tensor's, on `dim` mapped by `cut_of`."""
    cuts = list(meta.cuts)
    cut = cuts[dim]
    cuts[dim] = None if cut is None else Cut(cut.axes, cut_of(cut.bounds))
    return tuple(cuts)


@override("_pad_circular")
def _circular(keys: Any, image: Tensor, pad: Sequence[int]) -> Tensor:
    """Torch's `_pad_circular`, on tiles by the operation above: torch's writes slices of an empty tensor in place."""
    if type(image) is not TiledTensor:
        return aten._pad_circular.default.redispatch(keys & BELOW, image, pad)
    sides = _sides(Meta(tuple(image.shape), image.dtype, None, 0), pad)
    for dim, (before, after) in sides.items():  # crops come first, as in torch
        crop = max(-before, 0), max(-after, 0)
        if any(crop):
            image = image.narrow(dim, crop[0], max(0, image.shape[dim] - sum(crop)))
    _borders(Meta(tuple(image.shape), image.dtype, None, 0), [max(side, 0) for side in pad], "circular")
    out: Tensor = image
    for dim, (before, after) in sides.items():
        out = torch.ops.widefield.circular_pad(out, dim, max(before, 0), max(after, 0))
    return out if sides else image.clone(memory_format=torch.contiguous_format)


# ---------------------------------------------------------------------------------------------- cases


def _pad_case(name: str, pad: tuple[int, ...], mode: str, shape: tuple[int, ...]):
    return case(name, lambda x: F.pad(x, pad, mode=mode), shape)


def _conv_case(mode: str, padding=(1, 2), stride: int = 1):
    def run(x: Tensor, weight: Tensor) -> Tensor:
        layer = nn.Conv2d(3, 4, tuple(weight.shape[2:]), stride=stride, padding=padding, padding_mode=mode, bias=False)
        return torch.func.functional_call(layer, {"weight": weight}, (x,))

    size = (2 * padding[0] + 1, 2 * padding[1] + 1) if padding != "same" else (3, 4)
    return case(f"convolution with {mode} padding {padding}, stride {stride}", run, (2, 3, 17, 14), (4, 3, *size))


CASES = [
    case(
        "replicate, all of a dim cut away",
        lambda x: F.pad(x, (-4, 3, 2, 1), mode="replicate"),
        (1, 4, 5, 3),
        refuses="cuts away all 3 px of dim 3",
    ),
    case("constant", lambda x: F.pad(x, (1, 2, 3, 4), value=2.5), (2, 3, 17, 13)),
    case("constant, zero, one dim", lambda x: F.pad(x, (2, 0)), (2, 3, 17, 13)),
    case("constant crops", lambda x: F.pad(x, (-1, -2, -3, -4)), (2, 3, 17, 13)),
    case("constant crops and pads", lambda x: F.pad(x, (1, -2, -6, 4), value=-1.0), (2, 3, 17, 13)),
    case("constant crops more than a tile", lambda x: F.pad(x, (0, 0, -12, 1)), (2, 3, 17, 13)),
    case("constant, more than the image", lambda x: F.pad(x, (15, 0, 30, 20)), (2, 3, 9, 13)),
    case("constant, channels and batch", lambda x: F.pad(x, (0, 0, 1, 1, 2, -1, 1, 0), value=1.0), (2, 3, 17, 13)),
    case("constant, nothing", lambda x: F.pad(x, (0, 0, 0, 0)).mul_(2), (2, 3, 17, 13)),
    case("constant 1-D", lambda x: F.pad(x, (3, 1), value=1.0), (2, 3, 17)),
    case("constant 3-D", lambda x: F.pad(x, (1, 1, 0, 2, 3, -1)), (2, 3, 9, 8, 7)),
    case("ZeroPad2d", lambda x: nn.ZeroPad2d((1, 0, 1, 0))(x), (2, 3, 17, 13)),
    case("ConstantPad3d", lambda x: nn.ConstantPad3d(2, 3.5)(x), (1, 2, 9, 8, 7)),
    case("padded before a stride", lambda x, w: F.conv2d(F.pad(x, (0, 1, 0, 1)), w, stride=2), (2, 3, 18, 13), (4, 3, 3, 3)),
    case("crops all", lambda x: F.pad(x, (0, 0, -9, -9)), (2, 3, 17, 13), refuses="(?i)less than nothing|negative"),
    _pad_case("reflect", (1, 2, 3, 4), "reflect", (2, 3, 17, 13)),
    _pad_case("reflect, as far as it goes", (12, 12, 16, 16), "reflect", (2, 3, 17, 13)),
    _pad_case("reflect beyond a tile", (0, 0, 11, 0), "reflect", (2, 3, 17, 13)),
    _pad_case("reflect crops", (1, -2, -3, 4), "reflect", (2, 3, 17, 13)),
    _pad_case("reflect without batch", (1, 2, 3, 4), "reflect", (3, 17, 13)),
    _pad_case("reflect 1-D", (5, 2), "reflect", (2, 3, 17)),
    _pad_case("reflect 3-D", (1, 2, 3, 1, 2, 2), "reflect", (1, 2, 9, 8, 7)),
    case("reflect too far", lambda x: F.pad(x, (0, 0, 17, 0), mode="reflect"), (2, 3, 17, 13), refuses="beyond"),
    case("replicate of nothing", lambda x: F.pad(x[:, :, :0], (0, 0, 1, 1), mode="replicate"), (2, 3, 17, 9), refuses="beyond"),
    _pad_case("replicate", (1, 2, 3, 4), "replicate", (2, 3, 17, 13)),
    _pad_case("replicate, more than the image", (15, 2, 20, 31), "replicate", (2, 3, 17, 13)),
    _pad_case("replicate crops", (1, -2, -3, 4), "replicate", (2, 3, 17, 13)),
    _pad_case("replicate crops more than a tile", (0, 0, -11, 4), "replicate", (2, 3, 17, 13)),
    _pad_case("replicate 1-D", (5, 2), "replicate", (2, 3, 17)),
    _pad_case("replicate 3-D", (1, 2, 3, 1, 2, 2), "replicate", (1, 2, 9, 8, 7)),
    _pad_case("circular", (1, 2, 3, 4), "circular", (2, 3, 17, 13)),
    _pad_case("circular, as far as it goes", (13, 13, 17, 17), "circular", (2, 3, 17, 13)),
    _pad_case("circular crops", (1, -2, -3, 4), "circular", (2, 3, 17, 13)),
    _pad_case("circular without batch", (1, 2, 3, 4), "circular", (3, 17, 13)),
    _pad_case("circular 1-D", (5, 2), "circular", (2, 3, 17)),
    _pad_case("circular 3-D", (1, 2, 3, 1, 2, 2), "circular", (1, 2, 9, 8, 7)),
    case("circular, nothing", lambda x: F.pad(x, (0, 0, 0, 0), mode="circular").mul_(2), (2, 3, 17, 13)),
    case("circular too far", lambda x: F.pad(x, (0, 0, 18, 0), mode="circular"), (2, 3, 17, 13), refuses="beyond"),
    *(_conv_case(mode) for mode in ("zeros", "reflect", "replicate", "circular")),
    *(_conv_case(mode, stride=2) for mode in ("reflect", "replicate", "circular")),
    *(_conv_case(mode, padding="same") for mode in ("reflect", "circular")),
]
