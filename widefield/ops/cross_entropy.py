"""Cross entropy and negative log likelihood with class indices as targets.

Each tile sums over its pixels; the sums are added up, and divided once by the whole's count or sum of class weights.  The
class dim must be whole: a cut there moves to another dim.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from widefield.geometry.layout import Layout, layout_of, uncut
from widefield.ops.losses import MEAN, NONE, SUM, each, same_pixels
from widefield.ops.reductions import WIDE
from widefield.rules import Description, Local, Meta, Reduced, case, rule
from widefield.tiled.overrides import BELOW, override
from widefield.tiled.redistribute import move_cuts
from widefield.tiled.tensor import TiledTensor

aten = torch.ops.aten

# ---------------------------------------------------------------------------------------------- negative log likelihood


def _layouts(image: Meta, target: Meta, *others: Meta | None) -> tuple[Layout, Layout]:
    """The layouts of the image (B, C, ...) and the class indices (B, ...): as the image is cut, with its classes whole.

    others: the tensors of which one is tiled where image and indices are plain.
    """
    at = min(1, image.ndim - 1)
    layout = image.layout if image.is_cut or target.layout is None else _with_classes(target.layout, image.shape, at)
    if layout is None:
        layout = uncut(image.shape, next(o.layout.grid for o in others if o is not None and o.layout is not None))
    layout = move_cuts(layout, [at])
    return layout, layout_of(target.shape, (*layout.cuts[:at], *layout.cuts[at + 1 :]), layout.grid)


def _with_classes(layout: Layout, shape: tuple[int, ...], at: int) -> Layout:
    return layout_of(shape, (*layout.cuts[:at], None, *layout.cuts[at:]), layout.grid)


def _nll(image: Meta, target: Meta, weight: Meta | None, reduction: int, ignore_index: int, *, op: Callable) -> Description:
    reads = [image, target] if weight is None else [image, target, weight]
    of_image, of_target = _layouts(image, target, weight)
    layouts = [of_image, of_target, *_uncut(weight, of_image)]
    if reduction == NONE:
        none = [(of_target.shape, of_target.cuts), ((), None)]
        return Local(reads, lambda _: none, lambda _, *tiles: op(*_three(tiles), NONE, ignore_index), layouts=layouts)
    wide = WIDE.get(image.dtype)

    def local(image: Tensor, target: Tensor, *weight: Tensor) -> Tensor:
        if wide is not None:
            image, weight = image.to(wide), tuple(w.to(wide) for w in weight)
        return torch.stack(op(*_three((image, target, *weight)), SUM, ignore_index))

    def finish(total: Tensor, *_) -> tuple[Tensor, Tensor]:
        loss = total[0] / total[1] if reduction == MEAN else total[0]
        return loss.to(image.dtype), total[1].to(image.dtype)

    return Reduced(reads, range(image.ndim), local, [None, None], None, finish, layouts)


def _uncut(weight: Meta | None, like: Layout) -> list[Layout]:
    """The layout of the class weights, if there are any: whole."""
    return [] if weight is None else [uncut(weight.shape, like.grid)]


def _three(tiles: Sequence[Tensor]) -> tuple:
    """(image, target, weight or None)."""
    return (*tiles, None) if len(tiles) == 2 else tuple(tiles)


def _nll_backward(
    grad: Meta, image: Meta, target: Meta, weight: Meta | None, reduction, ignore_index, total: Meta, *, op: Callable
) -> Description:
    of_image, of_target = _layouts(image, target, weight, grad, total)
    has_weight = weight is not None
    reads = [image, target, grad] if weight is None else [image, target, grad, weight]
    layouts = [of_image, of_target, of_target if grad.ndim else None, *_uncut(weight, of_image)]

    def run(layout: Layout, grad: Tensor, image: Tensor, target: Tensor, *others: Tensor) -> Tensor:
        if not image.is_contiguous():  # the kernel requires it, and reads nothing but the shape
            image = torch.empty_like(image, memory_format=torch.contiguous_format)
        return op(grad, image, target, others[0] if has_weight else None, reduction, ignore_index, others[-1])

    return Local(reads, same_pixels, run, layouts=layouts)


for forward, backward in (
    (aten.nll_loss_forward.default, aten.nll_loss_backward.default),
    (aten.nll_loss2d_forward.default, aten.nll_loss2d_backward.default),
):
    rule(forward)(partial(_nll, op=forward))
    rule(backward)(partial(_nll_backward, op=backward))


# ---------------------------------------------------------------------------------------------- cross entropy


@override("cross_entropy_loss")
def _cross_entropy(
    keys: Any,
    logits: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    reduction=MEAN,
    ignore_index=-100,
    label_smoothing=0.0,
) -> Tensor:
    """Torch's cross entropy; on tiles with label smoothing and class weights a formula of our own.

    Torch would pick pixels by a mask to add up their weights, but how many a mask picks depends on all tiles.  Here every pixel
    looks up its weight, and an ignored pixel's is 0.
    """
    is_tiled = type(logits) is TiledTensor or type(target) is TiledTensor
    if not is_tiled or weight is None or not label_smoothing or reduction != MEAN or target.is_floating_point():
        below = keys & BELOW
        return aten.cross_entropy_loss.default.redispatch(
            below, logits, target, weight, reduction, ignore_index, label_smoothing
        )
    at = min(1, logits.ndim - 1)
    log_probabilities, ignored = logits.log_softmax(at), target == ignore_index
    hard = F.nll_loss(log_probabilities, target, weight, ignore_index=ignore_index)
    soft = (log_probabilities * weight.view(-1, *[1] * (logits.ndim - at - 1))).sum(at).neg().masked_fill_(ignored, 0.0).sum()
    weights = aten.index.Tensor(weight, [target.masked_fill(ignored, 0)]).masked_fill_(ignored, 0.0).sum()
    return (1 - label_smoothing) * hard + (label_smoothing / logits.shape[at]) * (soft / weights)


# ---------------------------------------------------------------------------------------------- cases


def _classes(like: Tensor, count: int) -> Tensor:
    """Class indices computed from an image, tiled or whole."""
    return (like.detach() * 7).abs().long() % count


def _ignored(like: Tensor, count: int) -> Tensor:
    classes = _classes(like, count)
    return classes.masked_fill(classes == 1, 255)


def _plain_classes(*shape: int) -> Tensor:
    return torch.arange(math.prod(shape)).mul(7).remainder(5).view(shape)


_X, _T = (2, 5, 11, 7), (2, 11, 7)
_BOTH = (0, 1)

CASES = [
    case("nll", each(lambda x, t, **k: F.nll_loss(x, _classes(t, 5), **k)), _X, _T, tiled=_BOTH),
    case("nll, plain target", each(lambda x, **k: F.nll_loss(x, _plain_classes(*_T), **k)), _X),
    case("nll, plain image", each(lambda x, t, **k: F.nll_loss(x, _classes(t, 5), **k)), _X, _T, tiled=(1,)),
    case(
        "nll, ignored pixels and class weights",
        each(lambda x, t, **k: F.nll_loss(x, _ignored(t, 5), torch.arange(1.0, 6), ignore_index=255, **k)),
        _X, _T, tiled=_BOTH,
    ),
    case("nll, weights in tiles", lambda x, w: F.nll_loss(x, _plain_classes(*_T), w.detach().sum(0)), _X, (3, 5), tiled=(1,)),
    case("nll of 3-D images", each(lambda x, **k: F.nll_loss(x, _plain_classes(2, 9, 7, 3), **k)), (2, 5, 9, 7, 3)),
    case("nll of lines", each(lambda x, t, **k: F.nll_loss(x, _classes(t, 5), **k)), (2, 5, 11), (2, 11), tiled=(0,)),
    case("nll of samples", each(lambda x, **k: F.nll_loss(x.mean((2, 3)), _plain_classes(2), **k)), _X),
    case("nll whose classes are cut", each(lambda x, **k: F.nll_loss(x, _plain_classes(6), **k)), (6, 5)),
    case(
        "nll, class weights on tiles",
        lambda x, t, w: F.nll_loss(x, _classes(t, 5), w.detach().exp()), _X, _T, (5,), tiled=(0, 1, 2),
    ),
    case(
        "cross entropy where classes and batch are cut",
        lambda x: (
            F.cross_entropy(x.transpose(1, 2), _plain_classes(2, 5, 7)),
            F.cross_entropy(x.transpose(0, 2), _plain_classes(11, 2, 7)),
        ),
        _X,
    ),
    case(
        "cross entropy", each(lambda x, t, **k: F.cross_entropy(x, _ignored(t, 5), ignore_index=255, **k)),
        _X, _T, tiled=_BOTH,
    ),
    case(
        "cross entropy with class weights",
        each(lambda x, **k: F.cross_entropy(x, _plain_classes(*_T), torch.arange(1.0, 6), **k)), _X,
    ),
    case(
        "cross entropy, label smoothing",
        each(lambda x, t, **k: F.cross_entropy(x, _ignored(t, 5), ignore_index=255, label_smoothing=0.1, **k)),
        _X, _T, tiled=_BOTH,
    ),
    case(
        "cross entropy, label smoothing and class weights",
        each(lambda x, **k: F.cross_entropy(x, _plain_classes(*_T), torch.arange(1.0, 6), label_smoothing=0.1, **k)), _X,
    ),
    case(
        "cross entropy, label smoothing and class weights on tiles",
        each(
            lambda x, t, **k: F.cross_entropy(
                x, _ignored(t, 5), torch.arange(1.0, 6), ignore_index=255, label_smoothing=0.1, **k
            )
        ),
        _X, _T, tiled=_BOTH,
    ),
    case(
        "cross entropy, label smoothing and class weights, classes and batch cut",
        lambda x, t: [
            F.cross_entropy(x.transpose(1, 2), _classes(t[:, :5], 11), torch.arange(1.0, 12), label_smoothing=0.1),
            F.cross_entropy(x.mean((0, 3)).t(), _classes(t[0, :, 0], 5), torch.arange(1.0, 6), label_smoothing=0.1),
            F.cross_entropy(x[0, 0, :, 0], torch.tensor(3), torch.arange(1.0, 12), label_smoothing=0.1),
        ],
        _X, _T, tiled=_BOTH,
    ),
    case(
        "cross entropy, label smoothing and class weights, plain image",
        lambda x, t: F.cross_entropy(x, _ignored(t, 5), torch.arange(1.0, 6), ignore_index=255, label_smoothing=0.1),
        _X, _T, tiled=(1,),
    ),
    case(
        "cross entropy, label smoothing and class weights, second gradients",
        lambda x, t: torch.autograd.grad(
            F.cross_entropy(x, _classes(t, 5), torch.arange(1.0, 6), label_smoothing=0.1), x, create_graph=True
        ),
        _X, _T, tiled=_BOTH,
    ),
    case(
        "cross entropy with probabilities",
        each(lambda x, t, **k: F.cross_entropy(x, t.softmax(1), torch.arange(1.0, 6), label_smoothing=0.2, **k)),
        _X, _X, tiled=_BOTH,
    ),
]  # fmt: skip
