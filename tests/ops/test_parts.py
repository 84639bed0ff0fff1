"""Reductions tile after tile, each tile in a turn of its own: do autograd's gradients through the parts equal the whole's?"""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from parts import Bounds, Call, Given, call, gradients, on_the_whole, tensors_for, tile_after_tile, turn_of
from torch import Tensor

from widefield.tiled.dispatch import load_rules

load_rules()
aten = torch.ops.aten
MEAN, SUM = 1, 2
HEIGHT, WIDTH = 11, 7
CUTS = {
    "3 uneven": ((0, 2, 9, HEIGHT),),
    "3, one empty": ((0, 5, 5, HEIGHT),),
    "2 x 2": ((0, 3, HEIGHT), (0, 5, WIDTH)),
}
"""Bounds of the tiles along rows, or rows and columns; never even, so that a mean of means is wrong."""


def image(made: Callable[[Tensor], Tensor] = Tensor.clone, *lead: int, has_grad: bool = True) -> Given:
    return Given((*(lead or (2, 3)), HEIGHT, WIDTH), is_cut=True, has_grad=has_grad, made=made)


def weight(*shape: int) -> Given:
    return Given(shape or (3,), has_grad=True)


def masked_tile(x: Tensor) -> Tensor:
    """-inf in the first two rows, which are a tile, and some others."""
    return x.masked_fill(torch.arange(HEIGHT).view(-1, 1) % 5 < 2, -math.inf)


def infinite(x: Tensor) -> Tensor:
    return x.abs().log() * math.inf


def blank_tile(x: Tensor) -> Tensor:
    """Zeros in the first rows of one channel, all of a tile, and all over another."""
    x = x.clone()
    x[:, 0, :3] = 0
    x[:, 1] = 0
    return x


def two_zeros(x: Tensor) -> Tensor:
    """One zero in one column, two in another, in different tiles and in the same."""
    x = x.clone()
    x[:, 0, 1, 0] = x[:, 0, [1, 10], 1] = x[:, 0, [4, 5], 2] = 0
    return x


def channels_last(x: Tensor) -> Tensor:
    return x.contiguous(memory_format=torch.channels_last)


def far(x: Tensor) -> Tensor:
    return x * 0.01 + 100


def chance(x: Tensor) -> Tensor:
    return x.sigmoid()


def sign(x: Tensor) -> Tensor:
    return x.sign()


def classes(x: Tensor) -> Tensor:
    """Class numbers below 3; some pixels are 255, to be ignored."""
    found = (x * 7).abs().long() % 4
    return found.masked_fill(found == 3, 255)


X, COARSE, FROZEN, SIGNS = image(), image(lambda x: x.round().clamp(-1, 1)), image(has_grad=False), image(sign, has_grad=False)
W, B, AREA = weight(), weight(), weight(HEIGHT, WIDTH)
R, V = Given((3,)), Given((3,), made=Tensor.exp)
CLASSES = Given((2, HEIGHT, WIDTH), is_cut=True, made=classes)
CLASS_WEIGHTS = Given((3,), made=Tensor.exp)
BATCH, FUNCTIONAL = aten._native_batch_norm_legit.default, aten._native_batch_norm_legit_functional.default

