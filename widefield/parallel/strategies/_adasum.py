"""Adasum: gradients of two ranks are added where they are orthogonal and averaged where they agree.

    adasum(a, b) = a (1 - a.b / 2|a|^2) + b (1 - a.b / 2|b|^2)        Maleki et al. 2020, arXiv:2006.02924

layer by layer, over pairs of ranks, then pairs of pairs.  It is not the mean, so the numbers are not one device's.
Each rank sends its gradients log2(ranks) times, one bucket after another, and waits: nothing overlaps.
(No `from __future__ import annotations` here: DDP checks the annotations of a hook, and text would not pass.)
"""

import torch
import torch.distributed as dist
from torch import Tensor

from widefield.comm.point_to_point import exchange


def adasum(a: Tensor, b: Tensor) -> Tensor:
    """Combine one layer's gradients of two ranks, or of two halves of the ranks.  Products are computed in float64."""
    dot = torch.dot(a.flatten().double(), b.flatten().double())
    return _without_shared(a, dot) + _without_shared(b, dot)


def _without_shared(gradient: Tensor, dot: Tensor) -> Tensor:
    """The gradient minus half of its projection on the other one; zero where it is zero."""
    square = gradient.double().square().sum()
    share = torch.where(square > 0, dot / (2 * square), torch.zeros_like(dot))
    return gradient * (1 - share).to(gradient.dtype)


def adasum_hook(group: dist.ProcessGroup, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    """A communication hook of DDP: combines the bucket's gradients over `group`, whose size is a power of two.

    Every rank gets the same bits.
    """
    buffer = bucket.buffer()
    rank, distance = dist.get_rank(group), 1
    while distance < dist.get_world_size(group):
        theirs = _swap(buffer, rank ^ distance, group)
        first, second = (buffer, theirs) if rank < rank ^ distance else (theirs, buffer)
        _combine(bucket, first, second, into=buffer)
        distance *= 2
    done: torch.futures.Future[Tensor] = torch.futures.Future(devices=[buffer.device] if buffer.is_cuda else [])
    done.set_result(buffer)
    return done


def _swap(buffer: Tensor, peer: int, group: dist.ProcessGroup) -> Tensor:
    theirs = torch.empty_like(buffer)
    for work in exchange({peer: buffer.clone()}, {peer: theirs}, group):
        work.wait()
    return theirs


def _combine(bucket: dist.GradBucket, first: Tensor, second: Tensor, *, into: Tensor) -> None:
    """Combine both buffers layer by layer; a layer's gradient is a contiguous run of the buffer."""
    for gradient in bucket.gradients():
        start = gradient.storage_offset() - bucket.buffer().storage_offset()
        run = slice(start, start + gradient.numel())
        into[run] = adasum(first[run], second[run])
