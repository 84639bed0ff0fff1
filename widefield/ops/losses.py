"""Losses between an image and a target of its shape; those with class indices are in cross_entropy.py.

Each tile sums over its pixels; the sums are added up, and divided once by the whole's count.  So every rank has the single
device's loss, as a plain number.  Losses that torch composes of other operations need no rule.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F

from widefield.geometry.layout import Cuts, Layout
from widefield.ops.reductions import WIDE
from widefield.rules import Description, Local, Meta, Reduced, case, rule
from widefield.tiled.redistribute import first_cut

aten = torch.ops.aten
NONE, MEAN, SUM = 0, 1, 2
"""Torch's codes for reduction="none", "mean" and "sum"."""

# ---------------------------------------------------------------------------------------------- between two images


def _loss(
    image: Meta, target: Meta, *others: Meta | None, reduction: int, op: Callable, dtype: torch.dtype | None = None
) -> Description:
    """The rule of a loss that op(*tiles, reduction) computes.

    others: weights that broadcast against the image.
    dtype: of the loss; None: that to which image and target promote.
    """
    if image.shape != target.shape:  # torch.nn.functional expands them before
        raise NotImplementedError(
            f"a loss between {list(image.shape)} and {list(target.shape)} px of tiles has no rule; expand one to the other's "
            "shape, or call it through torch.nn.functional, which does"
        )
    reads = [image, target, *(meta for meta in others if meta is not None)]
    call = partial(_with_gaps, op, [meta is not None for meta in (image, target, *others)])
    if reduction == NONE:
        return Local(reads, same_pixels, lambda _, *tiles: call(*tiles, reduction=NONE))
    count, dtype = math.prod(image.shape), dtype or torch.promote_types(image.dtype, target.dtype)
    wide = WIDE.get(dtype)

    def local(*tiles: Tensor) -> Tensor:
        return call(*(tile if wide is None else tile.to(wide) for tile in tiles), reduction=SUM)

    def finish(total: Tensor, *_) -> Tensor:
        return (total / count if reduction == MEAN else total).to(dtype)

    return Reduced(reads, range(first_cut(reads).ndim), local, [None], None, finish)


def _loss_backward(grad: Meta, image: Meta, target: Meta, *others: Meta | None, reduction: int, op: Callable) -> Description:
    """The rule of a loss's backward, where op(grad, *tiles, reduction) is the image's gradient."""
    metas = (grad, image, target, *others)
    reads = [meta for meta in metas if meta is not None]
    call = partial(_with_gaps, op, [meta is not None for meta in metas])
    count = math.prod(image.shape)

    def run(layout: Layout, grad: Tensor, *tiles: Tensor) -> Tensor:
        if reduction == MEAN:
            return call(grad / count, *tiles, reduction=SUM)
        return call(grad, *tiles, reduction=reduction)

    return Local(reads, same_pixels, run)


def same_pixels(layout: Layout) -> list[tuple[tuple[int, ...], Cuts]]:
    """The `outs` of a Local whose one output has the shape and cuts of the first read."""
    return [(layout.shape, layout.cuts)]


def _with_gaps(op: Callable, given: Sequence[bool], *tiles: Tensor, reduction: int) -> Tensor:
    """Call `op` with None in place of the tensor arguments that are not given."""
    left = iter(tiles)
    return op(*(next(left) if is_given else None for is_given in given), reduction)


@rule(aten.mse_loss.default)
def mse_loss(image: Meta, target: Meta, reduction=MEAN) -> Description:
    return _loss(image, target, reduction=reduction, op=aten.mse_loss.default)


@rule(aten.mse_loss_backward.default)
def mse_loss_backward(grad: Meta, image: Meta, target: Meta, reduction) -> Description:
    return _loss_backward(grad, image, target, reduction=reduction, op=aten.mse_loss_backward.default)


@rule(aten.soft_margin_loss.default)
def soft_margin_loss(image: Meta, target: Meta, reduction=MEAN) -> Description:
    return _loss(image, target, reduction=reduction, op=aten.soft_margin_loss.default)


@rule(aten.soft_margin_loss_backward.default)
def soft_margin_loss_backward(grad: Meta, image: Meta, target: Meta, reduction) -> Description:
    return _loss_backward(grad, image, target, reduction=reduction, op=aten.soft_margin_loss_backward.default)


