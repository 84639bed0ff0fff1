"""Replicas that average with a few others after every step, see widefield/agreement/gossip.py.

After its step a replica sends what it has to those that hear it, and takes its row of the mixing matrix.  Messages are between
two ranks, and a mix waits for those it hears alone.  Where rows do not sum to 1, as on edges of one's own, what is mixed are
values and a mass, and the weights are value / mass (push-sum).

With a `delay` a message is taken in so many steps after it was sent, and the replica goes on meanwhile (overlapped SGP).  Its
own part of a mix it takes at once; masses, with those on their way, sum to the number of replicas.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from widefield.agreement.mixing import GRAPHS, MixingGraph, mixed, of_edges
from widefield.comm.collectives import runs_of
from widefield.comm.mesh import Mesh
from widefield.config.agreement import AgreementConfig
from widefield.sharded_state import opened
from widefield.training.replicas import MESSAGE_BYTES, Named, Replicas, copies


def graph_of(asked: AgreementConfig, replicas: int) -> MixingGraph:
    """The graph of a recipe's section.  ValueError: there is none of so many replicas."""
    if asked.edges:
        return of_edges(replicas, [(sender, hearer) for sender, hearer in asked.edges], directed=True)
    return GRAPHS[asked.graph](replicas)


@dataclass(frozen=True)
class Mix:
    """A replica's part of what others sent it for a mix, and of its own: values by their order, and the mass."""

    values: list[Tensor]
    mass: float


@dataclass
class Late:
    """What is on its way to a replica.  due: the step, counted from 1, with whose mix it is taken in."""

    due: int
    wait: Callable[[], Mix]
    """Waits until it is there, and gives it."""
    arrived: Mix | None = None

    def take(self) -> Mix:
        """What it is, once it is there; this may wait."""
        self.arrived = self.wait() if self.arrived is None else self.arrived
        return self.arrived


