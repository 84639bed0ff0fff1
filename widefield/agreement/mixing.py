"""Who hears whom, and with what weight?  Graphs of replicas and the matrices with which these mix their weights.

One mix is x_i' = sum over j of W[i, j] x_j, where x_j are the weights of replica j.  W is *doubly stochastic* if no entry is
negative and its rows and columns sum to 1; then a mix keeps the mean and all replicas come to it.  It is *column stochastic*
if only its columns do; then a mix keeps the sum, and push-sum (see gossip.py) finds the mean.  A graph may vary in time: it
has one matrix per step of its period.

How fast replicas agree is the modulus of the second largest eigenvalue of the product of a period's matrices; see
Xiao and Boyd 2004, "Fast linear iterations for distributed averaging", and Ying et al. 2021, arXiv:2110.13363, for the
exponential graphs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import reduce

import torch
from torch import Tensor

MOST_OFF = 1e-12
"""How far a sum of a row or column may be from 1: rounding of up to some thousand float64 entries."""


@dataclass(frozen=True, eq=False)
class MixingGraph:
    """Matrices of one period, each (n, n) in float64 and column stochastic.  Step t mixes with matrix t modulo the period."""

    name: str
    matrices: tuple[Tensor, ...]

    def __post_init__(self) -> None:
        """ValueError: no matrix, or one that is not square, is negative somewhere, or whose columns do not sum to 1."""
        if not self.matrices:
            raise ValueError(f"the mixing graph {self.name} has no matrix; give one per step of its period")
        for step, matrix in enumerate(self.matrices):
            _refuse_unless_column_stochastic(matrix, f"matrix {step} of the mixing graph {self.name}", self.workers)

    @property
    def workers(self) -> int:
        return len(self.matrices[0])

    @property
    def is_doubly_stochastic(self) -> bool:
        """Whether every mix keeps the mean by itself, so that push-sum is not needed."""
        return all(float((matrix.sum(1) - 1).abs().max()) <= MOST_OFF for matrix in self.matrices)

    def matrix_at(self, step: int) -> Tensor:
        return self.matrices[step % len(self.matrices)]

    def messages_at(self, step: int) -> int:
        """How many messages a mix takes: the pairs of different replicas of which one hears the other."""
        matrix = self.matrix_at(step)
        return int((matrix != 0).sum()) - int((matrix.diagonal() != 0).sum())


def _refuse_unless_column_stochastic(matrix: Tensor, what: str, workers: int) -> None:
    if matrix.shape != (workers, workers) or matrix.dtype != torch.float64:
        raise ValueError(f"{what} is {tuple(matrix.shape)} in {matrix.dtype}; it has to be {(workers, workers)} in float64")
    off = (matrix.sum(0) - 1).abs()
    if float(matrix.min()) < 0 or not float(off.max()) <= MOST_OFF:
        column = int(off.argmax())
        raise ValueError(
            f"{what} keeps no sum: its least entry is {float(matrix.min()):.6g} and column {column} sums to "
            f"{float(matrix[:, column].sum()):.6g}, where entries of 0 or more that sum to 1 are needed; metropolis_weights "
            "and push_weights make such matrices of any graph"
        )


def mixed(tensors: Sequence[Tensor], weights: Sequence[float]) -> Tensor:
    """One row of a mix: the sum of tensors times their weights."""
    total = tensors[0] * weights[0]
    for tensor, weight in zip(tensors[1:], weights[1:], strict=True):
        total = total + tensor * weight
    return total


# ---------------------------------------------------------------------------------------------- weights of any graph


def metropolis_weights(hears: Tensor) -> Tensor:
    """The doubly stochastic matrix (n, n) of an undirected graph, in which both ends know each other's degree.

        W[i, j] = 1 / (1 + max(degree i, degree j)) between neighbours; W[i, i] takes the rest     Xiao and Boyd 2004

    hears: (n, n) of bool, symmetric; the diagonal does not count.  ValueError: it is not symmetric.
    """
    if not torch.equal(hears, hears.T):
        one, other = (hears != hears.T).nonzero()[0].tolist()
        raise ValueError(
            f"worker {one} and worker {other} do not both hear each other, and Metropolis weights are for undirected graphs; "
            "make the graph symmetric, or take push_weights and push-sum"
        )
    edges = hears & ~torch.eye(len(hears), dtype=torch.bool)
    degree = edges.sum(1)
    weights = torch.where(edges, 1 / (1 + torch.maximum(degree[:, None], degree[None, :])).double(), 0.0)
    return weights + torch.diag(1 - weights.sum(1))


def push_weights(hears: Tensor) -> Tensor:
    """The column stochastic matrix (n, n) of a directed graph: each replica sends equal parts to those who hear it and itself.

    hears: (n, n) of bool; hears[i, j]: i hears j.  A sender needs to know only who hears it.
    """
    heard = hears | torch.eye(len(hears), dtype=torch.bool)
    return heard.double() / heard.sum(0, keepdim=True)


def of_edges(workers: int, edges: Iterable[tuple[int, int]], *, directed: bool = False) -> MixingGraph:
    """A graph of one's own.  edges: (sender, hearer); both ways unless directed, which needs push-sum.

    ValueError: an edge to a worker that is not there, or to itself.
    """
    hears = torch.zeros(workers, workers, dtype=torch.bool)
    for sender, hearer in edges:
        if sender == hearer or not (0 <= sender < workers and 0 <= hearer < workers):
            raise ValueError(f"the edge ({sender}, {hearer}) is not between two of the workers 0 to {workers - 1}")
        hears[hearer, sender] = True
    matrix = push_weights(hears) if directed else metropolis_weights(hears | hears.T)
    return MixingGraph("directed edges" if directed else "edges", (matrix,))


# ---------------------------------------------------------------------------------------------- known graphs


def ring(workers: int) -> MixingGraph:
    """Each hears the next and the one before.  Contraction 1 - O(1/n^2): the fewest messages and the slowest agreement."""
    return MixingGraph("ring", (metropolis_weights(_hears(workers, lambda a, b: (a - b) % workers in (1, workers - 1))),))


def complete(workers: int) -> MixingGraph:
    """Each hears all: one mix is an all-reduce."""
    return MixingGraph("complete", (torch.full((_at_least_one(workers),) * 2, 1 / workers, dtype=torch.float64),))


def exponential(workers: int) -> MixingGraph:
    """Each hears those 1, 2, 4, ... places before it, in equal parts with itself.  Contraction 1 - O(1/log n)."""
    places = [2**k for k in range(_bits(workers))]
    shifts = [_shift(workers, place) for place in (0, *places)]
    return MixingGraph("exponential", (torch.stack(shifts).mean(0),))


def one_peer_exponential(workers: int) -> MixingGraph:
    """Step t: each hears the one 2^t places before it, in equal parts.  One message per replica and step.

    Of a power of two replicas a period, log2(n) steps, gives the exact mean.
    """
    steps = range(max(1, _bits(workers)))
    return MixingGraph("one-peer exponential", tuple((_shift(workers, 0) + _shift(workers, 2**k)) / 2 for k in steps))


def bipartite(workers: int) -> MixingGraph:
    """Even workers hear all odd ones and the other way round: the graph of pairwise averaging without deadlock."""
    return MixingGraph("bipartite", (metropolis_weights(_hears(workers, lambda a, b: (a - b) % 2 == 1)),))


def hypercube(workers: int) -> MixingGraph:
    """Each hears those whose numbers differ from its own in one bit.  ValueError: the workers are no power of two."""
    if _at_least_one(workers) & (workers - 1):
        raise ValueError(f"a hypercube of {workers} workers does not exist; take a power of two, or the exponential graph")
    return MixingGraph("hypercube", (metropolis_weights(_hears(workers, lambda a, b: (a ^ b).bit_count() == 1)),))


GRAPHS: dict[str, Callable[[int], MixingGraph]] = {
    "ring": ring, "complete": complete, "exponential": exponential, "one_peer_exponential": one_peer_exponential,
    "bipartite": bipartite, "hypercube": hypercube,
}  # fmt: skip


def _at_least_one(workers: int) -> int:
    if workers < 1:
        raise ValueError(f"a mixing graph of {workers} workers; take 1 or more")
    return workers


def _bits(workers: int) -> int:
    """How many powers of two are below the number of workers."""
    return (_at_least_one(workers) - 1).bit_length()


def _hears(workers: int, are_neighbours: Callable[[int, int], bool]) -> Tensor:
    numbers = range(_at_least_one(workers))
    return torch.tensor([[a != b and are_neighbours(a, b) for b in numbers] for a in numbers], dtype=torch.bool)


def _shift(workers: int, places: int) -> Tensor:
    """The permutation with which each hears the one so many places before it."""
    return torch.eye(workers, dtype=torch.float64).roll(places, 0)


# ---------------------------------------------------------------------------------------------- how fast


def contraction(graph: MixingGraph) -> float:
    """By what factor the distance to agreement shrinks per step, in the long run; 0: replicas agree after one period.

    The second largest modulus of the eigenvalues of the period's product, to the power of 1 / period.
    """
    product = reduce(lambda done, matrix: matrix @ done, graph.matrices)
    if float((product - product.mean(1, keepdim=True)).abs().max()) <= MOST_OFF:
        return 0.0
    # Columns sum to 1, so vectors that sum to 0 stay such: on them are all eigenvalues but the 1 of agreement.
    ones = torch.ones(graph.workers, 1, dtype=torch.float64)
    basis = torch.linalg.qr(ones, mode="complete").Q[:, 1:]
    inner = basis.T @ product @ basis
    is_symmetric = torch.equal(product, product.T)
    values = torch.linalg.eigvalsh(inner) if is_symmetric else torch.linalg.eigvals(inner)
    return float(values.abs().max()) ** (1 / len(graph.matrices))


def spectral_gap(graph: MixingGraph) -> float:
    """1 - contraction."""
    return 1 - contraction(graph)


def steps_to_shrink(graph: MixingGraph, factor: float) -> float:
    """How many steps the distance to agreement takes to shrink to `factor` of itself; inf where the graph is not connected.

    ValueError: the factor is not between 0 and 1.
    """
    if not 0 < factor < 1:
        raise ValueError(f"a distance that shrinks to {factor} of itself; take a factor between 0 and 1, as 0.01")
    rate = contraction(graph)
    if rate == 0:
        return float(len(graph.matrices))
    return math.inf if rate >= 1 - MOST_OFF else math.log(factor) / math.log(rate)
