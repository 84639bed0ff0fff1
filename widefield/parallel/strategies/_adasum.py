"""Adasum: gradients of two ranks are added where they are orthogonal and averaged where they agree.

    adasum(a, b) = a (1 - a.b / 2|a|^2) + b (1 - a.b / 2|b|^2)        Maleki et al. 2020, arXiv:2006.02924

layer by layer, over pairs of ranks, then pairs of pairs.  It is no mean, so the numbers are not one device's: it has to be
asked for.  Each rank sends its gradients log2(ranks) times, one bucket after another, and waits: nothing overlaps.
(DDP looks at the annotations of a hook and does not understand them as text, hence no import of them from the future.)
"""

import torch
import torch.distributed as dist
from torch import Tensor

from widefield.comm.point_to_point import exchange


def adasum(a: Tensor, b: Tensor) -> Tensor:
    """One layer's gradients of two ranks (or of two halves of the ranks) as one; products are taken in float64."""
    along = torch.dot(a.flatten().double(), b.flatten().double())
    return _without_shared(a, along) + _without_shared(b, along)


def _without_shared(gradient: Tensor, along: Tensor) -> Tensor:
    """The gradient less half of what it shares with the other one; itself where it is zero."""
    square = gradient.double().square().sum()
    share = torch.where(square > 0, along / (2 * square), torch.zeros_like(along))
    return gradient * (1 - share).to(gradient.dtype)


def adasum_hook(group: dist.ProcessGroup, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    """DDP's hook: the bucket's gradients of all ranks of `group`, a power of two, combined; the same bits on each."""
    buffer = bucket.buffer()
    rank, ways = dist.get_rank(group), 1
    while ways < dist.get_world_size(group):
        theirs = _swap(buffer, rank ^ ways, group)
        first, second = (buffer, theirs) if rank < rank ^ ways else (theirs, buffer)
        _combine(bucket, first, second, into=buffer)
        ways *= 2
    done: torch.futures.Future[Tensor] = torch.futures.Future(devices=[buffer.device] if buffer.is_cuda else [])
    done.set_result(buffer)
    return done


def _swap(buffer: Tensor, peer: int, group: dist.ProcessGroup) -> Tensor:
    theirs = torch.empty_like(buffer)
    for work in exchange({peer: buffer.clone()}, {peer: theirs}, group):
        work.wait()
    return theirs


def _combine(bucket: dist.GradBucket, first: Tensor, second: Tensor, *, into: Tensor) -> None:
    """Both buffers as one, a layer at a time; a layer's gradient is a run of the buffer."""
    for gradient in bucket.gradients():
        start = gradient.storage_offset() - bucket.buffer().storage_offset()
        run = slice(start, start + gradient.numel())
        into[run] = adasum(first[run], second[run])
