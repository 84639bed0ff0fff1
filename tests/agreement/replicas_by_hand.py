"""Replicas without ranks: plain models in one process, averaged by formulas written out, to compare runs with."""

from __future__ import annotations

import copy
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from widefield.comm.mesh import Mesh, World
from widefield.config import RunConfig
from widefield.data.order import Key, order_of, share_of
from widefield.parallel.optimizer_steps import clip_grad_norm_
from widefield.plans import Plan
from widefield.training.assemble import assemble, learner_of
from widefield.training.gossip_replicas import graph_of

Weights = dict[str, Tensor]


@dataclass
class ByHand:
    """config: of a run with replicas.  replicas: how many; copies: data-parallel copies of the model in each."""

    config: RunConfig
    replicas: int
    copies: int = 1
    losses: list[float] = field(default_factory=list)
    skips: tuple[int, ...] = ()
    """Steps, counted from 0, whose gradients nobody takes."""

    def __post_init__(self) -> None:
        alone = {"agreement": type(self.config.agreement)(), "batch_norm": "synchronized"}
        mesh = self.config.mesh.model_copy(update={"replicate": 1, "shard": 1, "space": [], "channel": 1, "stage": 1})
        parts = assemble(
            self.config.model_copy(update=alone | {"mesh": mesh, "stream": None}), Mesh(Plan(), World(), torch.device("cpu"))
        )
        self.parts, self.learner = parts, learner_of(parts)[0]
        self.models = [copy.deepcopy(self.learner.model) for _ in range(self.replicas)]
        self.optimizers = [self._optimizer(model) for model in self.models]
        self.counts = [0] * self.replicas
        self.agreed, self.outer = self.weights(0), Weights()
        self.sent: list[tuple[Tensor, list[Weights], list[float]]] = []
        self.values, self.masses = [self._floating(number) for number in range(self.replicas)], [1.0] * self.replicas

    def _optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        one, own = self.learner.optimizer, dict(model.named_parameters())
        names = {id(parameter): name for name, parameter in self.learner.model.named_parameters()}
        return type(one)([{**group, "params": [own[names[id(p)]] for p in group["params"]]} for group in one.param_groups])

    def weights(self, number: int) -> Weights:
        return {name: one.detach().clone() for name, one in self.models[number].named_parameters()}

    def train(self, steps: int) -> ByHand:
        for step in range(steps):
            self._step(step)
            self._agree(step + 1)
        return self

    def _step(self, step: int) -> None:
        learner, steps, config = self.learner, self.learner.steps, self.config
        learner.step = step
        order = order_of(config.seed, steps.epoch_of(step), steps.samples)
        reader, passes, total = self.parts.reader(train=True), config.gradient.accumulate, 0.0
        for number, (model, optimizer) in enumerate(zip(self.models, self.optimizers, strict=True)):
            optimizer.zero_grad()
            before = copy.deepcopy(dict(model.named_buffers()))
            copies = range(number * self.copies, (number + 1) * self.copies)
            shares = [
                share_of(steps.positions(step), rank=one, ranks=self.replicas * self.copies, passes=passes, multiple=1)
                for one in copies
            ]
            count = sum(len(part) for share in shares for part in share)
            for parts in zip(*shares, strict=True):  # copies of a replica are rows of one batch
                keys = [Key(steps.epoch_of(step), at, int(order[at])) for part in parts for at in part]
                if keys:
                    image, target = learner.prepare(reader.__getitems__(keys))
                    loss = learner.loss_of(model(image), target)
                    (loss / count).backward()
                    total += loss.item()
            for group in optimizer.param_groups:
                group["lr"] = learner.lr_now()
            if config.optimizer.clip_norm is not None:
                clip_grad_norm_(model, learner.mesh, config.optimizer.clip_norm)
            if step in self.skips:  # nor the statistics
                model.load_state_dict(before, strict=False)
            elif count:
                optimizer.step()
                self.counts[number] += count
        self.losses.append(total / len(steps.positions(step)))

    def _floating(self, number: int) -> Weights:
        state = self.models[number].state_dict()
        return {name: one.clone() for name, one in state.items() if one.is_floating_point()}

    def _gossip(self, step: int) -> None:
        """value_i = sum_j W[i, j] (value_j + step of j); mass_i = sum_j W[i, j] mass_j; weights = value / mass."""
        asked, everyone = self.config.agreement, range(self.replicas)
        matrix = graph_of(asked, self.replicas).matrix_at(step - 1)
        if asked.global_period and step % asked.global_period == 0:
            matrix = torch.full((self.replicas, self.replicas), 1 / self.replicas, dtype=torch.float64)
        new = [self._floating(number) for number in everyone]
        moved = [dict(one) for one in self.values]
        for j in everyone:
            for name, one in new[j].items():
                moved[j][name] = self.values[j][name] + one - self.values[j][name] / self.masses[j]
        self.sent.append((matrix, moved, self.masses))
        if asked.delay:
            self.values, self.masses = self._late_mix(asked.delay)
        else:
            self.values = [{name: sum(matrix[i, j] * moved[j][name] for j in everyone) for name in new[0]} for i in everyone]
            self.masses = (matrix @ torch.tensor(self.masses, dtype=torch.float64)).tolist()
        for i in everyone:
            weights = {name: one / self.masses[i] for name, one in self.values[i].items()}
            self.models[i].load_state_dict(weights, strict=False)

    def _late_mix(self, delay: int) -> tuple[list[Weights], list[float]]:
        """Its own part of this mix, and what others sent for that of `delay` steps ago."""
        everyone, (now, moved, masses) = range(self.replicas), self.sent[-1]
        values = [{name: now[i, i] * one for name, one in moved[i].items()} for i in everyone]
        mass = [float(now[i, i]) * masses[i] for i in everyone]
        if len(self.sent) > delay:
            then, sent, sent_masses = self.sent[-1 - delay]
            pairs = [(i, j) for i in everyone for j in everyone if i != j]
            values = [
                {name: one + sum(then[i, j] * sent[j][name] for k, j in pairs if k == i) for name, one in values[i].items()}
                for i in everyone
            ]
            mass = [mass[i] + sum(float(then[i, j]) * sent_masses[j] for k, j in pairs if k == i) for i in everyone]
        return values, mass

    def _on_its_way(self) -> Weights:
        """The sum of the values that nobody has taken in yet."""
        late = self.sent[-self.config.agreement.delay :] if self.config.agreement.delay else []
        pairs = [(i, j) for i in range(self.replicas) for j in range(self.replicas) if i != j]
        sums = {name: torch.zeros_like(one) for name, one in self.values[0].items()}
        for matrix, sent, _ in late:
            for i, j in pairs:
                sums = {name: one + matrix[i, j] * sent[j][name] for name, one in sums.items()}
        return sums

    def _agree(self, step: int) -> None:
        if self.config.agreement.name == "gossip":
            self._gossip(step)
            return
        asked, since = self.config.agreement, step - self.config.agreement.start
        if since <= 0 or since % asked.period == 0:
            self._agree_of_all(lr=self.learner.lr_now() if since > 0 and asked.name in ("slowmo", "diloco") else None)
            return
        due = [size for period, size in sorted(map(tuple, asked.groups)) if since % period == 0]
        for first in range(0, self.replicas, due[-1]) if due else ():
            self._take(range(first, first + due[-1]), self._mean(range(first, first + due[-1])))

    def _agree_of_all(self, lr: float | None) -> None:
        everyone = range(self.replicas)
        if not any(self.counts):
            return
        mean = self._mean(everyone)
        if lr is not None:
            for name in self.agreed:
                mean[name] = self._outer_step(name, mean[name], lr)
        self._take(everyone, mean)
        self.agreed, self.counts = {name: mean[name] for name in self.agreed}, [0] * self.replicas
        if not self.config.agreement.keeps_state:
            self.optimizers = [self._optimizer(model) for model in self.models]

    def _outer_step(self, name: str, mean: Tensor, lr: float) -> Tensor:
        asked, moved = self.config.agreement, self.agreed[name] - mean
        if asked.name == "slowmo":  # u = b u + (x - mean) / lr;  x - a lr u
            momentum, rate = (0.5 if asked.outer_momentum is None else asked.outer_momentum), asked.outer_rate or 1.0
            self.outer[name] = momentum * self.outer.get(name, 0.0) + moved / lr
            return self.agreed[name] - rate * lr * self.outer[name]
        momentum, rate = (0.9 if asked.outer_momentum is None else asked.outer_momentum), asked.outer_rate or 0.7
        self.outer[name] = momentum * self.outer.get(name, 0.0) + moved  # Nesterov: x - rate (g + m v)
        return self.agreed[name] - rate * (moved + momentum * self.outer[name])

    def _mean(self, numbers: range) -> Weights:
        counts = [self.counts[number] for number in numbers]
        shares = [count / sum(counts) for count in counts]
        states = [self.models[number].state_dict() for number in numbers]
        floating = [name for name, one in states[0].items() if one.is_floating_point()]
        return {name: sum(share * state[name] for share, state in zip(shares, states, strict=True)) for name in floating}

    def _take(self, numbers: range, mean: Weights) -> None:
        for number in numbers:
            self.models[number].load_state_dict(mean, strict=False)

    def consensus(self) -> Weights:
        """What would be evaluated and exported now."""
        if self.config.agreement.name == "gossip":
            late = self._on_its_way()
            return {name: (sum(one[name] for one in self.values) + late[name]) / self.replicas for name in self.values[0]}
        return self._mean(range(self.replicas)) if any(self.counts) else self._mean_of_equals()

    def _mean_of_equals(self) -> Weights:
        return {name: one.clone() for name, one in self.models[0].state_dict().items() if one.is_floating_point()}
