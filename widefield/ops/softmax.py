"""Softmax and log-softmax.

Over an uncut dim torch's kernels run on every tile.  Over a cut dim each tile gives its maximum and its sum of exponentials
relative to that, in one message; these merge as in Milakov & Gimelshein 2018, arXiv:1805.02867.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from widefield.ops.reductions import WIDE, exponentials, merge_exponentials
from widefield.rules import Description, Local, Meta, Reduced, Tile, case, rule
from widefield.tiled.redistribute import first_cut

aten = torch.ops.aten


def _forward(image: Meta, dim: int, half_to_float: bool, *, op, is_log: bool) -> Description:
    dim %= max(1, image.ndim)
    if image.cuts[dim] is None:
        return Local([image], lambda layout: [(layout.shape, layout.cuts)], lambda _, tile: op(tile, dim, half_to_float))
    wide = WIDE.get(image.dtype, image.dtype)
    out = torch.float32 if half_to_float else image.dtype

    def local(tile: Tensor) -> Tensor:
        return exponentials(tile.to(wide), [dim])

    def finish(total: Tensor, tile: Tensor) -> Tensor:
        shifted = tile.to(wide) - total[0].detach()
        result = shifted.sub_(total[1].log()) if is_log else _divided(shifted.exp_(), total[1])
        return result.to(out).contiguous()  # row-major, as torch's kernel gives it

    return Reduced([image], [dim], local, [Tile(image.shape)], merge_exponentials, finish)


def _divided(value: Tensor, by: Tensor) -> Tensor:
    """value / by; in place of `value` unless it has a gradient, for that of an exponential reads it."""
    return value / by if value.requires_grad else value.div_(by)


def _backward(grad: Meta, result: Meta, dim: int, input_dtype: torch.dtype, *, op, is_log: bool) -> Description:
    dim %= max(1, result.ndim)
    reads: Sequence[Meta] = [result, grad]
    if first_cut(reads).cuts[dim] is None:
        return Local(
            reads, lambda layout: [(layout.shape, layout.cuts)], lambda _, grad, result: op(grad, result, dim, input_dtype)
        )
    wide = WIDE.get(grad.dtype, grad.dtype)

    def local(result: Tensor, grad: Tensor) -> Tensor:
        return (grad if is_log else grad * result).sum(dim, keepdim=True, dtype=wide)

    def finish(total: Tensor, grad: Tensor, result: Tensor) -> Tensor:
        grad, result = grad.to(wide), result.to(wide)
        return (grad - result.exp() * total if is_log else (grad - total).mul_(result)).to(input_dtype)

    return Reduced(reads, [dim], local, [Tile(result.shape)], None, finish)


@rule(aten._softmax.default)
def softmax(image: Meta, dim: int, half_to_float: bool) -> Description:
    return _forward(image, dim, half_to_float, op=aten._softmax.default, is_log=False)


@rule(aten._log_softmax.default)
def log_softmax(image: Meta, dim: int, half_to_float: bool) -> Description:
    return _forward(image, dim, half_to_float, op=aten._log_softmax.default, is_log=True)


@rule(aten._softmax_backward_data.default)
def softmax_backward(grad: Meta, result: Meta, dim: int, input_dtype: torch.dtype) -> Description:
    return _backward(grad, result, dim, input_dtype, op=aten._softmax_backward_data.default, is_log=False)


@rule(aten._log_softmax_backward_data.default)
def log_softmax_backward(grad: Meta, result: Meta, dim: int, input_dtype: torch.dtype) -> Description:
    return _backward(grad, result, dim, input_dtype, op=aten._log_softmax_backward_data.default, is_log=True)


def _masked(x: Tensor, dim: int) -> Tensor:
    """Softmax where rows after the third are -inf, and so all of some tiles."""
    rows = torch.arange(x.shape[2]).view(-1, 1)
    return x.masked_fill((rows > 2).expand(x.shape), -math.inf).softmax(dim)


def _safe(x: Tensor, dim: int) -> Tensor:
    """Safe softmax, which gives zeros where all values are -inf."""
    columns = torch.arange(x.shape[3])
    return aten._safe_softmax.default(x.masked_fill((columns > 3).expand(x.shape), -math.inf), dim)


CASES = [
    case("over channels", lambda x: x.softmax(1), (2, 5, 11, 7)),
    case("log over channels", lambda x: x.log_softmax(1), (2, 5, 11, 7)),
    case("over rows", lambda x: x.softmax(2), (2, 5, 11, 7)),
    case("log over rows", lambda x: x.log_softmax(2), (2, 5, 11, 7)),
    case("over columns", lambda x: (x.softmax(-1), x.log_softmax(3)), (2, 5, 11, 7)),
    case("over the batch", lambda x: x.softmax(0), (2, 5, 11, 7)),
    case("softmin", lambda x: F.softmin(x, 2), (2, 5, 11, 7)),
    case("softmax2d", lambda x: torch.nn.Softmax2d()(x), (2, 5, 11, 7)),
    case("of great numbers", lambda x: ((1e3 * x).softmax(2), (1e3 * x).log_softmax(2)), (2, 5, 11, 7)),
    case("with masked tiles", lambda x: _masked(x, 2), (2, 5, 11, 7)),
    case("1-D", lambda x: x.softmax(2), (2, 5, 11)),
    case("3-D", lambda x: (x.softmax(1), x.log_softmax(3)), (2, 3, 9, 7, 5)),
    case("in float32", lambda x: (8 * x).round().float().softmax(2, dtype=torch.float64), (2, 5, 11, 7)),
    case("over all pixels", lambda x: x.flatten(2).softmax(-1).view(2, 5, 11, 7), (2, 5, 11, 7)),
    case("over a cut batch", lambda x: x.transpose(0, 2).softmax(0), (2, 5, 11, 7)),
    case("with a cut batch", lambda x: x.transpose(0, 2).log_softmax(1), (2, 5, 11, 7)),
    case("of samples", lambda x: (x.softmax(1), x.log_softmax(0)), (6, 11)),
    case("of a line", lambda x: x.softmax(0), (11,)),
    case("Gumbel", lambda x: (F.gumbel_softmax(x, dim=1, hard=True), F.gumbel_softmax(x, dim=2)), (2, 5, 11, 7)),
    case("safe where all is masked", lambda x: [_safe(x, dim) for dim in (1, 2)], (2, 5, 11, 7)),
    case("as attention weights", lambda x, y: (x.softmax(2) * y).sum(2), (2, 5, 11, 7), (2, 5, 11, 7), tiled=(0, 1)),
]
