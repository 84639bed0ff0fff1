"""Is whatever holds up a run found in time and named, and what does the watch cost?

    python benchmarks/watch.py table [--only 'missing rank,straggler'] [--plans data,stage] [--save]
    python benchmarks/watch.py cost [--pairs 12] [--steps 40] [--save]

table: everything of tests/hang_cases.py befalls rank 1 of two, under five plans.  Seconds are from the fault to the end of the
last rank, log.hang_seconds included.
cost: steps of ResNet-18 on two ranks with the watch and without it, in turns in the same processes (turns.py); the first steps,
whose collectives are compared, are not among those timed.  Their price is told beside it.  On a shared machine such a ratio has
a spread far above what a watch may cost.  So what the watch itself uses is counted too, on the rank where it is most: the
processor's time of its two threads, as the kernel counts it, and the wall's of its call at each step, over the wall's seconds.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import platform
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist
import torchvision
import turns
from torch.nn import functional as F

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "tests"))

from hang_cases import CASES, HANG_SECONDS, LATER, PLANS, see  # noqa: E402

from widefield.comm.mesh import Mesh, join, leave  # noqa: E402
from widefield.comm.stall_watch import StallWatch  # noqa: E402
from widefield.launchers import world_from  # noqa: E402
from widefield.launchers.local import start  # noqa: E402
from widefield.parallel.parallelize import parallelize  # noqa: E402
from widefield.plans import Plan  # noqa: E402

RESULT = HERE / "results" / "watch.json"
FOUND_SECONDS = 2.0
"""After log.hang_seconds all ranks are to have ended."""


# ---------------------------------------------------------------------------------------------- the table


def table(options: argparse.Namespace) -> dict:
    kinds = options.only.split(",") if options.only else [*CASES, *LATER]
    rows = []
    for what in kinds:
        for plan in options.plans.split(",") if options.plans else PLANS:
            if what == "skipped message" and plan not in ("space", "stage"):
                continue  # the others send none between two ranks
            with tempfile.TemporaryDirectory() as folder:
                seen = see(what, plan, Path(folder))
            ended = all(status != -9 for status in seen.statuses)
            row = {"what": what, "plan": plan, "seconds": round(seen.seconds, 2), "named": seen.named, "all ended": ended}
            rows.append(row | {"statuses": seen.statuses, "said": seen.text[:600]})
            print(json.dumps(row), "" if seen.named else f"\n    {seen.text}", flush=True)
    asked = [row for row in rows if row["what"] in CASES]
    hung = [row for row in asked if CASES[row["what"]].ends]
    return {
        "log.hang_seconds": HANG_SECONDS,
        "cases": len(asked),
        "named": sum(row["named"] for row in asked),
        "all ranks ended": sum(row["all ended"] for row in asked),
        "ended within log.hang_seconds + 2 s": sum(row["seconds"] <= HANG_SECONDS + FOUND_SECONDS for row in hung),
        "of": len(hung),
        "longest seconds": max((row["seconds"] for row in hung), default=None),
        "rows": rows,
    }


# ---------------------------------------------------------------------------------------------- the cost


class Net:
    """ResNet-18 under data parallelism, one step per `next`, watched where a watch is open."""

    def __init__(self, mesh: Mesh, options: argparse.Namespace) -> None:
        torch.manual_seed(0)
        self.mesh, self.done, self.since = mesh, 0, None
        self.model = torchvision.models.resnet18(num_classes=10)
        parallelize(self.model, mesh)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-3, momentum=0.9)
        self.batch = torch.randn(options.batch, 3, options.side, options.side), torch.zeros(options.batch, dtype=torch.long)
        self.watch: StallWatch | None = None
        self.called = 0.0
        """Seconds in the watch's call at each step."""

    def __iter__(self) -> Iterator[None]:
        return self

    def __next__(self) -> None:
        if self.watch is not None:
            began = time.perf_counter()
            self.watch.begin_step()
            self.called += time.perf_counter() - began
        self.since = time.perf_counter()
        self.optimizer.zero_grad(set_to_none=True)
        F.cross_entropy(self.model(self.batch[0]), self.batch[1]).backward()
        self.optimizer.step()
        self.done, self.since = self.done + 1, None

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        watch = StallWatch(
            self.mesh, seconds=60.0, at=lambda: (self.done, self.since), warn=lambda text: None, hang_seconds=600.0
        )
        with watch:
            self.watch = watch
            yield
        self.watch = None

    def used(self) -> float:
        """Seconds that the open watch has used so far on this rank."""
        assert self.watch is not None
        threads = (self.watch._thread, self.watch._asker._thread)
        return self.called + sum(map(processor_seconds, threads))


