"""What does widefield give on a GPU?  Four parts, each in a process and within a time of its own; 8 minutes at most together.

  step     images/s of the training step over those of a plain loop: ResNet-50, bfloat16, channels_last, torch.compile
  image    the largest image that a U-Net trains on in a tenth of the memory, whole and tile after tile; time per pixel of both
  halo     a convolution on tiles whose halo travels while it computes, over one that waits for it: 2 GPUs
  peers    DDP and ZeRO by hand over widefield's: 2 GPUs

A row is printed as soon as it is known.  All rows, with their conditions, go into results/gpu.json, and a table is printed.
Without a GPU this says so and measures nothing.  `--device cpu --small` runs the same lines on small sizes, within a minute, to
try the program; its figures say nothing of a GPU, and are written where --output says, or nowhere.

  python benchmarks/gpu.py [--only step,image] [--output FILE] [--device cpu] [--small]

The status is 1 where a part failed, or did not end within its time; the rows that it gave are kept.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import platform
import signal
import subprocess
import sys
import threading
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
from rows import Row, number, tell, told

from widefield.launchers.local import start

RESULT = Path(__file__).parent / "results" / "gpu.json"


@dataclass(frozen=True)
class Part:
    """`module` has `rows(device, small=, until=)`, which runs on `ranks` devices and gives rows; it has `seconds` in all."""

    module: str
    question: str
    ranks: int
    seconds: int


PARTS = {
    "step": Part("gpu_step", "images/s of a training step of ResNet-50 over those of a plain loop", 1, 200),
    "image": Part("gpu_image", "the largest image that a U-Net trains on, whole and tile after tile, and its time", 1, 150),
    "halo": Part("gpu_halo", "a convolution on tiles whose halo travels meanwhile, over one that waits for it", 2, 50),
    "peers": Part("gpu_peers", "seconds of a step of DDP and ZeRO over those of the same by hand", 2, 80),
}
MEASURING = 0.75
"""Of a part's time: no pair of blocks begins later.  The rest is for what has begun."""
LONGER = {"cuda": 1, "cpu": 3}
"""How many times its seconds a part may take: a CPU may have others to serve, and its figures are none to keep."""
END_SECONDS = 5.0
"""How long a part has to end after each signal."""


@dataclass
class Ran:
    """What a part gave: its rows, seconds that it took, and what went wrong, or why it was not run."""

    question: str
    rows: list[Row] = field(default_factory=list)
    seconds: float = 0.0
    failed: str = ""
    not_run: str = ""

    def as_json(self) -> dict:
        about = {"question": self.question, "seconds": round(self.seconds, 1)}
        wrong = {"failed": self.failed} if self.failed else {"not run": self.not_run} if self.not_run else {}
        return about | wrong | {"rows": [asdict(row) for row in self.rows]}


# ---------------------------------------------------------------------------------------------- a part, in its own process


def run_part(name: str, options: argparse.Namespace, until: float) -> int:
    """Measure, and hand on each row; a part of several ranks starts them, and each is this program again."""
    part = PARTS[name]
    if part.ranks > 1 and "RANK" not in os.environ:
        return start(part.ranks, [], program=[sys.executable, *sys.argv])
    device = torch.device("cuda", 0) if options.device == "cuda" else torch.device("cpu")  # the kind of it, for ranks
    for row in importlib.import_module(part.module).rows(device, small=options.small, until=until):
        if os.environ.get("RANK", "0") == "0":
            tell(row)
    return 0


# ---------------------------------------------------------------------------------------------- all parts


def measured(name: str, options: argparse.Namespace) -> Ran:
    """A part in a process of its own, ended where its time is over."""
    part, gpus = PARTS[name], torch.cuda.device_count()
    ran = Ran(part.question)
    if options.device == "cuda" and gpus < part.ranks:
        ran.not_run = f"needs {part.ranks} GPUs, {gpus} here"
        print(f"{name:6s} not run: {ran.not_run}", flush=True)
        return ran
    began, seconds = time.monotonic(), part.seconds * LONGER[options.device]
    words = ["--part", name, "--until", str(began + MEASURING * seconds), "--device", options.device]
    command = [sys.executable, __file__, *words, *(["--small"] if options.small else [])]
    hidden = {"CUDA_VISIBLE_DEVICES": ""} if options.device == "cpu" else {}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=os.environ | hidden, start_new_session=True)
    reader = threading.Thread(target=listen, args=(process, name, ran), daemon=True)
    reader.start()
    try:
        status = process.wait(seconds)
        ran.failed = f"its process ended with status {status}; its message is above" if status else ""
    except subprocess.TimeoutExpired:
        ran.failed = f"it had not ended after {seconds} s and was stopped"
    finally:
        end(process)
    reader.join(END_SECONDS)
    ran.seconds = time.monotonic() - began
    ran.failed = ran.failed or ("" if ran.rows else "it ended and gave no row")
    if ran.failed:
        print(f"{name:6s} failed: {ran.failed}", flush=True)
    return ran


