"""Sharded parameters, gradients and optimizer state: full tensors from the ranks' shards, and a rank's shard of a full tensor.

A tensor is sharded as a DTensor (fully_shard), or by a strategy that has registered a ShardSpec for it (channel, stage).  The
gradient, optimizer state and moving average of a parameter are sharded as the parameter is.  Checkpoints and exports contain
full tensors only, under the names of the plain model, so that a checkpoint written under one plan resumes under another.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, Protocol
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from widefield.comm.mesh import Mesh
from widefield.private_torch.tensors import foreach_norm
from widefield.tiled.redistribute import dense_strides, is_dense, memory_of

LOADED_BYTES = 2**26
"""How much of a checkpoint is mapped at a time; one module's tensors may be more."""
Path = tuple[Any, ...]
"""The keys that lead to a value in nested dicts."""


class ShardSpec(Protocol):
    """How one parameter, and any tensor of its shape, is sharded over the ranks of the axes `channel` and `stage`."""

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the full tensor."""

    @property
    def num_shards(self) -> int:
        """The number of ranks of those axes that share the tensor; each element is on one of them."""

    def whole(self, part: Tensor, receiver: int) -> Tensor | None:
        """Gather the full tensor on one of the ranks that share it; None on the others.  All of them must call it.

        receiver: any number from 0, the same on all of them; callers vary it to spread the full tensors over the ranks.  0 is
            the first rank.
        """

    def part(self, whole: Tensor) -> Tensor:
        """This rank's shard of a full tensor; sends nothing."""


@dataclass(frozen=True)
class RemoteTensor:
    """A placeholder for a tensor that is on another rank."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    stride: tuple[int, ...]

    def is_contiguous(self) -> bool:
        return torch.empty_strided(self.shape, self.stride, device="meta").is_contiguous()


@dataclass(frozen=True)
class UnreadTensor:
    """A full tensor in a file, of which each rank reads its shard when it has the place for it.

    mapped: gives the tensor in memory that is mapped from the file: only what is touched is read, and it is free again when the
        tensor is.  Copy what is to stay.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    mapped: Callable[[], Tensor]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def opened(tensor: Tensor | UnreadTensor) -> Tensor:
    """The tensor; one that is unread is mapped."""
    return tensor.mapped() if isinstance(tensor, UnreadTensor) else tensor


_SPECS: WeakKeyDictionary[nn.Module, dict[str, ShardSpec]] = WeakKeyDictionary()


def register(model: nn.Module, specs: Mapping[str, ShardSpec]) -> None:
    """Say how parameters and buffers of `model`, by name, are sharded over the axes `channel` and `stage`.

    A tensor with several names, such as the weight of a layer that is registered twice, gets its spec under all of them.
    """
    named = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    by_tensor = {id(tensor): specs[name] for name, tensor in named if name in specs}
    others = {name: by_tensor[id(tensor)] for name, tensor in named if id(tensor) in by_tensor}
    _SPECS.setdefault(model, {}).update(others | dict(specs))


def registered(model: nn.Module) -> Mapping[str, ShardSpec]:
    """The specs registered for `model` so far, by name."""
    return _SPECS.get(model, {})


def is_sharded(mesh: Mesh) -> bool:
    """Whether ranks of this mesh may have shards of tensors, so that a full tensor takes messages."""
    return mesh.plan.shard * mesh.plan.channel * mesh.plan.stage > 1


def is_part(tensor: Tensor) -> bool:
    """Whether the tensor is a DTensor, of which this rank has only some rows."""
    return isinstance(tensor, DTensor)


def local(tensor: Tensor) -> Tensor:
    """A DTensor's local tensor, with the same memory; any other tensor as it is."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def shapes(model: nn.Module) -> dict[str, list[int]]:
    """Name and full shape of every parameter and buffer in a checkpoint of `model`."""
    here = {name: list(value.shape) for name, value in model.state_dict().items()}
    return here | {name: list(spec.shape) for name, spec in registered(model).items()}


# ---------------------------------------------------------------------------------------------- from full tensors to shards


def part(model: nn.Module, name: str, whole: Tensor) -> Tensor:
    """This rank's shard of a full tensor that belongs to the parameter or buffer `name`; a DTensor where that one is."""
    spec = registered(model).get(name)
    mine = whole if spec is None else spec.part(whole)
    here = _named(model, name)
    return _rows_like(mine, here) if isinstance(here, DTensor) else mine


