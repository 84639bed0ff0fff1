"""Replicas of a model that train by themselves and agree on weights; see widefield/agreement/ for the ways to agree.

Each replica has its part of every batch and takes optimizer steps of its own.  What is saved, evaluated and exported is the
mean of all replicas; each goes on from its own weights, which a checkpoint keeps too.

Between averages a replica sends nothing to others; what all have to know of its steps is told some steps later, see
step_reports.py.  Evaluations and saves are of all together.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from widefield.comm.collectives import runs_of
from widefield.comm.mesh import Mesh
from widefield.comm.replica_mesh import peers_of, replica_mesh
from widefield.sharded_state import local, opened, square_distance

MESSAGE_BYTES = 2**25
Named = dict[str, Tensor]


@dataclass(frozen=True)
class Averaged:
    """One average of the weights.

    step: after which.  replicas: how many averaged among themselves.  distance: how far apart the replicas were, the root of
    the mean over all of |weights - mean of its group|^2.  bytes: what this rank gave to be added up.
    """

    step: int
    replicas: int
    distance: float
    bytes: int


class Replicas:
    """This rank's replica among all.  Every rank makes one and calls each method, in the same order.

    A way to agree is a subclass with an `after_step`; see periodic_replicas.py and gossip_replicas.py.
    count: the samples (or their pixels) that this replica has learned from since all last averaged.
    begin_anew: whether a checkpoint was of other replicas, whose mean was taken.
    """

    def __init__(self, mesh: Mesh, *, groups: Iterable[int] = ()) -> None:
        """groups: sizes of groups of neighbouring replicas that average among themselves."""
        self.mesh, self.replica = mesh, replica_mesh(mesh)
        self.number = mesh.rank // self.replica.size
        self._peers = {size: peers_of(mesh, size) for size in sorted({mesh.plan.replicate, *groups})}
        self.count, self.begin_anew = 0.0, False
        self._untold: list[Averaged] = []
        """Averages that nobody has asked for yet, with this rank's part of the squared distance in place of the distance."""

    def begin(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """Begin to train a parallelized model, from the weights that it has now, on all replicas the same."""
        self.model, self.optimizer, self.count = model, optimizer, 0.0

    def after_step(self, step: int, lr: float) -> None:
        """Agree, where it is time to.  step: counted from 1, that was just done, with the learning rate lr."""
        raise NotImplementedError

    @property
    def reasons(self) -> list[str]:
        """What a user should know."""
        ranks = self.replica.size
        of_ranks = "of one rank" if ranks == 1 else f"of {ranks} ranks"
        return [
            f"agreement={self.mesh.plan.agreement}: {self.mesh.plan.replicate} replicas {of_ranks} take steps of their own and "
            f"agree on weights, of {self._bytes():,} bytes on each rank; these are not one device's numbers"
        ]

    def _bytes(self) -> int:
        """Of this rank's part of what is agreed on."""
        return sum(one.nbytes for one in self._agreed_on().values())

    def _agreed_on(self) -> Named:
        """What replicas agree on, by name: this rank's part of the weights, then of the buffers."""
        return self._weights() | self._buffers()

    def tell_distance(self, means: Mapping[str, Tensor]) -> None:
        """The mean of all is looked at, as in an evaluation; a way to agree that has not told of it may tell now."""

    # ------------------------------------------------------------------------------------------ means

    def _share(self, size: int) -> tuple[float, float]:
        """(this replica's share of a mean over groups of `size`, of how many samples in all)."""
        total = torch.tensor([self.count], dtype=torch.float64, device=self.mesh.device)
        samples = self._peers[size].sum_(total).item()
        return self.count / samples if samples else 1 / size, samples

    def _means(self, tensors: Sequence[Tensor], size: int, share: float) -> tuple[list[Tensor], int]:
        """(the means over groups of `size` replicas, each by its share; the bytes of this rank's messages)."""
        found, sent = dict[int, Tensor](), 0
        for run in runs_of(tensors, MESSAGE_BYTES):
            flat = torch.cat([one.reshape(-1) for one in run]).mul_(share)
            parts = self._peers[size].sum_(flat).split([one.numel() for one in run])
            sent += flat.nbytes
            found |= {id(one): part.view(one.shape) for one, part in zip(run, parts, strict=True)}
        return [found[id(one)] for one in tensors], sent

    def _note(self, step: int, size: int, means: Mapping[str, Tensor], sent: int) -> None:
        """Keep what there is to tell of an average over groups of `size`, whose means of the weights these are."""
        self._untold.append(Averaged(step, size, square_distance(self.model, self.mesh, means).item(), sent))

    def averages(self) -> list[Averaged]:
        """Those since the last call.  Every rank calls it, and has the same."""
        squares = torch.tensor([one.distance for one in self._untold], dtype=torch.float64, device=self.mesh.device)
        totals = self.mesh.start_sum(squares)() if self._untold else []
        found = [
            replace(one, distance=(total / self.mesh.size) ** 0.5) for one, total in zip(self._untold, totals, strict=True)
        ]
        self._untold.clear()
        return found

    def _weights(self) -> Named:
        """This rank's part of what is learned."""
        learned = {id(one) for group in self.optimizer.param_groups for one in group["params"]}
        named = self.model.named_parameters()
        return {name: local(one).detach() for name, one in named if id(one) in learned and not one.is_meta}

    def _buffers(self) -> Named:
        """Running statistics, and whatever else a pass writes; counters are the same on all replicas."""
        named = self.model.named_buffers()
        return {name: local(one) for name, one in named if not one.is_meta and one.is_floating_point()}

    # ------------------------------------------------------------------------------------------ the mean of all

    @contextmanager
    def consensus(self, further: Sequence[Tensor] = (), *, optimizer: bool = False) -> Iterator[None]:
        """Inside, every replica has the mean of all; afterwards, its own weights again.

        further: what else is averaged, as a moving average's weights.  optimizer: its state too, where all replicas have it.
        """
        weights = self._weights()
        tensors = [*weights.values(), *self._buffers().values(), *(local(one).detach() for one in further)]
        tensors += self._common_state().values() if optimizer else ()
        with torch.no_grad():
            kept = [one.clone() for one in tensors]
            size = self.mesh.plan.replicate
            means, _ = self._means(tensors, size, self._share(size)[0])
            if not optimizer:  # where it is looked at, not where it is saved
                self.tell_distance(dict(zip(weights, means, strict=False)))
            for tensor, mean in zip(tensors, means, strict=True):
                tensor.copy_(mean)
        try:
            yield
        finally:
            with torch.no_grad():
                for tensor, own in zip(tensors, kept, strict=True):
                    tensor.copy_(own)

    def _states(self, *, counters: bool = False) -> dict[tuple[int, str], Tensor]:
        """The optimizer's tensors on this rank, by the place of the parameter and their name."""
        parameters = [one for group in self.optimizer.param_groups for one in group["params"]]
        return {
            (place, key): local(value)
            for place, one in enumerate(parameters)
            for key, value in self.optimizer.state.get(one, {}).items()
            if isinstance(value, Tensor) and (counters or value.dim())
        }

    def _common_state(self) -> dict[tuple[int, str], Tensor]:
        """Those that every replica has: one whose branch of the model never ran has no momentum for it."""
        own = self._states()
        of_ranks = self.mesh.gather_objects(list(own))
        of_peers = [set(keys) for keys in of_ranks[self.replica.rank :: self.replica.size]]
        return {key: own[key] for key in sorted(set.intersection(*of_peers))}

    def with_common_state(self, saved: dict[str, Any]) -> dict[str, Any]:
        """An `optimizer_state` without the parameters of which only some replicas have one.  Every rank calls it."""
        common, own = self._common_state(), self._states()
        parameters = [one for group in self.optimizer.param_groups for one in group["params"]]
        lacking = {id(parameters[place]) for place, key in own if (place, key) not in common}
        names = {name for name, one in self.model.named_parameters() if id(one) in lacking}
        return saved | {"parameters": {name: of for name, of in saved["parameters"].items() if name not in names}}

    # ------------------------------------------------------------------------------------------ checkpoints

    def state(self, average: Mapping[str, Tensor]) -> dict[str, Any]:
        """This rank's part of its replica, copied.  average: of the weights' moving average, by name."""
        optimizer: dict[str, dict[str, Tensor]] = {}
        for (place, key), value in self._states(counters=True).items():
            optimizer.setdefault(str(place), {})[key] = value.clone()
        return {
            "plan": self._layout,
            "count": self.count,
            "weights": copies(self._weights() | self._buffers()),
            "optimizer": optimizer,
            "average": copies(average),
            "further": self.further_state(),
        }

    def further_state(self) -> dict[str, Any]:
        """What a way to agree remembers besides, copied; see `load_further`."""
        return {}

    def load_further(self, saved: Mapping[str, Any]) -> None:
        """Load what `further_state` gave on a replica like this one."""

    @property
    def _layout(self) -> str:
        """How replicas are made up: their parts fit others only where this is the same."""
        plan = self.mesh.plan
        return f"{plan.agreement.name}: {plan.axes}, space {plan.space}, ZeRO-{plan.sharding.zero}"

    @torch.no_grad()
    def load(self, saved: Mapping[str, Any] | None, average: Mapping[str, Tensor]) -> None:
        """Go on as the replica that `state` is of; from the mean of all, which is loaded first, where the run had others."""
        if saved is None or saved["plan"] != self._layout:
            self.begin(self.model, self.optimizer)
            self.begin_anew = True
            return
        states = self._states(counters=True)
        places = [
            (states.get((int(place), key)), value) for place, of in saved["optimizer"].items() for key, value in of.items()
        ]
        own = self._weights() | self._buffers()
        places += [(own[name], value) for name, value in saved["weights"].items()]
        places += [(local(average[name]), value) for name, value in saved["average"].items() if name in average]
        for place, value in places:
            if place is not None:
                place.copy_(opened(value))
        self.count = saved["count"]
        self.load_further(saved["further"])


def copies(tensors: Mapping[str, Tensor]) -> Named:
    """Of this rank's parts."""
    return {name: local(one).detach().clone() for name, one in tensors.items()}