CALLS = [
    call("batch norm", BATCH, X, W, B, R, V, True, 0.3, 1e-5),
    call("batch norm, older", aten.native_batch_norm.default, X, W, B, R, V, True, 0.3, 1e-5),
    call("batch norm, functional", FUNCTIONAL, X, W, B, R, V, True, 0.3, 1e-5),
    call("batch norm with update", aten._batch_norm_with_update.default, X, W, B, R, V, 0.3, 1e-5),
    call("batch norm with update, functional", aten._batch_norm_with_update_functional.default, X, W, B, R, V, 0.3, 1e-5),
    call("batch norm without affine", FUNCTIONAL, X, None, None, R, V, True, 0.3, 1e-5),
    call("batch norm, bias alone", FUNCTIONAL, X, None, B, R, V, True, 0.3, 1e-5),
    call("batch norm, weight alone", FUNCTIONAL, X, W, None, R, V, True, 0.3, 1e-5),
    call("batch norm without running statistics", aten._native_batch_norm_legit.no_stats, X, W, B, True, 0.3, 0.1),
    call("batch norm without updates", aten._native_batch_norm_legit.no_stats, FROZEN, W, B, True, 0.3, 0.1),
    call("batch norm far from zero", FUNCTIONAL, image(far), W, B, R, V, True, 0.3, 1e-5),
    call("batch norm, channels last", FUNCTIONAL, image(channels_last), W, B, R, V, True, 0.3, 1e-5),
    call("batch norm 3-D", FUNCTIONAL, image(Tensor.clone, 2, 3, 4), W, B, R, V, True, 0.3, 1e-5),
    call("batch norm in evaluation", FUNCTIONAL, X, W, B, R, V, False, 0.3, 1e-5),
    call("batch norm, no update", aten._batch_norm_no_update.default, X, W, B, R, V, 0.3, 1e-5),
    call("group norm", aten.native_group_norm.default, image(Tensor.clone, 2, 6), weight(6), weight(6), 2, 6, 77, 3, 1e-5),
    call("group norm in one group", aten.native_group_norm.default, X, W, B, 2, 3, 77, 1, 1e-5),
    call("group norm of single channels", aten.native_group_norm.default, X, W, B, 2, 3, 77, 3, 1e-5),
    call("group norm without affine", aten.native_group_norm.default, X, None, None, 2, 3, 77, 1, 1e-5),
    call("group norm, bias alone", aten.native_group_norm.default, X, None, B, 2, 3, 77, 1, 1e-5),
    call("group norm, image without gradient", aten.native_group_norm.default, FROZEN, W, B, 2, 3, 77, 1, 1e-5),
    call("group norm, channels last", aten.native_group_norm.default, image(channels_last), W, B, 2, 3, 77, 1, 1e-5),
    call("layer norm over pixels", aten.native_layer_norm.default, X, [HEIGHT, WIDTH], AREA, AREA, 1e-5),
    call("layer norm over all", aten.native_layer_norm.default, X, [3, HEIGHT, WIDTH], *[weight(3, HEIGHT, WIDTH)] * 2, 1e-5),
    call("layer norm without affine", aten.native_layer_norm.default, X, [HEIGHT, WIDTH], None, None, 1e-5),
    call("layer norm, weight alone", aten.native_layer_norm.default, X, [HEIGHT, WIDTH], AREA, None, 1e-5),
    call("layer norm, bias alone", aten.native_layer_norm.default, X, [HEIGHT, WIDTH], None, AREA, 1e-5),
    call("layer norm, image without gradient", aten.native_layer_norm.default, FROZEN, [HEIGHT, WIDTH], AREA, AREA, 1e-5),
    call("layer norm of columns", aten.native_layer_norm.default, X, [WIDTH], weight(WIDTH), weight(WIDTH), 1e-5),
    call("RMS norm", aten._fused_rms_norm.default, X, [HEIGHT, WIDTH], AREA, 0.1),
    call("softmax", aten._softmax.default, X, 2, False),
    call("log softmax", aten._log_softmax.default, X, 2, False),
    call("softmax where a tile is masked", aten._softmax.default, image(masked_tile), 2, False),
    call("softmax of great numbers", aten._softmax.default, image(lambda x: x * 1e3), 2, False),
    call("softmax backward", aten._softmax_backward_data.default, X, image(chance), 2, torch.float64),
    call("log softmax backward", aten._log_softmax_backward_data.default, X, X, 2, torch.float64),
    call("logsumexp", aten.logsumexp.default, X, [2, 3]),
    call("logsumexp, kept", aten.logsumexp.default, X, [0, 2], True),
    call("logsumexp where a tile is masked", aten.logsumexp.default, image(masked_tile), [2]),
    call("logsumexp of infinite numbers", aten.logsumexp.default, image(infinite, has_grad=False), [2]),
    call("sum", aten.sum.default, X),
    call("sum over rows", aten.sum.dim_IntList, X, [2]),
    call("sum over samples and rows, kept", aten.sum.dim_IntList, X, [0, 2], True),
    call("sum in float32", aten.sum.dim_IntList, COARSE, [2, 3], dtype=torch.float32),
    call("sum in half precision", aten.sum.dim_IntList, image(lambda x: x.round().half()), [2, 3]),
    call("mean", aten.mean.default, X),
    call("mean over pixels", aten.mean.dim, X, [2, 3], True),
    call("nansum", aten.nansum.default, image(lambda x: x.masked_fill(x > 1, math.nan)), [2, 3]),
    call("count_nonzero", aten.count_nonzero.dim_IntList, image(torch.relu), [2]),
    call("any", aten.any.dim, image(lambda x: x > 2, has_grad=False), 2),
    call("all", aten.all.default, image(lambda x: x > -9, has_grad=False)),
    call("var", aten.var.correction, X, [2, 3], correction=1),
    call("var of all, correction 2", aten.var.correction, X, None, correction=2),
    call("var far from zero", aten.var.correction, image(far), [2, 3], correction=0),
    call("std", aten.std.correction, X, [2], correction=0, keepdim=True),
    call("std of equal pixels", aten.std.correction, image(blank_tile), [2, 3], correction=1),
    call("var_mean", aten.var_mean.correction, X, [2, 3], correction=0),
    call("std_mean", aten.std_mean.correction, X, [0, 2, 3], correction=1, keepdim=True),
    *(call(f"norm {p}", aten.linalg_vector_norm.default, X, p, [2, 3]) for p in (0, 0.5, 1, 2, 3, -2)),
    *(call(f"norm {p} with zeros", aten.linalg_vector_norm.default, image(blank_tile), p, [2, 3]) for p in (0.5, 1, 2, 3, -2)),
    call("older norm", aten.norm.ScalarOpt_dim, X, 2, [2], True),
    call("product", aten.prod.default, image(lambda x: x.exp())),
    call("product over rows", aten.prod.dim_int, X, 2),
    call("product with zeros", aten.prod.dim_int, image(two_zeros), 2),
    call("max along rows", aten.max.dim, X, 2),
    call("max of equal ones", aten.max.dim, COARSE, 2, True),
    call("min of equal ones", aten.min.dim, COARSE, 2),
    call("max with a missing value", aten.max.dim, image(lambda x: x.masked_fill(x > 1.5, math.nan)), 2),
    call("place of the largest", aten.argmax.default, COARSE),
    call("place of the least along rows", aten.argmin.default, COARSE, 2, True),
    call("adaptive average to 1", aten._adaptive_avg_pool2d.default, X, [1, 1]),
    call("adaptive average to 3 x 2", aten._adaptive_avg_pool2d.default, X, [3, 2]),
    call("adaptive max to 1", aten.adaptive_max_pool2d.default, X, [1, 1]),
    call("adaptive max of equal ones", aten.adaptive_max_pool2d.default, COARSE, [2, 1]),
    *(call(f"squared error, {r}", aten.mse_loss.default, X, X, r) for r in (MEAN, SUM)),
    call("squared error of a plain target", aten.mse_loss.default, X, weight(2, 3, HEIGHT, WIDTH), MEAN),
    call("soft margin", aten.soft_margin_loss.default, X, SIGNS, MEAN),
    *(call(f"smooth l1, {r}", aten.smooth_l1_loss.default, X, X, r, 0.5) for r in (MEAN, SUM)),
    call("Huber", aten.huber_loss.default, X, X, MEAN, 0.7),
    call("cross entropy of chances", aten.binary_cross_entropy.default, image(chance), image(chance), None, MEAN),
    call("weighted cross entropy of chances", aten.binary_cross_entropy.default, *[image(chance)] * 2, Given((WIDTH,)), SUM),
    call(
        "cross entropy of logits", aten.binary_cross_entropy_with_logits.default,
        X, image(chance), Given((HEIGHT, 1)), Given((3, 1, 1)), MEAN,
    ),
    *(call(f"nll, {r}", aten.nll_loss2d_forward.default, X, CLASSES, None, r, 255) for r in (MEAN, SUM)),
    call("weighted nll", aten.nll_loss2d_forward.default, X, CLASSES, CLASS_WEIGHTS, MEAN, 255),
]  # fmt: skip

