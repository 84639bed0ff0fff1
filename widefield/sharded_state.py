"""Who holds what of a model's tensors?  Wholes out of the parts that ranks hold, and a rank's part of a whole.

A part is a DTensor (fully_shard), or what a strategy that cuts parameters or deals them out has registered.  Gradients,
optimizer state and averages of a parameter are held as the parameter is.  Checkpoints and exports hold wholes alone, under
the plain model's names, so that any plan takes up what another wrote.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from widefield.comm.mesh import Mesh
from widefield.private_torch.tensors import foreach_norm
from widefield.tiled.redistribute import dense_strides, is_dense, memory_of

Path = tuple[Any, ...]
"""The keys that lead to a value in nested dicts."""


class ShardSpec(Protocol):
    """How the ranks of the axes `channel` and `stage` hold one parameter, and whatever else has its shape."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the whole."""

    @property
    def num_shards(self) -> int:
        """Among how many ranks of those axes it is shared out, each element being on one of so many."""

    def whole(self, part: Tensor, turn: int) -> Tensor | None:
        """The whole, on one of the ranks that share it; None on the others.  They all call it, with the same `turn`.

        turn: a number from 0 that says which of them gets it, so that the work is spread; 0 is the first.
        """

    def part(self, whole: Tensor) -> Tensor:
        """This rank's part; sends nothing."""


@dataclass(frozen=True)
class RemoteTensor:
    """Stands for a tensor that another rank gives."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    stride: tuple[int, ...]

    def is_contiguous(self) -> bool:
        return torch.empty_strided(self.shape, self.stride, device="meta").is_contiguous()


_HOLDERS: WeakKeyDictionary[nn.Module, dict[str, ShardSpec]] = WeakKeyDictionary()


def register(model: nn.Module, holders: Mapping[str, ShardSpec]) -> None:
    """Say of which parameters and buffers of `model`, by name, this rank has a part only, or another rank all.

    What has several names, as a layer that is registered twice, is held alike under all of them.
    """
    named = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    held = {id(tensor): holders[name] for name, tensor in named if name in holders}
    others = {name: held[id(tensor)] for name, tensor in named if id(tensor) in held}
    _HOLDERS.setdefault(model, {}).update(others | dict(holders))


def registered(model: nn.Module) -> Mapping[str, ShardSpec]:
    """What has been told of so far."""
    return _HOLDERS.get(model, {})


def is_sharded(mesh: Mesh) -> bool:
    """Whether ranks of this mesh may hold parts of tensors, so that wholes take messages."""
    return mesh.plan.shard * mesh.plan.channel * mesh.plan.stage > 1


def is_part(tensor: Tensor) -> bool:
    """Whether this rank has only some rows of a tensor, which is a DTensor then."""
    return isinstance(tensor, DTensor)


def local(tensor: Tensor) -> Tensor:
    """What this rank has of a tensor, as a plain one that shares its memory."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def shapes(model: nn.Module) -> dict[str, list[int]]:
    """Name and whole shape of every parameter and buffer that a checkpoint has."""
    registered = _HOLDERS.get(model, {})
    here = {name: list(value.shape) for name, value in model.state_dict().items()}
    return here | {name: list(spec.shape) for name, spec in registered.items()}


# ---------------------------------------------------------------------------------------------- from wholes to parts


def part(model: nn.Module, name: str, whole: Tensor) -> Tensor:
    """This rank's part of a whole that belongs to the parameter or buffer `name`, in the form that it has here."""
    spec = _HOLDERS.get(model, {}).get(name)
    mine = whole if spec is None else spec.part(whole)
    here = _named(model, name)
    return _dealt(mine, here) if isinstance(here, DTensor) else mine


