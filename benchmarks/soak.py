"""Does a run that meets a fault every few seconds learn what an undisturbed one learns, and leave nothing behind?

    python benchmarks/soak.py --minutes 30 --every 15

One run, `widefield train ... --max-restarts 1000000`, for so many minutes.  Faults come at random moments, `--every` seconds
apart in the mean, each of a random kind:

    rank        SIGKILL to a rank                                     the command goes on by itself
    forker      SIGKILL to the process that ranks are forked from     the command goes on by itself
    damage      a bit of the newest checkpoint flips, a rank dies     the command goes on from the checkpoint before
    preempted   SIGTERM to the command, which ends with 75            the same command is given again, as Slurm's requeue does
    launcher    SIGKILL to the command; its ranks save and end        the same command is given again

At the end the run is stopped, and a run of as many steps without faults is made.  Losses, weights and samples have to be equal.
Looked for afterwards: processes, files in /dev/shm and in the folder for temporary files, and whether the command's open files,
sockets among them, grew.  Writes benchmarks/results/soak.json.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import random
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import psutil
import torch

HERE = Path(__file__).resolve().parent
TESTS = HERE.parent / "tests"
sys.path.insert(0, str(TESTS))

from accounted import FOLDER, problems_of  # noqa: E402
from command import DIGITS, fingerprint, losses, ranks_of, record  # noqa: E402

BATCH, EVERY = 64, 50
SETTINGS = [
    "data.name=accounted:open_dataset", "schedule.name=constant", "schedule.warmup=0step", "optimizer.lr=0.02",
    f"checkpoint.every={EVERY}step", "checkpoint.keep_last=3", "model.options.dropout=0.1", "log.tensorboard=false",
    "evaluate.every=100000ep", "mesh.replicate=2", "data.workers=1", "log.every=100000",
]  # fmt: skip
KINDS = {"rank": 5, "forker": 1, "damage": 1, "preempted": 2, "launcher": 1}
"""How often each kind comes, in relation."""


class Soak:
    """The run, its faults, and what was seen of its command."""

    def __init__(self, root: Path, draw: random.Random) -> None:
        self.folder, self.draw = root / "soaked", draw
        self.faults: list[dict[str, Any]] = []
        self.open_files: list[int] = []
        self.said = root / "said"
        self.process = self.begin()

    def begin(self) -> psutil.Popen:
        return begin(self.folder, "--max-restarts", "1000000", said=self.said)

    def steps(self) -> int:
        return max((line["step"] for line in record(self.folder / "run", "step")), default=0)

    def wait_until_it_steps(self, since: float, *, seconds: float = 180.0) -> None:
        """Return once a step is recorded that ended after `since`."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            lines = record(self.folder / "run", "step")[-1:]
            if lines and lines[0]["time"] > since:
                return lines[0]["time"] - since
            time.sleep(0.05)
        raise AssertionError(
            f"no step within {seconds} s of a fault; the last: {self.faults[-1:]}\n{self.said.read_text()[-3000:]}"
        )

    def fault(self) -> None:
        """One fault, and the run goes on."""
        kind = self.draw.choices(list(KINDS), weights=list(KINDS.values()))[0]
        ranks, when, at = ranks_of(self.process), time.time(), self.steps()
        if len(ranks) < 2 or self.process.poll() is not None:
            raise AssertionError(f"the command has not its 2 ranks but {ranks}\n{self.said.read_text()[-3000:]}")
        self.open_files.append(psutil.Process(self.process.pid).num_fds())
        getattr(self, f"_{kind}")(ranks)
        self.wait_until_it_steps(time.time() + 0.2)
        self.faults.append({"kind": kind, "step": at, "seconds": time.time() - when})

    def _rank(self, ranks: list[psutil.Process]) -> None:
        self.draw.choice(ranks).kill()

    def _forker(self, ranks: list[psutil.Process]) -> None:
        ranks[0].parent().kill()

    def _damage(self, ranks: list[psutil.Process]) -> None:
        places = sorted((self.folder / "run" / "checkpoints").glob("step_*"))
        file = places[-1] / "tensors_0.safetensors" if len(places) > 1 else None
        if file is not None and file.is_file():
            with file.open("r+b") as opened:
                opened.seek(file.stat().st_size // 2)
                byte = opened.read(1)[0]
                opened.seek(-1, os.SEEK_CUR)
                opened.write(bytes([byte ^ 1]))
        self._rank(ranks)

    def _preempted(self, ranks: list[psutil.Process]) -> None:
        self.stop()
        self.process = self.begin()

    def _launcher(self, ranks: list[psutil.Process]) -> None:
        self.process.kill()
        self.process.wait()
        psutil.wait_procs(ranks, timeout=60)
        self.process = self.begin()

    def stop(self) -> None:
        self.process.terminate()
        status = self.process.wait(120)
        assert status == 75, f"a stopped run ended with {status}\n{self.said.read_text()[-3000:]}"


def begin(folder: Path, *further: str, said: Path) -> Any:
    """The command in the background; what it says goes into a file."""
    (folder / "seen").mkdir(parents=True, exist_ok=True)
    (folder / "tmp").mkdir(exist_ok=True)
    environment = os.environ | {FOLDER: str(folder / "seen"), "OMP_NUM_THREADS": "1", "TMPDIR": str(folder / "tmp")}
    command = [sys.executable, "-m", "widefield", "train", DIGITS, *SETTINGS, "--run", str(folder / "run"), *further]
    with said.open("a") as output:
        return psutil.Popen(command, cwd=TESTS, env=environment, stdout=output, stderr=output)


def measure(root: Path, asked: argparse.Namespace) -> dict[str, Any]:
    draw, shared = random.Random(asked.seed), set(os.listdir("/dev/shm"))
    began = time.time()
    soak = Soak(root, draw)
    soak.wait_until_it_steps(began)
    while time.time() < began + 60 * asked.minutes:
        time.sleep(draw.expovariate(1 / asked.every))
        soak.fault()
    soak.stop()
    minutes, steps = (time.time() - began) / 60, record(soak.folder / "run", "end")[-1]["step"]
    time.sleep(1)
    left = [process.pid for process in psutil.process_iter() if _is_ours(process, root)]
    leaks = {
        "processes": left,
        "shared_memory": sorted(set(os.listdir("/dev/shm")) - shared),
        "temporary_files": sorted(os.listdir(soak.folder / "tmp")),
        "open_files_of_the_command": [min(soak.open_files), max(soak.open_files)],
    }
    whole = root / "whole"
    begin(whole, f"schedule.length={steps}step", said=root / "said_whole").wait()
    mine, theirs = losses(soak.folder / "run"), losses(whole / "run")
    prints = [fingerprint(place / "run", ranks=2) for place in (soak.folder, whole)]
    return {
        "minutes": minutes,
        "faults": len(soak.faults),
        "faults_by_kind": dict(Counter(fault["kind"] for fault in soak.faults)),
        "seconds_between_faults": 60 * minutes / max(1, len(soak.faults)),
        "seconds_to_the_next_step_most": max((fault["seconds"] for fault in soak.faults), default=None),
        "steps": steps,
        "losses_equal": mine == theirs,
        "same_bytes": {name: prints[0][name] == prints[1][name] for name in prints[0]},
        "problems_of_samples": problems_of(soak.folder / "seen", steps=steps, batch=BATCH)[:10],
        "leaks": leaks,
    }


def _is_ours(process: psutil.Process, root: Path) -> bool:
    try:
        return str(root) in process.environ().get(FOLDER, "")
    except psutil.Error:
        return False


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("--minutes", type=float, default=30)
    arguments.add_argument("--every", type=float, default=15, help="seconds between faults, in the mean")
    arguments.add_argument("--seed", type=int, default=0)
    arguments.add_argument("--output", type=Path, default=HERE / "results" / "soak.json")
    asked = arguments.parse_args()
    SETTINGS.append("schedule.length=1000000step")
    conditions = {
        "date": datetime.date.today().isoformat(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "cores": os.cpu_count(),
        "load_at_start": os.getloadavg()[0],
        "seed": asked.seed,
        "asked": {"minutes": asked.minutes, "every": asked.every},
    }
    with tempfile.TemporaryDirectory(prefix="soak_") as root:
        figures = measure(Path(root), asked)
    figures = {"conditions": conditions | {"load_at_end": os.getloadavg()[0]}, **figures}
    asked.output.write_text(json.dumps(figures, indent=2) + "\n")
    print(json.dumps(figures, indent=2))


if __name__ == "__main__":
    main()
