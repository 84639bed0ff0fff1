"""How far does a plan scale?  The same ranks per replica and the same samples per replica, on more and more devices.

Nothing is emulated for each size: a replica's record is priced with larger groups.  What it says of more devices than exist
here is simulated, and named so.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from widefield.planner.machines import Cluster
from widefield.planner.search.layouts import RunLayout
from widefield.planner.search.pricing import Pricing
from widefield.planner.search.reasons import seconds_text
from widefield.quantity import count_of

SIZES = (1, 8, 64, 512, 1024, 16384)
GOOD, POOR = 0.9, 0.5


@dataclass(frozen=True)
class ScalePoint:
    """A plan on `devices` devices.  efficiency: images per second and device against those of the smallest size that runs.

    samples: of a step.  seconds_by: the parts of a step.
    """

    devices: int
    layout: RunLayout
    samples: int
    seconds: float
    images_per_second: float
    efficiency: float
    seconds_by: dict[str, float]

    def to_tree(self) -> dict[str, Any]:
        return {
            "devices": self.devices, "plan": str(self.layout), "samples": self.samples, "seconds": self.seconds,
            "images_per_second": self.images_per_second, "efficiency": self.efficiency, "seconds_by": dict(self.seconds_by),
        }  # fmt: skip


def cluster_with(cluster: Cluster, devices: int) -> Cluster:
    """The same devices and links, in as many nodes as so many devices fill.  ValueError: a part of a node would be left."""
    each = cluster.devices_per_node
    if devices <= each:
        return replace(cluster, text=f"{devices} of {cluster.text}", nodes=1, devices_per_node=devices)
    if devices % each:
        raise ValueError(f"{devices} devices do not fill nodes of {each}; use a multiple of {each}, or at most {each}")
    return replace(cluster, text=f"{devices} of {cluster.text}", nodes=devices // each)


def weak_scaling(pricing: Pricing, layout: RunLayout, sizes: Sequence[int] = SIZES) -> list[ScalePoint]:
    """The plan with more and more replicas, each with the samples that it has now; sizes that it cannot have are left out."""
    each, points = layout.ranks_of_a_replica, []
    per_replica = max(layout.shard, -(-pricing.batch // layout.replicate))
    for devices in sorted({*sizes, layout.ranks}):
        if devices % each or devices < each:
            continue
        try:
            cluster = cluster_with(pricing.cluster, devices)
        except ValueError:
            continue
        larger = replace(layout, replicate=devices // each)
        estimate = replace(pricing, cluster=cluster).with_batch(per_replica * larger.replicate).estimate(larger)
        if estimate.state == "refused":
            continue
        rate = estimate.images_per_second / devices
        first = points[0].images_per_second / points[0].devices if points else rate
        points.append(ScalePoint(
            devices, larger, per_replica * larger.replicate, estimate.seconds, estimate.images_per_second, rate / first,
            dict(estimate.seconds_by),
        ))  # fmt: skip
    return points


def where_it_stops(points: Sequence[ScalePoint]) -> str:
    """Up to how many devices it scales, and what then takes the time."""
    if len(points) < 2:
        return "one size alone can be priced, so there is nothing to compare"
    first, last = points[0], points[-1]
    poor = next((point for point in points if point.efficiency < POOR), None)
    fair = next((point for point in points if point.efficiency < GOOD), None)
    if fair is None:
        return (
            f"it scales to {last.devices:,} devices with {100 * last.efficiency:.0f} % of the images per second and device of "
            f"{first.devices:,}"
        )
    good = [point for point in points if point.efficiency >= GOOD]
    text = (
        f"it keeps {100 * GOOD:.0f} % up to {count_of(good[-1].devices, 'device')}; at {fair.devices:,} it has "
        if good
        else "at once "
    )
    text += f"{100 * fair.efficiency:.0f} %, since {_grown(first, fair)}"
    if poor is not None and poor is not fair:
        text += f"; from {poor.devices:,} on less than half"
    return text


def _grown(first: ScalePoint, point: ScalePoint) -> str:
    grown = {name: took - first.seconds_by.get(name, 0.0) for name, took in point.seconds_by.items()}
    name, most = max(grown.items(), key=lambda part: part[1], default=("the step", point.seconds - first.seconds))
    return f"{name} takes {seconds_text(most)} more a step"
