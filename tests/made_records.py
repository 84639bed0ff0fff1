"""Steps made by hand, in place of emulated ones: a model of so many bytes, whose memory and operations follow from the plan."""

from __future__ import annotations

from dataclasses import dataclass

from widefield.config import RunConfig, parse_config
from widefield.planner.machines import cluster_of
from widefield.planner.search.pricing import Pricing
from widefield.planner.step_record import MemoryPoint, MessageEvent, OpEvent, StepRecord, WaitEvent
from widefield.plans import plan_of

MIB = 2**20


@dataclass(frozen=True)
class MadeModel:
    """weights: bytes; SGD with momentum has as many states.  activations: bytes of a sample.  flops: of a sample.

    refused: words of a plan's text, and what the refusal says.
    """

    weights: int = 100 * MIB
    activations: int = 1000 * MIB
    flops: float = 1e12
    refused: tuple[str, str] = ("", "")

    def step(self, config: RunConfig, *, ranks: int, rank: int = 0, **_: object) -> StepRecord:
        plan = plan_of(config, ranks)
        if self.refused[0] and self.refused[0] in str(plan):
            raise NotImplementedError(self.refused[1])
        tiles, copies, cut = plan.axes["space"], plan.replicate * plan.shard, plan.channel * plan.stage
        samples = -(-config.data.batch // copies)
        weights = self.weights // cut // (plan.shard * tiles if plan.shard > 1 and plan.sharding.zero == 3 else 1)
        states = self.weights // cut // (plan.shard * tiles if plan.shard > 1 else 1)
        kept = 0.2 if plan.recompute is not None else 0.05 if plan.stream is not None else 1.0
        activations = int(kept * self.activations * samples / tiles / cut)
        again = 4 / 3 if plan.recompute is not None else 1.5 if plan.stream is not None else 1.0
        again *= 1.5 if plan.stage > 1 else 1.0  # the bubble
        flops = self.flops * samples / tiles / cut * again
        events = [operation("forward", flops / 3), operation("backward", 2 * flops / 3)]
        if ranks // cut > 1:
            group = tuple(one for one in range(ranks) if one % cut == rank % cut)
            events += [MessageEvent("all_reduce", self.weights // cut, group, "backward", "", 1), WaitEvent(1)]
        if plan.shard > 1 and plan.sharding.zero == 3:
            events = [MessageEvent("all_gather", weights, group, "forward", "", 3), WaitEvent(3), *events]
        if plan.channel > 1:
            base = rank - rank % cut
            pair = tuple(range(base, base + cut))
            events += [MessageEvent("all_reduce", activations // 10, pair, "forward", "", 2), WaitEvent(2)]
        peak = weights + states + activations
        parts = {"weights": weights, "optimizer": states, "activations": activations}
        points = [MemoryPoint(0, weights + states), MemoryPoint(1, peak), MemoryPoint(2, weights + states)]
        return StepRecord(
            rank, ranks, events, points, peak, 1, "layer2.0", "aten.convolution.default", parts, samples=config.data.batch
        )  # fmt: skip


def operation(phase: str, flops: float) -> OpEvent:
    return OpEvent("aten.convolution.default", phase, "layer2.0", (phase, flops), flops, MIB, MIB, "float32")


def made_pricing(model: MadeModel, cluster: str, *, batch: int = 8, overrides: tuple[str, ...] = ()) -> Pricing:
    """Prices of a made model on a cluster."""
    text = "model: {name: resnet}\ndata: {name: digits}\nprecision: float32\n"
    config = parse_config(text, [f"data.batch_size={batch}", *overrides])
    return Pricing(config, cluster_of(cluster), emulate=model.step)
