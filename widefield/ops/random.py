"""Random numbers on tiles: exactly those that a single device draws.

Every rank draws for the whole tensor and takes its tile.  All ranks' generators have the same state, and draw the same for
tiled, uncut and plain tensors, so they stay in step; each draw checks that, see `tiled/rng.py`.  Numbers are drawn in the order
in which one device's memory would hold the pixels, see `rng.order_of`.

Cost of a draw: one small message, and temporary memory for one tensor of the whole's shape.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from widefield.geometry.layout import Layout
from widefield.private_torch.dispatcher import schema_of
from widefield.private_torch.tensors import base_of, standard_gamma
from widefield.rules import case, composed
from widefield.tiled.redistribute import is_dense, to_layout, whole_of
from widefield.tiled.rng import check_generators, drawn, with_gaps
from widefield.tiled.tensor import TiledTensor, wrap, wrap_uncut

aten = torch.ops.aten


# ---------------------------------------------------------------------------------------------- draws that read no values


def _fill(operation: Any, tensor: TiledTensor, *args: Any, generator: torch.Generator | None = None) -> Tensor:
    """An in-place draw into a tiled tensor."""
    check_generators(tensor, generator)
    if operation is aten.normal_.default and base_of(tensor) is not None and base_of(tensor).numel() != tensor.numel():
        raise NotImplementedError(
            f"normal_ on {list(tensor.shape)} px of {list(base_of(tensor).shape)} px cut into tiles: torch draws other numbers "
            "where memory has gaps, which tiles do not show; write part.copy_(torch.randn_like(part))"
        )
    part = drawn(tensor, lambda whole: operation(whole, *args, generator=generator))
    aten.copy_.default(tensor, wrap(part, tensor.tile_layout))
    return tensor


for _operation in (
    aten.bernoulli_.float, aten.uniform_.default, aten.normal_.default, aten.exponential_.default, aten.geometric_.default,
    aten.cauchy_.default, aten.log_normal_.default, aten.random_.default, getattr(aten.random_, "from"), aten.random_.to,
):  # fmt: skip
    composed(_operation, uncut_too=True)(partial(_fill, _operation))


def _like(operation: Any, tensor: TiledTensor, *args: Any, generator: torch.Generator | None = None, **options: Any) -> Tensor:
    """A draw into a new tensor of the same layout; options: dtype, memory format and the like."""
    check_generators(tensor, generator)
    if generator is not None:
        options["generator"] = generator
    if not tensor.tile_layout.is_cut and tensor.writeback is None:
        return wrap_uncut(operation(tensor.local, *args, **options), tensor.tile_layout.grid)
    part = drawn(tensor, lambda whole: operation(whole, *args, **options))
    return wrap(part.clone(), tensor.tile_layout)


for _operation in (
    aten.rand_like.default, aten.rand_like.generator, aten.randn_like.default, aten.randn_like.generator,
    aten.randint_like.default, aten.randint_like.generator, aten.randint_like.low_dtype, aten.randint_like.low_generator_dtype,
    aten.bernoulli.p, aten.uniform.default, aten.normal_functional.default, aten.exponential.default, aten.geometric.default,
    aten.cauchy.default, aten.log_normal.default,
):  # fmt: skip
    composed(_operation, uncut_too=True)(partial(_like, _operation))


@composed(aten.native_dropout.default, uncut_too=True)
def native_dropout(image: Tensor, p: float, train: bool | None = True) -> tuple[Tensor, Tensor]:
    """Dropout as CUDA implements it: the output, and the mask, by which the backward multiplies."""
    if train is False or p == 0 or image.numel() == 0:
        return image.clone(), torch.ones_like(image, dtype=torch.bool)
    assert type(image) is TiledTensor
    check_generators(image, None)
    if not image.tile_layout.is_cut and image.writeback is None:
        out, mask = aten.native_dropout.default(image.local, p, train)
        return wrap_uncut(out, image.tile_layout.grid), wrap_uncut(mask, image.tile_layout.grid)
    has_gaps = base_of(image) is not None and not is_dense(image)
    mask = drawn(image, lambda whole: aten.native_dropout.default(with_gaps(whole) if has_gaps else whole, p, train)[1]).clone()
    scale = 0.0 if p == 1 else 1 / (1 - p)
    return wrap(image.local * mask * scale, image.tile_layout), wrap(mask, image.tile_layout)


# ---------------------------------------------------------------------------------------------- draws that read values


def _draw_whole(operation: Any, *args: Any, **options: Any) -> Any:
    """A draw whose numbers, or how many there are, depend on the input's values: every rank gathers the input and draws."""
    tiled = [value for value in args if type(value) is TiledTensor]
    check_generators(tiled[0], options.get("generator"))
    layout = next((value.tile_layout for value in tiled if value.tile_layout.is_cut), tiled[0].tile_layout)
    wholes = [whole_of(value) if type(value) is TiledTensor else value for value in args]
    out = operation(*wholes, **options)
    for number, argument in enumerate(schema_of(operation).arguments[: len(args)]):
        if argument.alias_info is not None and argument.alias_info.is_write:
            _write_back(args[number], wholes[number])
    if out is wholes[0]:
        return args[0]
    return _wrapped(out, layout) if isinstance(out, Tensor) else tuple(_wrapped(value, layout) for value in out)


