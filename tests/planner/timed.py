"""Seconds of real steps beside planned ones: their errors, whether the order of plans is the same, what the choice costs.

The models are none that a calibration has timed: a calibration times single kernels and messages (widefield/planner/machines).
"""

from __future__ import annotations

import itertools
import math
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import combinations
from typing import Any

from planner.comparison import emulated
from planner.measured_step import learner_and_batches
from planner.truth_cases import TruthCase
from ranks import RankFailed, on_ranks

from widefield.comm.mesh import Mesh
from widefield.planner.cost.step_time import step_time
from widefield.planner.machines.cluster import Cluster
from widefield.planner.machines.cluster_text import cluster_of
from widefield.planner.machines.own_kernels import OwnKernels, is_here
from widefield.plans import plan_of
from widefield.streaming.storage.heap import keep_memory_of_steps

WARMUP = 2
HOLD_OUT = ("resnet", "unet", "resnet50", "densenet", "unet 3-D")
CHOICES = (
    "copies",
    "zero3",
    "rows",
    "columns",
    "channel",
    "stages",
    "copies, recompute",
    "zero3, recompute",
    "rows, recompute",
    "zero2",
)
"""Plans of two ranks for one and the same batch, of which the planner would choose."""


def seconds_of_steps(mesh: Mesh, case: TruthCase, steps: int) -> list[float] | str:
    """The seconds of each of so many steps on this rank, or the words in which the plan is refused."""
    try:
        learner, batches = learner_and_batches(mesh, case)
    except (ValueError, NotImplementedError) as error:
        return str(error)
    keep_memory_of_steps(mesh)  # as a run does
    found = []
    for _ in range(WARMUP + steps):
        mesh.barrier()
        began = time.perf_counter()
        learner.learn(batches, stop=False)
        found.append(time.perf_counter() - began)
    return found[WARMUP:]


def measured_seconds(case: TruthCase, steps: int) -> list[float] | str:
    """The slowest rank's seconds of each step."""
    try:
        ranks = on_ranks(case.ranks, seconds_of_steps, case, steps, plan=plan_of(case.config, case.ranks))
    except (RankFailed, ValueError, NotImplementedError) as error:
        return str(error).strip().splitlines()[-1]
    refused = next((found for found in ranks if isinstance(found, str)), None)
    return refused or [max(of_ranks) for of_ranks in zip(*ranks, strict=True)]


def planned_seconds(case: TruthCase, cluster: Cluster, kernels: OwnKernels | None = None) -> float | str:
    """kernels: to time those of the plan on this machine first, as `widefield plan --calibrate` with a recipe does."""
    records = emulated(case)
    if isinstance(records, str):
        return records
    if kernels is not None:
        kernels.measure(records)
    return step_time(records, cluster, spans=False).seconds


def measured_in_turns(cases: Sequence[TruthCase], steps: int) -> Iterator[dict[TruthCase, list[float] | str]]:
    """The seconds of so many steps of each case, all cases in turn, as often as asked for; those that fail are tried once.

    Every other turn begins with the last case: what a machine does in the course of minutes then favours none.
    """
    failed: dict[TruthCase, list[float] | str] = {}
    for turn in itertools.count():
        order = cases if turn % 2 == 0 else cases[::-1]
        found = {case: failed.get(case) or measured_seconds(case, steps) for case in order}
        failed |= {case: seconds for case, seconds in found.items() if isinstance(seconds, str)}
        yield found


def compared(
    ranks: int,
    *,
    steps: int,
    nets: Sequence[str] = HOLD_OUT,
    plans: Sequence[str] = CHOICES,
    kernel_seconds: float = 0.0,
    turns: int = 9,
) -> dict[str, Any]:
    """Every model under every plan: seconds, errors, and of each model the agreement of the orders and the regret.

    kernel_seconds: for timing the plans' own kernels, a plan and model.  turns: in which the plans of a model are measured
    one after the other, since a machine is faster in one minute than in the next.
    """
    rows = []
    cluster = cluster_of(f"cpu:{ranks}")
    assert not kernel_seconds or is_here(cluster), "measure this machine first: widefield plan --calibrate"
    for net in nets:
        cases = [TruthCase(net, plan, "sgd") for plan in plans]
        assert all(case.ranks == ranks for case in cases), f"not all of {plans} are of {ranks} ranks"
        measured = measured_in_turns(cases, steps)
        found = [next(measured)]
        planned = {case: planned_seconds(case, cluster, _kernels(cluster, kernel_seconds)) for case in cases}
        found += itertools.islice(measured, turns - 1)
        for case in cases:
            row = _row(case, [of_turn[case] for of_turn in found], planned[case])
            print(row, file=sys.stderr, flush=True)
            rows.append(row)
    return {"question": "seconds of real steps beside planned ones"} | judged(rows) | {"rows": rows}


