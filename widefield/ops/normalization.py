"""Batch and instance norm, forward and backward, in any number of dims.

Forward: one message gathers every tile's mean and squared deviations, which are merged in float64.  Backward: one message with
two sums per channel, which are also the gradients of weight and bias, the same on every rank.  In evaluation nothing is sent.
Instance norm arrives as batch norm of an image (1, B * C, ...).  The arithmetic is in `kernels/moments.py`.

Formulas: Ioffe & Szegedy 2015, arXiv:1502.03167.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from widefield.geometry.layout import Layout
from widefield.kernels import moments
from widefield.private_torch.tensors import weight_norm
from widefield.rules import Meta, PartialSum, Reduced, Tile, case, rule
from widefield.tiled.redistribute import first_cut, move_cuts

aten = torch.ops.aten


def layout_for(images: Sequence[Meta], whole: Sequence[int]) -> Layout:
    """The layout of the first image that is cut, with the dims in `whole` uncut."""
    layout = first_cut(images).layout
    assert layout is not None, "a normalization without a tiled image is plain"
    return move_cuts(layout, whole)


def reads_and_layouts(images: Sequence[Meta], layout: Layout, *others: Meta | None) -> dict[str, Any]:
    """The arguments `reads` and `layouts` of a Reduced: the images in `layout`, the tensors of `others` as they are."""
    given = [meta for meta in others if meta is not None]
    return {"reads": [*images, *given], "layouts": [*[layout] * len(images), *[None] * len(given)]}


def pick(tensors: Sequence[Tensor], meta: Meta | None) -> Any:
    """The tensor argument that `meta` describes; None for None."""
    return None if meta is None else tensors[meta.number]


def first_tile(tile: Tensor, *others: Tensor) -> Tensor:
    """The `local` of a rule that reduces no dims, whose `finish` ignores the total."""
    return tile


def refuse_cut(kind: str, *affine: Meta | None) -> None:
    """NotImplementedError where a tensor that every tile needs whole is cut."""
    if any(meta is not None and meta.is_cut for meta in affine):
        raise NotImplementedError(
            f"{kind} whose weight, bias or statistics are cut into tiles has no rule; take widefield.whole(...) of them"
        )


def gives_partial_gradient(meta: Meta | None) -> bool:
    """Whether the weight is plain, or absent, so that its gradient may be a partial gradient."""
    return meta is None or meta.layout is None


def zeros_of(sums: Sequence[PartialSum | None], like: Tensor) -> list[Tensor | None]:
    """What an empty tile adds to the sums; None for those that are not wanted."""
    return [None if out is None else like.new_zeros(out.shape, dtype=out.dtype) for out in sums]


# ---------------------------------------------------------------------------------------------- batch norm


@rule(aten.native_batch_norm.default, aten._native_batch_norm_legit.default)
def batch_norm(image: Meta, weight, bias, running_mean, running_var, training, momentum, eps, more: str = "") -> Reduced:
    """more: the operation's further outputs, a letter each; r: cuDNN's reserve, empty here; s: the new running statistics."""
    refuse_cut("batch norm", weight, bias, running_mean, running_var)
    if not training and bias is not None and (weight is None or gives_partial_gradient(weight) != gives_partial_gradient(bias)):
        _refuse_bias(weight, bias)
    layout = layout_for([image], [1])
    call = _BatchNorm(image, weight, bias, running_mean, running_var, momentum, eps, more)
    outs = [Tile(image.shape), *[None] * (2 + len(more) + more.count("s"))]
    reads = reads_and_layouts([image], layout, weight, bias, running_mean, running_var)
    if not training:
        return Reduced(dims=(), local=first_tile, outs=outs, finish=call.evaluated, **reads)
    dims = [dim for dim in range(image.ndim) if dim != 1]
    writes = "s" not in more and not (running_mean is None and running_var is None)
    update_buffers = call.update_buffers if writes else None
    ends = {
        "local": call.local,
        "attach_grad": call.attach_grad,
        "merge": moments.merged,
        "finish": call.trained,
        "update_buffers": update_buffers,
    }
    return Reduced(dims=dims, outs=outs, **ends, **reads)


def _refuse_bias(weight: Meta | None, bias: Meta) -> None:
    """The backward in evaluation gets the weight and not the bias, and so cannot know whether the bias is plain."""
    if weight is None and bias.layout is None:
        return
    raise NotImplementedError(
        "batch norm in evaluation with one of weight and bias made from a tiled tensor and the other not has no rule; "
        "make both from it, or add the bias afterwards"
    )


class _BatchNorm:
    """The functions of batch norm's rule; each takes the operation's tensor arguments."""

    def __init__(self, image, weight, bias, running_mean, running_var, momentum: float, eps: float, more: str) -> None:
        self.image, self.affine, self.running = image, (weight, bias), (running_mean, running_var)
        self.momentum, self.eps, self.more = momentum, eps, more

    def local(self, tile: Tensor, *others: Tensor) -> Tensor:
        channels = self.image.shape[1]
        if tile.numel() == 0:
            return moments.packed_empty(channels, tile)
        return moments.packed(*moments.moments_of(moments.dense(tile)), tile.numel() // channels)

    def attach_grad(self, part: Tensor, tile: Tensor, *others: Tensor) -> Tensor:
        return moments.attach_grad(part, moments.dense(tile))

    def update_buffers(self, total: Tensor, *tensors: Tensor) -> None:
        """Write the new running statistics, once for the whole."""
        for meta, new in zip(self.running, self._new_running(total, tensors), strict=True):
            if new is not None:
                pick(tensors, meta).copy_(new)

    def _new_running(self, total: Tensor, tensors: Sequence[Tensor]) -> list[Tensor | None]:
        """The new running statistics, without a gradient; None where there are none."""
        batch = moments.unpacked(total.detach(), unbiased=True)
        running = [pick(tensors, meta) for meta in self.running]
        return [
            None if old is None else torch.lerp(old.double(), new, self.momentum).to(old.dtype)
            for old, new in zip(running, batch, strict=True)
        ]

    def trained(self, total: Tensor, *tensors: Tensor) -> tuple:
        mean, var = moments.unpacked(total)
        dtype = moments.statistics_dtype(self.image.dtype)
        mean, invstd = mean.to(dtype), moments.invstd_of(var, self.eps).to(dtype)
        running = self._new_running(total, tensors) if "s" in self.more else []
        return self._outputs(tensors, (mean, var.to(dtype)), (mean.detach(), invstd.detach()), running)

    def evaluated(self, total: Tensor, *tensors: Tensor) -> tuple:
        running = [pick(tensors, meta) for meta in self.running]
        empty = running[0].new_empty(0)
        return self._outputs(tensors, running, (empty, empty.clone()), running)

    def _outputs(self, tensors: Sequence[Tensor], statistics: Sequence[Tensor], saved: Sequence[Tensor], running) -> tuple:
        tile = moments.dense(tensors[self.image.number])
        out = moments.normalized(tile, *statistics, *(pick(tensors, meta) for meta in self.affine), self.eps)
        reserve = (tile.new_empty(0, dtype=torch.uint8),)
        return out, *saved, *(value for kind in self.more for value in (reserve if kind == "r" else running))


@rule(aten._native_batch_norm_legit.no_stats)
def batch_norm_without_running(image: Meta, weight, bias, training, momentum, eps) -> Reduced:
    return batch_norm(image, weight, bias, None, None, training, momentum, eps)


@rule(aten._native_batch_norm_legit_no_training.default)
def batch_norm_in_evaluation(image: Meta, weight, bias, running_mean, running_var, momentum, eps) -> Reduced:
    return batch_norm(image, weight, bias, running_mean, running_var, False, momentum, eps)


@rule(aten._native_batch_norm_legit_functional.default)
def batch_norm_functional(image: Meta, weight, bias, running_mean, running_var, training, momentum, eps) -> Reduced:
    return batch_norm(image, weight, bias, running_mean, running_var, training, momentum, eps, "s")


@rule(aten.cudnn_batch_norm.default)
def cudnn_batch_norm(image: Meta, weight, bias, running_mean, running_var, training, momentum, eps) -> Reduced:
    return batch_norm(image, weight, bias, running_mean, running_var, training, momentum, eps, "r")


@rule(aten._batch_norm_with_update.default)
def batch_norm_with_update(image: Meta, weight, bias, running_mean, running_var, momentum, eps) -> Reduced:
    return batch_norm(image, weight, bias, running_mean, running_var, True, momentum, eps, "r")


@rule(aten._batch_norm_with_update_functional.default)
def batch_norm_with_update_functional(image: Meta, weight, bias, running_mean, running_var, momentum, eps) -> Reduced:
    return batch_norm(image, weight, bias, running_mean, running_var, True, momentum, eps, "rs")


@rule(aten._batch_norm_no_update.default)
def batch_norm_no_update(image: Meta, weight, bias, running_mean, running_var, momentum, eps) -> Reduced:
    return batch_norm(image, weight, bias, running_mean, running_var, False, momentum, eps, "r")


@rule(aten.native_batch_norm_backward.default, plain_outputs=(1, 2))
def batch_norm_backward(
    grad: Meta, image: Meta, weight, running_mean, running_var, save_mean, save_invstd, training, eps, mask
) -> Reduced:
    refuse_cut("batch norm", weight, running_mean, running_var, save_mean, save_invstd)
    if not training:
        return _backward_in_evaluation(grad, image, weight, running_mean, running_var, eps, mask)
    layout, count = layout_for([image, grad], [1]), math.prod(image.shape) // max(1, image.shape[1])

    def local(tile: Tensor, grad_tile: Tensor, mean: Tensor, invstd: Tensor, *weight: Tensor) -> Tensor:
        tile = moments.dense(tile)
        return moments.gradient_sums(moments.in_format_of(tile, grad_tile), tile, mean, invstd)

    def finish(total: Tensor, *tensors: Tensor) -> tuple:
        tile, scale = moments.dense(tensors[image.number]), pick(tensors, weight)
        dtype = tile.dtype if scale is None else scale.dtype
        sums = [total[n].to(dtype) if mask[1 + n] else None for n in (0, 1)]
        if not mask[0]:
            return None, *sums
        means = (total if scale is None else total * scale.to(total.dtype)) / count
        statistics = (pick(tensors, save_mean), pick(tensors, save_invstd))
        grad_tile = moments.in_format_of(tile, tensors[grad.number])
        return moments.input_gradient(grad_tile, tile, *statistics, scale, means), *sums

    dims = [dim for dim in range(image.ndim) if dim != 1]
    outs = [Tile(image.shape), None, None]
    reads = reads_and_layouts([image, grad], layout, save_mean, save_invstd, weight)
    return Reduced(dims=dims, local=local, outs=outs, finish=finish, by_parts=False, **reads)  # its kernels have no gradient


def _backward_in_evaluation(grad: Meta, image: Meta, weight, running_mean, running_var, eps: float, mask) -> Reduced:
    """Statistics are constants: each tile computes its own part of the image's gradient, and of the sums."""
    layout = layout_for([image, grad], [1])

    def finish(total: Tensor, *tensors: Tensor) -> tuple:
        tile, scale = moments.dense(tensors[image.number]), pick(tensors, weight)
        if tile.numel() == 0:
            return torch.empty_like(tile), *zeros_of(sums, tile)
        statistics = (pick(tensors, running_mean), pick(tensors, running_var))
        saved = (statistics[0].new_empty(0),) * 2  # as the forward saves; a GPU's kernel does not take None
        grad_tile = moments.in_format_of(tile, tensors[grad.number])
        return aten.native_batch_norm_backward.default(grad_tile, tile, scale, *statistics, *saved, False, eps, mask)

    dtype = image.dtype if weight is None else weight.dtype
    sums = [PartialSum(gives_partial_gradient(weight), (image.shape[1],), dtype) if wanted else None for wanted in mask[1:]]
    reads = reads_and_layouts([image, grad], layout, weight, running_mean, running_var)
    return Reduced(dims=(), local=first_tile, outs=[Tile(image.shape), *sums], finish=finish, **reads)