def _write_back(target: Tensor, whole: Tensor) -> None:
    """Copy this rank's tile of what was written to the gathered argument into the argument."""
    if type(target) is TiledTensor and target.local is not whole:
        aten.copy_.default(target, wrap(to_layout(whole, target.tile_layout), target.tile_layout))


def _wrapped(value: Tensor, layout: Layout) -> Tensor:
    if value.shape == layout.shape and layout.is_cut:
        return wrap(to_layout(value, layout).clone(), layout)
    return wrap_uncut(value, layout.grid)


for _operation in (
    aten.bernoulli.default, aten.bernoulli.Tensor, aten.bernoulli_.Tensor, aten.poisson.default, aten.binomial.default,
    aten.normal.Tensor_float, aten.normal.float_Tensor, aten.normal.Tensor_Tensor, aten.multinomial.default,
    aten._standard_gamma.default, aten._sample_dirichlet.default, aten._fused_dropout.default, aten.randint_like.Tensor,
    aten.randint_like.Tensor_generator,
):  # fmt: skip
    composed(_operation, uncut_too=True)(partial(_draw_whole, _operation))


def _rrelu(operation: Any, image: Tensor, noise: Tensor, lower=0.125, upper=1 / 3, training=False, generator=None) -> Any:
    """RReLU: in training it draws a slope for each negative pixel, so how many it draws depends on the pixels."""
    if training:
        return _draw_whole(operation, image, noise, lower, upper, training, generator)
    slope = (lower + upper) / 2
    if operation is aten.rrelu_with_noise_.default:
        return aten.leaky_relu_.default(image, slope)
    out = aten.leaky_relu.default(image, slope)
    return out if operation is aten.rrelu_with_noise.default else (out, noise.clone())


for _operation in (aten.rrelu_with_noise.default, aten.rrelu_with_noise_.default, aten.rrelu_with_noise_functional.default):
    composed(_operation, uncut_too=True)(partial(_rrelu, _operation))


# ---------------------------------------------------------------------------------------------- cases


def _drop_path(x: Tensor) -> Tensor:
    return x * x.new_empty((x.shape[0], 1, 1, 1)).bernoulli_(0.5).div_(0.5)


def _filled(fill: Callable[[Tensor], Any]) -> Callable[[Tensor], Tensor]:
    """Noise from an in-place draw, added to an image."""

    def run(x: Tensor) -> Tensor:
        noise = torch.empty_like(x)
        fill(noise)
        return x + noise

    return run


