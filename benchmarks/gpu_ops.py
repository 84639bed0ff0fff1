"""What do the steps of ten models take on a GPU, and its kernels by operation, beside what is planned from its data sheet?

Each model trains on random images that lie on the GPU: the median of eight steps, then one step under torch's profiler.  The
rates of widefield/planner/cost/gpu_kernels.py were taken from six of the models, and not from those that are `held out`.
Then each kernel of the ten is timed by itself, as `widefield plan --calibrate` does for the plans that are asked about.
tests/planner/test_gpu_kernels.py compares both with what is planned.  Writes results/gpu_ops.json and gpu_kernels.json.gz.

    python benchmarks/gpu_ops.py [--seconds 90] [--output FOLDER]

Without a GPU this says so and measures nothing.
"""

from __future__ import annotations

import argparse
import gc
import gzip
import json
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import date
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path[0] = str(HERE.parent / "tests")  # in place of this folder, where `planner` would be planner.py

import torch  # noqa: E402  after the path of the tests, as the next ones
from planner.comparison import emulated  # noqa: E402
from planner.gpu_nets import GpuCase, is_held_out, names  # noqa: E402
from planner.measured_step import learner_and_batches  # noqa: E402
from torch.profiler import ProfilerActivity, profile  # noqa: E402

from widefield.comm.mesh import World, join  # noqa: E402
from widefield.planner.machines.calibrate import calibrate  # noqa: E402
from widefield.planner.machines.calibration import write_calibration  # noqa: E402
from widefield.planner.machines.timing import measure_signatures  # noqa: E402
from widefield.plans import plan_of  # noqa: E402

RESULTS = HERE / "results"
STEPS, WARMUP = 8, 3
LEAST_SECONDS = 5e-5
"""An operation on some shapes that takes less of a step is left out, and so are all but the MOST_OPERATIONS longest."""
MOST_OPERATIONS = 90
KERNEL_SECONDS = 11.0
"""For timing the kernels of a model by themselves."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=90.0, help="after which no further model begins")
    parser.add_argument("--output", type=Path, default=RESULTS, help="folder")
    asked = parser.parse_args()
    if not torch.cuda.is_available():
        print("no GPU here: nothing is measured")
        return 0
    until, models = time.monotonic() + asked.seconds, {}
    for name in names():
        if time.monotonic() > until:
            print(f"{name} and what follows: the time is up")
            break
        models[name] = measured(name)
        print(name, {key: value for key, value in models[name].items() if key != "operations"}, flush=True)
        text = json.dumps({"conditions": _conditions(), "models": models}, indent=1)
        (asked.output / "gpu_ops.json").write_text(text + "\n")
    _time_kernels(list(models), asked.output / "gpu_kernels.json.gz")
    return 0


def _time_kernels(names: list[str], path: Path) -> None:
    """What a calibration of this GPU holds once the plans of these models have been asked about."""
    device = torch.device("cuda", torch.cuda.current_device())
    calibration = replace(calibrate(device=device, seconds=8, keep=False), kernels={})  # the host's share alone
    for name in names:
        records = emulated(GpuCase(name))
        assert not isinstance(records, str), records
        found = measure_signatures(records[0], calibration, budget_seconds=KERNEL_SECONDS, device=device)
        print(f"{name}: {len(found)} kernels of {len({event.signature for event in records[0].operations})}", flush=True)
    del calibration.conditions["host"]
    with tempfile.TemporaryDirectory() as folder:
        plain = Path(folder) / "kernels.json"
        write_calibration(calibration, plain)
        path.write_bytes(gzip.compress(plain.read_bytes(), mtime=0))


def measured(name: str) -> dict[str, Any]:
    """Seconds of a step and of its kernels, bytes allocated, and the seconds of each operation by the shapes it is given."""
    gc.collect()
    torch.cuda.empty_cache()
    case = GpuCase(name)
    mesh = join(World(), plan_of(case.config, 1))
    learner, batches = learner_and_batches(mesh, case)
    batches = [replace(one, image=one.image.to(mesh.device), target=one.target.to(mesh.device)) for one in batches]

    def step() -> None:
        learner.learn(list(batches), stop=False)
        torch.cuda.synchronize()

    for _ in range(WARMUP):
        step()
    torch.cuda.reset_peak_memory_stats()
    seconds = [_timed(step) for _ in range(STEPS)]
    allocated = torch.cuda.max_memory_allocated()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA], record_shapes=True) as profiled:
        step()
    kernels = [event for event in profiled.events() if str(event.device_type).endswith("CUDA")]
    return {
        "held out": is_held_out(name),
        "seconds": statistics.median(seconds),
        "lowest": min(seconds),
        "highest": max(seconds),
        "allocated bytes": allocated,
        "kernels": len(kernels),
        "kernel seconds": sum(event.device_time for event in kernels) / 1e6,
        "operations": sorted(_operations(profiled), key=lambda row: -row[3])[:MOST_OPERATIONS],
    }


def _timed(step: Callable[[], None]) -> float:
    began = time.perf_counter()
    step()
    return time.perf_counter() - began


def _operations(profiled: profile) -> Iterator[tuple[str, str, int, float]]:
    """Name, shapes, how often, and seconds in all."""
    for row in profiled.key_averages(group_by_input_shape=True):
        if row.key.startswith("aten::") and row.self_device_time_total / 1e6 >= LEAST_SECONDS:
            yield row.key.removeprefix("aten::"), str(row.input_shapes), row.count, row.self_device_time_total / 1e6


def _conditions() -> dict[str, str]:
    return {
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "cudnn": str(torch.backends.cudnn.version()),
        "cuda": str(torch.version.cuda),
        "python": platform.python_version(),
        "date": date.today().isoformat(),
    }


if __name__ == "__main__":
    sys.exit(main())
