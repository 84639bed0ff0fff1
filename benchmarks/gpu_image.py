"""The largest image that a U-Net trains on in a part of the device's memory, whole and tile after tile, and the time per pixel.

The side is doubled until a step does not fit, and bisected from there.  A GPU is held to its part of the memory by torch
(torch.cuda.set_per_process_memory_fraction), so that what does not fit raises torch.OutOfMemoryError.  A CPU has no such limit:
there the most bytes that torch's allocator held in a step are compared with the budget.

Tile after tile the image and its labels come by windows (widefield.from_reader), the loss is inside of what is streamed, and
what is kept between segments may go to the host's memory.  The search ends before that is more than half of the host's.
"""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import torch
import turns
from rows import Row, row_of
from stream import CLASSES, stepper, unet
from tiles import peak_bytes
from torch import Tensor, nn

import widefield as wf

LARGE = {"widths": [16, 32, 64, 128], "start": 512, "most": 65536, "pairs": 5, "fraction": 0.1}
SMALL = {"widths": [4, 8], "start": 64, "most": 256, "pairs": 3, "budget": 8 << 20}
MULTIPLE = 64
"""Sides are multiples of this: tiles are even, and the search is short."""
FOR_TENSORS = 0.8
"""Of the budget: what is told to widefield.stream, which counts tensors.  Kernels' workspaces and gaps take the rest."""
MIB = 1 << 20
MakeStep = Callable[[int], Callable[[], float]]
"""From a side in pixels to a training step on an image of that side, which gives its loss."""


@dataclass(frozen=True)
class Found:
    """side: the largest that fitted, in pixels.  over: the smallest that did not, None where the search ended before.

    why: what ended it then.
    """

    side: int
    over: int | None
    why: str = ""

    @property
    def note(self) -> str:
        return f"{self.over:,} px did not fit" if self.over is not None else f"not tried further: {self.why}"


