"""Replicas that average with a few others after every step, see widefield/agreement/gossip.py.

After its step a replica sends what it has to those that hear it, and takes its row of the mixing matrix.  Messages are between
two ranks, and a mix waits for those it hears alone.  Where rows do not sum to 1, as on edges of one's own, what is mixed are
values and a mass, and the weights are value / mass (push-sum).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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


class GossipReplicas(Replicas):
    """Replicas that mix.  mass: of push-sum; it stays 1 where the matrices are doubly stochastic."""

    def __init__(self, mesh: Mesh) -> None:
        super().__init__(mesh)
        self.asked, self.graph = mesh.plan.agreement, graph_of(mesh.plan.agreement, mesh.plan.replicate)
        self.mass, self._step, self._told_step, self._sent = 1.0, 0, 0, 0
        self._values: Named = {}
        """What is mixed, the weights times the mass; empty where that is 1."""

    def begin(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        super().begin(model, optimizer)
        self.mass = 1.0
        self._values.clear()

    @torch.no_grad()
    def after_step(self, step: int, lr: float) -> None:
        self._step, period = step, self.asked.global_period
        tensors = self._agreed_on()
        if period is not None and step % period == 0:
            found, sent = self._means(
                list(tensors.values()), self.mesh.plan.replicate, self._share(self.mesh.plan.replicate)[0]
            )
            self._take(tensors, found, 1.0)
        else:
            values = list(self._moved(tensors).values())
            values, mass, sent = self._mixed(values, self.graph.matrix_at(step - 1))
            self._take(tensors, values, mass)
        self._sent += sent

    def _moved(self, tensors: Named) -> Named:
        """The values after this replica's step: the step of the weights is added to them."""
        return {
            name: one if name not in self._values else self._values[name] + one - self._values[name] / self.mass
            for name, one in tensors.items()
        }

    def _take(self, tensors: Named, values: Sequence[Tensor], mass: float) -> None:
        for tensor, value in zip(tensors.values(), values, strict=True):
            tensor.copy_(value if mass == 1 else value / mass)
        self.mass = mass
        self._values = {} if mass == 1 else dict(zip(tensors, values, strict=True))

    def _mixed(self, values: Sequence[Tensor], matrix: Tensor) -> tuple[list[Tensor], float, int]:
        """(this replica's row of a mix of values, and of masses; the bytes that this rank sent)."""
        peers = self._peers[self.mesh.plan.replicate]
        row, column = matrix[self.number].tolist(), matrix[:, self.number].tolist()
        hears = [one for one, weight in enumerate(row) if weight and one != self.number]
        hearers = [one for one, weight in enumerate(column) if weight and one != self.number]
        weights, sent, found = [row[self.number], *(row[one] for one in hears)], 0, dict[int, Tensor]()
        for run in runs_of(values, MESSAGE_BYTES):
            own = torch.cat([one.reshape(-1) for one in run])
            heard = peers.exchanged(own, hears=hears, hearers=hearers)
            sent += own.nbytes * len(hearers)
            parts = mixed([own, *heard], weights).split([one.numel() for one in run])
            found |= {id(one): part.view(one.shape) for one, part in zip(run, parts, strict=True)}
        mass = self.mass
        if not self.graph.is_doubly_stochastic:
            own = torch.tensor([mass], dtype=torch.float64, device=self.mesh.device)
            mass = mixed([own, *peers.exchanged(own, hears=hears, hearers=hearers)], weights).item()
            sent += own.nbytes * len(hearers)
        return [found[id(one)] for one in values], mass, sent

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
        return {"mass": self.mass, "values": copies(self._values)} | counts

    def load_further(self, saved: Mapping[str, Any]) -> None:
        own = self._agreed_on()
        self.mass, self._step, self._told_step, self._sent = (saved[key] for key in ("mass", "step", "told_step", "sent"))
        self._values = {name: opened(value).to(own[name], copy=True) for name, value in saved["values"].items()}
