"""Resizing, forward and backward: nearest, linear and cubic, with and without antialiasing, by size or by scale factor.

An output pixel reads the pixels around its source; a pixel of the input's gradient reads the output pixels that read it.  Along
a dim on which torch's kernel would give a tile's pixels the weights that they have in the whole, as with integer factors, that
kernel runs on the tile.  Along other dims the sums are computed from the weights.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from widefield.geometry.box import is_empty, size_of
from widefield.geometry.interval import Interval
from widefield.geometry.resize import Resize, Resized
from widefield.private_torch.decompositions import get_decompositions
from widefield.private_torch.dispatcher import dispatch_tls_is_dispatch_key_included
from widefield.private_torch.fake_tensors import is_eager
from widefield.rules import RULES, LocalBoxes, Meta, Read, Tile, Windowed, case, rule
from widefield.tiled.overrides import BELOW, override
from widefield.tiled.tensor import TiledTensor

aten = torch.ops.aten


@dataclass(frozen=True)
class _Side:
    """How torch's kernel is called along one dim: for `count` pixels and with `scale`; the first `skip` are dropped."""

    count: int
    scale: float | None = None
    skip: int = 0


def _resize(kernel: Any, kind: str, image: Meta, size: Sequence[int], align_corners: bool, scales: Sequence[float | None]):
    resizes = _resizes(kind, image.shape[2:], size, align_corners, scales, image)

    def call(tile: Tensor, kernel_size: list[int], kernel_scales: list) -> Tensor:
        return _kernel_for(tile, kernel)(tile, kernel_size, *_align(kind, align_corners), *kernel_scales)

    shape = (*image.shape[:2], *size)
    return _description(image, dict(enumerate(resizes, 2)), shape, call)


def _resize_backward(
    kernel: Any, kind: str, grad: Meta, size: Sequence[int], input_size: Sequence[int], align_corners: bool, scales: Sequence
):
    resizes = _resizes(kind, input_size[2:], size, align_corners, scales, grad)
    if kind.startswith("nearest"):  # torch computes these coordinates in float32 for every dtype
        resizes = [replace(r, single=True) for r in resizes]

    def call(tile: Tensor, kernel_size: list[int], kernel_scales: list) -> Tensor:
        full = [*tile.shape[:2], *kernel_size]
        return kernel(tile, list(tile.shape[2:]), full, *_align(kind, align_corners), *kernel_scales)

    return _description(grad, {2 + n: Resized(r) for n, r in enumerate(resizes)}, tuple(input_size), call)


def _resizes(kind: str, extents, size, align_corners: bool, scales: Sequence[float | None], read: Meta) -> list[Resize]:
    single = read.dtype is not torch.float64
    resizes = [
        Resize(kind, extent, count, scale, align_corners, single)
        for extent, count, scale in zip(extents, size, scales, strict=True)
    ]
    if min(*extents, *size) < 1:
        raise ValueError(
            f"cannot resize {list(extents)} px to {list(size)} px: both must be positive; give a larger image or size"
        )
    if not (read.dtype.is_floating_point or kind.startswith("nearest")) and any(read.cuts[2:]):
        raise NotImplementedError(
            f"resizing tiles of {read.dtype}, which torch rounds in its own way, has no rule; convert them to float"
        )
    odd = next((r for r in resizes if r.is_odd), None)
    if odd is not None and any(read.cuts[2:]):
        raise NotImplementedError(
            f"resizing {odd.extent} px by a factor of {odd.scale} to {odd.count} px is not the same in all of torch's kernels: "
            f"some copy and some resample; leave it out, or give size={odd.count} or recompute_scale_factor=True"
        )
    return resizes


def _kernel_for(tile: Tensor, kernel: Any) -> Callable:
    """Torch's kernel; under a compiler its decomposition, if there is one, which fuses with other operations."""
    return kernel if is_eager(tile) else get_decompositions([kernel]).get(kernel, kernel)


def _align(kind: str, align_corners: bool) -> list[bool]:
    return [] if kind.startswith("nearest") else [align_corners]