class GossipReplicas(Replicas):
    """Replicas that mix.  mass: of push-sum; it stays 1 where the matrices are doubly stochastic and nothing is late."""

    def __init__(self, mesh: Mesh) -> None:
        super().__init__(mesh)
        self.asked, self.graph = mesh.plan.agreement, graph_of(mesh.plan.agreement, mesh.plan.replicate)
        self._sums_mass = self.asked.delay > 0 or not self.graph.is_doubly_stochastic
        self.mass, self._step, self._told_step, self._sent = 1.0, 0, 0, 0
        self._values: Named = {}
        """What is mixed, the weights times the mass; empty where that is 1."""
        self._late: list[Late] = []

    def begin(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        super().begin(model, optimizer)
        self.mass = 1.0
        self._values.clear()
        self._late.clear()

    @torch.no_grad()
    def after_step(self, step: int, lr: float) -> None:
        self._step, period = step, self.asked.global_period
        tensors, all_ = self._agreed_on(), self.mesh.plan.replicate
        if period is not None and step % period == 0:
            found, sent = self._means(list(tensors.values()), all_, self._share(all_)[0])
            self._take(tensors, Mix(found, 1.0))
            self._sent += sent
            return
        values, matrix = list(self._moved(tensors).values()), self.graph.matrix_at(step - 1)
        self._late.append(Late(step + self.asked.delay, self._start_mix(values, matrix)))
        own = matrix[self.number, self.number].item()
        if self.asked.delay:
            found = [one * own for one in values]
            self._take(tensors, self._with_late(Mix(found, self.mass * own), until=step))
        else:
            self._take(tensors, self._late.pop().take())

    def _moved(self, tensors: Named) -> Named:
        """The values after this replica's step: the step of the weights is added to them."""
        return {
            name: one if name not in self._values else self._values[name] + one - self._values[name] / self.mass
            for name, one in tensors.items()
        }

    def _take(self, tensors: Named, mix: Mix) -> None:
        for tensor, value in zip(tensors.values(), mix.values, strict=True):
            tensor.copy_(value if mix.mass == 1 else value / mix.mass)
        self.mass = mix.mass
        self._values = {} if mix.mass == 1 else dict(zip(tensors, mix.values, strict=True))

    def _with_late(self, own: Mix, *, until: int | None = None) -> Mix:
        """`own` and what was on its way: what is due up to a step, which is forgotten; None: all, which stays on its way."""
        due = [one.take() for one in self._late if until is None or one.due <= until]
        if until is not None:
            self._late = [one for one in self._late if one.due > until]
        values = [torch.stack(parts).sum(0) for parts in zip(own.values, *(one.values for one in due), strict=True)]
        return Mix(values, own.mass + sum(one.mass for one in due))

    def _start_mix(self, values: Sequence[Tensor], matrix: Tensor) -> Callable[[], Mix]:
        """Send values and the mass; the function returned waits for those of others and gives this replica's row of the mix.

        What it has itself is in the row where nothing may be late.
        """
        peers = self._peers[self.mesh.plan.replicate]
        row, column = matrix[self.number].tolist(), matrix[:, self.number].tolist()
        hears = [one for one, weight in enumerate(row) if weight and one != self.number]
        hearers = [one for one, weight in enumerate(column) if weight and one != self.number]
        has_own = not self.asked.delay
        weights = [*([row[self.number]] if has_own else []), *(row[one] for one in hears)]
        places = {id(one): number for number, one in enumerate(values)}
        runs = [[(places[id(one)], one.shape) for one in run] for run in runs_of(values, MESSAGE_BYTES)]
        flat = [torch.cat([values[number].reshape(-1) for number, _ in run]) for run in runs]
        if self._sums_mass:
            flat.append(torch.tensor([self.mass], dtype=torch.float64, device=self.mesh.device))
        self._sent += sum(one.nbytes for one in flat) * len(hearers)
        waits, mass = [peers.start_exchange(one, hears=hears, hearers=hearers) for one in flat], self.mass

        def mix() -> Mix:
            held = [[*([own] if has_own else []), *wait()] for own, wait in zip(flat, waits, strict=True)]
            rows = [mixed(of, weights) if of else torch.zeros_like(own) for of, own in zip(held, flat, strict=True)]
            found, mixed_mass = dict[int, Tensor](), rows.pop().item() if self._sums_mass else mass
            for run, row in zip(runs, rows, strict=True):
                parts = row.split([shape.numel() for _, shape in run])
                found |= {number: part.view(shape) for (number, shape), part in zip(run, parts, strict=True)}
            return Mix([found[number] for number in range(len(found))], mixed_mass)

        return mix

    @contextmanager
    def consensus(self, further: Sequence[Tensor] = (), *, optimizer: bool = False) -> Iterator[None]:
        """As of all replicas; what is on its way counts with those to whom it goes, and stays on its way."""
        if not self._late:
            with super().consensus(further, optimizer=optimizer):
                yield
            return
        tensors, own, values = self._agreed_on(), self.mass, self._values
        with torch.no_grad():
            kept = copies(tensors)
            of_mass = [values.get(name, one) for name, one in tensors.items()]
            self._take(tensors, self._with_late(Mix(of_mass, own)))
        try:
            with super().consensus(further, optimizer=optimizer):
                yield
        finally:
            self.mass, self._values = own, values
            with torch.no_grad():
                for name, tensor in tensors.items():
                    tensor.copy_(kept[name])

    def _share(self, size: int) -> tuple[float, float]:
        """By mass, of which there is one per replica: that is the mean which mixes keep."""
        return self.mass / size, float(size)

    def tell_distance(self, means: Mapping[str, Tensor]) -> None:
        """Once per look at the mean of all, since a distance takes a message of all."""
        if self._step == self._told_step:
            return
        self._told_step = self._step
        self._note(self._step, self.mesh.plan.replicate, means, self._sent)
        self._sent = 0

    def further_state(self) -> dict[str, Any]:
        counts = {"step": self._step, "told_step": self._told_step, "sent": self._sent}
        names = list(self._agreed_on())
        late = [
            {"due": one.due, "mass": mix.mass, "values": copies(dict(zip(names, mix.values, strict=True)))}
            for one in self._late
            for mix in [one.take()]
        ]
        return {"mass": self.mass, "values": copies(self._values), "late": late} | counts

    def load_further(self, saved: Mapping[str, Any]) -> None:
        own = self._agreed_on()
        self.mass, self._step, self._told_step, self._sent = (saved[key] for key in ("mass", "step", "told_step", "sent"))

        def opened_all(values: Mapping[str, Tensor]) -> Named:
            return {name: opened(value).to(own[name], copy=True) for name, value in values.items()}

        self._values = opened_all(saved["values"])
        self._late.clear()
        for one in saved["late"]:
            mix = Mix(list(opened_all(one["values"]).values()), one["mass"])
            self._late.append(Late(one["due"], lambda mix=mix: mix))
