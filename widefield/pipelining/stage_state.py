"""What a rank has of a model that is dealt out over stages: its own stages' weights; of the others, names and shapes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import chain

import torch
import torch.distributed as dist
from torch import Tensor, nn

from widefield import sharded_state
from widefield.capture.fake_parameters import named_tensors
from widefield.comm.mesh import Mesh
from widefield.private_torch.modules import buffers_of, parameters_of
from widefield.tiled.partial_gradient import part_of_mean


@dataclass(frozen=True)
class OnOneStage:
    """One rank of the axis `stage` has all of a tensor; `is_here` on that one.  On the others it is a tensor on `meta`."""

    shape: tuple[int, ...]
    num_shards: int
    is_here: bool
    within: sharded_state.ShardSpec | None = None
    """How the ranks that have this stage share the tensor; None where each has all of it."""

    def whole(self, part: Tensor, receiver: int) -> Tensor | None:
        """The tensor where it lies; it needs no message between stages."""
        if not self.is_here:
            return None
        return part if self.within is None else self.within.whole(part, receiver)

    def part(self, whole: Tensor) -> Tensor:
        """The tensor itself where it belongs, else one without memory."""
        mine = whole if self.within is None else self.within.part(whole)
        return mine if self.is_here else mine.to("meta")


@torch.no_grad()
def free_other_stages(model: nn.Module, names: frozenset[str], mesh: Mesh) -> None:
    """Leave this rank the parameters and buffers in `names`; the others keep their names and shapes, and no memory."""
    before, told, put = sharded_state.registered(model), {}, {}
    for name, tensor in named_tensors(model).items():
        within = before.get(name)
        shape, ways = (tuple(tensor.shape), 1) if within is None else (within.shape, within.num_shards)
        told[name] = OnOneStage(shape, ways * mesh.plan.stage, name in names, within)
        if name not in names:
            put[tensor] = _without_memory(tensor)
    for part in model.modules():
        for held in (parameters_of(part), buffers_of(part)):
            held.update({name: put[tensor] for name, tensor in held.items() if tensor is not None and tensor in put})  # type: ignore
    sharded_state.register(model, told)


def _without_memory(tensor: Tensor) -> Tensor:
    bare = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
    return nn.Parameter(bare, requires_grad=tensor.requires_grad) if isinstance(tensor, nn.Parameter) else bare


@torch.no_grad()
def agree(model: nn.Module, mesh: Mesh) -> None:
    """Weights and buffers become those of the first copy, on every rank that has them."""
    mesh.broadcast_all_([tensor for tensor in named_tensors(model).values() if not tensor.is_meta])


@torch.no_grad()
def average_gradients(parameters: Iterable[Tensor], mesh: Mesh, bucket_mib: float) -> None:
    """The mean of every gradient over the ranks with the same stage, in buckets of that size, all under way at once.

    Later stages are done with their backwards first, so their messages travel while the earlier ones compute.
    """
    if mesh.data_group is None or mesh.data_size == 1:
        return
    under_way, learning = [], [p for p in parameters if p.grad is not None]
    for parameter in learning:
        if type(parameter.grad) is not Tensor:  # of a weight that meets every token, as positions do
            parameter.grad = part_of_mean(parameter.grad)
    for bucket in _buckets([p.grad for p in learning], int(bucket_mib * 2**20)):
        flat = torch.cat([gradient.reshape(-1) for gradient in bucket])
        under_way.append((bucket, flat, dist.all_reduce(flat, group=mesh.data_group, async_op=True)))
    for bucket, flat, work in under_way:
        work.wait()
        flat.div_(mesh.data_size)
        for gradient, mean in zip(bucket, flat.split([g.numel() for g in bucket]), strict=True):
            gradient.copy_(mean.view(gradient.shape))


def _buckets(gradients: list[Tensor], most: int) -> list[list[Tensor]]:
    """Gradients of one dtype, in order, up to `most` bytes together."""
    by_kind: dict[torch.dtype, list[list[Tensor]]] = {}
    for gradient in gradients:
        buckets = by_kind.setdefault(gradient.dtype, [[]])
        if buckets[-1] and sum(g.nbytes for g in buckets[-1]) + gradient.nbytes > most:
            buckets.append([])
        buckets[-1].append(gradient)
    return list(chain.from_iterable(by_kind.values()))


def bytes_of(tensors: Mapping[str, Tensor]) -> int:
    """Of memory that this rank has."""
    return sum(tensor.nbytes for tensor in tensors.values() if not tensor.is_meta)