def _description(read: Meta, reach: dict[int, Any], shape: tuple[int, ...], call: Callable) -> Windowed:
    """The rule of an operation that maps each dim by a Resize or by the adjoint of one.  call: torch's kernel."""

    def prepare(part: LocalBoxes) -> Callable[[Tensor], Tensor]:
        if is_empty(part.reads[0]):  # the gradient of pixels that no output reads
            return partial(Tensor.new_zeros, size=size_of(part.write))
        pairs = {dim: (part.reads[0][dim], part.write[dim]) for dim in reach}
        sides = {dim: _side(reach[dim], *pairs[dim]) for dim in reach}
        if _resize_of(reach[2]).kind.endswith("-aa") and any(len(at) < 2 for pair in pairs.values() for at in pair):
            sides = dict.fromkeys(reach)  # torch 2.15 confuses the dims of an image that is one pixel wide
        weights = [_Weights(dim, reach[dim], *pairs[dim]) for dim in reach if sides[dim] is None]
        return _ResizeRun(list(sides.values()), weights, call, size_of(part.write))

    return Windowed([Read(read, reach)], [Tile(shape)], prepare, splits=True)


def _resize_of(reach: Resize | Resized) -> Resize:
    return reach.resize if isinstance(reach, Resized) else reach


class _ResizeRun:
    """The local operation: some dims by weights, then all others by one call of torch's kernel."""

    def __init__(self, sides: list[_Side | None], weights: list[_Weights], call: Callable, size: Sequence[int]) -> None:
        self.weights, self.call = weights, call
        self.counts = [None if side is None else side.count for side in sides]
        self.scales = [None if side is None else side.scale for side in sides]
        skips = [0 if side is None else side.skip for side in sides]
        self.at = tuple(slice(skip, skip + n) for skip, n in zip(skips, size[2:], strict=True)) if any(skips) else None
        self.is_weights_only = all(side is None for side in sides)

    def __call__(self, tile: Tensor) -> Tensor:
        dtype = tile.dtype
        if self.weights:
            tile = _weighted(tile, self.weights)
        if not self.is_weights_only:
            size = [n if count is None else count for n, count in zip(tile.shape[2:], self.counts, strict=True)]
            tile = self.call(tile, size, self.scales)
        if self.at is not None:
            tile = tile[(slice(None), slice(None), *self.at)].contiguous(memory_format=_format_of(tile))
        return tile.to(dtype)


def _format_of(tile: Tensor) -> torch.memory_format:
    last = {4: torch.channels_last, 5: torch.channels_last_3d}.get(tile.ndim)
    is_last = last is not None and not tile.is_contiguous() and tile.is_contiguous(memory_format=last)
    return last if is_last else torch.contiguous_format


# ---------------------------------------------------------------------------------------------- by torch's kernel


def _side(reach: Resize | Resized, read: Interval, write: Interval) -> _Side | None:
    """The call of torch's kernel that computes `write` from `read` as in the whole; None where there is none.

    Pixels that read outside of `read` may come out wrong: they are computed again with their halo.
    """
    whole, backward = _resize_of(reach), isinstance(reach, Resized)
    outputs, inputs = (read, write) if backward else (write, read)
    if (len(inputs), len(outputs)) == (whole.extent, whole.count):
        return _Side(len(write), whole.scale)
    if whole.align_corners or whole.step == 0:
        return None
    first = round(read.start * whole.step) if backward else round(read.start / whole.step)
    if not 0 <= write.start - first <= 8 * max(1.0, 1 / whole.step):  # more than any halo would be dropped
        return None
    count, scale = write.stop - first, whole.scale or whole.count / whole.extent
    extents = (count, len(read)) if backward else (len(read), count)
    local = Resize(whole.kind, *extents, scale, False, whole.single)
    found = Resized(local) if backward else local
    if local.is_odd or local.extent == local.count and whole.extent != whole.count:  # torch would copy, not resample
        return None
    if backward and local.is_clamped or not all(local.taps(at)[1] for at in range(local.count)):
        return None  # the tile's kernel would leave a gradient out; or some outputs would read no pixel of the tile
    if all(_is_same(reach, found, at, first, read) for at in write):
        return _Side(count, scale, write.start - first)
    return None


