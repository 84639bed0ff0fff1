"""What accuracy do ways of agreeing reach, beside data-parallel training with equal samples?  Digits, several seeds.

Each setting trains the digits recipe by the command, from the same weights and in the same order of samples, with
batch_norm=averaged: `--workers` ranks that compute gradients and, with a server, one rank more.  It is evaluated as a run is at
its end, on all held-out images.  Told is the difference in top-1 from data-parallel training, in points, with the interval of
the mean over seeds at 95 % (Student's t).  Runs of a server depend on the times at which gradients come, so that they differ
a little from one to the next.

    python benchmarks/agreement.py [--workers 4] [--seeds 5] [--epochs 20] [--only local_sgd,gossip] [--save]
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
import turns

RESULT = Path(__file__).parent / "results" / "agreement.json"
BASE = "data parallel"
SETTINGS = {
    BASE: "mean",
    "local_sgd": "{name: local_sgd, period: 8}",
    "post_local_sgd": "{name: post_local_sgd, period: 8, start: 46}",
    "slowmo": "{name: slowmo, period: 8}",
    "gossip": "gossip",
    "gossip on a ring": "{name: gossip, graph: ring}",
    "asynchronous server": "{name: server}",
    "max_staleness 8": "{name: server, kind: bounded_staleness, max_staleness: 8}",
    "delay compensated": "{name: server, kind: delay_compensated, compensation: 0.04}",
    "AD-PSGD": "ad_psgd",
    "late gossip": "{name: gossip, graph: ring, delay: 2}",
}
GATES = {
    "local_sgd": 0.5, "slowmo": 0.5, "gossip": 1.2, "gossip on a ring": 1.2, "asynchronous server": 1.5,
    "delay compensated": 1.0, "late gossip": 1.2,
}  # fmt: skip
"""Points that the mean may be below data-parallel training."""
STUDENT = {2: 12.706, 3: 4.303, 4: 3.182, 5: 2.776, 6: 2.571, 7: 2.447, 8: 2.365, 9: 2.306, 10: 2.262}
"""The 97.5th percentile of Student's t, by the number of seeds."""


def trained(name: str, seed: int, options: argparse.Namespace) -> float:
    """The top-1 at the end, in percent."""
    ranks = options.workers + any(one in SETTINGS[name] for one in ("server", "ad_psgd"))
    settings = [
        f"agreement={SETTINGS[name]}", f"mesh.replicate={ranks}", "batch_norm=averaged", f"schedule.length={options.epochs}ep",
        "data.workers=0", f"seed={seed}", "log.tensorboard=false", "evaluate.every=1000ep", "checkpoint.every=1000ep",
    ]  # fmt: skip
    with tempfile.TemporaryDirectory() as place:
        command = [sys.executable, "-m", "widefield", "train", "digits", "--run", f"{place}/run", *settings]
        subprocess.run(command, env=os.environ | {"OMP_NUM_THREADS": "1"}, check=True, stdout=subprocess.DEVNULL)
        lines = [json.loads(line) for line in Path(place, "run", "record.jsonl").read_text().splitlines()]
    return [line["metrics"]["top1"] for line in lines if line["kind"] == "evaluation"][-1]


def row_of(name: str, tops: list[float], base: list[float]) -> dict:
    below = [one - other for one, other in zip(tops, base, strict=True)]
    spread = statistics.stdev(below) / math.sqrt(len(below)) if len(below) > 1 else math.nan
    return {
        "agreement": name, "top-1 of seeds, %": [round(one, 2) for one in tops],
        "points over data parallel": round(statistics.mean(below), 2),
        "95 % interval, +-": round(STUDENT.get(len(below), math.nan) * spread, 2), "gate": GATES.get(name),
    }  # fmt: skip


def main() -> int:
    """The command; its status is 1 where the mean of a setting is further below than its gate."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, value in (("workers", 4), ("seeds", 5), ("epochs", 20)):
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--only", default="", help="settings, by comma; all where left out")
    parser.add_argument("--save", action="store_true", help=f"write {RESULT.name} into results/")
    options = parser.parse_args()
    reached: dict[str, list[float]] = {}
    for name in dict.fromkeys([BASE, *(options.only.split(",") if options.only else SETTINGS)]):
        reached[name] = [trained(name, seed, options) for seed in range(options.seeds)]
        print(name, [round(one, 2) for one in reached[name]], flush=True)
    rows = [row_of(name, tops, reached[BASE]) for name, tops in reached.items()]
    conditions = {
        "recipe": "digits", "epochs": options.epochs, "workers": options.workers, "held out": 360, "precision": "float32",
        "cores": os.cpu_count(), "torch": torch.__version__, "python": platform.python_version(),
        "date": time.strftime("%Y-%m-%d"),
    }  # fmt: skip
    turns.tell({"rows": rows, "conditions": conditions}, RESULT, options)
    return int(any(-row["points over data parallel"] > row["gate"] for row in rows if row["gate"] is not None))


if __name__ == "__main__":
    sys.exit(main())