def _own_generator(x: Tensor) -> Tensor:
    generator = torch.Generator(x.device).manual_seed(7)
    return x + torch.empty_like(x).normal_(generator=generator) + torch.rand_like(x)


def _last(x: Tensor) -> Tensor:
    return x.contiguous(memory_format=torch.channels_last)


def _chance(x: Tensor) -> Tensor:
    return x.detach().sigmoid()


def _dropped_again(x: Tensor, w: Tensor) -> Tensor:
    """Two draws inside an activation checkpoint and one after it."""
    block = lambda x: F.dropout(F.dropout2d(F.conv2d(x, w, padding=1), 0.3), 0.4).square()  # noqa: E731
    return F.dropout(checkpoint(block, x, use_reentrant=False), 0.2)


CASES = [
    case("dropout", lambda x: F.dropout(x, 0.3), (2, 3, 9, 7)),
    case("dropout, not in training", lambda x: F.dropout(x, 0.3, False), (2, 3, 9, 7)),
    case("dropout of everything", lambda x: F.dropout(x, 1.0), (2, 3, 9, 7)),
    case("dropout in place", lambda x: F.dropout(x * 2, 0.3, inplace=True), (2, 3, 9, 7)),
    case("dropout, 1 image dim", lambda x: F.dropout(x, 0.3), (2, 3, 29)),
    case("dropout, 3 image dims", lambda x: F.dropout(x, 0.3), (2, 3, 5, 4, 7)),
    case("dropout, channels last", lambda x: F.dropout(x.contiguous(memory_format=torch.channels_last)), (2, 3, 9, 7)),
    case("dropout, dims in another order", lambda x: F.dropout(x.permute(0, 2, 3, 1)), (2, 3, 9, 7)),
    case("dropout, rows inside", lambda x: F.dropout(x.transpose(1, 2).exp(), 0.3), (2, 3, 9, 7)),
    case("dropout, two rows", lambda x: F.dropout(x), (2, 3, 2, 7)),
    case("dropout, two rows, channels last", lambda x: F.dropout(_last(x)), (2, 3, 2, 7)),
    case(
        "dropout of norms, channels last", lambda x: F.dropout(F.batch_norm(_last(x), None, None, training=True)), (2, 9, 11, 7)
    ),
    case("dropout of shares, channels last", lambda x: F.dropout(_last(x).softmax(2), 0.3), (2, 3, 9, 7)),
    case("dropout of windows", lambda x: F.dropout(x.unfold(2, 3, 2), 0.3), (2, 3, 25, 7)),
    case("dropout of a sum, channels last first", lambda x: F.dropout(_last(x) + x), (2, 3, 9, 7)),
    case("dropout of circular padding", lambda x: F.dropout(F.pad(_last(x), (1, 2, 1, 1), mode="circular")), (2, 3, 9, 7)),
    case("dropout of tokens", lambda x: F.dropout(x.flatten(2).transpose(1, 2), 0.3), (2, 3, 9, 8)),
    case("dropout twice", lambda x: F.dropout(F.dropout(x, 0.3), 0.2), (2, 3, 9, 7)),
    case("dropout1d", lambda x: F.dropout1d(x), (2, 3, 29)),
    case("dropout2d", lambda x: F.dropout2d(x), (2, 3, 9, 7)),
    case("dropout3d", lambda x: F.dropout3d(x), (2, 3, 5, 4, 7)),
    case("alpha dropout", lambda x: F.alpha_dropout(x, 0.3, True), (2, 3, 9, 7)),
    case("feature alpha dropout", lambda x: F.feature_alpha_dropout(x, 0.3, True), (2, 3, 9, 7)),
    case("native dropout", lambda x: torch.native_dropout(x, 0.3, True)[0], (2, 3, 9, 7)),
    case("native dropout, its mask", lambda x: torch.native_dropout(x.detach(), 0.3, True)[1], (2, 3, 9, 7)),
    case("native dropout, not in training", lambda x: torch.native_dropout(x, 0.3, False)[0], (2, 3, 9, 7)),
    case("native dropout of a mean", lambda x: torch.native_dropout(x.mean((2, 3)), 0.3, True)[0], (2, 3, 9, 7)),
    case("dropout of a mean, then of an image", lambda x: F.dropout(x.mean((2, 3), True)) * F.dropout(x), (2, 3, 9, 7)),
    case("dropout in a checkpoint", _dropped_again, (2, 3, 9, 7), (3, 3, 3, 3)),
    case("drop path", _drop_path, (4, 3, 9, 7)),
    case("like", lambda x: x + torch.rand_like(x) * torch.randn_like(x), (2, 3, 9, 7)),
    case("whole numbers", lambda x: x + torch.randint_like(x, 9) + torch.randint_like(x, 2, 7), (2, 3, 9, 7)),
    case("another dtype", lambda x: torch.rand_like(x, dtype=torch.float32), (2, 3, 9, 7)),
    case("normal", _filled(lambda n: n.normal_(1.0, 2.0)), (2, 3, 9, 7)),
    case("uniform", _filled(lambda n: n.uniform_(-1.0, 2.0)), (2, 3, 9, 7)),
    case("exponential", _filled(lambda n: n.exponential_(2.0)), (2, 3, 9, 7)),
    case("geometric", _filled(lambda n: n.geometric_(0.3)), (2, 3, 9, 7)),
    case("cauchy", _filled(lambda n: n.cauchy_()), (2, 3, 9, 7)),
    case("log-normal", _filled(lambda n: n.log_normal_()), (2, 3, 9, 7)),
    case("uniform in a part", lambda x: (n := torch.zeros_like(x), n[:, 1:, ::2].uniform_(), x + n)[-1], (2, 3, 9, 7)),
    case("normal in a part", lambda x: torch.zeros_like(x)[:, :, 2:8].normal_(), (2, 3, 9, 7), refuses="randn_like"),
    case("normal in a turned image", lambda x: (n := torch.zeros_like(x), n.mT.normal_(), x + n)[-1], (2, 3, 9, 7)),
    case("random integers", _filled(lambda n: n.random_(3, 9)), (2, 3, 9, 7)),
    case("bernoulli", lambda x: x + torch.bernoulli(_chance(x)), (2, 3, 9, 7)),
    case("bernoulli of one chance", lambda x: x + torch.bernoulli(x.detach(), 0.4), (2, 3, 9, 7)),
    case("bernoulli in place", lambda x: x + torch.empty_like(x).bernoulli_(_chance(x)), (2, 3, 9, 7)),
    case("poisson", lambda x: x + torch.poisson(_chance(x)), (2, 3, 9, 7)),
    case("binomial", lambda x: x + torch.binomial(torch.full_like(x, 5.0), _chance(x)), (2, 3, 9, 7)),
    case("normal around pixels", lambda x: torch.normal(x, 1.0) + torch.normal(x, _chance(x)), (2, 3, 9, 7)),
    case("Gamma around pixels", lambda x: standard_gamma(x.abs() + 0.5), (2, 3, 9, 7)),
    case("multinomial", lambda x: torch.multinomial(_chance(x), 3), (4, 9)),
    case("gumbel softmax", lambda x: F.gumbel_softmax(x, dim=1), (2, 3, 9, 7)),
    case("rrelu", lambda x: F.rrelu(x, training=True), (2, 3, 9, 7)),
    case("rrelu, not in training", lambda x: F.rrelu(x), (2, 3, 9, 7)),
    case("rrelu in place", lambda x: F.rrelu(x * 2, training=True, inplace=True), (2, 3, 9, 7)),
    case("a generator of one's own", _own_generator, (2, 3, 9, 7)),
]
