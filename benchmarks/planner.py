"""Is the planner right?  What real ranks hold, send, compute and take, beside what is planned without them.

    memory      the peak of the CPU allocator's bytes of every rank beside the emulated step's: median, worst, never below
    messages    number and bytes of messages of every rank beside the emulated step's, exactly
    flops       of the plain model by torch's FlopCounterMode, exactly
    time        seconds of steps of models and plans that no calibration has seen, beside the planned ones; how the order of
                plans agrees (Kendall's tau), and how much slower the planned best is than the measured best
    planning    seconds that a plan itself takes, and the memory of the process that makes it

Ranks are those of the tests, one thread each.  Memory, messages and FLOPs do not depend on what else the machine does; time
does, so `time` wants a quiet machine, and its figures are of one with at least as many cores as ranks.

    python benchmarks/planner.py memory messages flops [--nets unet,resnet] [--plans 'one;rows'] [--save] [--missing]
    OMP_NUM_THREADS=1 widefield plan --calibrate
    python benchmarks/planner.py time [--ranks 2] [--steps 5] [--save]
    python benchmarks/planner.py planning [--save]
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import platform
import resource
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import date
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path[0] = str(HERE.parent / "tests")  # in place of this folder, where `planner` would be this file

import devices  # noqa: E402  the tests', as the next ones
import torch  # noqa: E402
from planner import timed  # noqa: E402
from planner.comparison import Gates, PeakRow, difference_of_messages, emulated, peak_rows, summary  # noqa: E402
from planner.measured_step import MeasuredStep, flops_of, measured  # noqa: E402
from planner.truth_cases import NETS, PLANS, TruthCase, all_cases  # noqa: E402
from ranks import RankFailed, close_all, on_ranks  # noqa: E402

import widefield as wf  # noqa: E402
from widefield.comm.mesh import Mesh, World  # noqa: E402
from widefield.plans import Plan, plan_of  # noqa: E402

RESULTS = HERE / "results"
PATIENCE_SECONDS = 1200.0
"""For a few steps of a case: a stream's are many, and the machine may be busy."""


def main(arguments: Sequence[str] | None = None) -> int:
    asked = _parser().parse_args(arguments)
    torch.set_num_threads(1)
    devices.CURRENT.append("cpu")
    try:
        if {"memory", "messages", "flops"} & set(asked.what):
            _finish("planner_steps", _steps(asked), asked)
        if "time" in asked.what:
            found = timed.compared(asked.ranks, steps=asked.steps, kernel_seconds=asked.kernel_seconds, turns=asked.turns)
            how = {
                "ranks": asked.ranks,
                "turns": asked.turns,
                "steps": asked.steps,
                "own kernels, seconds": asked.kernel_seconds,
            }
            _finish("planner_time", {"conditions": _conditions() | how, **found}, asked)
        if "planning" in asked.what:
            _finish("planner_planning", {"conditions": _conditions(), **_planning()}, asked)
    finally:
        close_all()
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="+", choices=["memory", "messages", "flops", "time", "planning"])
    parser.add_argument("--nets", type=lambda text: text.split(","), default=list(NETS), help=", ".join(NETS))
    parser.add_argument("--plans", type=lambda text: text.split(";"), default=list(PLANS), help="; ".join(PLANS))
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--turns", type=int, default=9, help="of all plans of a model, one after the other (9)")
    parser.add_argument("--kernel-seconds", type=float, default=15.0, help="for the own kernels of a plan; 0: not (15)")
    parser.add_argument("--save", action="store_true", help="keep the table in benchmarks/results/")
    parser.add_argument("--missing", action="store_true", help="only those steps that the table does not have yet")
    return parser


def _finish(name: str, result: dict[str, Any], asked: argparse.Namespace) -> None:
    text = json.dumps(result, indent=1)
    if asked.save:
        (RESULTS / f"{name}.json").write_text(text + "\n", encoding="utf-8")
    print(text)


def _conditions() -> dict[str, Any]:
    return {
        "device": "cpu", "processor": platform.processor() or platform.machine(),
        "capability": torch.backends.cpu.get_cpu_capability(), "threads per rank": 1, "torch": torch.__version__,
        "python": platform.python_version(), "date": date.today().isoformat(),
    }  # fmt: skip


# ---------------------------------------------------------------------------------------------- the time of a plan

QUESTIONS = {
    "ResNet-50, 3 x 32,768 x 32,768, 32 H100s": (
        "torchvision/resnet50",
        {"image": (3, 32768, 32768), "classes": 10, "batch": 8, "cluster": "4x8xH100-80G", "seconds": 1},
    ),
    "ResNet-50, 3 x 224 x 224, 1,024 H100s": (
        "torchvision/resnet50", {"image": (3, 224, 224), "batch": 8192, "cluster": "128x8xH100-80G"},
    ),
    "U-Net, 1 x 512 x 512 x 512, 1,024 H100s": (
        "unet", {"image": (1, 512, 512, 512), "batch": 1024, "cluster": "128x8xH100-80G"},
    ),
}  # fmt: skip


