"""What a layout costs at least, in microseconds and without emulating it: so that only layouts that may win are emulated.

The bounds order and leave out; no figure of a plan is made of them.
"""

from __future__ import annotations

from dataclasses import dataclass

from widefield.planner.search.layouts import RunLayout
from widefield.planner.step_record import StepRecord

KEPT_BY_RECOMPUTE = 0.1
"""Of activations, at least, where blocks run again in the backward."""
CERTAIN = 0.5
"""Of the activations that a division by the ranks gives, at least, in any layout: tensors of several sizes come and go."""


@dataclass(frozen=True)
class ModelBytes:
    """Of a step on one device, as it was emulated.  activations: of one sample."""

    weights: int
    optimizer: int
    activations: float


def model_bytes(record: StepRecord) -> ModelBytes:
    """record: of one rank that has the whole model."""
    parts = record.parts
    return ModelBytes(parts.get("weights", 0), parts.get("optimizer", 0), parts.get("activations", 0) / max(1, record.samples))


def least_bytes(layout: RunLayout, model: ModelBytes, batch: int) -> float:
    """No rank of this layout can do with less memory than the fullest one's bound."""
    parts_of_model, shards = layout.channel * layout.stage, layout.shard * layout.tiles
    sharded = layout.shard > 1
    weights = model.weights / parts_of_model / (shards if sharded and layout.zero == 3 else 1)
    states = model.optimizer / parts_of_model / (shards if sharded else 1)
    samples = -(-batch // layout.copies)
    activations = CERTAIN * model.activations * samples / (layout.tiles * parts_of_model)
    if layout.recompute:
        activations *= KEPT_BY_RECOMPUTE
    if layout.stream:
        activations = 0.0
    return weights + states + activations


def relative_time(layout: RunLayout, batch: int, devices_per_node: int) -> float:
    """Roughly how long a step takes, in units of one device's time for a sample: only to emulate likely winners first."""
    samples = -(-batch // layout.copies)
    work = samples / (layout.tiles * layout.channel * layout.stage)
    factor = 1.0 + 0.02 * sum(size > 1 for size in layout.space) + 0.01 * layout.tiles**0.5 * (layout.tiles > 1)
    factor += 0.15 * (layout.channel - 1) ** 0.5 + {0: 0.0, 1: 0.02, 2: 0.03, 3: 0.04}[layout.zero if layout.shard > 1 else 0]
    if layout.stage > 1:
        micro_batches = max(1, min(2 * layout.stage, samples))
        factor *= (micro_batches + layout.stage - 1) / micro_batches
    if layout.ranks_of_a_replica > devices_per_node:
        factor += 0.1
    return work * factor * (1.33 if layout.recompute else 1.0) * (1.6 if layout.stream else 1.0)
