"""What do tiles in time cost and give?  Ratios of two things measured in turns in one run.

unet        a U-Net's training step on one 4096 x 4096 image, tile after tile: its time per pixel over that of the whole net at
            1024 x 1024, and its peak memory over that of the whole run, which is measured at 2048 x 2048 and taken times 4;
            and both at 2048 x 2048 with tiles of the same size
classifier  a ResNet with BatchNorm trains two steps on one 16,384 x 16,384 image that is read by windows: the most memory that
            the process ever held

Memory is resident memory as the kernel counts it, above where the step began; each figure from a process of its own.

  python benchmarks/stream.py unet classifier [--norm batch] [--keep file]
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import date
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import widefield as wf
from widefield.config import ModelConfig
from widefield.models import build

RESULT = Path(__file__).parent / "results" / "stream.json"
CLASSES = 5
MIB = 2**20


class WithLoss(nn.Module):
    """A net and its loss per pixel, so that no output of the whole image's size has to exist."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, image: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(self.net(image), target)


def unet(options: argparse.Namespace) -> nn.Module:
    torch.manual_seed(0)
    config = ModelConfig(name="unet", options={"norm": options.norm, "widths": options.widths})
    return WithLoss(build(config, in_channels=3, num_classes=CLASSES))


def streamed(model: nn.Module, options: argparse.Namespace) -> nn.Module:
    tiles, memory = (options.tiles, options.tiles), options.memory
    return wf.stream(model, tiles=tiles, keep=options.keep, memory=memory, compile=options.compile)


def page(side: int) -> tuple[Tensor, Tensor]:
    torch.manual_seed(1)
    return torch.randn(1, 3, side, side), torch.randint(0, CLASSES, (1, side, side))


def stepper(model: nn.Module, *given: object) -> Callable[[], float]:
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)

    def step() -> float:
        optimizer.zero_grad()
        loss = model(*given)
        loss.backward()
        optimizer.step()
        return loss.item()

    return step


def seconds_of(step: Callable[[], object]) -> float:
    start = time.perf_counter()
    step()
    return time.perf_counter() - start


# ---------------------------------------------------------------------------------------------- memory of a process