def _planning() -> dict[str, Any]:
    """Of each question: the seconds of its first plan, without imports, and of the same once more; the process's peak."""
    found: dict[str, Any] = {}
    for name in QUESTIONS:
        with multiprocessing.get_context("spawn").Pool(1) as new_process:
            answer = new_process.apply(_asked_of_a_new_process, (name,))
        print(name, answer, file=sys.stderr, flush=True)
        found[name] = answer
    return {
        "question": "how long a plan takes, in a process of its own that has imported this library and torchvision",
        "plans": found,
    }


def _asked_of_a_new_process(name: str) -> dict[str, Any]:
    recipe, question = QUESTIONS[name]
    first, again = (_seconds_of(lambda: wf.plan(recipe, **question)) for _ in range(2))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return {"first, seconds": round(first, 1), "again, seconds": round(again, 1), "peak of the process, MiB": round(peak)}


def _seconds_of(call: Callable[[], Any]) -> float:
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


# ---------------------------------------------------------------------------------------------- memory, messages, FLOPs


def _steps(asked: argparse.Namespace) -> dict[str, Any]:
    """Every case that is asked for.  To be saved, it is after each of them, beside the rows of others that are there."""
    cases = [case for case in all_cases() if case.net in asked.nets and case.plan in asked.plans]
    cases.sort(key=lambda case: (case.ranks, list(PLANS).index(case.plan)))  # ranks start anew when their number changes
    kept = RESULTS / "planner_steps.json"
    rows = json.loads(kept.read_text(encoding="utf-8"))["rows"] if asked.save and kept.exists() else []
    there = {row["case"] for row in rows}
    with ThreadPoolExecutor(1) as beside:
        for case in cases:
            if asked.missing and str(case) in there:
                continue
            rows = [row for row in rows if row["case"] != str(case)] + list(_rows(case, asked.what, beside))
            if asked.save:
                kept.write_text(json.dumps(_result(rows), indent=1) + "\n", encoding="utf-8")
    return _result(rows)


def _result(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    ran = [row for row in rows if "refused" not in row]
    peaks = [PeakRow(row["case"], row["rank"], row["measured bytes"], row["emulated bytes"]) for row in ran if "error" in row]
    return {
        "question": "what real ranks hold, send and compute in a step, beside the emulated step",
        "conditions": _conditions(),
        "cases": f"{len({row['case'] for row in ran})} run, {len(rows) - len(ran)} refused, of {len(all_cases())}",
        "memory": summary(peaks),
        "refusals that differ": [row["case"] for row in rows if isinstance(row.get("refused"), dict)],
        "gates that do not hold": Gates().failures(peaks),
        "messages that differ": [row["case"] for row in ran if row.get("messages")],
        "FLOPs that differ": [row["case"] for row in ran if len(set(row.get("flops", [0]))) > 1],
        "rows": list(rows),
    }


def _rows(case: TruthCase, what: Sequence[str], beside: ThreadPoolExecutor) -> Iterator[dict[str, Any]]:
    """A row for each rank of a case, or one that tells who refuses it in which words.  beside: emulates while ranks measure."""
    began = time.perf_counter()
    emulation = beside.submit(_tried, lambda: emulated(case))
    plan = plan_of(case.config, case.ranks)
    steps, real = _tried(lambda: on_ranks(case.ranks, measured, case, plan=plan, timeout_seconds=PATIENCE_SECONDS))
    refused = real or steps[0].refused
    records, crash = emulation.result()
    told = crash or (records if isinstance(records, str) else "")
    print(f"{case}: {time.perf_counter() - began:.1f} s {refused or told}", file=sys.stderr, flush=True)
    if refused or told:
        same = "the same words" if refused == told else {"ranks": refused or "run", "emulation": told or "runs"}
        yield {"case": str(case), "refused": refused if same == "the same words" else same}
        return
    for step, record, peak in zip(steps, records, peak_rows(case, steps, records), strict=True):
        yield _row(case, what, step, record, peak)


def _row(case: TruthCase, what: Sequence[str], step: MeasuredStep, record: Any, peak: PeakRow) -> dict[str, Any]:
    row: dict[str, Any] = {"case": str(case), "rank": peak.rank}
    if "memory" in what:
        row |= {"measured bytes": peak.measured, "emulated bytes": peak.emulated, "error": f"{peak.error:+.3%}"}
        row |= {"unknown": record.unknown} if record.unknown else {}
    if "messages" in what:
        row |= {"messages": difference_of_messages(step, record), "sent": len(step.messages)}
    if "flops" in what and case.plan == "one":
        row["flops"] = [flops_of(Mesh(Plan(), World(), torch.device("cpu")), case), round(record.flops)]
    return row


def _tried(work: Callable[[], Any]) -> tuple[Any, str]:
    """What `work` gives, or the last line of its error."""
    try:
        return work(), ""
    except RankFailed as error:
        return None, f"the ranks fail: {str(error).strip().splitlines()[-1]}"
    except (ValueError, NotImplementedError) as error:
        return None, str(error)
    except (RuntimeError, AssertionError, TypeError, AttributeError) as error:
        return None, f"it crashes with {type(error).__name__}: {error}"


if __name__ == "__main__":
    sys.exit(main())