def _with_knee(image: Meta, target: Meta, reduction=MEAN, knee=1.0, *, op: Callable) -> Description:
    return _loss(image, target, reduction=reduction, op=lambda *given: op(*given, knee))


def _with_knee_backward(grad: Meta, image: Meta, target: Meta, reduction, knee, *, op: Callable) -> Description:
    return _loss_backward(grad, image, target, reduction=reduction, op=lambda *given: op(*given, knee))


for forward, backward in (
    (aten.smooth_l1_loss.default, aten.smooth_l1_loss_backward.default),
    (aten.huber_loss.default, aten.huber_loss_backward.default),
):
    rule(forward)(partial(_with_knee, op=forward))
    rule(backward)(partial(_with_knee_backward, op=backward))


@rule(aten.binary_cross_entropy.default)
def binary_cross_entropy(image: Meta, target: Meta, weight: Meta | None = None, reduction=MEAN) -> Description:
    return _loss(image, target, weight, reduction=reduction, op=aten.binary_cross_entropy.default)


@rule(aten.binary_cross_entropy_backward.default)
def binary_cross_entropy_backward(
    grad: Meta, image: Meta, target: Meta, weight: Meta | None = None, reduction=MEAN
) -> Description:
    return _loss_backward(grad, image, target, weight, reduction=reduction, op=aten.binary_cross_entropy_backward.default)


@rule(aten.binary_cross_entropy_with_logits.default)
def binary_cross_entropy_with_logits(
    image: Meta, target: Meta, weight: Meta | None = None, pos_weight: Meta | None = None, reduction=MEAN
) -> Description:
    op = aten.binary_cross_entropy_with_logits.default
    return _loss(image, target, weight, pos_weight, reduction=reduction, dtype=target.dtype, op=op)


# ---------------------------------------------------------------------------------------------- margins


def _margins(image: Meta, target: Meta, *_: object, **__: object) -> Description:
    raise NotImplementedError(
        f"a multi-class margin loss of samples cut into tiles (scores of shape {list(image.shape)}) has no rule; "
        "take widefield.whole(scores) before it, which is small"
    )


rule(aten.multi_margin_loss.default, aten.multilabel_margin_loss_forward.default)(_margins)

# ---------------------------------------------------------------------------------------------- cases

REDUCTIONS = ("none", "mean", "sum")


def each(loss: Callable) -> Callable:
    """A case: the loss under every reduction."""
    return lambda *inputs: [loss(*inputs, reduction=reduction) for reduction in REDUCTIONS]


def _dice(x: Tensor, t: Tensor, alpha: float = 0.5, beta: float = 0.5) -> Tensor:
    """Tversky loss; the Dice loss where both weights are one half."""
    p, t = x.softmax(1), t.sigmoid()
    both, wrong, missed = (p * t).sum((2, 3)), (p * (1 - t)).sum((2, 3)), ((1 - p) * t).sum((2, 3))
    return 1 - ((both + 1) / (both + alpha * wrong + beta * missed + 1)).mean()


def _focal(x: Tensor, t: Tensor) -> Tensor:
    t = (t > 0).double()
    p = x.sigmoid()
    right = p * t + (1 - p) * (1 - t)
    return (F.binary_cross_entropy_with_logits(x, t, reduction="none") * (1 - right) ** 2 * (0.25 * t + 0.75 * (1 - t))).mean()


def _total_variation(x: Tensor) -> Tensor:
    return (x[:, :, 1:] - x[:, :, :-1]).abs().mean() + (x[..., 1:] - x[..., :-1]).pow(2).sum()


def _ssim(x: Tensor, y: Tensor) -> Tensor:
    """Wang et al. 2004, with a Gaussian window of 5 pixels."""
    channels = x.shape[1]
    line = torch.exp(-(torch.arange(-2.0, 3.0) ** 2) / 4.5)
    window = (line[:, None] * line / line.sum() ** 2).expand(channels, 1, 5, 5)

    def blur(image: Tensor) -> Tensor:
        return F.conv2d(image, window, groups=channels)

    a, b = blur(x), blur(y)
    top = (2 * a * b + 1e-4) * (2 * (blur(x * y) - a * b) + 9e-4)
    return 1 - (top / ((a**2 + b**2 + 1e-4) * (blur(x * x) - a**2 + blur(y * y) - b**2 + 9e-4))).mean()