def resident(name: str = "VmRSS") -> int:
    """Bytes that this process holds; VmHWM: that it held at most."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name))


def peak_above(step: Callable[[], object]) -> int:
    """Most bytes resident during a step above where it began."""
    before = resident()
    Path("/proc/self/clear_refs").write_text("5")
    step()
    return resident("VmHWM") - before


def memory(options: argparse.Namespace) -> dict:
    """In a process of its own: the peak of one training step."""
    image, target = page(options.side)
    model = unet(options)
    if options.tiles is not None:
        streamed(model, options)
    step = stepper(model, *page(64 * (options.tiles or 1)))
    step()  # what is there once: threads, momentum, compiled kernels
    peak = peak_above(stepper(model, image, target))
    found = {"peak, MiB": round(peak / MIB, 1)}
    if options.tiles is not None:
        program = model._stream.known.values()[-1].program
        found["kept between segments, MiB"] = round(program.kept_bytes / MIB, 1)
    return found


def speed(options: argparse.Namespace) -> dict:
    """The whole at 1024 x 1024 and the stream in turns."""
    alone = stepper(unet(options), *page(1024))
    tiled = stepper(streamed(unet(options), options), *page(options.side))
    alone(), tiled()
    ratios, wholes = [], []
    for _ in range(options.pairs):
        whole = statistics.median(seconds_of(alone) for _ in range(3))
        ratios.append(seconds_of(tiled) / (options.side / 1024) ** 2 / whole)
        wholes.append(whole)
    return {"time per pixel over the whole's at 1024 x 1024": spread(ratios), "seconds of the whole": round(min(wholes), 3)}


def spread(values: list[float]) -> dict[str, float]:
    return {"median": round(statistics.median(values), 3), "lowest": round(min(values), 3), "highest": round(max(values), 3)}


def measured(part: str, options: argparse.Namespace, **changes: object) -> dict:
    """What a part of this script finds in a process of its own."""
    given = vars(options) | changes
    words = [f"--{name}={value}" for name, value in given.items() if value is not None and name not in ("parts", "widths")]
    words.append("--widths=" + ",".join(map(str, options.widths)))
    out = subprocess.run([sys.executable, __file__, part, *words], check=True, capture_output=True, text=True).stdout
    return json.loads(out.splitlines()[-1])


def of_unet(options: argparse.Namespace) -> dict:
    found: dict = {}
    whole = measured("memory", options, side=2048, tiles=None)["peak, MiB"]
    for side, tiles in ((2048, options.tiles // 2), (4096, options.tiles)):
        tiled = measured("memory", options, side=side, tiles=tiles)
        times = measured("speed", options, side=side, tiles=tiles)
        of_whole = whole * (side / 2048) ** 2
        share = round(tiled["peak, MiB"] / of_whole, 4)
        found[f"{side} x {side}, {tiles} x {tiles} tiles"] = (
            {"peak over the whole's": share, "whole, MiB": of_whole} | tiled | times
        )
        print(json.dumps(found, indent=1), flush=True)
    return found


# ---------------------------------------------------------------------------------------------- one large image


def classifier(options: argparse.Namespace) -> dict:
    """In a process of its own: two steps, and all the memory that the process ever held."""
    side = options.side if options.side != 4096 else 16384
    torch.manual_seed(0)
    config = ModelConfig(name="timm/resnet18", options={"channels": [16, 32, 64, 128], "stem_width": 16})
    model = wf.stream(build(config, in_channels=3, num_classes=2), tiles=(side // 1024,) * 2, keep="file")
    rows, columns = (torch.arange(side, dtype=torch.float32) for _ in range(2))

    def read(window: tuple[slice, ...]) -> Tensor:
        """A texture, computed where it is asked for: nowhere is the image whole."""
        y, x = rows[window[2], None], columns[None, window[3]]
        waves = [torch.sin(y * a + x * b) for a, b in ((0.1, 0.03), (0.02, 0.2), (0.05, 0.07))]
        return torch.stack(waves)[None][window[0], window[1]]

    image = wf.from_reader(read, (1, 3, side, side))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    losses, seconds = [], []
    for _ in range(2):
        start = time.perf_counter()
        loss = F.cross_entropy(model(image), torch.tensor([1]))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(round(loss.item(), 4))
        seconds.append(round(time.perf_counter() - start, 1))
    kept = model._stream.known.values()[-1].program.kept_bytes
    return {
        "side": side,
        "losses": losses,
        "most that the process ever held, MiB": round(resident("VmHWM") / MIB, 1),
        "kept in a file between segments, MiB": round(kept / MIB, 1),
        "seconds per step": seconds,
    }


def write(part: str, found: dict, options: argparse.Namespace) -> None:
    results = json.loads(RESULT.read_text()) if RESULT.exists() else {}
    conditions = {"widths": options.widths, "keep": options.keep, "pairs": options.pairs} if part.startswith("unet") else {}
    conditions |= {
        "threads": torch.get_num_threads(),
        "device": "cpu",
        "processor": platform.machine(),
        "cores": os.cpu_count(),
    }
    conditions |= {"torch": torch.__version__, "python": platform.python_version(), "date": str(date.today())}
    results[part] = found | {"conditions": conditions}
    RESULT.write_text(json.dumps(results, indent=1) + "\n")
    print(part, json.dumps(found, indent=1))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = ["unet", "classifier", "memory", "speed", "large"]
    parser.add_argument(
        "parts", nargs="+", choices=names, help="the last three are what the others run in processes of their own"
    )
    parser.add_argument("--side", type=int, default=4096)
    parser.add_argument("--tiles", type=int, help="along each side of the 4096 x 4096 image")
    parser.add_argument("--keep", default="file")
    parser.add_argument("--memory", help="what a step may take, as 3GiB: what fits of what is kept stays out of the file")
    parser.add_argument("--compile", type=lambda text: text == "True", default=False, help="True: pointwise runs of the stream")
    parser.add_argument("--norm", default="batch")
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--widths", type=lambda text: [int(n) for n in text.split(",")], default=[16, 32, 64, 128])
    options = parser.parse_args()
    inner = {"memory": memory, "speed": speed, "large": classifier}
    for part in options.parts:
        if part in inner:
            print(json.dumps(inner[part](options)))
            continue
        options.tiles = options.tiles or 8
        if part == "unet":
            write(f"unet, {options.norm} norm", of_unet(options), options)
        else:
            write("classifier", measured("large", options), options)
    return 0


if __name__ == "__main__":
    sys.exit(main())
