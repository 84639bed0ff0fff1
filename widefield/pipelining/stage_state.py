"""A rank's weights in a pipeline: those of its own stages; those of other stages are meta tensors with name and shape."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import chain

import torch
import torch.distributed as dist
from torch import Tensor, nn

from widefield import sharded_state
from widefield.capture.fake_parameters import Like, named_tensors
from widefield.comm.mesh import Mesh
from widefield.private_torch.modules import buffers_of, parameters_of
from widefield.tiled.partial_gradient import part_of_mean


@dataclass(frozen=True)
class OnOneStage:
    """ShardSpec of a tensor that is on one rank of the axis `stage`, where `is_here`; on the others it is a meta tensor."""

    shape: tuple[int, ...]
    num_shards: int
    is_here: bool
    within: sharded_state.ShardSpec | None = None
    """How the ranks with this stage shard the tensor over the axis `channel`; None where each has all of it."""

    def whole(self, part: Tensor, receiver: int) -> Tensor | None:
        """The full tensor on a rank with its stage; there is no message between stages."""
        if not self.is_here:
            return None
        return part if self.within is None else self.within.whole(part, receiver)

    def part(self, whole: Tensor) -> Tensor:
        """The tensor, or this rank's shard of it, with its stage; a meta tensor elsewhere."""
        mine = whole if self.within is None else self.within.part(whole)
        return mine if self.is_here else mine.to("meta")


def likes_of(model: nn.Module, device: torch.device) -> dict[str, Like]:
    """Shape, dtype and strides of every parameter and buffer, with `device`; to be recorded before `free_other_stages`."""
    return {name: Like.of(tensor, device) for name, tensor in named_tensors(model).items()}


@torch.no_grad()
def free_other_stages(model: nn.Module, names: frozenset[str], mesh: Mesh) -> None:
    """Keep the parameters and buffers in `names`; replace all others by meta tensors, which have no memory."""
    before, specs, metas = sharded_state.registered(model), {}, {}
    for name, tensor in named_tensors(model).items():
        within = before.get(name)
        shape, num_shards = (tuple(tensor.shape), 1) if within is None else (within.shape, within.num_shards)
        specs[name] = OnOneStage(shape, num_shards * mesh.plan.stage, name in names, within)
        if name not in names:
            metas[tensor] = _to_meta(tensor)
    for part in model.modules():
        for owned in (parameters_of(part), buffers_of(part)):
            owned.update({name: metas[tensor] for name, tensor in owned.items() if tensor is not None and tensor in metas})  # type: ignore
    sharded_state.register(model, specs)


def _to_meta(tensor: Tensor) -> Tensor:
    meta = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
    return nn.Parameter(meta, requires_grad=tensor.requires_grad) if isinstance(tensor, nn.Parameter) else meta


@torch.no_grad()
def broadcast_weights(model: nn.Module, mesh: Mesh) -> None:
    """Overwrite the parameters and buffers of this rank's stages with those of the first rank of `mesh.data_group`."""
    mesh.broadcast_all_([tensor for tensor in named_tensors(model).values() if not tensor.is_meta])


@torch.no_grad()
def average_gradients(parameters: Iterable[Tensor], mesh: Mesh, bucket_mib: float) -> None:
    """Replace every gradient by its mean over the ranks with the same stage, in concurrent all-reduces of `bucket_mib`.

    Later stages finish their backwards first, so their messages overlap the computation of earlier stages.
    """
    if mesh.data_group is None or mesh.data_size == 1:
        return
    under_way, trained = [], [p for p in parameters if p.grad is not None]
    for parameter in trained:
        if type(parameter.grad) is not Tensor:  # a PartialGradient or, of a position embedding, a TiledTensor
            parameter.grad = part_of_mean(parameter.grad)
    for bucket in _buckets([p.grad for p in trained], int(bucket_mib * 2**20)):
        flat = torch.cat([gradient.reshape(-1) for gradient in bucket])
        under_way.append((bucket, flat, dist.all_reduce(flat, group=mesh.data_group, async_op=True)))
    for bucket, flat, work in under_way:
        work.wait()
        flat.div_(mesh.data_size)
        for gradient, mean in zip(bucket, flat.split([g.numel() for g in bucket]), strict=True):
            gradient.copy_(mean.view(gradient.shape))


def _buckets(gradients: list[Tensor], most: int) -> list[list[Tensor]]:
    """The gradients in groups of one dtype, in order, each up to `most` bytes."""
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
