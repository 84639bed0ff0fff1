"""How many flipped bits are found, what does kill -9 leave, and how long does a save hold training up?

    python benchmarks/checkpoint_faults.py --flips 1000 --kills 200

For contrast the same kind of flip in a file of torch.save and in a plain torch.distributed.checkpoint (DCP) folder.
Writes benchmarks/results/checkpoint_faults.json.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "tests"))

from faults import ONE_RANK, Flip, about_of, kill_saves, missed, no_warning, random_flips, state_of  # noqa: E402

from widefield.training.checkpoint import Checkpoints  # noqa: E402
from widefield.training.checkpoint_directory import steps_in  # noqa: E402
from widefield.training.staging import Changes, address_of  # noqa: E402

STATE_NUMBERS = 250_000
"""1 MB of float32 in what is flipped and killed."""
STEP_SECONDS = 0.2
"""Of the forward and backward that follow a timed save."""
SPEED_BYTES = 200_000_000
"""Of the state whose saves are timed, about ResNet-50's weights with one momentum: 8 tensors."""


def flips_found(folder: Path, count: int) -> int:
    checkpoints = Checkpoints(folder, ONE_RANK, keep_last=1, keep_best=0, warn=no_warning)
    own = {"seed": torch.get_rng_state()}
    checkpoints.save(state_of(1, numbers=STATE_NUMBERS), about_of(1), own=own, wait=True)
    (sealed,) = steps_in(folder)
    return count - len(missed(sealed, random_flips(sealed, count)))


def flips_noticed(folder: Path, count: int, load: Callable[[], object]) -> int:
    """Of `count` random flips, spread over all bytes of the folder, those at which `load` raises."""
    file = max(folder.iterdir(), key=lambda path: path.stat().st_size)  # 99 % and more of the bytes
    draw = torch.Generator().manual_seed(0)
    noticed = 0
    for _ in range(count):
        flip = Flip(file, int(torch.randint(8 * file.stat().st_size, (), generator=draw)))
        flip.do()
        try:
            load()
        except Exception:
            noticed += 1
        flip.do()
    return noticed


def torch_load_notices(folder: Path, count: int) -> int:
    torch.save(state_of(1, numbers=STATE_NUMBERS), folder / "all.pt")
    return flips_noticed(folder, count, lambda: torch.load(folder / "all.pt"))


def plain_dcp_notices(folder: Path, count: int) -> int:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # one process is what is meant
        dcp.save(state_of(1, numbers=STATE_NUMBERS), checkpoint_id=folder)
        return flips_noticed(folder, count, lambda: dcp.load(state_of(0, numbers=STATE_NUMBERS), checkpoint_id=folder))


WAYS = ("background", "at_once", "waited")
"""In the background with weights copied during the next step, or copied before it; and waited for."""


def blocking_seconds(folder: Path, repeats: int) -> dict[str, list[float]]:
    """How long a save holds training up, each way in turn, each after one that is not counted.

    That is the time in `save` and, after a forward and backward of STEP_SECONDS, in `wait_until_copied`.
    """
    state = {f"part{index}": torch.randn(SPEED_BYTES // 32) for index in range(8)}
    every = {address_of(tensor) for tensor in state.values()}
    checkpoints = Checkpoints(folder, ONE_RANK, keep_last=1, keep_best=0, warn=no_warning)
    seconds: dict[str, list[float]] = {way: [] for way in WAYS}
    for repeat in range(repeats + 1):
        for number, way in enumerate(WAYS):
            changes = Changes(live=every, steady=set() if way == "at_once" else every)
            began = time.perf_counter()
            checkpoints.save(state, about_of(3 * repeat + number), wait=way == "waited", changes=changes)
            spent = time.perf_counter() - began
            compute(STEP_SECONDS)
            began = time.perf_counter()
            checkpoints.wait_until_copied()
            spent += time.perf_counter() - began
            checkpoints.wait()
            if repeat:
                seconds[way].append(spent)
    return seconds


def compute(seconds: float) -> None:
    """What a forward and backward is to a save: multiplications on one thread."""
    until, matrix = time.perf_counter() + seconds, torch.randn(256, 256)
    while time.perf_counter() < until:
        matrix @ matrix


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("--flips", type=int, default=1000)
    arguments.add_argument("--kills", type=int, default=200)
    arguments.add_argument("--contrast", type=int, default=40, help="flips shown to torch.load and to plain DCP")
    arguments.add_argument("--repeats", type=int, default=5, help="timed saves of each kind")
    asked = arguments.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="checkpoint_faults_") as root:
        figures = measure(Path(root), asked)
    report(figures)


def measure(root: Path, asked: argparse.Namespace) -> dict:
    folders = [root / name for name in ("flips", "kills", "torch", "dcp", "speed")]
    for folder in folders:
        folder.mkdir()
    flips, kills, torch_folder, dcp_folder, speed = folders
    found = flips_found(flips, asked.flips)
    left = kill_saves(kills, asked.kills, numbers=STATE_NUMBERS, longest_seconds=0.1)
    seconds = blocking_seconds(speed, asked.repeats)
    medians = {way: statistics.median(times) for way, times in seconds.items()}
    return {
        "flips": asked.flips,
        "flips_found": found,
        "kills": asked.kills,
        "kills_that_left_a_sound_checkpoint": sum(kill.problem is None for kill in left),
        "kills_inside_a_save": sum(kill.inside_a_save for kill in left),
        "kill_problems": [kill.problem for kill in left if kill.problem is not None],
        "contrast_flips": asked.contrast,
        "torch_load_noticed": torch_load_notices(torch_folder, asked.contrast),
        "plain_dcp_noticed": plain_dcp_notices(dcp_folder, asked.contrast),
        **{f"blocking_{way}_seconds": times for way, times in seconds.items()},
        "blocking_share": medians["background"] / medians["waited"],
        "blocking_share_where_all_is_copied_at_once": medians["at_once"] / medians["waited"],
    }


def report(figures: dict) -> None:
    print(f"{figures['flips_found']} of {figures['flips']} flips found")
    sound, kills = figures["kills_that_left_a_sound_checkpoint"], figures["kills"]
    print(f"{sound} of {kills} kills left a sound checkpoint ({figures['kills_inside_a_save']} fell inside a save)")
    for name in ("torch_load", "plain_dcp"):
        print(f"{name} noticed {figures[name + '_noticed']} of {figures['contrast_flips']} flips")
    print(
        f"a background save holds training up for {figures['blocking_share']:.4f} of a waited one, "
        f"{figures['blocking_share_where_all_is_copied_at_once']:.3f} where all is copied at once "
        f"({SPEED_BYTES / 1e6:.0f} MB, median of {len(figures['blocking_waited_seconds'])})"
    )
    conditions = {
        "date": datetime.date.today().isoformat(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "cpu": cpu_name(),
        "cores": os.cpu_count(),
        "state_bytes": 4 * STATE_NUMBERS,
        "speed_bytes": SPEED_BYTES,
        "step_seconds": STEP_SECONDS,
    }
    path = HERE / "results" / "checkpoint_faults.json"
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps({"conditions": conditions, **figures}, indent=2) + "\n")
    complete = figures["flips_found"] == figures["flips"] and sound == kills
    sys.exit(0 if complete else 1)


def cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


if __name__ == "__main__":
    main()