def parts(model: nn.Module, wholes: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """`part` of every parameter and buffer that this rank's model has, for its `load_state_dict`."""
    return {name: part(model, name, wholes[name]) for name in model.state_dict() if name in wholes}


def _named(model: nn.Module, name: str) -> Any:
    owner, _, last = name.rpartition(".")
    return getattr(model.get_submodule(owner), last, None)


def _dealt(whole: Tensor, like: DTensor) -> DTensor:
    """The rows of `whole` that this rank has of `like`, with its placement and device."""
    lengths, ranks = _rows(like), like.device_mesh.get_local_rank(like.device_mesh.ndim - 1)
    start = sum(lengths[:ranks])
    rows = whole[start : start + lengths[ranks]].to(like.to_local().device).contiguous()
    arguments = {"shape": like.shape, "stride": like.stride(), "run_check": False}
    return DTensor.from_local(rows, like.device_mesh, like.placements, **arguments)


def _rows(tensor: DTensor) -> list[int]:
    """How many rows each rank of the innermost mesh axis has: as torch.chunk cuts them, so that the last may have none."""
    ways, rows = tensor.device_mesh.size(tensor.device_mesh.ndim - 1), tensor.shape[0]
    each = -(-rows // ways)
    return [max(0, min(each, rows - rank * each)) for rank in range(ways)]


# ---------------------------------------------------------------------------------------------- from parts to wholes


@torch.no_grad()
def gather_full(model: nn.Module, mesh: Mesh, state: dict) -> dict:
    """`state`, nested dicts of what belongs to `model`, with wholes in place of parts; every rank calls it.

    Each whole is put together on one rank, one after another, and lies in the CPU's memory there; on the others a RemoteTensor
    stands for it.  Ranks take turns by bytes, so that each has about its share.  What only some ranks have (the state of a
    shared optimizer, the layers of a stage) every rank has afterwards, as itself or as a RemoteTensor.
    """
    return _nested(_united(mesh, dict(_gather(model, mesh, state, spread=True)))) if is_sharded(mesh) else state


@torch.no_grad()
def gather_full_on_main(model: nn.Module, mesh: Mesh, state: dict) -> dict:
    """As `gather_full`, with every whole on rank 0; others may have RemoteTensors.  Every rank calls it."""
    if not is_sharded(mesh):
        return state
    found = dict(_gather(model, mesh, state, spread=False))
    having = mesh.gather_objects({path: dense_strides(value) for path, value in found.items() if isinstance(value, Tensor)})
    united = _united(mesh, found)
    for path, value in united.items():
        ranks = [rank for rank, strides in enumerate(having) if path in strides]
        if ranks and ranks[0] > 0:
            united[path] = _sent(value, mesh, source=ranks[0], strides=having[ranks[0]][path])
    return _nested(united)


def _gather(model: nn.Module, mesh: Mesh, state: dict, *, spread: bool) -> Iterator[tuple[Path, Any]]:
    """Every value of `state` by its path, wholes in place of parts; the rank whose turn it is not has a RemoteTensor."""
    loads = [0] * (mesh.size if spread else 1)
    for path, value in _leaves(state):
        spec = _holder_of(model, path, value)
        if spec is None and not isinstance(value, DTensor):
            yield path, value
            continue
        turn = loads.index(min(loads))
        loads[turn] += value.numel() * value.element_size()
        whole = _joined(value, mesh, turn) if isinstance(value, DTensor) else value
        if whole is not None and spec is not None:
            whole = spec.whole(whole, turn // _ways(value))
        yield path, _absent(value, spec) if whole is None else whole.cpu()


def _joined(tensor: DTensor, mesh: Mesh, turn: int) -> Tensor | None:
    """The whole of a tensor cut over the innermost axis of its mesh, on one rank of it; None on the others.

    The groups are those of `mesh`: what torch computes from a DTensor may name an equal mesh that was left before.
    """
    shards, lengths = mesh.shards, _rows(tensor)
    assert shards is not None, "a parameter is cut although the plan has no axis `shard`"
    innermost = shards.ndim - 1
    if shards.ndim > 1 and shards.get_local_rank(0) != turn // len(lengths) % shards.size(0):
        return None  # another copy's turn
    group, receiver = shards.get_group(innermost), turn % len(lengths)
    mine = tensor.to_local().detach()
    padded = mine.new_zeros(lengths[0], *tensor.shape[1:])
    padded[: len(mine)] = mine
    if shards.get_local_rank(innermost) != receiver:
        dist.gather(padded, None, group=group, group_dst=receiver)
        return None
    gathered = [torch.empty_like(padded) for _ in lengths]
    dist.gather(padded, gathered, group=group, group_dst=receiver)
    return torch.cat([rows[:length] for rows, length in zip(gathered, lengths, strict=True)])


def _ways(tensor: Tensor) -> int:
    return tensor.device_mesh.size() if isinstance(tensor, DTensor) else 1


def _holder_of(model: nn.Module, path: Path, value: Any) -> ShardSpec | None:
    """Who holds a tensor of `state`: the name of a parameter is one of the keys, under `module.` in an average."""
    registered = _HOLDERS.get(model)
    if not registered or not isinstance(value, Tensor):
        return None
    for name in (key.removeprefix("module.") for key in path if isinstance(key, str)):
        here = _named(model, name) if name in registered else None
        if here is not None and here.shape == value.shape:
            return registered[name]
    return None


def _absent(tensor: Tensor, spec: ShardSpec | None = None) -> RemoteTensor:
    whole = torch.empty(tensor.shape if spec is None else spec.shape, device="meta")
    keeps = spec is None and not isinstance(tensor, DTensor) and is_dense(tensor)
    stride = tensor.stride() if keeps else whole.stride()
    return RemoteTensor(tuple(whole.shape), tensor.dtype, tuple(stride))


def _united(mesh: Mesh, found: dict[Path, Any]) -> dict[Path, Any]:
    """What any rank has, in rank order: this rank's own values first, for tensors of others a RemoteTensor."""
    registered = {path: _absent(value) if isinstance(value, Tensor) else value for path, value in found.items()}
    united: dict[Path, Any] = {}
    for of_rank in mesh.gather_objects(registered):
        for path, value in of_rank.items():
            united.setdefault(path, found.get(path, value))
    return united


def _sent(value: Any, mesh: Mesh, *, source: int, strides: tuple[int, ...]) -> Any:
    """A tensor that `source` has, on rank 0 too; what the others have stays.  strides: the source's, see `dense_strides`."""
    group = mesh.checkpoint_group  # in `mesh.group` it would count among the collectives, see comm/mesh.py
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


# ---------------------------------------------------------------------------------------------- sums over parts


def total_norm(model: nn.Module, mesh: Mesh, gradients: Mapping[str, Tensor]) -> Tensor:
    """The 2-norm of all gradients, by parameter name, as of wholes; one number in float64, equal on every rank."""
    registered = _HOLDERS.get(model, {})
    mine = torch.zeros((), dtype=torch.float64, device=mesh.device)
    for name, gradient in gradients.items():
        ways = (registered[name].num_shards if name in registered else 1) * _shards(gradient)
        mine += torch.linalg.vector_norm(local(gradient)).double().square().to(mine.device) * ways
    return (mesh.sum_(mine) / mesh.size).sqrt()


def sums_of_wholes(
    model: nn.Module, mesh: Mesh, numbers: Mapping[str, Sequence[Tensor]], *, count: int, num_shards: int
) -> dict[str, Tensor]:
    """Numbers that add up over the elements of a parameter, of every one as a whole; (count,) in float64, on every rank alike.

    numbers: by name, `count` of them of this rank's part; of the parameters that this rank answers for.
    num_shards: how many ranks share out among themselves who answers for what they all have.
    Cost: one message of `count` numbers per parameter.
    """
    registered, parameters = _HOLDERS.get(model, {}), dict(model.named_parameters())
    mine = torch.zeros(len(parameters), count, dtype=torch.float64, device=mesh.device)
    for row, (name, parameter) in enumerate(parameters.items()):
        if name in numbers:
            share = num_shards * (registered[name].num_shards if name in registered else 1) * _shards(parameter)
            mine[row] = torch.stack([number.to(mine) for number in numbers[name]]) * share
    return dict(zip(parameters, mesh.sum_(mine) / mesh.size, strict=True))


def _shards(tensor: Tensor) -> int:
    return tensor.device_mesh.size(tensor.device_mesh.ndim - 1) if isinstance(tensor, DTensor) else 1


def are_finite(mesh: Mesh, tensors: Iterable[Tensor]) -> bool:
    """Whether every number of the tensors is finite, on every rank where ranks hold parts; then every rank calls it."""
    norms = foreach_norm([local(tensor).detach() for tensor in tensors if not tensor.is_meta])
    bad = (~torch.isfinite(torch.stack([norm.to(mesh.device) for norm in norms]))).sum()
    return int(mesh.sum_(bad) if is_sharded(mesh) else bad) == 0