EXTREMES = [
    call("amax", aten.amax.default, COARSE, [2, 3]),
    call("amin", aten.amin.default, COARSE, [2], True),
    call("max of all", aten.max.default, COARSE),
    call("min of all", aten.min.default, COARSE),
    call("aminmax", aten.aminmax.default, COARSE, dim=2),
    call("largest norm", aten.linalg_vector_norm.default, COARSE, math.inf, [2, 3]),
    call("least norm", aten.linalg_vector_norm.default, image(lambda x: x.round().clamp(-1, 1) + 0.5), -math.inf, [2, 3]),
]
"""Equal values share the gradient over the whole, in parts they cannot."""
RUNNING = [call("running sum", aten.cumsum.default, X, 2), call("running product", aten.cumprod.default, image(two_zeros), 2)]
"""What comes before a tile is told by the parts of all tiles, one by one."""
BACKWARDS = [
    call("batch norm backward", aten.native_batch_norm_backward.default, X, X, W, None, None, R, V, True, 1e-5, [True] * 3),
    call(
        "group norm backward", aten.native_group_norm_backward.default,
        X, X, *[Given((2, 1))] * 2, W, 2, 3, HEIGHT * WIDTH, 1, [True] * 3,
    ),
    call(
        "layer norm backward", aten.native_layer_norm_backward.default,
        X, X, [HEIGHT, WIDTH], *[Given((2, 3, 1, 1))] * 2, AREA, AREA, [True] * 3,
    ),
]  # fmt: skip