@rule(aten.cudnn_batch_norm_backward.default, plain_outputs=(1, 2))
def cudnn_batch_norm_backward(
    image: Meta, grad: Meta, weight: Meta, running_mean, running_var, save_mean, save_invstd, eps, reserve
) -> Reduced:
    mask = [True] * 3
    return batch_norm_backward(grad, image, weight, running_mean, running_var, save_mean, save_invstd, True, eps, mask)


@rule(aten.batch_norm_backward.default, plain_outputs=(1, 2))
def batch_norm_backward_with_reserve(
    grad: Meta, image: Meta, weight, running_mean, running_var, save_mean, save_invstd, training, eps, mask, reserve
) -> Reduced:
    return batch_norm_backward(grad, image, weight, running_mean, running_var, save_mean, save_invstd, training, eps, mask)


def _with_running(operation, *args, momentum=0.3, **options):
    """The output, and the running statistics after the operation."""
    running = torch.linspace(0.1, 0.7, 3), torch.linspace(0.5, 2.0, 3)
    return [operation(args[0], *running, *args[1:], momentum=momentum, **options), *running]


def _twice(x, w, b):
    running = torch.zeros(3), torch.ones(3)
    y = F.batch_norm(x, *running, w, b, training=True)
    return [F.batch_norm(y * y, *running, w, b, training=True, momentum=0.5), *running]


