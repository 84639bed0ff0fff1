"""Workers average with a few others at a time, and nobody with all.

    D-PSGD        x_i' = sum_j W[i, j] (x_j - r g_j), with a doubly stochastic W        Lian et al. 2017, arXiv:1705.09056
    SGP           the same with a column stochastic W; x and a mass are mixed, and
                  x / mass are the weights (push-sum)                                   Assran et al. 2019, arXiv:1811.10792
    overlapped    a message arrives `delay` mixes later, while the worker goes on       the same paper
    Gossip-PGA    every `global_period` steps the mean over all instead of a mix        Chen et al. 2021, arXiv:2105.09080
    AD-PSGD       no rounds: a worker with a gradient averages with one other           Lian et al. 2018, arXiv:1710.06952

D-PSGD's paper mixes first and takes the step, with the gradient at the unmixed weights, afterwards; `combines_first` does that.
Then the message can travel while the gradient is computed; on the complete graph it is no all-reduce, as gradients are of
weights that differ by a step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from widefield.agreement.descent import Descent
from widefield.agreement.mixing import GRAPHS, MixingGraph, bipartite, mixed

MASS_BYTES = 8
"""What push-sum sends beside the weights: the mass, in float64."""


def pairwise_mean(one: Tensor, other: Tensor) -> Tensor:
    """What both hold after a pair averaged; the same bits for both, whoever asked."""
    return (one + other) / 2


@dataclass(frozen=True)
class PushSum:
    """A worker's part in push-sum.  value: its weights times its mass.  Masses, with those on their way, sum to n."""

    value: Tensor
    mass: float = 1.0

    @property
    def weights(self) -> Tensor:
        """The weights, free of the bias of the mixing."""
        return self.value / self.mass

    def moved(self, step: Tensor) -> PushSum:
        """After a step of the weights' optimizer, which is added to the value as SGP does it."""
        return PushSum(self.value + step, self.mass)


def push_sum(held: Sequence[PushSum], weights: Sequence[float]) -> PushSum:
    """One row of a mix of push-sum."""
    mass = sum(weight * one.mass for one, weight in zip(held, weights, strict=True))
    return PushSum(mixed([one.value for one in held], weights), mass)


@dataclass(frozen=True)
class Gossip:
    """Rounds of a step and a mix; a worker waits for those it hears, and for nobody else.

    graph: a name of mixing.GRAPHS, or a function from the number of living workers to a graph.
    """

    descent: Descent = field(default_factory=Descent)
    graph: str | Callable[[int], MixingGraph] = "one_peer_exponential"
    push_sum: bool = False
    delay: int = 0
    global_period: int | None = None
    combines_first: bool = False

    def __post_init__(self) -> None:
        """ValueError: options that do not go together; an unknown graph."""
        if isinstance(self.graph, str) and self.graph not in GRAPHS:
            raise ValueError(f"no mixing graph is called {self.graph!r}; there are {', '.join(GRAPHS)}")
        if self.delay < 0 or (self.delay and not self.push_sum):
            raise ValueError(
                f"a delay of {self.delay} mixes leaves weights on their way, which only push-sum counts; set push_sum"
            )
        if self.global_period is not None and (self.global_period < 1 or self.delay):
            raise ValueError(
                f"an average over all every {self.global_period} steps, with messages that are {self.delay} steps on their "
                "way; take a period of 1 or more, and no delay"
            )
        if self.combines_first and self.push_sum:
            raise ValueError("push-sum takes its step before it mixes; leave combines_first out, or push_sum")

    def graph_of(self, workers: int) -> MixingGraph:
        """The graph of so many living workers.  ValueError: it needs push-sum and there is none, or is of another number."""
        graph = (GRAPHS[self.graph] if isinstance(self.graph, str) else self.graph)(workers)
        if graph.workers != workers:
            raise ValueError(f"the mixing graph {graph.name} is of {graph.workers} workers and {workers} are alive")
        if not self.push_sum and not graph.is_doubly_stochastic:
            raise ValueError(
                f"the mixing graph {graph.name} does not keep the mean of the weights, since its rows do not sum to 1; set "
                "push_sum, or make it of metropolis_weights"
            )
        return graph


@dataclass(frozen=True)
class PairwiseGossip:
    """AD-PSGD.  Active workers ask; passive ones only answer, so that nobody waits in a circle and all compute gradients.

    graph: from the number of workers to a graph, of which only the edges count; it has to be bipartite.
    """

    descent: Descent = field(default_factory=Descent)
    graph: Callable[[int], MixingGraph] = bipartite

    def partners(self, workers: int) -> dict[int, tuple[int, ...]]:
        """Whom each active worker may ask.  ValueError: the graph is not bipartite, or is not connected."""
        graph = self.graph(workers)
        hears = torch.stack([matrix != 0 for matrix in graph.matrices]).any(0)
        sides = _sides((hears | hears.T) & ~torch.eye(workers, dtype=torch.bool), graph.name)
        passive = [one for one in range(workers) if sides[one] == 1]
        return {one: tuple(two for two in passive if hears[one, two] or hears[two, one]) for one in sides if sides[one] == 0}


def _sides(edges: Tensor, name: str) -> dict[int, int]:
    """On which of two sides each worker is, such that edges only cross; worker 0 is on side 0, which asks."""
    sides, to_do = {0: 0}, [0]
    while to_do:
        one = to_do.pop()
        for other in edges[one].nonzero().flatten().tolist():
            if other not in sides:
                sides[other] = 1 - sides[one]
                to_do.append(other)
            elif sides[other] == sides[one]:
                raise ValueError(
                    f"workers {one} and {other} of the graph {name} are on one side of a circle of odd length, where pairs "
                    "could wait for each other without end; take a bipartite graph, as a ring of an even number"
                )
    if len(sides) < len(edges):
        lost = min(set(range(len(edges))) - set(sides))
        raise ValueError(
            f"worker {lost} of the graph {name} hears nobody that worker 0 reaches, so they never agree; add an edge"
        )
    return sides
