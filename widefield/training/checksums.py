"""Do the replicas still hold the same bits?  A checksum of weights, buffers and optimizer states, compared over ranks.

The checksum of a tensor is the sum of its memory read as integers, which any flipped bit changes; it is computed where the
tensor is, and only sums leave the device.  Tensors are told apart by an odd factor each.  Ranks that hold the same part of the
model are replicas: the copies and the tiles of a plan, of each shard, channel and stage by itself.  Where one differs, all
ranks learn it at once, and the majority of replicas is right; of two nobody knows which one.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from widefield import sharded_state
from widefield.comm.mesh import Mesh
from widefield.tiled.redistribute import is_dense, memory_of

PARTS = ("weights", "buffers", "the optimizer's states", "the moving average")
_BYTES = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}
_MODULUS = 2**64


@dataclass(frozen=True)
class Difference:
    """Replicas whose bits differ.  ranks: the odd ones; all of them where there is no majority.  names: of the tensors."""

    part: str
    ranks: tuple[int, ...]
    replicas: tuple[int, ...]
    names: tuple[str, ...]

    @property
    def is_named(self) -> bool:
        """Whether a majority says which ranks are the odd ones."""
        return len(self.ranks) < len(self.replicas)

    def in_words(self) -> str:
        which = f"{self.names[0]}" + (f" and {len(self.names) - 1} more tensors" if len(self.names) > 1 else "")
        here, others = _ranks_in_words(self.ranks), len(self.replicas) - len(self.ranks)
        if self.is_named:
            has = "has" if len(self.ranks) == 1 else "have"
            return f"{here} {has} other bits in {self.part} ({which}) than the {others} other replicas, which agree"
        return f"{here} have different bits in {self.part} ({which}), and no majority says which of these replicas is right"


class Checksums:
    """Compares the replicas of a mesh.  has_same_buffers: whether ranks keep the same buffers between synchronizations."""

    def __init__(self, mesh: Mesh, *, has_same_buffers: bool) -> None:
        self._mesh, self._has_same_buffers = mesh, has_same_buffers
        self._keys = mesh.gather_objects((_part_of(mesh, of="weights"), _part_of(mesh, of="states")))

    @property
    def has_replicas(self) -> bool:
        """Whether any two ranks hold the same part of the weights."""
        return any(count > 1 for count in Counter(weights for weights, _ in self._keys).values())

    @torch.no_grad()
    def differences(self, model: nn.Module, optimizer: torch.optim.Optimizer, average: nn.Module | None) -> list[Difference]:
        """The replicas that differ, the same on every rank; every rank calls it.

        Cost: one read of all that is compared, and a message of four numbers per rank; further ones only where they differ.
        """
        mine = self._of_parts(model, optimizer, average)
        sums = self._gathered([combined(tensors) for tensors in mine])
        found = [self._differs(number, [row[number] for row in sums]) for number in range(len(PARTS))]
        if not any(found):
            return []
        named = self._mesh.gather_objects([{name: int(checksum(tensor)) for name, tensor in part} for part in mine])
        return [
            Difference(PARTS[number], ranks, replicas, _names(named, number, replicas))
            for number, groups in enumerate(found)
            for ranks, replicas in groups
        ]

    def _of_parts(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, average: nn.Module | None
    ) -> list[list[tuple[str, Tensor]]]:
        buffers = model.named_buffers() if self._has_same_buffers else ()
        averaged = () if average is None else average.named_parameters()
        return [_plain(model.named_parameters()), _plain(buffers), _plain(_states(model, optimizer)), _plain(averaged)]

    def _gathered(self, mine: list[Tensor | None]) -> list[list[int]]:
        """The sums of every rank."""
        here = torch.zeros(self._mesh.size, len(mine), dtype=torch.int64, device=self._mesh.device)
        row = torch.stack([torch.zeros_like(here[0, 0]) if one is None else one.to(here.device) for one in mine])
        here[self._mesh.rank] = row
        return self._mesh.sum_(here).tolist()

    def _differs(self, part: int, sums: list[int]) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
        """(the odd ranks, all replicas) of each group of replicas that is not of one mind."""
        found = []
        keys = [states if PARTS[part] == PARTS[2] else weights for weights, states in self._keys]
        for key in dict.fromkeys(keys):
            replicas = tuple(rank for rank, one in enumerate(keys) if one == key)
            counts = Counter(sums[rank] for rank in replicas).most_common()
            if len(counts) > 1:
                right = counts[0][0] if counts[0][1] * 2 > len(replicas) else None
                found.append((tuple(rank for rank in replicas if sums[rank] != right), replicas))
        return found


def _part_of(mesh: Mesh, *, of: str) -> tuple[int, ...]:
    """Which part of the model this rank holds: equal on replicas."""
    shard = -1
    if mesh.shards is not None and (of == "states" or mesh.plan.sharding.zero > 1):
        shard = mesh.shards.get_local_rank(mesh.shards.ndim - 1)
    return mesh.channel, mesh.stage, shard


def _states(model: nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[tuple[str, Tensor]]:
    names = {parameter: name for name, parameter in model.named_parameters()}
    for parameter, values in optimizer.state.items():
        for key, value in values.items():
            if isinstance(value, Tensor):
                yield f"{key} of {names.get(parameter, 'a weight')}", value


def _plain(named: Iterable[tuple[str, Tensor]]) -> list[tuple[str, Tensor]]:
    return [(name, sharded_state.local(tensor).detach()) for name, tensor in named if not tensor.is_meta]


def _names(named: Sequence[Any], part: int, replicas: Sequence[int]) -> tuple[str, ...]:
    """The tensors of which some replicas have other bits."""
    of_replicas = [named[rank][part] for rank in replicas]
    names = dict.fromkeys(name for of_rank in of_replicas for name in of_rank)
    return tuple(name for name in names if len({of_rank.get(name) for of_rank in of_replicas}) > 1) or ("their order",)


# ---------------------------------------------------------------------------------------------- the sums


def checksum(tensor: Tensor) -> Tensor:
    """A whole number, on the tensor's device, that any single flipped bit changes: (), int64."""
    flat = (memory_of(tensor) if is_dense(tensor) else tensor.contiguous()).reshape(-1)
    flat = torch.view_as_real(flat).reshape(-1) if flat.is_complex() else flat
    size = flat.element_size()
    if size < 8 and flat.numel() and flat.numel() * size % 8 == 0 and flat.data_ptr() % 8 == 0:
        size = 8  # two or more numbers at a time
    return flat.view(_BYTES[size]).sum(dtype=torch.int64)


def combined(tensors: Sequence[tuple[str, Tensor]]) -> Tensor | None:
    """One number of many tensors and their names; None of none."""
    if not tensors:
        return None
    sums: dict[torch.device, list[Tensor]] = {}
    factors: dict[torch.device, list[int]] = {}
    for name, tensor in tensors:
        sums.setdefault(tensor.device, []).append(checksum(tensor))
        factors.setdefault(tensor.device, []).append(factor_of(name))
    totals = [(torch.stack(some) * torch.tensor(factors[device], device=device)).sum() for device, some in sums.items()]
    return torch.stack([total.to(totals[-1].device) for total in totals]).sum()


_FACTORS: dict[str, int] = {}


def factor_of(name: str) -> int:
    """An odd number for a name, the same in every process; with it a sum keeps a flipped bit."""
    if name not in _FACTORS:
        number = int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little") | 1
        _FACTORS[name] = number - _MODULUS if number >= _MODULUS // 2 else number
    return _FACTORS[name]


def _ranks_in_words(ranks: Sequence[int]) -> str:
    *most, last = map(str, ranks)
    return f"ranks {', '.join(most)} and {last}" if most else f"rank {last}"