def _is_same(reach: Resize | Resized, local: Resize | Resized, at: int, first: int, read: Interval) -> bool:
    """Whether torch's kernel on the tile gives this output its taps in the whole; True if those lie outside of the tile."""
    start, weights = reach.taps(at)
    if start < read.start or start + len(weights) > read.stop:
        return True
    local_start, found = local.taps(at - first)
    if len(found) != len(weights) or weights and local_start + read.start != start:
        return False
    bound = 1e-5 if _resize_of(reach).single else 1e-11
    return all(abs(a - b) <= bound for a, b in zip(weights, found, strict=False))


# ---------------------------------------------------------------------------------------------- by weights


class _Weights:
    """For each tap and each output along one dim: the pixel of the box that is read, and its weight."""

    def __init__(self, dim: int, reach: Resize | Resized, read: Interval, write: Interval) -> None:
        taps = [reach.taps(at) for at in write]
        most = max(1, *(len(weights) for _, weights in taps)) if taps else 1
        last = max(0, len(read) - 1)
        self.dim, self.shrinks = dim, len(write) <= len(read)
        self.pixels = [[min(max(first + n - read.start, 0), last) for first, _ in taps] for n in range(most)]
        self.numbers = [[weights[n] if n < len(weights) else 0.0 for _, weights in taps] for n in range(most)]
        self.unread = [[n >= len(weights) for _, weights in taps] for n in range(most)]
        self.is_copy = most == 1 and all(number == 1.0 for number in self.numbers[0])
        self.cache: dict[Any, tuple[Tensor, Tensor, list[Tensor | None]]] = {}

    def tensors(self, tile: Tensor) -> tuple[Tensor, Tensor, list[Tensor | None]]:
        """Per tap: the pixels; their weights, shaped to broadcast; and where the tap is unused.  Cached by device and dtype."""
        if (key := (tile.device, tile.dtype)) in self.cache:
            return self.cache[key]
        shape = [-1 if dim == self.dim else 1 for dim in range(tile.ndim)]
        numbers = torch.tensor(self.numbers, device=tile.device, dtype=tile.dtype).view(len(self.numbers), *shape)
        unread = [torch.tensor(taps, device=tile.device).view(shape) if any(taps) else None for taps in self.unread]
        made = torch.tensor(self.pixels, device=tile.device), numbers, unread
        if type(tile) is Tensor and type(numbers) is Tensor:  # not under a compiler
            self.cache[key] = made
        return made

    def __call__(self, tile: Tensor) -> Tensor:
        pixels, numbers, unread = self.tensors(tile)
        if self.is_copy:
            return tile.index_select(self.dim, pixels[0])
        out = None
        for at, weights, nothing in zip(pixels, numbers, unread, strict=True):
            tap = tile.index_select(self.dim, at)
            if nothing is not None:  # 0 * NaN or 0 * inf would spoil the sum
                tap.masked_fill_(nothing, 0)
            out = tap.mul_(weights) if out is None else out.addcmul_(tap, weights)
        return out


def _weighted(tile: Tensor, weights: Sequence[_Weights]) -> Tensor:
    """Along one dim after another, those that shrink first; sums are in float32 at least, as in torch's kernels."""
    memory_format = _format_of(tile)
    if tile.dtype in (torch.float16, torch.bfloat16) and not all(w.is_copy for w in weights):
        tile = tile.float()
    for one in sorted(weights, key=lambda w: not w.shrinks):
        tile = one(tile)
    return tile.contiguous(memory_format=memory_format)


# ---------------------------------------------------------------------------------------------- under a compiler


@torch.library.custom_op("widefield::resize", mutates_args=())
def _resize_whole(image: Tensor, name: str, size: list[int], given: list[bool], scales: list[float] | None) -> Tensor:
    return getattr(aten, name).default(image, size, *_rest(size, given, scales))


@torch.library.custom_op("widefield::resize_backward", mutates_args=())
def _resize_whole_backward(
    grad: Tensor, name: str, size: list[int], input_size: list[int], given: list[bool], scales: list[float] | None
) -> Tensor:
    return getattr(aten, f"{name}_backward").default(grad, size, input_size, *_rest(size, given, scales))