_X, _T = (2, 5, 11, 7), (2, 11, 7)
_BOTH = (0, 1)

CASES = [
    case("mse of integers", lambda x, t: F.mse_loss((3 * x).long(), t), (2, 3, 8, 7), (2, 3, 8, 7), tiled=(0, 1)),
    case(
        "mse of unequal shapes", lambda x, t: aten.mse_loss.default(x, t), (2, 3, 8, 7), (2, 3, 8, 1),
        refuses="px of tiles has no rule; expand one",
    ),
    case("bce", each(lambda x, t, **k: F.binary_cross_entropy(x.sigmoid(), t.sigmoid().detach(), **k)), _X, _X),
    case(
        "bce, weighted",
        each(lambda x, t, **k: F.binary_cross_entropy(x.sigmoid(), t.sigmoid(), torch.arange(1.0, 8), **k)),
        _X, _X, tiled=_BOTH,
    ),
    case(
        "bce with logits", each(lambda x, t, **k: F.binary_cross_entropy_with_logits(x, t.sigmoid(), **k)),
        _X, _X, tiled=_BOTH,
    ),
    case(
        "bce with logits, weights of rows and classes",
        each(
            lambda x, t, **k: F.binary_cross_entropy_with_logits(
                x, t.sigmoid(), torch.arange(1.0, 12).view(11, 1), pos_weight=torch.arange(1.0, 6).view(5, 1, 1), **k
            )
        ),
        _X, _X,
    ),
    case("mse", each(F.mse_loss), _X, _X, tiled=_BOTH),
    case("mse, plain target", each(F.mse_loss), _X, _X),
    case("mse, plain image", each(F.mse_loss), _X, _X, tiled=(1,)),
    case("l1", each(F.l1_loss), _X, _X, tiled=_BOTH),
    case("smooth l1", each(partial(F.smooth_l1_loss, beta=0.5)), _X, _X, tiled=_BOTH),
    case("smooth l1 of a sharp knee", each(partial(F.smooth_l1_loss, beta=0.0)), _X, _X),
    case("huber", each(partial(F.huber_loss, delta=0.7)), _X, _X, tiled=_BOTH),
    case("soft margin", each(lambda x, t, **k: F.soft_margin_loss(x, t.detach().sign(), **k)), _X, _X, tiled=_BOTH),
    case(
        "KL divergence",
        lambda x, t: [F.kl_div(x.log_softmax(1), t.softmax(1), reduction=r) for r in ("none", "batchmean", "sum")],
        _X, _X, tiled=_BOTH,
    ),
    case("KL divergence of logs", lambda x, t: F.kl_div(x, t, reduction="batchmean", log_target=True), _X, _X, tiled=_BOTH),
    case("Poisson", each(lambda x, t, **k: F.poisson_nll_loss(x, t.exp(), full=True, **k)), _X, _X, tiled=_BOTH),
    case("Gauss", each(lambda x, t, **k: F.gaussian_nll_loss(x, t, t.exp(), **k)), _X, _X, tiled=_BOTH),
    case("hinge", each(lambda x, t, **k: F.hinge_embedding_loss(x, t.detach().sign(), **k)), _X, _X, tiled=_BOTH),
    case("cosine similarity", lambda x, y: F.cosine_similarity(x, y, 1), _X, _X, tiled=_BOTH),
    case("cosine similarity along rows", lambda x, y: F.cosine_similarity(x, y, 2), _X, _X, tiled=_BOTH),
    case("triplet margin", lambda x, y, z: F.triplet_margin_loss(x, y, z), _X, _X, _X, tiled=(0, 1, 2)),
    case("Dice", _dice, _X, _X, tiled=_BOTH),
    case("Tversky", partial(_dice, alpha=0.3, beta=0.7), _X, _X, tiled=_BOTH),
    case("focal", _focal, _X, _X, tiled=_BOTH),
    case("total variation", _total_variation, _X),
    case("structural similarity", _ssim, _X, _X, tiled=_BOTH),
    case("multi margin", lambda x: F.multi_margin_loss(x, torch.arange(6) % 5), (6, 5), refuses="margin loss of samples cut"),
    case(
        "multilabel margin",
        lambda x: F.multilabel_margin_loss(x, torch.arange(30).view(6, 5) % 5),
        (6, 5),
        refuses="margin loss of",
    ),
]  # fmt: skip
