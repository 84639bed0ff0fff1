"""The questions asked backwards: the largest image, the largest batch, the fewest devices, the cheapest plan.

Every answer was emulated and fits.  The next larger (or smaller) one was tried and does not, unless the answer says that the
time for the question was over before.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from widefield.planner.search.estimate import SAFETY, PlanEstimate
from widefield.planner.search.layouts import RunLayout, with_less_memory
from widefield.planner.search.pricing import Pricing
from widefield.planner.search.reasons import nothing_fits, seconds_text
from widefield.planner.search.scaling import cluster_with
from widefield.planner.search.search import SearchResult, search
from widefield.quantity import bytes_text, count_of

CLOSE = 0.02
"""How near the largest that fits and the smallest that does not are, at most, in relation."""
PROBES = 10
IMAGE_STEP_PX = 32
"""Sides of images are multiples of it, since networks halve them some five times."""
SECONDS = 20.0
"""For one question."""


@dataclass(frozen=True)
class Reply:
    """question: `largest image`, `largest batch`, `fewest devices` or `cheapest`.  value: pixels, samples, devices or dollars
    per million images; None where there is no answer, and `text` says why."""

    question: str
    text: str
    value: Any = None
    estimate: PlanEstimate | None = None

    def to_tree(self) -> dict[str, Any]:
        plan = None if self.estimate is None else self.estimate.to_tree()
        return {"question": self.question, "text": self.text, "value": self.value, "estimate": plan}


def largest_batch(pricing: Pricing, found: SearchResult, *, seconds: float = SECONDS) -> Reply:
    """The most samples a step that fit the devices of a search, under its leanest plans.  found: of any batch."""
    best: tuple[int, PlanEstimate] | None = None
    for layout in _leanest(found, _dims(found)):
        copies = layout.copies

        def probe(samples: int, layout: RunLayout = layout, copies: int = copies) -> PlanEstimate:
            return pricing.with_batch(samples * copies).estimate(layout)

        result = _largest(probe, power=1, seconds=seconds / 3)
        if result is not None and (best is None or result[0] * copies > best[0]):
            best = result[0] * copies, result[1]
    if best is None:
        return Reply("largest batch", f"not one sample per copy fits: {nothing_fits(found, pricing.cluster.device.name)}")
    samples, estimate = best
    return Reply("largest batch", f"{count_of(samples, 'sample')} a step with {_short(estimate)}", samples, estimate)


def largest_image(
    of_pixels: Callable[[tuple[int, ...]], Pricing], pixels: Sequence[int], found: SearchResult, *, seconds: float = SECONDS
) -> Reply:
    """The largest image of the same proportions that fits the devices of a search, under its leanest plans.

    of_pixels: prices images of that size.  pixels: of an image now, whose proportions are kept, in steps of IMAGE_STEP_PX of
    the first side.
    """
    dims, best = len(pixels), None
    for layout in _leanest(found, dims):

        def probe(steps: int, layout: RunLayout = layout) -> PlanEstimate:
            return of_pixels(_scaled(pixels, steps)).estimate(layout)

        result = _largest(probe, power=dims, seconds=seconds / 3, first=max(1, pixels[0] // IMAGE_STEP_PX))
        if result is not None and (best is None or result[0] > best[0]):
            best = result
    if best is None:
        return Reply("largest image", f"no image was found that fits; {nothing_fits(found, 'a device')}")
    size = _scaled(pixels, best[0])
    return Reply("largest image", f"{' x '.join(map(str, size))} pixels with {_short(best[1])}", list(size), best[1])


def fewest_devices(pricing: Pricing, pixels: tuple[int, ...], *, seconds: float = SECONDS) -> Reply:
    """The smallest number of the cluster's devices on which a plan fits: powers of two, all, and then the numbers between."""
    last: SearchResult | None = None
    below, most = 0, pricing.cluster.ranks
    sizes = sorted({2**power for power in range(most.bit_length()) if 2**power <= most} | {most})
    for devices, found in _by_devices(pricing, pixels, sizes, seconds / 2):
        if (last := found).best is not None:
            return _between(pricing, pixels, below, devices, found.best, seconds / 2)
        below = devices
    if last is None:
        return Reply("fewest devices", "no number of devices could be tried")
    return Reply("fewest devices", nothing_fits(last, pricing.cluster.device.name))


def _between(pricing: Pricing, pixels: tuple[int, ...], below: int, devices: int, best: PlanEstimate, seconds: float) -> Reply:
    """Fewer than `devices`, on which `best` fits, and more than `below`, on which nothing does; by halves."""
    until = time.monotonic() + seconds
    while devices - below > 1 and time.monotonic() < until:
        middle = (below + devices) // 2
        found = next(iter(_by_devices(pricing, pixels, [middle], until - time.monotonic())), None)
        if found is None or found[1].best is None:
            below = middle
        else:
            devices, best = middle, found[1].best
    more = f"; {below + 1} to {devices - 1} were not tried, as the time was over" if devices - below > 1 else ""
    return Reply("fewest devices", f"{count_of(devices, 'device')} with {_short(best)}{more}", devices, best)