def _rest(size: Sequence[int], given: Sequence[bool], scales: Sequence[float] | None) -> list:
    """The last arguments of torch's operations; given: [align_corners], or [] for operations without it."""
    return [*given, *(scales if scales is not None else [None] * len(size))]


@_resize_whole.register_fake
def _(image, name, size, given, scales):
    return image.new_empty((*image.shape[:2], *size))


@_resize_whole_backward.register_fake
def _(grad, name, size, input_size, given, scales):
    return grad.new_empty(input_size)


def _remember(ctx: Any, inputs: tuple, output: Tensor) -> None:
    image, *ctx.arguments = inputs
    ctx.shape = list(image.shape)


def _resize_gradient(ctx: Any, grad: Tensor) -> tuple:
    name, size, *rest = ctx.arguments
    return torch.ops.widefield.resize_backward(grad, name, size, ctx.shape, *rest), None, None, None, None


_resize_whole.register_autograd(_resize_gradient, setup_context=_remember)


@rule(torch.ops.widefield.resize.default)
def resize(image: Meta, name: str, size, given, scales) -> Windowed:
    return RULES[getattr(aten, name).default](image, size, *_rest(size, given, scales))  # type: ignore[return-value]


@rule(torch.ops.widefield.resize_backward.default)
def resize_backward(grad: Meta, name: str, size, input_size, given, scales) -> Windowed:
    return RULES[getattr(aten, f"{name}_backward").default](grad, size, input_size, *_rest(size, given, scales))  # type: ignore


def _resized(name: str, keys: Any, image: Tensor, size: Sequence[int] | None, *rest: Any) -> Tensor:
    """Torch's resize by size or scale factors.  For tiles under a compiler it becomes one operation of ours: the compiler would
    decompose it into indexing by tensors, which gathers a cut image."""
    compiling = dispatch_tls_is_dispatch_key_included("PythonDispatcher")
    if compiling and type(image) is not TiledTensor:
        return getattr(aten, name).vec.redispatch(keys & BELOW, image, size, *rest)
    *given, scales = rest
    if size is None:
        size = [int(extent * scale) for extent, scale in zip(image.shape[2:], scales, strict=True)]
    if not compiling:  # as torch's own kernel does; torch 2.11 cannot redispatch to that one in inference mode
        return getattr(aten, name).default(image, size, *_rest(size, given, scales))
    return torch.ops.widefield.resize(image, name, size, given, scales)


# ---------------------------------------------------------------------------------------------- registration


def _register(dims: int, kind: str, name: str) -> None:
    """Register the rules of an operation of `dims` image dims and of its backward, if this version of torch has it."""
    if not hasattr(aten, name):
        return
    kernel, back = getattr(aten, name).default, getattr(aten, f"{name}_backward").default
    takes_align = not kind.startswith("nearest")

    def given(rest: tuple) -> tuple[bool, tuple[float | None, ...]]:
        align, scales = (rest[0], rest[1:]) if takes_align else (False, rest)
        return align, (*scales, *[None] * (dims - len(scales)))

    @rule(kernel)
    def forward(image: Meta, output_size, *rest) -> Windowed:
        return _resize(kernel, kind, image, output_size, *given(rest))

    @rule(back)
    def backward(grad: Meta, output_size, input_size, *rest) -> Windowed:
        return _resize_backward(back, kind, grad, output_size, input_size, *given(rest))

    override(f"{name}.vec")(partial(_resized, name))


for _dims, _kind, _name in (
    (1, "nearest", "upsample_nearest1d"), (2, "nearest", "upsample_nearest2d"), (3, "nearest", "upsample_nearest3d"),
    (1, "nearest-exact", "_upsample_nearest_exact1d"), (2, "nearest-exact", "_upsample_nearest_exact2d"),
    (3, "nearest-exact", "_upsample_nearest_exact3d"), (1, "linear", "upsample_linear1d"),
    (2, "linear", "upsample_bilinear2d"), (3, "linear", "upsample_trilinear3d"), (2, "cubic", "upsample_bicubic2d"),
    (2, "linear-aa", "_upsample_bilinear2d_aa"), (2, "cubic-aa", "_upsample_bicubic2d_aa"),
    (2, "lanczos-aa", "_upsample_lanczos2d_aa"),
):  # fmt: skip
    _register(_dims, _kind, _name)