def _kernels(cluster: Cluster, seconds: float) -> OwnKernels | None:
    return OwnKernels(cluster, seconds=seconds) if seconds else None


def _row(case: TruthCase, turns: Sequence[list[float] | str], planned: float | str) -> dict[str, Any]:
    """measured seconds: the median of all steps.  quietest turn: the least of the medians of each turn.  Or a refusal."""
    refused = next((found for found in turns if isinstance(found, str)), None)
    row = {"case": str(case), "measured seconds": refused, "planned seconds": planned}
    if refused is None:
        row["measured seconds"] = statistics.median(seconds for found in turns for seconds in found)
        row["turn by turn"] = [statistics.median(map(float, found)) for found in turns]
        row["quietest turn"] = min(row["turn by turn"])
    return row


def judged(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Errors, orders and regrets, beside the median of all steps and beside each plan's quietest turn.

    Other programs, of this machine or of others on the same host, only ever slow a step.
    """
    done = [row for row in rows if "quietest turn" in row and not isinstance(row["planned seconds"], str)]
    found = {key: _judged(done, key) for key in ("measured seconds", "quietest turn")} if done else {}
    if not done or len(done[0]["turn by turn"]) < 2:
        return found
    return found | {
        "Kendall's tau of pairs that the turns tell apart": _mean_by_net(done, tau_of_pairs_told_apart),
        "the same, one half of the turns beside the other": {
            "Kendall's tau, mean": _mean_by_net(done, lambda rows: kendall_tau(_halves(rows))),
            "regret, mean": _mean_by_net(done, lambda rows: regret(_halves(rows))),
        },
    }


def _rows_by_net(rows: Sequence[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    by_net: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        by_net.setdefault(row["case"].split(", ")[0], []).append(row)
    return by_net


def _mean_by_net(rows: Sequence[dict[str, Any]], of_net: Callable[[list[dict[str, Any]]], float]) -> float | None:
    found = [of_net(rows) for rows in _rows_by_net(rows).values() if len(rows) > 1]
    return statistics.mean(found) if found else None


def _halves(rows: Sequence[dict[str, Any]]) -> list[tuple[float, float]]:
    """Of each plan the medians of every other turn and of those between: how well could these turns judge a perfect planner?"""
    return [(statistics.median(row["turn by turn"][::2]), statistics.median(row["turn by turn"][1::2])) for row in rows]


def tau_of_pairs_told_apart(rows: Sequence[dict[str, Any]]) -> float:
    """Kendall's tau of those pairs of plans whose seconds, turn by turn, differ by more than twice the error of their mean."""
    signs = []
    for one, other in combinations(rows, 2):
        ratios = [math.log(a / b) for a, b in zip(one["turn by turn"], other["turn by turn"], strict=True)]
        mean = statistics.mean(ratios)
        if len(ratios) > 1 and abs(mean) > 2 * statistics.stdev(ratios) / math.sqrt(len(ratios)):
            signs.append(_sign(mean) * _sign(one["planned seconds"] - other["planned seconds"]))
    return sum(signs) / len(signs) if signs else 0.0


def _judged(rows: Sequence[dict[str, Any]], key: str) -> dict[str, Any]:
    by_net = {net: [(row[key], row["planned seconds"]) for row in of_net] for net, of_net in _rows_by_net(rows).items()}
    errors = sorted(abs(planned / real - 1) for pairs in by_net.values() for real, planned in pairs)
    orders = {
        net: {"Kendall's tau": kendall_tau(pairs), "regret": regret(pairs)} for net, pairs in by_net.items() if len(pairs) > 1
    }
    return {
        "median error": statistics.median(errors),
        "90th percentile": errors[math.ceil(0.9 * len(errors)) - 1],
        "Kendall's tau, mean": statistics.mean(order["Kendall's tau"] for order in orders.values()) if orders else None,
        "regret, mean": statistics.mean(order["regret"] for order in orders.values()) if orders else None,
        "regret, worst": max((order["regret"] for order in orders.values()), default=None),
        "orders": orders,
    }


def kendall_tau(pairs: Sequence[tuple[float, float]]) -> float:
    """Pairs of plans that both orders rank alike, less those that they rank otherwise, over all (tau-a)."""
    signs = [_sign(a[0] - b[0]) * _sign(a[1] - b[1]) for a, b in combinations(pairs, 2)]
    return sum(signs) / len(signs)


def _sign(value: float) -> int:
    return (value > 0) - (value < 0)


def regret(pairs: Sequence[tuple[float, float]]) -> float:
    """How much slower than the best of the measured plans is the one that is planned to be the best?"""
    return min(pairs, key=lambda pair: pair[1])[0] / min(real for real, _ in pairs) - 1