def parts(model: nn.Module, wholes: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """`part` of every full tensor in `wholes` that this rank's model has a name for, for `load_state_dict`."""
    return {name: part(model, name, wholes[name]) for name in model.state_dict() if name in wholes}


def load_full(model: nn.Module, wholes: Mapping[str, Tensor | UnreadTensor]) -> None:
    """Load into `model` this rank's shard of every full tensor; some LOADED_BYTES of tensors are mapped at a time.

    wholes: a tensor for each name of the model.
    """
    names = list(model.state_dict())
    missing = [name for name in names if name not in wholes]
    assert not missing, f"there is no tensor for {missing}"
    for some in _runs_of_modules(names, {name: wholes[name] for name in names}):
        model.load_state_dict({name: part(model, name, opened(wholes[name])) for name in some}, strict=False)


def _runs_of_modules(names: Sequence[str], wholes: Mapping[str, Tensor | UnreadTensor]) -> Iterator[list[str]]:
    """The names in runs of some LOADED_BYTES; what one module has stays together, as its own loading may want."""
    run, size = list[str](), 0
    for _, group in groupby(names, key=lambda name: name.rpartition(".")[0]):
        run += (own := list(group))
        size += sum(wholes[name].nbytes for name in own)
        if size >= LOADED_BYTES:
            yield run
            run, size = [], 0
    yield run


def _named(model: nn.Module, name: str) -> Any:
    owner, _, last = name.rpartition(".")
    return getattr(model.get_submodule(owner), last, None)


def _rows_like(whole: Tensor, like: DTensor) -> DTensor:
    """A DTensor of `whole`, with the placements and device of `like`."""
    lengths, rank = _rows(like), like.device_mesh.get_local_rank(like.device_mesh.ndim - 1)
    start = sum(lengths[:rank])
    rows = whole[start : start + lengths[rank]].to(like.to_local().device).contiguous()
    arguments = {"shape": like.shape, "stride": like.stride(), "run_check": False}
    return DTensor.from_local(rows, like.device_mesh, like.placements, **arguments)


def _rows(tensor: DTensor) -> list[int]:
    """How many rows each rank of the innermost mesh axis has: as torch.chunk divides them, so the last ranks may have none."""
    num_shards, rows = _num_shards(tensor), tensor.shape[0]
    each = -(-rows // num_shards)
    return [max(0, min(each, rows - rank * each)) for rank in range(num_shards)]


# ---------------------------------------------------------------------------------------------- from shards to full tensors


@torch.no_grad()
def gather_full(model: nn.Module, mesh: Mesh, state: dict) -> dict:
    """`state` with full tensors in place of shards; every rank calls it.

    state: nested dicts of what belongs to `model`: parameters, buffers, gradients, optimizer state.
    Each full tensor is gathered on one rank, in the CPU's memory; the other ranks get a RemoteTensor.  The ranks are chosen so
    that each gets about the same bytes.  Entries that only some ranks have (optimizer state under ZeRO-1, the layers of a
    stage) are in every rank's result, as a value or a RemoteTensor.
    """
    return _nested(_merged(mesh, dict(_gather(model, mesh, state, spread=True)))) if is_sharded(mesh) else state


@torch.no_grad()
def gather_full_on_main(model: nn.Module, mesh: Mesh, state: dict) -> dict:
    """As `gather_full`, with every full tensor on rank 0; other ranks may get RemoteTensors.  Every rank calls it."""
    if not is_sharded(mesh):
        return state
    found = dict(_gather(model, mesh, state, spread=False))
    having = mesh.gather_objects({path: dense_strides(value) for path, value in found.items() if isinstance(value, Tensor)})
    merged = _merged(mesh, found)
    for path, value in merged.items():
        ranks = [rank for rank, strides in enumerate(having) if path in strides]
        if ranks and ranks[0] > 0:
            merged[path] = _sent_to_main(value, mesh, source=ranks[0], strides=having[ranks[0]][path])
    return _nested(merged)


def _gather(model: nn.Module, mesh: Mesh, state: dict, *, spread: bool) -> Iterator[tuple[Path, Any]]:
    """Every value of `state` by its path, full tensors in place of shards, or a RemoteTensor if another rank receives it."""
    loads = [0] * (mesh.size if spread else 1)
    for path, value in _leaves(state):
        spec = _spec_of(model, path, value)
        if spec is None and not isinstance(value, DTensor):
            yield path, value
            continue
        receiver = loads.index(min(loads))
        loads[receiver] += value.numel() * value.element_size()
        whole = _gather_rows(value, mesh, receiver) if isinstance(value, DTensor) else value
        if whole is not None and spec is not None:
            whole = spec.whole(whole, receiver // (value.device_mesh.size() if isinstance(value, DTensor) else 1))
        yield path, _remote(value, spec) if whole is None else whole.cpu()


def _gather_rows(tensor: DTensor, mesh: Mesh, receiver: int) -> Tensor | None:
    """The rows of a DTensor from the innermost axis of its mesh, on one rank of it; None on the others.

    The groups are those of `mesh`: a DTensor that torch computed may refer to an equal mesh that was destroyed.
    """
    shards, lengths = mesh.shards, _rows(tensor)
    assert shards is not None, "a parameter is cut although the plan has no axis `shard`"
    innermost = shards.ndim - 1
    if shards.ndim > 1 and shards.get_local_rank(0) != receiver // len(lengths) % shards.size(0):
        return None  # another replica gathers this tensor
    group, group_dst = shards.get_group(innermost), receiver % len(lengths)
    mine = tensor.to_local().detach()
    padded = mine.new_zeros(lengths[0], *tensor.shape[1:])
    padded[: len(mine)] = mine
    if shards.get_local_rank(innermost) != group_dst:
        dist.gather(padded, None, group=group, group_dst=group_dst)
        return None
    gathered = [torch.empty_like(padded) for _ in lengths]
    dist.gather(padded, gathered, group=group, group_dst=group_dst)
    return torch.cat([rows[:length] for rows, length in zip(gathered, lengths, strict=True)])


def _spec_of(model: nn.Module, path: Path, value: Any) -> ShardSpec | None:
    """The spec of a tensor of `state`: one of its keys is a parameter's name, with `module.` before it in a moving average."""
    specs = registered(model)
    if not specs or not isinstance(value, Tensor):
        return None
    for name in (key.removeprefix("module.") for key in path if isinstance(key, str)):
        here = _named(model, name) if name in specs else None
        if here is not None and here.shape == value.shape:
            return specs[name]
    return None


def _remote(tensor: Tensor, spec: ShardSpec | None = None) -> RemoteTensor:
    whole = torch.empty(tensor.shape if spec is None else spec.shape, device="meta")
    keeps = spec is None and not isinstance(tensor, DTensor) and is_dense(tensor)
    stride = tensor.stride() if keeps else whole.stride()
    return RemoteTensor(tuple(whole.shape), tensor.dtype, tuple(stride))


def _merged(mesh: Mesh, found: dict[Path, Any]) -> dict[Path, Any]:
    """The entries of all ranks, in rank order: this rank's own values, and RemoteTensors for tensors of others."""
    described = {path: _remote(value) if isinstance(value, Tensor) else value for path, value in found.items()}
    merged: dict[Path, Any] = {}
    for of_rank in mesh.gather_objects(described):
        for path, value in of_rank.items():
            merged.setdefault(path, found.get(path, value))
    return merged


def _sent_to_main(value: Any, mesh: Mesh, *, source: int, strides: tuple[int, ...]) -> Any:
    """The tensor of rank `source`, received on rank 0; on other ranks `value`.  strides: the source's, see `dense_strides`."""
    group = mesh.checkpoint_group  # in `mesh.group` it would count among the collectives that the StallWatch compares
    if mesh.rank == 0:
        value = torch.empty_strided(value.shape, strides, dtype=value.dtype)
        dist.recv(memory_of(value), src=source, group=group)
    elif mesh.rank == source:
        dist.send(memory_of(value if is_dense(value) else value.contiguous()).cpu(), dst=0, group=group)
    return value


def _leaves(state: Mapping, before: Path = ()) -> Iterator[tuple[Path, Any]]:
    for key, value in state.items():
        if isinstance(value, Mapping) and value:
            yield from _leaves(value, (*before, key))
        else:
            yield (*before, key), value


def _nested(leaves: Mapping[Path, Any]) -> dict:
    state: dict = {}
    for path, value in leaves.items():
        place = state
        for key in path[:-1]:
            place = place.setdefault(key, {})
        if isinstance(value, Mapping):  # an empty one, and other ranks may have something in it
            place.setdefault(path[-1], {})
        else:
            place[path[-1]] = value
    return state


# ---------------------------------------------------------------------------------------------- sums over shards


def total_norm(model: nn.Module, mesh: Mesh, gradients: Mapping[str, Tensor]) -> Tensor:
    """The 2-norm of all gradients as full tensors: a float64 scalar, the same on every rank.  Every rank calls it.

    gradients: this rank's, by parameter name.
    """
    return (mesh.sum_(square_norm(model, mesh, gradients)[0]) / mesh.size).sqrt()


def square_norm(model: nn.Module, mesh: Mesh, gradients: Mapping[str, Tensor]) -> Tensor:
    """This rank's part of the squared 2-norm of all gradients: (1,) float64, whose mean over all ranks is that of full tensors.

    gradients: this rank's, by parameter name.  It sends nothing.
    """
    specs = registered(model)
    alike: dict[int, list[Tensor]] = {}
    for name, gradient in gradients.items():
        # The sum over all ranks is divided by their number; each element is on one of so many ranks.
        num_shards = (specs[name].num_shards if name in specs else 1) * _num_shards(gradient)
        alike.setdefault(num_shards, []).append(local(gradient))
    mine = torch.zeros(1, dtype=torch.float64, device=mesh.device)
    for num_shards, tensors in alike.items():
        norms = torch.stack([norm.to(mine.device) for norm in foreach_norm(tensors)])
        mine += norms.double().square().sum() * num_shards
    return mine


def square_distance(model: nn.Module, mesh: Mesh, others: Mapping[str, Tensor]) -> Tensor:
    """This rank's part of the squared distance of parameters from others: (1,) float64, as `square_norm`.

    others: by name, each the shape of this rank's shard.
    """
    found, named = torch.zeros(1, dtype=torch.float64, device=mesh.device), dict(model.named_parameters())
    specs = registered(model)
    for name, other in others.items():
        num_shards = (specs[name].num_shards if name in specs else 1) * _num_shards(named[name])
        found += (local(named[name]).detach() - other).double().square().sum().to(found) * num_shards
    return found


def sum_over_shards(
    model: nn.Module, mesh: Mesh, numbers: Mapping[str, Sequence[Tensor]], *, count: int, steppers: int
) -> dict[str, Tensor]:
    """Sums over the elements of each full parameter, from sums over its shards: (count,) in float64, the same on every rank.

    numbers: `count` sums over this rank's shard, by the name of each parameter that this rank steps.
    steppers: the number of ranks that share the steps of parameters which they all have (ZeRO-1); else 1.
    Every rank calls it.  Cost: one all-reduce of `count` numbers per parameter.
    """
    specs, parameters = registered(model), dict(model.named_parameters())
    mine = torch.zeros(len(parameters), count, dtype=torch.float64, device=mesh.device)
    for row, (name, parameter) in enumerate(parameters.items()):
        if name in numbers:
            num_shards = steppers * (specs[name].num_shards if name in specs else 1) * _num_shards(parameter)
            mine[row] = torch.stack([number.to(mine) for number in numbers[name]]) * num_shards
    return dict(zip(parameters, mesh.sum_(mine) / mesh.size, strict=True))


def _num_shards(tensor: Tensor) -> int:
    return tensor.device_mesh.size(tensor.device_mesh.ndim - 1) if isinstance(tensor, DTensor) else 1


def are_finite(mesh: Mesh, tensors: Iterable[Tensor]) -> bool:
    """Whether every number of the tensors is finite, on all ranks where these may differ; then every rank calls it."""
    norms = foreach_norm([local(tensor).detach() for tensor in tensors if not tensor.is_meta])
    bad = (~torch.isfinite(torch.stack([norm.to(mesh.device) for norm in norms]))).sum()
    return int(mesh.sum_(bad) if is_sharded(mesh) or mesh.plan.has_replicas else bad) == 0
