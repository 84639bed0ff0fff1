"""A table and sentences from the values of bench.json.

A plan's row is `measured`, `refused` (it cannot run) or `failed`.  Plans are ranked by images per second with the recipe's own
loader, and only where no plan waits for that loader: a fast plan that waits cannot be distinguished from a slow one.
"""

from __future__ import annotations

import csv
import io
from typing import Any

from widefield.report.text_table import aligned
from widefield.training.terminal import memory_text, rate_text

Row = dict[str, Any]
Result = dict[str, Any]

LOADER_SHARE = 0.10
"""By which share a step on real data may be longer than one on a batch in memory; beyond, the loader is measured."""
UNSTEADY = 2.0
"""The factor by which steps on the same batch may differ; beyond, the machine is busy with something else."""
SAME_LOSS = {"float64": 1e-10, "float32": 1e-4, "tf32": 1e-2, "bfloat16": 5e-2, "float16": 5e-2}
"""The relative difference of the first two losses from one rank's that another order of sums may make."""

HEAD = (
    "plan", "ranks", "img/s", "img/s, no loader", "ms/step", "data wait", "communication", "peak memory", "bytes/step",
    "scaling", "loss differs",
)  # fmt: skip


def measured(result: Result) -> list[Row]:
    return [row for row in result["plans"] if row["state"] == "measured"]


def one_rank(result: Result) -> Row | None:
    """What the others are compared with: the first plan, where it could run."""
    first = result["plans"][0] if result["plans"] else None
    return first if first is not None and first["state"] == "measured" and first["ranks"] == 1 else None


def scaling(row: Row, result: Result) -> float | None:
    """Images per second against one rank, both without a loader."""
    one = one_rank(result)
    return None if one is None else row["synthetic"]["images_per_second"] / one["synthetic"]["images_per_second"]


def loss_difference(row: Row, result: Result) -> tuple[float, float] | None:
    """The largest relative difference of losses from one rank's, of the first two steps and of all; None without one rank.

    The second step's loss is the first that depends on gradients.
    """
    one = one_rank(result)
    if one is None or row is one:
        return None
    differences = [abs(a - b) / max(abs(b), 1e-300) for a, b in zip(row["losses"], one["losses"], strict=False)]
    return max(differences[:2]), max(differences)


def data_share(row: Row) -> float:
    return row["real"]["data_seconds"] / row["real"]["step_seconds"]


def waits_for_loader(row: Row) -> bool:
    """Whether real steps are longer than synthetic ones by LOADER_SHARE, and waiting is over half of the difference."""
    real, synthetic = row["real"]["step_seconds"], row["synthetic"]["step_seconds"]
    return real > (1 + LOADER_SHARE) * synthetic and row["real"]["data_seconds"] > 0.5 * (real - synthetic)


def ranking(result: Result) -> list[Row] | None:
    """Measured plans, the fastest first; None where a plan waits for the loader."""
    rows = measured(result)
    if any(waits_for_loader(row) for row in rows):
        return None
    return sorted(rows, key=lambda row: -row["real"]["images_per_second"])


# ---------------------------------------------------------------------------------------------- words


def findings(result: Result) -> list[str]:
    """The findings, a sentence or two each, the most important first."""
    rows = measured(result)
    if not rows:
        return ["No plan could run; the reasons are listed with each."]
    order = ranking(result)
    ranking_in_words = [_refusal_to_rank(result)] if order is None else _order_in_words(order, result)
    return [*ranking_in_words, *_leanest(rows), *_inexact(result), *_unsteady(result), *trap_in_words(result)]


