"""Samples per second with one slow rank of four: three workers and a server against data-parallel training of the same four.

    python benchmarks/asynchrony.py --save

Every sample takes a rank some milliseconds, in which it sleeps, since four ranks that compute on two cores would measure these;
the first rank takes five times as long.  A round runs every way once, one after another; a way's figure is the ratio to the
data-parallel run of its round.  Counted is from the end of step 2 to that of the last, with all waiting.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from rows import row_of
from torch import Tensor, nn

from widefield.agreement import EventLog
from widefield.agreement.sample_account import times_learned
from widefield.asynchrony.messages import bytes_of_run
from widefield.asynchrony.pair_messages import bytes_of_pair

RESULT = Path(__file__).parent / "results" / "asynchrony.json"
RANKS, SLOWER, GATE = 4, 5, 2.2
GATED = ("asynchronous", "max_staleness 16", "AD-PSGD")
"""Ways that have to make GATE times the samples of data-parallel training."""
SECONDS = "SLOW_RANK_SECONDS"
"""The environment variable with the seconds of a sample."""
WAYS = {
    "data parallel": "mean",
    "asynchronous": "{name: server}",
    "max_staleness 16": "{name: server, kind: bounded_staleness, max_staleness: 16}",
    "delay compensated": "{name: server, kind: delay_compensated, compensation: 0.04}",
    "AD-PSGD": "ad_psgd",
    "bound 4": "{name: server, kind: bounded_staleness, bound: 4}",
    "synchronous": "{name: server, kind: synchronous}",
}


class Waiting(nn.Module):
    """A small net on which a sample takes as long in training as it is told."""

    def __init__(self, in_channels: int, num_classes: int) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Conv2d(in_channels, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(),
            nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, num_classes),
        )  # fmt: skip

    def forward(self, image: Tensor) -> Tensor:
        if self.training:
            factor = SLOWER if os.environ["RANK"] == "0" else 1
            time.sleep(float(os.environ[SECONDS]) * len(image) * factor)
        return self.net(image)


def lines_of(folder: Path, kind: str) -> list[dict[str, Any]]:
    lines = (json.loads(line) for line in (folder / "record.jsonl").read_text().splitlines())
    return [line for line in lines if line["kind"] == kind]


def trained(way: str, folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """A run's samples per second, and of a server's what else belongs to it."""
    settings = [
        f"agreement={WAYS[way]}", f"mesh.replicate={RANKS}", "batch_norm=averaged", "model.name=asynchrony:Waiting",
        "model.options={}", f"data.batch_size={options.batch}", "data.augment=[]", "data.workers=0", "evaluate.every=1000ep",
        "checkpoint.every=1000ep", f"schedule.length={options.epochs}ep", "schedule.warmup=0step", "log.tensorboard=false",
        "optimizer.lr=0.05", "precision=float32",
    ]  # fmt: skip
    environment = os.environ | {SECONDS: str(options.seconds), "OMP_NUM_THREADS": "1"}
    environment["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, "-m", "widefield", "train", "digits", "--run", str(folder), *settings]
    subprocess.run(command, env=environment, check=True, stdout=subprocess.DEVNULL)
    steps = [line["time"] for line in lines_of(folder, "step")]
    samples = 1437 * options.epochs - 2 * options.batch
    found = {"samples per second": samples / (steps[-1] - steps[1])}
    found["top1"] = lines_of(folder, "evaluation")[-1]["metrics"]["top1"]
    return found | ({} if way == "data parallel" else of_pairs(folder) if way == "AD-PSGD" else of_server(folder))


def of_pairs(folder: Path) -> dict[str, Any]:
    """How often each worker averaged, and whether bytes and samples are as they have to be.  AssertionError: they are not."""
    log = EventLog.from_text((folder / "events.jsonl").read_text())
    sent = [event.bytes for event in log.events if event.kind == "offer"]
    sizes = [
        bytes_of_pair(log.workers, of_state=log.numel, itemsize=4, done=done) for done in (0, 1)
    ]  # there is no other state
    wrong = [one for one in sent if one < sizes[0] or (one - sizes[0]) % (sizes[1] - sizes[0])]
    assert not wrong, f"a pair sends {wrong[0]} bytes, not {sizes[0]} and {sizes[1] - sizes[0]} for each doing that it tells"
    assert set(times_learned(log).values()) == {1}, "a sample was not learned from exactly once"
    return {"pairs": len(sent), "bytes per pair": sum(sent) // len(sent)}


def of_server(folder: Path) -> dict[str, Any]:
    """Staleness, and whether bytes and samples are as they have to be.  AssertionError: they are not."""
    log = EventLog.from_text((folder / "events.jsonl").read_text())
    sums = {kind: sum(event.bytes for event in log.events if event.kind == kind) for kind in ("read", "gradient")}
    pushes = sum(event.kind == "gradient" for event in log.events)
    sent, received = bytes_of_run(pushes, log.workers, of_push=log.numel, of_state=log.numel, itemsize=4)
    assert sums["read"] == sent and sums["gradient"] == received - log.workers * 8 * 5, f"{sums} bytes, not {sent}, {received}"
    assert set(times_learned(log).values()) == {1}, "a sample was not learned from exactly once"
    staleness = [one for line in lines_of(folder, "updates") for one in line["staleness"]]
    return {
        "mean staleness": sum(staleness) / len(staleness),
        "most": max(staleness),
        "bytes per push": (sent + received) // pushes,
    }


def measured(options: argparse.Namespace) -> dict[str, Any]:
    runs: dict[str, list[dict[str, Any]]] = {way: [] for way in WAYS}
    for number in range(options.rounds):
        with tempfile.TemporaryDirectory() as place:
            for way, found in runs.items():
                found.append(trained(way, Path(place) / way.replace(" ", "_"), options))
                print(f"round {number + 1}, {way}: {found[-1]}", flush=True)
    rates = {way: [one["samples per second"] for one in found] for way, found in runs.items()}
    ratios = {way: [one / base for one, base in zip(of, rates["data parallel"], strict=True)] for way, of in rates.items()}
    rows = [row_of(f"samples per second, {way}", of, "1/s") for way, of in rates.items()]
    rows += [row_of(f"{way} / data parallel", of, "x") for way, of in ratios.items() if way != "data parallel"]
    about = {"ranks": RANKS, "slower": SLOWER, "torch": torch.__version__, "cores": os.cpu_count(), "load": os.getloadavg()[0]}
    about |= {name: getattr(options, name) for name in ("batch", "epochs", "seconds", "rounds")}
    last = {way: found[-1] for way, found in runs.items()}
    return {"question": __doc__.split("\n")[0], "conditions": about, "rows": [row.text for row in rows], "last round": last}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, kind, value in (("batch", int, 48), ("epochs", int, 2), ("rounds", int, 3), ("seconds", float, 0.004)):
        parser.add_argument(f"--{name}", type=kind, default=value)
    parser.add_argument("--save", action="store_true", help=f"write {RESULT.name}")
    options = parser.parse_args()
    result = measured(options)
    print(*result["rows"], sep="\n")
    if options.save:
        RESULT.write_text(json.dumps(result, indent=1) + "\n")
    ratios = [next(row for row in result["rows"] if row.startswith(f"{way} /")) for way in GATED]
    return 0 if all(float(row.split(": ")[1].split(" ")[0]) >= GATE for row in ratios) else 1


if __name__ == "__main__":
    sys.exit(main())
