"""From a comparison's bench.json to report.html and bench.csv.  Equal files give equal bytes."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

from markupsafe import Markup

from widefield.quantity import count_of
from widefield.report.bars import bars
from widefield.report.comparison import (
    HEAD,
    Result,
    Row,
    bytes_text,
    cells,
    data_share,
    findings,
    in_order,
    one_rank,
    ranking,
    scaling,
    table_csv,
    waits_for_loader,
)  # fmt: skip
from widefield.report.filling import from_files, render
from widefield.training.disk import replace_text
from widefield.training.run_folder import check_own
from widefield.training.terminal import MIB, memory_text, rate_text


def write_bench(folder: str | Path) -> Path:
    """Write `report.html` and `bench.csv` beside the `bench.json` of a folder; returns the page's path.

    ValueError: there is no bench.json, it is damaged, or a link leads out of the folder.
    """
    folder = Path(folder)
    if folder.is_dir():
        check_own(folder)
    result = read_bench(folder)
    table, page = from_files(lambda: (table_csv(result), _page(result)), folder)
    replace_text(folder / "bench.csv", table)
    replace_text(folder / "report.html", page)
    return folder / "report.html"


def read_bench(folder: Path) -> Result:
    path = folder / "bench.json"
    if not path.is_file():
        raise ValueError(f"{folder} has no bench.json; name the --out folder of a `widefield bench`")
    try:
        result = json.loads(path.read_text(encoding="utf-8"))
        return {**result, "plans": list(result["plans"]), "trap": list(result["trap"])}
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise ValueError(
            f"{path} is damaged ({type(error).__name__}: {error}); run `widefield bench` again into another folder"
        ) from None


def _page(result: Result) -> str:
    rows = in_order(result)
    ranked = ranking(result) is not None
    words = "no plan could run" if not rows else "ranked" if ranked else "not ranked: the loader is the bottleneck"
    return render(
        "bench.html",
        title=f"{result['model']} on {result['data']}",
        state="failed" if not rows else "complete" if ranked else "interrupted",
        state_words=words,
        findings=findings(result),
        cards=_cards(rows, result, ranked=ranked),
        head=HEAD,
        ranked=ranked,
        rows=[cells(row, result) for row in rows],
        curves=_curves(rows, result) if rows else [],
        others=[(row["name"], row["state"], row["reason"]) for row in result["plans"] if row["state"] != "measured"],
        trap=[_trap(row) for row in result["trap"] if row["state"] == "measured"],
        meanings=_meanings(result),
        conditions=_conditions(rows, result),
        choices=[(row["name"], row["layout"], row["reasons"]) for row in rows],
        version=result["versions"].get("widefield", ""),
    )


# ---------------------------------------------------------------------------------------------- figures


def _cards(rows: list[Row], result: Result, *, ranked: bool) -> list[dict[str, str]]:
    refused = sum(row["state"] != "measured" for row in result["plans"])
    cards = [_card(str(len(rows)), "plans measured", f"{refused} did not run" if refused else "none refused")]
    if not rows:
        return cards
    if ranked:
        best = rows[0]
        cards.insert(0, _card(f"{rate_text(best['real']['images_per_second'])} img/s", "fastest plan", best["name"]))
    quick = max(rows, key=lambda row: row["synthetic"]["images_per_second"])
    cards.append(_card(f"{rate_text(quick['synthetic']['images_per_second'])} img/s", "most without a loader", quick["name"]))
    if (times := scaling(quick, result)) is not None:
        cards.append(_card(f"{times:.2f} x", "of one rank", f"{quick['name']}, no loader"))
    lean = min(rows, key=lambda row: row["memory_bytes"])
    cards.append(_card(memory_text(lean["memory_bytes"]), "least memory on a rank", lean["name"]))
    slow = max(rows, key=data_share)
    bound = "the loader is the bottleneck" if waits_for_loader(slow) else "the loader keeps up"
    cards.append(_card(f"{100 * data_share(slow):.1f} %", "most time waiting for data", f"{slow['name']}; {bound}"))
    cards.append(_card(f"{result['batch_size']:,}", "images a step", " x ".join(map(str, rows[0]["shape"]))))
    cards.append(_card(f"{rows[0]['parameters']:,}", "parameters", rows[0]["precision"]))
    return cards[: 4 * (len(cards) // 4)]


def _card(value: str, label: str, detail: str) -> dict[str, str]:
    return {"value": value, "label": label, "detail": detail}


def _curves(rows: list[Row], result: Result) -> list[dict[str, Any]]:
    names = [row["name"] for row in rows]
    rates = {name: [row[kind]["images_per_second"] for row in rows]
             for name, kind in (("with the loader", "real"), ("a batch in memory", "synthetic"))}  # fmt: skip
    waits = [1e3 * row["real"]["data_seconds"] for row in rows]
    sends = [1e3 * row["communication_share"] * row["synthetic"]["step_seconds"] for row in rows]
    whole = [1e3 * row["real"]["step_seconds"] for row in rows]
    rest = [max(0.0, all_ - wait - send) for all_, wait, send in zip(whole, waits, sends, strict=True)]
    curves = [
        _curve("Images per second", bars(names, rates, label="images per second", text=rate_text),
               "More is better. Where the two differ, the loader decides."),
        _curve("Time of a step", bars(names, {"the rest": rest, "waiting for data": waits, "communication": sends},
               label="ms per step with the loader", text=lambda value: f"{value:.3g}", stacked=True),
               "Less is better. Communication is an upper bound: part of it goes on behind computation."),
        _curve("Peak memory of a rank", bars(names, {"": [row["memory_bytes"] / MIB for row in rows]},
               label="MiB", text=lambda value: memory_text(round(value * MIB))), _memory_words(rows)),
    ]  # fmt: skip
    if any(row["messages"] for row in rows):
        size, unit = (MIB, "MiB") if max(row["handed_bytes"] for row in rows) >= MIB else (1024, "KiB")
        sent = [row["handed_bytes"] / size for row in rows]
        svg = bars(names, {"": sent}, label=f"{unit} per step and rank", text=lambda value: bytes_text(round(value * size)))
        curves.append(_curve("Handed to collectives and sends", svg, "By the rank that hands over most."))
    if one_rank(result) is not None and len(rows) > 1:
        times = [scaling(row, result) or 0.0 for row in rows]
        svg = bars(names, {"": times}, label="times one rank, no loader", text=lambda value: f"{value:.2f}")
        curves.append(_curve("Scaling", svg, "Images per second on a batch in memory, against one rank."))
    return curves


def _curve(title: str, svg: str, caption: str) -> dict[str, Any]:
    return {"title": title, "svg": Markup(svg), "caption": caption}


def _memory_words(rows: list[Row]) -> str:
    if rows[0]["device"] == "CPU":
        return "Resident memory of the rank with most, above what it had before data and model."
    return "Most that torch had allocated on a GPU, of the rank with most."


def _trap(row: Row) -> list[str]:
    rates = [rate_text(row[kind]["images_per_second"]) for kind in ("real", "synthetic")]
    return [str(row["workers"]), *rates, f"{100 * data_share(row):.1f} %"]


# ---------------------------------------------------------------------------------------------- words


def _meanings(result: Result) -> list[str]:
    return [
        f"img/s: images of all ranks together, over {result['steps']} steps with the recipe's loader and augmentation, after "
        "warm-up; every plan begins with the same weights and takes the same batches. ms/step: the same, of a whole batch.",
        "img/s, no loader: the same learner on one batch in memory. The difference between the two is due to the loader.",
        "data wait: share of a step, with the loader, that the rank waiting longest spent waiting for its batch.",
        "communication: share of a step in which at least one message or collective was under way, mean of the ranks, from "
        "torch's profiler over 3 further steps on the batch in memory. It includes waiting for slower ranks, and what overlaps "
        "with computation, so it is an upper bound on what communication costs.",
        "bytes/step: size of the tensors that a rank hands to collectives and sends in a step. A ring all-reduce over p ranks "
        "moves 2 (p - 1) / p times as much over each link.",
        "peak memory: the largest of any rank.",
        "scaling: img/s without a loader, against one rank with as many cores or the same GPU as each rank of the others has.",
        "loss differs: the largest relative difference of a step's loss from one rank's, over all steps on real data. "
        "Rounding alone grows from step to step, so only the first two steps are compared with a tolerance; the second one's "
        "loss depends on the first one's gradients.",
    ]


def _conditions(rows: list[Row], result: Result) -> list[tuple[str, str]]:
    machine = result["machine"]
    gpus = [f"{count} × {name}" for name, count in Counter(machine["gpus"]).items()]
    workers = sorted({row["workers"] for row in rows})
    return [
        ("recipe", " ".join([result["recipe"], *result["overrides"]])),
        ("processor", f"{machine['cpu']}, {machine['cores']} cores"),
        ("GPUs", ", ".join(gpus) or f"none; {count_of(result['threads'], 'thread')} for each rank"),
        ("memory", memory_text(machine["memory_bytes"])),
        ("load at the start", f"{result['load']:.1f}"),
        ("loader workers", ", ".join(map(str, workers)) + " per rank" if workers else "–"),
        ("steps", f"{result['steps']} timed, {rows[0]['warmup'] if rows else 0} before"),
        *((name, version) for name, version in result["versions"].items()),
    ]