def processor_seconds(thread: threading.Thread) -> float:
    """For how long a thread has been on a processor (proc(5), schedstat: its first number is in nanoseconds)."""
    return int(Path(f"/proc/self/task/{thread.native_id}/schedstat").read_text().split()[0]) / 1e9


def cost(options: argparse.Namespace) -> None:
    """On each rank: blocks of steps A B B A, each after three steps that are not timed."""
    world = world_from(os.environ)
    mesh = join(world, Plan(replicate=world.size))
    net, times = Net(mesh, options), {"plain": [], "watched": []}
    first: list[float] = []
    used: list[float] = []
    turns.seconds_of(net, 3, mesh.device)
    for pair in range(options.pairs):
        for name in ("plain", "watched") if pair % 2 == 0 else ("watched", "plain"):
            with net.watched() if name == "watched" else contextlib.nullcontext():
                compared = turns.seconds_of(net, 2, mesh.device)[0]
                if name == "watched":
                    first.append(compared / 2)
                turns.seconds_of(net, 1, mesh.device)
                before = net.used() if net.watch else 0.0
                times[name].append(turns.seconds_of(net, options.steps, mesh.device))
                if net.watch:
                    share = torch.tensor((net.used() - before) / times[name][-1][0])
                    dist.all_reduce(share, op=dist.ReduceOp.MAX)
                    used.append(share.item())
    if mesh.is_main:
        found = turns.compared(times, "watched", "plain", options.steps)
        found["used by the watch over the wall's seconds"] = {
            "median of blocks": round(statistics.median(used), 5), "lowest": round(min(used), 5), "highest": round(max(used), 5)
        }  # fmt: skip
        found["a step whose collectives are compared, seconds"] = round(statistics.median(first), 4)
        print("COST " + json.dumps(found | {"conditions": turns.conditions(mesh, options, batch=options.batch)}), flush=True)
        if options.save:
            _save({"cost": found | {"conditions": turns.conditions(mesh, options, batch=options.batch)}})
    leave(mesh)


# ---------------------------------------------------------------------------------------------- the command


def _save(part: dict) -> None:
    known = json.loads(RESULT.read_text()) if RESULT.is_file() else {}
    known["conditions"] = {
        "torch": torch.__version__, "python": platform.python_version(), "cores": os.cpu_count(),
        "date": time.strftime("%Y-%m-%d"), "load at the end": round(os.getloadavg()[0], 1),
    }  # fmt: skip
    RESULT.write_text(json.dumps(known | part, indent=1) + "\n")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=["table", "cost"])
    parser.add_argument("--only", default="", help="what befalls, by comma")
    parser.add_argument("--plans", default="", help="plans, by comma")
    for name, value in {"ranks": 2, "pairs": 12, "steps": 40, "batch": 8, "side": 64}.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--save", action="store_true", help="write the part into results/watch.json")
    options = parser.parse_args()
    if options.part == "cost":
        if "RANK" not in os.environ:
            return start(options.ranks, [], program=[sys.executable, *sys.argv])
        torch.set_num_threads(1)
        cost(options)
        return 0
    found = table(options)
    print(json.dumps({key: value for key, value in found.items() if key != "rows"}, indent=1))
    if options.save:
        _save({"table": found})
    return 0 if found["named"] >= math.ceil(0.95 * found["cases"]) else 1


if __name__ == "__main__":
    sys.exit(main())