def _by(operation: Any, x: Tensor, w: Tensor, b: Tensor, *training: bool) -> list[Tensor]:
    """The output, the running statistics after the operation, and the new ones that it returns."""
    running = torch.linspace(0.1, 0.7, 3), torch.linspace(0.5, 2.0, 3)
    given = operation(x, w, b, *running, *training, 0.3, 1e-5)
    return [given[0], *running, *(value for value in given[3:] if value.dtype == x.dtype)]


def _cudnn(x: Tensor, w: Tensor, b: Tensor) -> list[Tensor]:
    running = torch.linspace(0.1, 0.7, 3), torch.linspace(0.5, 2.0, 3)
    if type(x) is Tensor:
        return [F.batch_norm(x, *running, w, b, True, 0.3), *running]
    return [aten.cudnn_batch_norm(x, w, b, *running, True, 0.3, 1e-5)[0], *running]


def _through(make: Callable[[], nn.Module]):
    """A case: the output and the buffers of a new layer after two passes."""

    def run(x: Tensor, *affine: Tensor) -> list[Tensor]:
        mine = make().to(x.dtype)
        values = dict(zip(("weight", "bias"), affine, strict=False))
        torch.func.functional_call(mine, values, (x * 2 + 1,))
        return [torch.func.functional_call(mine, values, (x,)), *(buffer for _, buffer in mine.named_buffers())]

    return run