def listen(process: subprocess.Popen, name: str, ran: Ran) -> None:
    """Take a part's rows as they come; what else it prints goes on to stderr."""
    assert process.stdout is not None
    for line in process.stdout:
        row = told(line)
        if row is None:
            sys.stderr.write(line)
            continue
        ran.rows.append(row)
        print(f"{name:6s} {row.text}", flush=True)


def end(process: subprocess.Popen) -> None:
    """Leave nothing of a part behind: the launcher of ranks passes a first SIGTERM on to them, and kills them at the second."""
    for _ in range(2):
        if process.poll() is None:
            process.terminate()
            try:
                process.wait(END_SECONDS)
            except subprocess.TimeoutExpired:
                continue
    try:
        os.killpg(process.pid, signal.SIGKILL)  # and the processes that compile, which are of its session
    except ProcessLookupError:
        pass
    process.wait()


def conditions(options: argparse.Namespace) -> dict:
    """What all parts were measured on."""
    gpus = [torch.cuda.get_device_properties(n) for n in range(torch.cuda.device_count())] if options.device == "cuda" else []
    return {
        "device": options.device, "small": options.small,
        "gpus": [f"{gpu.name}, {gpu.total_memory / 2**30:.0f} GiB" for gpu in gpus],
        "cuda": torch.version.cuda if gpus else None, "cudnn": torch.backends.cudnn.version() if gpus else None,
        "torch": torch.__version__, "python": platform.python_version(), "commit": commit(),
        "processor": platform.processor() or platform.machine(), "cores": os.cpu_count(), "date": time.strftime("%Y-%m-%d"),
    }  # fmt: skip


def commit() -> str:
    """Of this checkout, with a + where files have changed since; "unknown" where it is none."""
    try:
        return git("rev-parse", "--short=12", "HEAD") + ("+" if git("status", "--porcelain", "-uno") else "")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def git(*words: str) -> str:
    command = ["git", "-C", str(Path(__file__).parent), *words]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def table(found: dict[str, Ran]) -> str:
    lines = ["| part | what | median | lowest to highest | n |", "|---|---|---|---|---|"]
    for name, ran in found.items():
        for row in ran.rows:
            spread = "" if row.n == 1 else f"{number(row.lowest)} to {number(row.highest)}"
            lines.append(f"| {name} | {row.name} | {number(row.value)} {row.unit} | {spread} | {row.n} |")
        if ran.failed or ran.not_run:
            lines.append(f"| {name} | {'failed: ' + ran.failed if ran.failed else 'not run: ' + ran.not_run} | | | |")
    return "\n".join(lines)


def measure_all(options: argparse.Namespace) -> int:
    about, names = conditions(options), options.only or list(PARTS)
    found = {name: measured(name, options) for name in names}
    result = {"conditions": about, "parts": {name: ran.as_json() for name, ran in found.items()}}
    output = options.output or (RESULT if options.device == "cuda" and not options.small else None)
    if output is not None:
        output.parent.mkdir(parents=True, exist_ok=True)
        output.write_text(json.dumps(result, indent=1) + "\n")
    print(table(found))
    return int(any(ran.failed for ran in found.values()))


def parts_named(text: str) -> list[str]:
    """`step,image` as a list; argparse says what is wrong with it."""
    names = text.split(",")
    wrong = [name for name in names if name not in PARTS]
    if wrong:
        raise argparse.ArgumentTypeError(f"there is no part {wrong[0]!r}; there are {', '.join(PARTS)}")
    return names


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--small", action="store_true", help="sizes that a CPU computes within a minute")
    parser.add_argument("--only", type=parts_named, help="parts, by comma; all where left out")
    parser.add_argument("--output", type=Path, help="the file of the results; results/gpu.json on a GPU where left out")
    parser.add_argument("--part", choices=list(PARTS), help=argparse.SUPPRESS)
    parser.add_argument("--until", type=float, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.part is not None:
        return run_part(options.part, options, options.until)
    if options.device == "cuda" and not torch.cuda.is_available():
        print("No GPU is here, so nothing was measured; --device cpu --small tries the program on the CPU.")
        return 0
    return measure_all(options)


if __name__ == "__main__":
    sys.exit(main())