def _refusal_to_rank(result: Result) -> str:
    slow = [row for row in measured(result) if waits_for_loader(row)]
    worst = max(slow, key=data_share)
    real, synthetic = (1e3 * worst[kind]["step_seconds"] for kind in ("real", "synthetic"))
    return (
        f"NOT RANKED: {len(slow)} of {len(measured(result))} plans wait for the loader, most of all {worst['name']}: a step "
        f"takes {real:.1f} ms on real data and {synthetic:.1f} ms on a batch in memory, and {100 * data_share(worst):.0f} % of "
        f"it is waiting for data. With data.workers={worst['workers']} per rank the order of plans by images/s would be an "
        "order of loaders; raise data.workers (as many as there are cores), store smaller images, or move work from data.read "
        "to data.augment. The column without a loader says what each plan could do."
    )


def _order_in_words(order: list[Row], result: Result) -> list[str]:
    best = order[0]
    text = f"Fastest: {best['name']} with {rate_text(best['real']['images_per_second'])} images/s"
    one = one_rank(result)
    if one is not None and best is not one:
        text += f", {best['real']['images_per_second'] / one['real']['images_per_second']:.2f} times one rank"
    if len(order) > 1:
        near = [row for row in order[1:] if _overlap(row, best)]
        second = order[1]
        lead = best["real"]["images_per_second"] / second["real"]["images_per_second"]
        text += f"; {lead:.2f} times the next, {second['name']}" if lead > 1.005 else f"; {second['name']} equals it"
        if near:
            text += f". Steps vary by more than what lies between it and {', '.join(row['name'] for row in near)}"
    return [f"{text}."]


def _overlap(row: Row, best: Row) -> bool:
    """Whether the fastest step of one plan is faster than the mean step of the better one, so that the order is uncertain."""
    return row["real"]["fastest_seconds"] <= best["real"]["step_seconds"]


def _leanest(rows: list[Row]) -> list[str]:
    if len(rows) < 2:
        return []
    least, most = (pick(rows, key=lambda row: row["memory_bytes"]) for pick in (min, max))
    return [
        f"Least memory on a rank: {least['name']} with {memory_text(least['memory_bytes'])}; most: {most['name']} with "
        f"{memory_text(most['memory_bytes'])}."
    ]


def _inexact(result: Result) -> list[str]:
    """Plans whose first losses are not one rank's."""
    off = []
    for row in measured(result):
        found = loss_difference(row, result)
        if found is not None and not found[0] <= SAME_LOSS[row["precision"]]:
            off.append(f"{row['name']} ({found[0]:.1e})")
    if not off:
        return []
    return [f"Not one rank's numbers: the losses of the first two steps differ under {', '.join(off)}; compare with care."]


def _unsteady(result: Result) -> list[str]:
    """A sentence where steps on one and the same batch took unequally long, so something else was using the machine."""
    rows = [row for row in measured(result) if _spread(row) > UNSTEADY]
    if not rows:
        return []
    worst = max(rows, key=_spread)
    low, high = (1e3 * worst["synthetic"][f"{name}_seconds"] for name in ("fastest", "slowest"))
    return [
        f"Unsteady: steps of {worst['name']} on one and the same batch took from {low:.1f} to {high:.1f} ms, and {len(rows)} "
        f"of {len(measured(result))} plans vary by more than {UNSTEADY:g} times. The load was {result['load']:.1f} on "
        f"{result['machine']['cores']} cores when it began; on a machine to itself, or with more --steps, figures say more."
    ]


def _spread(row: Row) -> float:
    return row["synthetic"]["slowest_seconds"] / row["synthetic"]["fastest_seconds"]


def trap_in_words(result: Result) -> list[str]:
    """The effect of more loader workers on the same plan, as a sentence."""
    rows = [row for row in result["trap"] if row["state"] == "measured"]
    if len(rows) < 2:
        return []
    few, many = rows[0], rows[-1]
    gain = many["real"]["images_per_second"] / few["real"]["images_per_second"]
    same = many["synthetic"]["images_per_second"] / few["synthetic"]["images_per_second"]
    reads = " and ".join(rate_text(row["real"]["images_per_second"]) for row in (few, many))
    facts = (
        f"with {few['workers']} and with {many['workers']} loader workers it reads {reads} images/s ({gain:.2f} times), and "
        f"without a loader {same:.2f} times as many"
    )
    if gain < 1 + LOADER_SHARE:
        return [f"Trap: none here. One rank is one rank: {facts}; the loader keeps up, so it decides nothing."]
    return [
        f"Trap: the same plan on the same rank, {facts}. A comparison that gives one strategy {_workers(few)} and "
        f"another {_workers(many)} would call the second one {gain:.2f} times as fast; that 'speed-up' is the loader's."
    ]


