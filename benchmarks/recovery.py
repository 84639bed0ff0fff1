"""Does a run go on without a person after a rank was killed, how soon, and on other numbers of ranks?

    python benchmarks/recovery.py --kills 50

Kills: each run is one of `widefield train ... --max-restarts 3`, a random rank of which gets SIGKILL at a random step.  It has
to end with status 0 and with the weights, optimizer, order of samples and losses of the run that was not killed, byte for byte.
What is measured: the seconds from the kill to the first step after it, and the steps that had to be done again.
Moves: a run with dropout is stopped at a random step on A ranks and goes on on B, for all A and B of 1 to 4.
Every run accounts for its samples, see tests/accounted.py.  Writes benchmarks/results/recovery.json.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import random
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from itertools import permutations
from pathlib import Path
from typing import Any

import psutil
import torch

HERE = Path(__file__).resolve().parent
TESTS = HERE.parent / "tests"
sys.path.insert(0, str(TESTS))

from accounted import FOLDER, problems_of  # noqa: E402
from command import DIGITS, fingerprint, losses, ranks_of, record, start, wait_for_step  # noqa: E402

STEPS, EVERY, BATCH = 46, 10, 64
PLANS = {
    "replicate=2": (2, ["mesh.replicate=2"]),
    "replicate=3": (3, ["mesh.replicate=3"]),
    "ZeRO-3 over 2": (2, ["mesh.shard=2"]),
    "channel=2": (2, ["mesh.channel=2"]),
    "replicate=2 x ZeRO-1 over 2": (4, ["mesh.replicate=2", "mesh.shard=2", "sharding.zero=1"]),
}
SETTINGS = [
    "data.name=accounted:open_dataset", f"schedule.length={STEPS}step", "schedule.warmup=5step", "data.workers=0",
    f"checkpoint.every={EVERY}step", "checkpoint.keep_last=100", "model.options.dropout=0.1", "log.tensorboard=false",
    "evaluate.every=100ep",
]  # fmt: skip


def begin(folder: Path, ranks: int, axes: list[str], *further: str) -> Any:
    """The command in the background.  ranks: for one, the mesh says nothing."""
    (folder / "seen").mkdir(parents=True, exist_ok=True)
    environment = os.environ | {FOLDER: str(folder / "seen"), "OMP_NUM_THREADS": "1"}
    options = ["--run", folder / "run", *further]
    return start("train", DIGITS, *SETTINGS, *axes, *options, cwd=TESTS, env=environment)


def ended(process: Any, folder: Path, *, status: int = 0) -> None:
    output, _ = process.communicate(timeout=600)
    assert process.returncode == status, f"{folder}: ended with {process.returncode}, not {status}:\n{output}"


def killed(root: Path, number: int, plan: str, whole: dict[str, str], draw: random.Random) -> dict[str, Any]:
    """One run with one kill."""
    folder, (ranks, axes) = root / f"kill{number}", PLANS[plan]
    at, victim = draw.randrange(3, STEPS - 3), draw.randrange(ranks)
    process = begin(folder, ranks, axes, "--max-restarts", "3")
    wait_for_step(process, folder / "run", at)
    os.kill(ranks_of(process)[victim].pid, signal.SIGKILL)
    when = time.time()
    stood = max(line["step"] for line in record(folder / "run", "step"))
    seconds, resumed = _next_step(process, folder / "run", when)
    ended(process, folder)
    problems = problems_of(folder / "seen", steps=STEPS, batch=BATCH)
    same = fingerprint(folder / "run", ranks=ranks) == whole
    row = {"plan": plan, "rank": victim, "step": stood, "resumed_from": resumed, "lost_steps": stood - (resumed or 0)}
    return {**row, "seconds": seconds, "same_bytes": same, "problems_of_samples": problems}


def _next_step(process: Any, folder: Path, when: float) -> tuple[float, int | None]:
    """The seconds from `when` to the first step after a start that came later, and the step it resumed from."""
    while process.poll() is None:
        starts = [line for line in record(folder, "start") if line["time"] > when]
        steps = [line for line in record(folder, "step") if starts and line["time"] > starts[-1]["time"]]
        if steps:
            return steps[0]["time"] - when, starts[-1]["resumed_from"]
        time.sleep(0.02)
    return float("inf"), None


def moved(root: Path, before: int, after: int, whole: list[float], draw: random.Random, precision: str) -> dict[str, Any]:
    """A run that is stopped on `before` ranks and goes on on `after`."""
    folder, at = root / f"move{before}to{after}", draw.randrange(5, STEPS - 10)
    how = [f"precision={precision}"]
    process = begin(folder, before, [f"mesh.replicate={before}", *how])
    wait_for_step(process, folder / "run", at)
    process.send_signal(signal.SIGTERM)
    ended(process, folder, status=75)
    stopped = record(folder / "run", "end")[-1]["step"]
    ended(begin(folder, after, [f"mesh.replicate={after}", *how]), folder)
    found = losses(folder / "run")
    difference = max(abs(a - b) / abs(b) for a, b in zip(found, whole, strict=True))
    problems = problems_of(folder / "seen", steps=STEPS, batch=BATCH)
    row = {"ranks": [before, after], "stopped_at": stopped, "largest_relative_difference": difference}
    return {**row, "problems_of_samples": problems}


def measure(root: Path, asked: argparse.Namespace, write: Callable[[dict[str, Any]], None]) -> dict[str, Any]:
    draw, left = random.Random(asked.seed), set(os.listdir("/dev/shm"))
    plans = list(PLANS)[: asked.plans]
    wholes: dict[str, dict[str, str]] = {}
    for number, plan in enumerate(plans):
        folder, (ranks, axes) = root / f"whole{number}", PLANS[plan]
        ended(begin(folder, ranks, axes), folder)
        wholes[plan] = fingerprint(folder / "run", ranks=ranks)
    kills = []
    for number in range(asked.kills):
        plan = plans[number % len(plans)]
        kills.append(killed(root, number, plan, wholes[plan], draw))
        print(json.dumps(kills[-1]), flush=True)
        write(summary(kills, []) | {"kills": kills})  # so that a benchmark that is cut short has measured something
    moves = []
    if asked.moves:
        ended(begin(root / "alone", 1, ["mesh.replicate=1", f"precision={asked.precision}"]), root / "alone")
        whole = losses(root / "alone" / "run")
        for before, after in list(permutations((1, 2, 3, 4), 2))[: asked.moves]:
            moves.append(moved(root, before, after, whole, draw, asked.precision))
            print(json.dumps(moves[-1]), flush=True)
    return summary(kills, moves) | {
        "left_in_dev_shm": sorted(set(os.listdir("/dev/shm")) - left),
        "processes_left": [p.pid for p in psutil.process_iter() if _is_ours(p, root)],
        "kills": kills,
        "moves": moves,
    }


def _is_ours(process: psutil.Process, root: Path) -> bool:
    try:
        return str(root) in process.environ().get(FOLDER, "")
    except psutil.Error:
        return False


def summary(kills: list[dict], moves: list[dict]) -> dict[str, Any]:
    seconds = [row["seconds"] for row in kills]
    differences = [row["largest_relative_difference"] for row in moves]
    return {
        "interval_steps": EVERY,
        "runs": len(kills),
        "recovered_with_the_same_bytes": sum(row["same_bytes"] for row in kills),
        "recovered_within_15_s": sum(one <= 15 for one in seconds),
        "seconds_median": statistics.median(seconds) if seconds else None,
        "seconds_most": max(seconds, default=None),
        "lost_at_most_an_interval": sum(row["lost_steps"] <= EVERY for row in kills),
        "lost_steps_most": max((row["lost_steps"] for row in kills), default=None),
        "moves_within_1e-5": sum(one <= 1e-5 for one in differences),
        "largest_relative_difference": max(differences, default=None),
        "runs_with_problems_of_samples": sum(bool(row["problems_of_samples"]) for row in (*kills, *moves)),
    }


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("--kills", type=int, default=50)
    arguments.add_argument("--moves", type=int, default=12, help="of the 12 pairs of 1 to 4 ranks")
    arguments.add_argument("--plans", type=int, default=len(PLANS), help="the first so many plans")
    arguments.add_argument("--precision", default="float64", help="of the moves: AdamW grows float32 rounding")
    arguments.add_argument("--seed", type=int, default=0)
    arguments.add_argument("--output", type=Path, default=HERE / "results" / "recovery.json")
    asked = arguments.parse_args()
    conditions = {
        "date": datetime.date.today().isoformat(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "cores": os.cpu_count(),
        "load_at_start": os.getloadavg()[0],
        "seed": asked.seed,
        "steps": STEPS,
        "precision_of_moves": asked.precision,
    }

    def write(figures: dict[str, Any]) -> None:
        told = {"conditions": conditions | {"load_at_end": os.getloadavg()[0]}, **figures}
        asked.output.write_text(json.dumps(told, indent=2) + "\n")

    with tempfile.TemporaryDirectory(prefix="recovery_") as root:
        figures = measure(Path(root), asked, write)
    write(figures)
    print(json.dumps({key: value for key, value in figures.items() if key not in ("kills", "moves")}, indent=2))


if __name__ == "__main__":
    main()