def _channels_last(x: Tensor) -> Tensor:
    return x.contiguous(memory_format=torch.channels_last)


_train = partial(_with_running, F.batch_norm, training=True)
_eval = partial(_with_running, F.batch_norm, training=False)
_instance = partial(_with_running, F.instance_norm)


def _penalty(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    """The first gradient, which the case differentiates again."""
    (grad,) = torch.autograd.grad(F.batch_norm(x, None, None, w, b, True).pow(3).sum(), x, create_graph=True)
    return grad


CASES = [
    case("batch", _train, (2, 3, 17, 11), (3,), (3,)),
    case("batch, momentum 1", partial(_train, momentum=1.0, eps=0.1), (2, 3, 17, 11), (3,), (3,)),
    case("batch, gradient penalty", _penalty, (2, 3, 17, 11), (3,), (3,)),
    case("batch 1-D", _train, (2, 3, 29), (3,), (3,)),
    case("batch 3-D", _train, (2, 3, 9, 5, 4), (3,), (3,)),
    case("batch without affine", _train, (2, 3, 17, 11)),
    case("batch, bias alone", lambda x, b: _train(x, None, b), (2, 3, 17, 11), (3,)),
    case(
        "batch without running statistics", lambda x, w, b: F.batch_norm(x, None, None, w, b, True), (2, 3, 17, 11), (3,), (3,)
    ),
    case("batch, channels last", lambda x, w, b: _train(_channels_last(x), w, b), (2, 3, 17, 11), (3,), (3,)),
    case("batch far from zero", lambda x, w, b: _train(x * 0.01 + 100, w, b), (2, 3, 17, 11), (3,), (3,)),
    case("batch of (N, C), cut in C", _train, (9, 3), (3,), (3,)),
    case("batch twice over the same statistics", _twice, (2, 3, 17, 11), (3,), (3,)),
    case("batch, image without gradient", lambda x, w, b: _train(x.detach(), w, b), (2, 3, 17, 11), (3,), (3,)),
    case(
        "batch, weights from the image", lambda x, w: _train(x, x.mean((0, 2, 3)), x.amax((0, 2, 3)) * w), (2, 3, 17, 11), (3,)
    ),
    case("batch with no average", _through(lambda: nn.BatchNorm2d(3, momentum=None)), (2, 3, 17, 11), (3,), (3,)),
    case("evaluation", _eval, (2, 3, 17, 11), (3,), (3,)),
    case("evaluation 3-D", _eval, (2, 3, 9, 5, 4), (3,), (3,)),
    case("evaluation, bias alone", lambda x, b: _eval(x, None, b), (2, 3, 17, 11), (3,)),
    case("evaluation, channels last", lambda x, w, b: _eval(_channels_last(x), w, b), (2, 3, 17, 11), (3,), (3,)),
    case("evaluation of (N, C), cut in C", _eval, (9, 3), (3,), (3,)),
    case("evaluation, weights from the image", lambda x: _eval(x, x.mean((0, 2, 3)), x.amax((0, 2, 3))), (2, 3, 17, 11)),
    case(
        "evaluation, one weight from the image",
        lambda x, b: _eval(x, x.mean((0, 2, 3)), b),
        (2, 3, 17, 11),
        (3,),
        refuses="one of weight and bias made from a tiled tensor",
    ),
    case(
        "batch, weight cut",
        lambda w, x: F.batch_norm(x, None, None, w, None, True),
        (9,),
        (2, 9, 5, 4),
        refuses="weight, bias or statistics are cut into tiles",
    ),
    case("cuDNN's", _cudnn, (2, 3, 17, 11), (3,), (3,)),
    case("legit", lambda *given: _by(aten._native_batch_norm_legit, *given, True), (2, 3, 17, 11), (3,), (3,)),
    case("legit in evaluation", lambda *given: _by(aten._native_batch_norm_legit, *given, False), (2, 3, 17, 11), (3,), (3,)),
    case("functional", lambda *given: _by(aten._native_batch_norm_legit_functional, *given, True), (2, 3, 17, 11), (3,), (3,)),
    case("with update", partial(_by, aten._batch_norm_with_update), (2, 3, 17, 11), (3,), (3,)),
    case("with update, functional", partial(_by, aten._batch_norm_with_update_functional), (2, 3, 17, 11), (3,), (3,)),
    case("no update", partial(_by, aten._batch_norm_no_update), (2, 3, 17, 11), (3,), (3,)),
    case("no statistics", lambda x, w: aten._native_batch_norm_legit(x, w, None, True, 0.1, 1e-5)[0], (2, 3, 17, 11), (3,)),
    case("instance", lambda x, w, b: F.instance_norm(x, None, None, w, b), (2, 3, 17, 11), (3,), (3,)),
    case("instance 1-D", lambda x: F.instance_norm(x), (2, 3, 29)),
    case("instance 3-D", lambda x, w, b: F.instance_norm(x, None, None, w, b), (2, 3, 9, 5, 4), (3,), (3,)),
    case("instance, running statistics", partial(_instance, use_input_stats=True), (2, 3, 17, 11), (3,), (3,)),
    case("instance, evaluation", partial(_instance, use_input_stats=False), (2, 3, 17, 11), (3,), (3,)),
    case(
        "instance with statistics",
        _through(lambda: nn.InstanceNorm2d(3, affine=True, track_running_stats=True)),
        (2, 3, 17, 11),
        (3,),
        (3,),
    ),
    case("local response", lambda x: F.local_response_norm(x * 9, 3), (2, 6, 17, 11)),
    case("weight norm", lambda x, v, g: F.conv2d(x, weight_norm(v, g, 0)), (2, 3, 17, 11), (4, 3, 3, 3), (4, 1, 1, 1)),
    case(
        "spectral norm", lambda x, w: F.conv2d(x, w / torch.linalg.matrix_norm(w.flatten(1), 2)), (2, 3, 17, 11), (4, 3, 3, 3)
    ),
]