def _workers(row: Row) -> str:
    return f"{row['workers']} worker{'' if row['workers'] == 1 else 's'}"


def line(row: Row, result: Result) -> str:
    """The line that is printed when a plan has been measured."""
    if row["state"] != "measured":
        return f"  {row['name']}: {row['state']}: {row['reason']}"
    real, synthetic = row["real"], row["synthetic"]
    return (
        f"  {row['name']}: {rate_text(real['images_per_second'])} images/s "
        f"({rate_text(synthetic['images_per_second'])} without a loader), {memory_text(row['memory_bytes'])}"
    )


# ---------------------------------------------------------------------------------------------- table


def cells(row: Row, result: Result) -> list[str]:
    """A measured plan's row of the table, with the columns of HEAD."""
    times, loss = scaling(row, result), loss_difference(row, result)
    real = row["real"]
    return [
        row["name"], str(row["ranks"]), rate_text(real["images_per_second"]), rate_text(row["synthetic"]["images_per_second"]),
        f"{1e3 * real['step_seconds']:.1f}", f"{100 * data_share(row):.1f} %",
        f"{100 * row['communication_share']:.0f} %" if row["messages"] else "–",
        memory_text(row["memory_bytes"]), bytes_text(row["handed_bytes"]) if row["messages"] else "–",
        "–" if times is None else f"{times:.2f} x", "–" if loss is None else f"{loss[1]:.0e}" if loss[1] else "0",
    ]  # fmt: skip


def in_order(result: Result) -> list[Row]:
    """Measured plans in the order of `ranking`, or without one as they were tried."""
    order = ranking(result)
    return measured(result) if order is None else order


def table_text(result: Result) -> str:
    """The table for a terminal, with the plans that did not run below it."""
    lines = aligned([HEAD, *(cells(row, result) for row in in_order(result))])
    for row in result["plans"]:
        if row["state"] != "measured":
            lines.append(f"{row['name']}: {row['state']}: {row['reason']}")
    return "\n".join(lines)


def table_csv(result: Result) -> str:
    """Every plan as CSV with plain numbers: seconds, bytes, shares of 1."""
    columns = [
        "name", "state", "overrides", "ranks", "workers", "real_images_per_second", "synthetic_images_per_second",
        "real_step_seconds", "synthetic_step_seconds", "data_share", "communication_share", "memory_bytes", "handed_bytes",
        "scaling", "loss_difference_first", "loss_difference_worst", "reason",
    ]  # fmt: skip
    text = io.StringIO()
    writer = csv.DictWriter(text, columns, lineterminator="\n", extrasaction="ignore")
    writer.writeheader()
    for row in (*result["plans"], *result["trap"]):
        values = {**row, "overrides": " ".join(row["overrides"])}
        if row["state"] == "measured":
            for kind in ("real", "synthetic"):
                values |= {f"{kind}_{name}": row[kind][name] for name in ("images_per_second", "step_seconds")}
            first, worst = loss_difference(row, result) or ("", "")
            values |= {"data_share": data_share(row), "scaling": scaling(row, result)}
            values |= {"loss_difference_first": first, "loss_difference_worst": worst}
        writer.writerow(values)
    return text.getvalue()


def bytes_text(count: int) -> str:
    return f"{count} B" if count < 1024 else f"{count / 2**10:.0f} KiB" if count < 2**20 else f"{count / 2**20:.1f} MiB"
