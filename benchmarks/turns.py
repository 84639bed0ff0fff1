"""What benchmarks share: loops that run in turns in the same processes, and a result with its conditions.

Blocks of steps run A B B A ...; the ratio of each pair is noted and the median is the result, so that a machine whose speed
drifts does not decide it.  Beside the wall's seconds stand the processor's, of all ranks: others who use the machine disturb
these less.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from widefield.comm.mesh import Mesh
from widefield.launchers.local import start

Seconds = tuple[float, float]
"""On the wall's clock, and of all ranks' processors."""
CLOCKS = ("wall", "processor")
PAIRS_LEAST = 3
"""Of which a median with a spread is made, however little time there is."""


def seconds_of(loop: Iterator[object], steps: int, device: torch.device) -> Seconds:
    """What so many steps take, from when all ranks begin to when all are done."""
    all_are_here(device)
    began, worked = time.perf_counter(), time.process_time()
    for _ in range(steps):
        next(loop)
    synchronize(device)
    used = torch.tensor(time.process_time() - worked, dtype=torch.float64, device=device)
    all_are_here(device)
    wall = time.perf_counter() - began
    if dist.is_initialized():
        dist.all_reduce(used)
    return wall, used.item()


def all_are_here(device: torch.device) -> None:
    """Wait for this process's device and, where there are several ranks, for the others."""
    synchronize(device)
    if dist.is_initialized():
        dist.barrier()


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def in_turns(
    loops: Mapping[str, Iterator[object]], options: argparse.Namespace, device: torch.device, *, until: float | None = None
) -> dict:
    """Seconds of `options.pairs` blocks of `options.steps` steps of each loop, after three that warm it up.

    until: a time of time.monotonic(), after which no pair begins but the first PAIRS_LEAST; ranks stop together.
    """
    for loop in loops.values():
        seconds_of(loop, 3, device)
    times: dict[str, list[Seconds]] = {name: [] for name in loops}
    for pair in range(options.pairs):
        if until is not None and pair >= PAIRS_LEAST and is_over(until, device):
            break
        for name in loops if pair % 2 == 0 else reversed(loops):
            times[name].append(seconds_of(loops[name], options.steps, device))
    return times


def is_over(until: float, device: torch.device) -> bool:
    """Whether it is later than `until` by any rank's clock."""
    late = torch.tensor(float(time.monotonic() > until), device=device)
    if dist.is_initialized():
        dist.all_reduce(late, op=dist.ReduceOp.MAX)
    return bool(late.item())


def compared(times: Mapping[str, list[Seconds]], ours: str, theirs: str, steps: int) -> dict:
    """Seconds of a step of two loops, and our seconds over theirs, by each clock."""
    found: dict = {}
    for number, clock in enumerate(CLOCKS):
        each = {name: [seconds[number] for seconds in times[name]] for name in (theirs, ours)}
        ratios = sorted(b / a for a, b in zip(each[theirs], each[ours], strict=True))
        told = {f"seconds per step, {name}": statistics.median(all_) / steps for name, all_ in each.items()}
        told |= {"ratio, median of pairs": statistics.median(ratios), "lowest": ratios[0], "highest": ratios[-1]}
        found[clock] = {key: round(value, 4) for key, value in told.items()}
    return found


def conditions(mesh: Mesh, options: argparse.Namespace, **more: Any) -> dict:
    """What a result was measured on."""
    return more | {
        "ranks": mesh.size, "image": [3, options.side, options.side], "steps per block": options.steps, "pairs": options.pairs,
        "device": mesh.device.type, "processor": platform.processor() or platform.machine(), "cores": os.cpu_count(),
        "threads per rank": torch.get_num_threads(), "torch": torch.__version__, "python": platform.python_version(),
        "date": time.strftime("%Y-%m-%d"),
    }  # fmt: skip


def tell(result: dict, path: Path, options: argparse.Namespace) -> None:
    """Print a result, and write it where that is asked for."""
    print(json.dumps(result, indent=1))
    if options.save:
        path.parent.mkdir(exist_ok=True)
        path.write_text(json.dumps(result, indent=1) + "\n")


def command(
    on_rank: Callable[[argparse.Namespace], None], result: Path, *, about: str | None, only: str = "", **numbers: int
) -> int:
    """The command of a benchmark: starts ranks, each of which runs `on_rank`.

    numbers: its options and their defaults, with `ranks`.  only: what `--only` chooses among, if it can.
    """
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, value in numbers.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    if only:
        parser.add_argument("--only", help=f"{only}, by comma; all where left out")
    parser.add_argument("--save", action="store_true", help=f"write {result.name} into results/")
    options = parser.parse_args()
    if "RANK" in os.environ:
        torch.set_num_threads(1)
        on_rank(options)
        return 0
    return start(options.ranks, [], program=[sys.executable, *sys.argv])