# ---------------------------------------------------------------------------------------------- the law


def problem_of(call: Call, cut: str, *, ends: Bounds | None = None) -> str | None:
    """Where tiles differ from the whole: outputs with gradients and without, tensors that are written to, gradients."""
    whole, given, plain = (tensors_for(call) for _ in range(3))
    expected, got = on_the_whole(call, whole), tile_after_tile(call, given, CUTS[cut], ends=ends)
    with torch.no_grad():
        without = tile_after_tile(call, plain, CUTS[cut], ends=ends)
    pairs = {
        "output": zip(got, expected, strict=True),
        "output without gradients": zip(without, expected, strict=True),
        "argument": zip(given, whole, strict=True),
        "gradient": zip(gradients(got, given), gradients(expected, whole), strict=True),
    }
    named = ((f"{what} {n}", a, b) for what, several in pairs.items() for n, (a, b) in enumerate(several))
    return next((found for name, a, b in named if (found := difference(name, a, b))), None)


def difference(what: str, got: Tensor, expected: Tensor) -> str | None:
    tolerance = 1e-6 if expected.dtype == torch.float32 else 1e-10  # float32 sums of small whole numbers, rounded once
    try:
        torch.testing.assert_close(got, expected, rtol=tolerance, atol=tolerance, equal_nan=True)
    except AssertionError as error:
        return f"{what}: {error}"
    return None


@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("call", CALLS, ids=lambda call: call.name)
def test_tiles_one_after_another_equal_the_whole(call, cut):
    assert turn_of(call, tensors_for(call), CUTS[cut], 0).description.by_parts
    assert problem_of(call, cut) is None


def has_total(call: Call) -> bool:
    """Whether something is summed; some norms have each tile normalized by itself."""
    return len(turn_of(call, tensors_for(call), CUTS["3 uneven"], 0).description.dims) > 0


@pytest.mark.parametrize("call", [call for call in CALLS if has_total(call)], ids=lambda call: call.name)
def test_a_total_serves_tiles_of_any_cut(call):
    assert problem_of(call, "3 uneven", ends=((0, 4, 4, HEIGHT),)) is None


