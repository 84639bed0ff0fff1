"""Mixing: matrices keep the mean, and replicas agree as fast as the spectrum says."""

import math

import pytest
import torch

from widefield.agreement.mixing import (
    GRAPHS,
    MixingGraph,
    contraction,
    metropolis_weights,
    of_edges,
    push_weights,
    spectral_gap,
    steps_to_shrink,
)  # fmt: skip

COUNTS = [1, 2, 3, 4, 5, 8, 12, 16, 33, 64]


def graphs_of(workers: int) -> list[MixingGraph]:
    """Every known graph of so many workers; a hypercube has a power of two."""
    return [build(workers) for name, build in GRAPHS.items() if name != "hypercube" or workers & (workers - 1) == 0]


def vectors(workers: int) -> torch.Tensor:
    return torch.randn(workers, 7, generator=torch.Generator().manual_seed(workers), dtype=torch.float64)


@pytest.mark.parametrize("workers", COUNTS)
def test_rows_and_columns_sum_to_1_and_every_mix_keeps_the_mean(workers):
    for graph in graphs_of(workers):
        assert graph.is_doubly_stochastic and graph.workers == workers
        mixed = vectors(workers)
        mean = mixed.mean(0)
        for step, matrix in enumerate(graph.matrices):
            # 64 entries of at most 1, each rounded: 64 * 2^-53 = 7e-15
            assert float((matrix.sum(0) - 1).abs().max()) <= 1e-14 and float((matrix.sum(1) - 1).abs().max()) <= 1e-14
            mixed = graph.matrix_at(step) @ mixed
            assert float((mixed.mean(0) - mean).abs().max()) <= 1e-12


def measured_contraction(graph: MixingGraph) -> float:
    """By what factor the distance to the mean shrinks per step, after other modes have died out; scaled up as it shrinks."""
    mixed, periods = vectors(graph.workers), 3000 // len(graph.matrices)
    logarithms = []
    for _ in range(periods):
        for matrix in graph.matrices:
            mixed = matrix @ mixed
        mixed = mixed - mixed.mean(0)
        size = float(mixed.norm())
        mixed = mixed / size
        logarithms.append(math.log(size))
    late = logarithms[len(logarithms) // 2 :]
    return math.exp(sum(late) / len(late) / len(graph.matrices))


@pytest.mark.parametrize("workers", [8, 12, 16, 24, 32, 48, 64])
def test_replicas_agree_as_fast_as_the_spectrum_says(workers):
    for graph in graphs_of(workers):
        predicted = contraction(graph)
        if predicted:
            assert measured_contraction(graph) == pytest.approx(predicted, rel=0.01), graph.name


@pytest.mark.parametrize("workers", [8, 16, 64])
def test_the_contraction_of_known_graphs_is_what_the_literature_says(workers):
    ring, cube = GRAPHS["ring"](workers), GRAPHS["hypercube"](workers)
    bits = workers.bit_length() - 1
    assert contraction(ring) == pytest.approx(1 - (1 - math.cos(2 * math.pi / workers)) * 2 / 3, abs=1e-12)
    assert contraction(cube) == pytest.approx(1 - 2 / (bits + 1), abs=1e-12)
    assert contraction(GRAPHS["exponential"](workers)) == pytest.approx(1 - 2 / (bits + 1), abs=1e-12)
    assert contraction(GRAPHS["complete"](workers)) == 0 == contraction(GRAPHS["one_peer_exponential"](workers))
    assert spectral_gap(ring) == 1 - contraction(ring)


@pytest.mark.parametrize("workers", [2, 8, 64])
def test_one_period_of_one_peer_gives_the_mean_of_a_power_of_two(workers):
    graph, mixed = GRAPHS["one_peer_exponential"](workers), vectors(workers)
    mean = mixed.mean(0)
    for matrix in graph.matrices:
        mixed = matrix @ mixed
    torch.testing.assert_close(mixed, mean.expand_as(mixed), rtol=0, atol=1e-14)
    assert graph.messages_at(0) == workers and len(graph.matrices) == workers.bit_length() - 1


def test_a_directed_graph_keeps_the_sum_and_needs_push_sum():
    graph = of_edges(4, [(0, 1), (1, 2), (2, 3), (3, 0), (0, 2)], directed=True)
    (matrix,) = graph.matrices
    assert not graph.is_doubly_stochastic and graph.messages_at(0) == 5
    assert float((matrix.sum(0) - 1).abs().max()) <= 1e-15
    mixed = vectors(4)
    torch.testing.assert_close((matrix @ mixed).sum(0), mixed.sum(0), rtol=0, atol=1e-12)


def test_how_long_agreement_takes():
    ring = GRAPHS["ring"](8)
    assert contraction(ring) ** steps_to_shrink(ring, 0.01) == pytest.approx(0.01)
    assert steps_to_shrink(GRAPHS["one_peer_exponential"](8), 0.01) == 3
    assert steps_to_shrink(of_edges(4, [(0, 1), (2, 3)]), 0.01) == math.inf


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: MixingGraph("none", ()), "no matrix"),
        (lambda: MixingGraph("odd", (torch.eye(2, dtype=torch.float64), torch.eye(3, dtype=torch.float64))), "has to be"),
        (lambda: MixingGraph("narrow", (torch.eye(2),)), "float64"),
        (lambda: MixingGraph("leaky", (torch.tensor([[0.5, 0], [0.4, 1]], dtype=torch.float64),)), "column 0 sums to 0.9"),
        (lambda: MixingGraph("below", (torch.tensor([[2.0, 0], [-1, 1]], dtype=torch.float64),)), "least entry is -1"),
        (lambda: metropolis_weights(torch.tensor([[False, True], [False, False]])), "worker 0 and worker 1 do not both hear"),
        (lambda: of_edges(3, [(0, 3)]), r"the edge \(0, 3\)"),
        (lambda: of_edges(3, [(1, 1)]), r"the edge \(1, 1\)"),
        (lambda: GRAPHS["hypercube"](6), "hypercube of 6 workers"),
        (lambda: GRAPHS["ring"](0), "graph of 0 workers"),
        (lambda: GRAPHS["complete"](0), "graph of 0 workers"),
        (lambda: GRAPHS["exponential"](0), "graph of 0 workers"),
        (lambda: steps_to_shrink(GRAPHS["ring"](4), 1.0), "factor between 0 and 1"),
    ],
)
def test_what_keeps_no_sum_is_refused(make, words):
    with pytest.raises(ValueError, match=words):
        make()


def test_senders_divide_evenly():
    weights = push_weights(torch.tensor([[False, False, True], [True, False, False], [True, True, False]]))
    assert weights[:, 0].tolist() == [1 / 3, 1 / 3, 1 / 3] and weights[:, 1].tolist() == [0, 0.5, 0.5]