def cheapest(pricing: Pricing, pixels: tuple[int, ...], dollars_per_hour: float, *, seconds: float = SECONDS) -> Reply:
    """The number of devices and the plan with the lowest price of an image.  dollars_per_hour: of one device."""
    best: tuple[float, int, PlanEstimate] | None = None
    most = pricing.cluster.ranks
    sizes = sorted({2**power for power in range(most.bit_length()) if 2**power <= most} | {most})
    for devices, found in _by_devices(pricing, pixels, sizes, seconds):
        if found.best is None:
            continue
        dollars = 1e6 * devices * dollars_per_hour / 3600 / found.best.images_per_second
        if best is None or dollars < best[0]:
            best = dollars, devices, found.best
    if best is None:
        return Reply("cheapest", "no plan fits, so none has a price; ask without --price for what is missing")
    dollars, devices, estimate = best
    text = f"{dollars:,.4g} dollars per million images on {count_of(devices, 'device')}, with {_short(estimate)}"
    return Reply("cheapest", text, dollars, estimate)


def _by_devices(
    pricing: Pricing, pixels: tuple[int, ...], sizes: Sequence[int], seconds: float
) -> Iterator[tuple[int, SearchResult]]:
    """A search for each number of devices, lazily; sizes on which no plan is possible are left out."""
    until = time.monotonic() + seconds
    for devices in sizes:
        try:
            one = replace(pricing, cluster=cluster_with(pricing.cluster, devices))
            found = search(one, devices, pixels, seconds=max(1.0, (until - time.monotonic()) / 3), own=False)
        except ValueError:  # the nodes cannot be cut so, or the batch is too small for the copies
            continue
        yield devices, found


def _leanest(found: SearchResult, dims: int) -> list[RunLayout]:
    """The layouts of a search that hold least, and what holds less still."""
    priced = [estimate for estimate in found.estimates if estimate.memory]
    lean = sorted(priced, key=lambda estimate: estimate.peak_memory_bytes)[:2]
    fast = found.ranking[:1]
    chosen = [estimate.layout for estimate in [*lean, *fast]]
    return list(dict.fromkeys([*chosen, *(less for layout in chosen[:1] for less in with_less_memory(layout, dims))]))


def _dims(found: SearchResult) -> int:
    return max([2, *(len(estimate.layout.space) for estimate in found.estimates)])


def _largest(
    probe: Callable[[int], PlanEstimate], *, power: int, seconds: float, first: int = 1
) -> tuple[int, PlanEstimate] | None:
    """The largest number whose probe fits, to within CLOSE, and its estimate; None: not even 1, or `first`, can run.

    Memory is nearly a constant and a multiple of number**power, so the next probe is where a line through two meets the limit.
    """
    until, low, high = time.monotonic() + seconds, None, None
    points: list[tuple[float, int]] = []
    number = first
    for _ in range(PROBES):
        estimate = probe(number)
        if estimate.state == "refused":
            high = number
        elif estimate.state == "fits":
            low = (number, estimate)
        else:
            high = number
        if estimate.memory:
            points.append((float(number) ** power, estimate.peak_memory_bytes))
            limit = estimate.memory_bytes / SAFETY
        if not points or time.monotonic() > until or _is_close(low, high):
            break
        number = _next(number, low, high, points, limit, power)
    return low


def _is_close(low: tuple[int, PlanEstimate] | None, high: int | None) -> bool:
    if high == 1:
        return True
    return low is not None and high is not None and high - low[0] <= max(1, CLOSE * low[0])


def _next(
    number: int,
    low: tuple[int, PlanEstimate] | None,
    high: int | None,
    points: list[tuple[float, int]],
    limit: float,
    power: int,
) -> int:
    """Between what fits and what does not; where one of them is unknown, where the memory's line meets the limit.

    The line of one point goes through nothing: what does not grow with the number makes the guess too small, and it fits.
    """
    x, y = points[-1]
    guess = max(math.floor(max(x * limit / max(y, 1), 1.0) ** (1 / power)), number + 1 if high is None else 1)
    if len(points) > 1:
        (x0, y0), (x1, y1) = points[-2:]
        slope = (y1 - y0) / (x1 - x0) if x1 != x0 else 0.0
        if slope > 0:
            meets = x1 + (limit - y1) / slope
            guess = math.floor(max(meets, 1.0) ** (1 / power))
    least, most = (low[0] + 1 if low else 1), (high - 1 if high else max(2, 16 * number))
    if low and high and not least <= guess <= most:
        guess = (low[0] + high) // 2
    return min(max(guess, least), most)


def _scaled(pixels: Sequence[int], steps: int) -> tuple[int, ...]:
    """Sides in the proportions of `pixels`, the first of `steps` times IMAGE_STEP_PX."""
    return tuple(max(1, round(steps * length / pixels[0])) * IMAGE_STEP_PX for length in pixels)


def _short(estimate: PlanEstimate) -> str:
    return (
        f"{estimate.name}: {bytes_text(estimate.peak_memory_bytes)} of {bytes_text(estimate.memory_bytes)}, "
        f"{seconds_text(estimate.seconds)} a step"
    )