@pytest.mark.parametrize("call", RUNNING, ids=lambda call: call.name)
def test_a_running_total_serves_the_tiles_alone_that_it_was_made_of(call):
    assert problem_of(call, "3 uneven") is None
    assert str(problem_of(call, "3 uneven", ends=((0, 4, 4, HEIGHT),))).startswith("output")


@pytest.mark.parametrize("call", EXTREMES + RUNNING + BACKWARDS, ids=lambda call: call.name)
def test_what_parts_do_not_give_is_said(call):
    assert not turn_of(call, tensors_for(call), CUTS["3 uneven"], 0).description.by_parts


@pytest.mark.parametrize("call", EXTREMES, ids=lambda call: call.name)
def test_equal_extremes_of_several_tiles_would_share_the_gradient_otherwise_than_in_the_whole(call):
    assert str(problem_of(call, "3 uneven")).startswith("gradient")


# ---------------------------------------------------------------------------------------------- low precision

NORMS = {
    "batch": lambda x: call("batch", FUNCTIONAL, x, W, B, R, V, True, 0.3, 1e-5),
    "group": lambda x: call("group", aten.native_group_norm.default, x, W, B, 2, 3, HEIGHT * WIDTH, 1, 1e-5),
    "layer": lambda x: call("layer", aten.native_layer_norm.default, x, [HEIGHT, WIDTH], AREA, AREA, 1e-5),
}


def found_of(run: Callable[[Call, list[Tensor]], tuple], call: Call, tensors: list[Tensor]) -> list[Tensor]:
    """The output and all gradients."""
    outputs = run(call, tensors)[:1]
    return [outputs[0].detach(), *gradients(outputs, tensors)]


@pytest.mark.parametrize("layout", [Tensor.contiguous, channels_last], ids=["contiguous", "channels last"])
@pytest.mark.parametrize(("dtype", "mean", "std"), [
    (torch.float32, 100.0, 0.01), (torch.float32, 0.0, 1.0), (torch.bfloat16, 10.0, 0.1), (torch.float16, 10.0, 0.1),
])  # fmt: skip
@pytest.mark.parametrize("kind", NORMS)
def test_gradients_far_from_zero_are_no_worse_than_twice_torchs(kind, dtype, mean, std, layout):
    norm = NORMS[kind](image(lambda x: layout(x * std + mean)))
    for n, (tiles, alone, rounding) in enumerate(
        zip(*worst_of([errors(norm, dtype, seed) for seed in range(20)]), strict=True)
    ):
        # In 16 bits an image's gradient is rounded thrice: through `finish`, through `local`, and their sum.
        times = 3 if dtype.itemsize == 2 and n == 1 else 2
        assert tiles <= times * alone + rounding


def errors(norm: Call, dtype: torch.dtype, seed: int) -> list[list[float]]:
    """Of the output and each gradient the largest error in tiles, in torch's own norm, and how far float32 rounds it."""
    low, again = tensors_for(norm, dtype, seed), tensors_for(norm, dtype, seed)
    exact = [x.detach().double().requires_grad_(x.requires_grad) for x in low]
    ours = found_of(lambda call, tensors: tile_after_tile(call, tensors, CUTS["3 uneven"]), norm, low)
    torchs, right = found_of(on_the_whole, norm, again), found_of(on_the_whole, norm, exact)
    assert [x.dtype for x in ours] == [x.dtype for x in torchs]
    return [
        [(x - y).abs().max().item() for x, y in zip(ours, right, strict=True)],
        [(x - y).abs().max().item() for x, y in zip(torchs, right, strict=True)],
        [2.0**-24 * y.abs().max().item() for y in right],
    ]


def worst_of(draws: list[list[list[float]]]) -> list[list[float]]:
    """The largest over all draws: one small image more or less lucky says nothing."""
    return torch.tensor(draws, dtype=torch.float64).amax(0).tolist()