def largest(fits: Callable[[int], bool], *, start: int, most: int, halt: Callable[[int], str | None]) -> Found | None:
    """The largest side that fits, by doubling from `start` and bisection to MULTIPLE or a sixteenth; None where none does.

    halt(side): why a side is not to be tried, or None.  Sides beyond `most` are not tried either.
    """
    low, side = 0, start
    while (why := f"{most:,} px is the most that is tried" if side > most else halt(side)) is None and fits(side):
        low, side = side, 2 * side
    if why is not None:
        return Found(low, None, why) if low else None
    high = side
    while high - low > max(MULTIPLE, low // 16) and halt(middle := (low + high) // 2 // MULTIPLE * MULTIPLE) is None:
        low, high = (middle, high) if fits(middle) else (low, middle)
    return Found(low, high) if low else None


# ---------------------------------------------------------------------------------------------- a step of either kind


def page(side: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """An image and the class of each of its pixels, whole."""
    window = (slice(0, 1), slice(0, 3), slice(0, side), slice(0, side))
    return texture(window, device), labels((window[0], *window[2:]), device)


def pages_by_windows(side: int, device: torch.device) -> tuple[object, object]:
    """The same, computed where it is asked for: nowhere is it whole."""
    image = wf.from_reader(partial(texture, device=device), (1, 3, side, side), torch.float32, device)
    return image, wf.from_reader(partial(labels, device=device), (1, side, side), torch.int64, device)


def texture(window: tuple[slice, ...], device: torch.device) -> Tensor:
    y, x = (torch.arange(part.start, part.stop, dtype=torch.float32, device=device) for part in window[2:])
    waves = [torch.sin(y[:, None] * a + x * b) for a, b in ((0.1, 0.03), (0.02, 0.2), (0.05, 0.07))]
    return torch.stack(waves)[None][window[0], window[1]]


def labels(window: tuple[slice, ...], device: torch.device) -> Tensor:
    y, x = (torch.arange(part.start, part.stop, device=device) // 32 for part in window[1:])
    return ((y[:, None] + x) % CLASSES)[None][window[0]]


def whole_step(net: nn.Module, device: torch.device, side: int) -> Callable[[], float]:
    return stepper(net, *page(side, device))


def streamed_step(net: nn.Module, device: torch.device, side: int) -> Callable[[], float]:
    return stepper(net, *pages_by_windows(side, device))


# ---------------------------------------------------------------------------------------------- does it fit?


@dataclass
class Trials:
    """Steps of one kind on ever other sides: `fits` tries one, `halt` says why one is not to be tried.

    budget: bytes that a step may take.  until: a time of time.monotonic().  kept(): bytes that the last one kept on the host.
    last: the side that was tried last, and how many seconds that took.
    """

    make: MakeStep
    device: torch.device
    budget: int
    until: float
    kept: Callable[[], int] = lambda: 0
    last: tuple[int, float] = (1, 0.0)

    def fits(self, side: int) -> bool:
        """Whether a step on an image of side x side pixels fits."""
        began = time.monotonic()
        try:
            return self._ran(side)
        except torch.OutOfMemoryError:
            return False
        except ValueError as error:
            if "nothing fits" not in str(error):  # what widefield.stream says where no tiles do
                raise
            return False
        finally:
            gc.collect()  # frames of the error hold tensors in a circle
            if self.device.type == "cuda":
                torch.cuda.empty_cache()
            self.last = side, time.monotonic() - began

    def _ran(self, side: int) -> bool:
        if self.device.type != "cuda":
            return peak_bytes(self.make(side)) <= self.budget
        self.make(side)()
        turns.synchronize(self.device)
        return True

    def halt(self, side: int) -> str | None:
        """Judged by the last trial, with as many times its seconds and bytes as there are pixels."""
        pixels = (side / self.last[0]) ** 2
        if time.monotonic() + pixels * self.last[1] > self.until:
            return "it would take longer than the time that is left"
        kept = int(pixels * self.kept())
        if kept > host_bytes() // 2:
            return f"{kept // MIB:,} MiB would be kept, more than half of the host's {host_bytes() // MIB:,} MiB"
        return None


def host_bytes() -> int:
    """Of memory that this process may have beside the device's: the machine's, or its container's where that is less."""
    machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limit = Path("/sys/fs/cgroup/memory.max")
    text = limit.read_text().strip() if limit.is_file() else "max"
    return machine if text == "max" else min(machine, int(text))


def kept_bytes(net: nn.Module) -> int:
    """What the last shape of a streamed net keeps between segments."""
    known = net._stream.known.values()
    return known[-1].program.kept_bytes if known else 0


# ---------------------------------------------------------------------------------------------- the rows


def rows(device: torch.device, *, small: bool, until: float) -> Iterator[Row]:
    sizes = SimpleNamespace(**(SMALL if small else LARGE), norm="batch")
    budget, left = hold_to(sizes, device), until - time.monotonic()
    whole, streamed = unet(sizes).to(device), wf.stream(unet(sizes).to(device), memory=int(FOR_TENSORS * budget))
    kinds = {
        "whole": Trials(partial(whole_step, whole, device), device, budget, until - 0.7 * left),
        "tile after tile": Trials(
            partial(streamed_step, streamed, device), device, budget, until - 0.3 * left, partial(kept_bytes, streamed)
        ),
    }
    sides: dict[str, int] = {}
    for name, trials in kinds.items():
        found = largest(trials.fits, start=sizes.start, most=sizes.most, halt=trials.halt)
        if found is None:
            raise RuntimeError(
                f"{name}, not even {sizes.start} px fit {budget // MIB} MiB; give a larger fraction of the memory"
            )
        sides[name] = found.side
        yield Row(f"largest side in {budget / MIB:,.0f} MiB, {name}", found.side, "px", note=found.note)
    yield from times_per_pixel({name: trials.make for name, trials in kinds.items()}, sides, sizes.pairs, device, until)


def hold_to(sizes: SimpleNamespace, device: torch.device) -> int:
    """The budget in bytes; a GPU is held to it from now on."""
    if device.type != "cuda":
        return sizes.budget
    torch.cuda.set_per_process_memory_fraction(sizes.fraction, device)
    return int(sizes.fraction * torch.cuda.get_device_properties(device).total_memory)


def times_per_pixel(
    steps: dict[str, Callable[[int], Callable[[], float]]],
    sides: dict[str, int],
    pairs: int,
    device: torch.device,
    until: float,
) -> Iterator[Row]:
    """Of both at a side that half of the whole's pixels give, so that both fit, in turns; and of tiles at their largest."""
    side = max(MULTIPLE, int(sides["whole"] * 0.5**0.5) // MULTIPLE * MULTIPLE)
    loops = {name: forever(make(side)) for name, make in steps.items()}
    turn = SimpleNamespace(steps=1, pairs=pairs)
    times = turns.in_turns(loops, turn, device, until=until)
    walls = {name: [wall for wall, _ in each] for name, each in times.items()}
    for name, each in walls.items():
        yield row_of(f"time per pixel, {name}, {side:,} px", [1e9 * wall / side**2 for wall in each], "ns")
    ratios = [tiled / whole for whole, tiled in zip(walls["whole"], walls["tile after tile"], strict=True)]
    yield row_of(f"time per pixel, tile after tile over whole, {side:,} px", ratios, "times")
    del loops
    gc.collect()
    side = sides["tile after tile"]
    wall, _ = turns.seconds_of(forever(steps["tile after tile"](side)), 1, device)
    yield Row(f"time per pixel, tile after tile, {side:,} px", 1e9 * wall / side**2, "ns", note="one step")


def forever(step: Callable[[], float]) -> Iterator[float]:
    while True:
        yield step()