def _last(x: Tensor) -> Tensor:
    return x.to(memory_format=torch.channels_last)


_MODES = (("nearest", {}), ("nearest-exact", {}), ("bilinear", {}), ("bilinear", {"align_corners": True}), ("bicubic", {}))
_MODES += (("bicubic", {"align_corners": True}), ("bilinear", {"antialias": True}), ("bicubic", {"antialias": True}))
if hasattr(aten, "_upsample_lanczos2d_aa"):  # newer than torch 2.11
    _MODES += (("lanczos", {"antialias": True}),)
_TARGETS: tuple[dict, ...] = (
    {"scale_factor": 2}, {"scale_factor": 3}, {"scale_factor": 0.5}, {"scale_factor": 1 / 3}, {"scale_factor": 1.7},
    {"scale_factor": (0.7, 2.3)}, {"scale_factor": 1.7, "recompute_scale_factor": True}, {"size": (37, 41)}, {"size": (5, 4)},
    {"size": (17, 26)}, {"size": (1, 1)},
)  # fmt: skip
CASES = [
    case(f"{mode} {options or ''} {target}", partial(F.interpolate, mode=mode, **options, **target), (2, 3, 17, 13))
    for mode, options in _MODES
    for target in _TARGETS
]
CASES += [
    case(f"{name} {target}", partial(F.interpolate, mode=mode, **target), (2, 3, 19, *[6] * (dims - 1)))
    for dims, modes in ((1, ("nearest", "nearest-exact", "linear")), (3, ("nearest", "nearest-exact", "trilinear")))
    for mode in modes
    for target in ({"scale_factor": 2}, {"scale_factor": 0.4}, {"size": (23, 9, 5)[:dims]})
    for name in [f"{mode} {dims}-D"]
]
CASES += [
    case(
        "trilinear, corners aligned",
        partial(F.interpolate, scale_factor=2, mode="trilinear", align_corners=True),
        (1, 2, 9, 8, 5),
    ),
    case("linear, corners aligned", partial(F.interpolate, size=31, mode="linear", align_corners=True), (2, 2, 13)),
    case(
        "skip", lambda x, y: F.interpolate(x, size=y.shape[2:], mode="bilinear") + y, (2, 3, 9, 7), (2, 3, 17, 14), tiled=(0, 1)
    ),
    case("channels last", lambda x: F.interpolate(_last(x), scale_factor=2, mode="bilinear"), (2, 3, 37, 14)),
    case("channels last, by size", lambda x: F.interpolate(_last(x), size=(40, 40), mode="bilinear"), (2, 3, 37, 14)),
    case("large, x2 bilinear", partial(F.interpolate, scale_factor=2, mode="bilinear"), (1, 2, 66, 40)),
    case("large, x2 bicubic", partial(F.interpolate, scale_factor=2, mode="bicubic"), (1, 2, 66, 66)),
    case("large, half antialiased", partial(F.interpolate, scale_factor=0.5, mode="bicubic", antialias=True), (1, 2, 96, 96)),
    case("large, half bilinear", partial(F.interpolate, scale_factor=0.5, mode="bilinear"), (1, 2, 66, 67)),
    case("bilinear, some pixels unread", partial(F.interpolate, size=(2, 5), mode="bilinear"), (1, 2, 5, 7)),
    case("nearest of integers", lambda x: F.interpolate((9 * x).to(torch.uint8), size=(23, 20)), (1, 2, 17, 13)),
    case(
        "linear of bytes",
        lambda x: F.interpolate((9 * x.abs()).to(torch.uint8), size=(23, 20), mode="bilinear"),
        (1, 2, 17, 13),
        refuses="convert them to float",
    ),
    case("to nothing", partial(F.interpolate, size=(0, 3)), (1, 2, 17, 13), refuses="both must be positive|greater than 0"),
    *(
        case(f"{name} size, another step", partial(F.interpolate, scale_factor=by, mode=m), (1, 2, 17, 13), refuses=f"size={n}")
        for name, by, m, n in (("same", 1.02, "bicubic", 17), ("twice the", 2.05, "nearest", 34))
    ),
]
