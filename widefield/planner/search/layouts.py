"""Every way of laying a run out on a number of ranks that gives one device's numbers: the axes, ZeRO, recompute, tiles in time.

What changes numbers is the recipe's alone and is never searched: accumulation where there is BatchNorm, compression, precision,
the batch.  A RunLayout says nothing of whether a model can run so; the strategies do, when one is emulated.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from widefield.config import RunConfig
from widefield.config.mesh import MeshConfig
from widefield.config.recompute import RecomputeConfig
from widefield.config.sharding import ShardingConfig
from widefield.config.stream import StreamConfig
from widefield.plans import Plan, plan_of

MOST_SHARDS = 64
"""Shards beyond that save little and cost a message per rank; more ranks are copies of the sharded model (HSDP)."""
MOST_STAGES = 8
"""Each stage is emulated by itself."""
LEAST_TILE_PX = 8
AXES_AT_ONCE = 3
"""Besides copies."""


@dataclass(frozen=True)
class RunLayout:
    """Sizes of the axes and what is done with activations.

    zero: of shard, where that is above 1.  space: tiles along each dim of an image; () where images stay whole.
    stream: tiles in time along each dim of a rank's tile; () for none.  recompute: of all blocks, or as the recipe says.
    """

    replicate: int = 1
    shard: int = 1
    zero: int = 3
    space: tuple[int, ...] = ()
    channel: int = 1
    stage: int = 1
    recompute: bool = False
    stream: tuple[int, ...] = ()

    @property
    def tiles(self) -> int:
        return math.prod(self.space)

    @property
    def copies(self) -> int:
        """Each has its part of the batch."""
        return self.replicate * self.shard

    @property
    def ranks_of_a_replica(self) -> int:
        return self.shard * self.tiles * self.channel * self.stage

    @property
    def ranks(self) -> int:
        return self.replicate * self.ranks_of_a_replica

    @property
    def family(self) -> tuple[object, ...]:
        """What layouts of one kind share: which axes are used, and how activations are kept."""
        zero = self.zero if self.shard > 1 else 0
        return zero, self.tiles > 1, self.channel > 1, self.stage > 1, self.recompute, bool(self.stream)

    @property
    def kind(self) -> str:
        """The family in words: `copies`, `ZeRO-3 x tiles, recompute`."""
        used = {f"ZeRO-{self.zero}": self.shard, "tiles": self.tiles, "channels": self.channel, "stages": self.stage}
        axes = " x ".join(name for name, size in used.items() if size > 1) or "copies"
        return ", ".join([axes, *["recompute"] * self.recompute, *["streamed"] * bool(self.stream)])

    @property
    def choices(self) -> int:
        """How many things beside copies of the model it uses: fewer are simpler."""
        used = [size > 1 for size in (self.shard, self.tiles, self.channel, self.stage)]
        return sum(used) + self.recompute + bool(self.stream)

    def overrides(self) -> tuple[str, ...]:
        """The keys of a recipe that ask for this layout, as on the command line."""
        found = [f"mesh.{axis}={getattr(self, axis)}" for axis in ("replicate", "shard", "channel", "stage")]
        found.insert(2, f"mesh.space={json.dumps(list(self.space))}")
        found += [f"sharding.zero={self.zero}"] * (self.shard > 1)
        found.append("recompute={}" if self.recompute else "recompute=")
        found += [f"stream={{tiles: {json.dumps(list(self.stream))}, keep: device}}"] if self.stream else ["stream="]
        return tuple(found)

    def config(self, base: RunConfig, *, batch: int | None = None) -> RunConfig:
        """`base` with this layout in place of its own, and with another batch."""
        data = base.data if batch is None else base.data.model_copy(update={"batch_size": batch})
        mesh = MeshConfig(
            replicate=self.replicate, shard=self.shard, space=list(self.space), channel=self.channel, stage=self.stage,
            independent=base.mesh.independent,
        )  # fmt: skip
        return base.model_copy(update={
            "mesh": mesh, "data": data, "sharding": base.sharding.model_copy(update={"zero": self.zero}),
            "recompute": (base.recompute or RecomputeConfig()) if self.recompute else None,
            "stream": self._streamed(base.stream) if self.stream else None,
        })  # fmt: skip

    def _streamed(self, own: StreamConfig | None) -> StreamConfig:
        """Activations stay on the device, unless the recipe says otherwise: what the host has free is not known here."""
        keep = "device" if own is None or own.keep is None else own.keep
        return (own or StreamConfig(tiles=[1])).model_copy(update={"tiles": list(self.stream), "keep": keep})

    def plan(self, base: RunConfig) -> Plan:
        return plan_of(self.config(base), self.ranks)

    def __str__(self) -> str:
        """As a Plan's: `replicate=2 x space=[2, 1]`, `shard=4, ZeRO-3`, `one rank, recompute`."""
        return str(Plan(
            replicate=self.replicate, shard=self.shard, space=list(self.space), channel=self.channel, stage=self.stage,
            sharding=ShardingConfig(zero=self.zero),  # type: ignore[arg-type]
            recompute=RecomputeConfig() if self.recompute else None,
            stream=StreamConfig(tiles=list(self.stream)) if self.stream else None,
        ))  # fmt: skip


def layout_of(config: RunConfig, ranks: int) -> RunLayout:
    """The layout that a recipe itself asks for."""
    plan = plan_of(config, ranks)
    tiles = plan.stream.tiles if plan.stream is not None else None
    return RunLayout(
        plan.replicate, plan.shard, plan.sharding.zero, tuple(plan.space), plan.channel, plan.stage,
        plan.recompute is not None, tuple(tiles or ()),
    )  # fmt: skip


def layouts(ranks: int, *, pixels: tuple[int, ...], batch: int, accumulate: int = 1, most_channels: int = 8) -> list[RunLayout]:
    """The layouts of exactly `ranks` ranks without recompute and without tiles in time.

    pixels: of an image, (H, W) or (D, H, W); no tile is thinner than LEAST_TILE_PX.  batch: samples of a step, of which every
    copy has at least one in each of its `accumulate` passes.  most_channels: those of one node, whose link they need.
    Of tiles along several dims only the squarest, the most along the first dim, and those along the first dim alone.
    """
    found = []
    for shard, tiles, channel, stage in _sizes(ranks, most_channels=most_channels):
        replicate = ranks // (shard * tiles * channel * stage)
        if replicate * shard * accumulate > batch:
            continue
        for space in _cuts(tiles, pixels):
            for zero in (1, 2, 3) if shard > 1 else (3,):
                found.append(RunLayout(replicate, shard, zero, space, channel, stage))
    return found


def with_less_memory(layout: RunLayout, dims: int) -> list[RunLayout]:
    """The same on the same ranks with fewer activations at a time, in the order of what it costs: recompute, tiles in time.

    Recompute calls modules again and a stream runs operations tile after tile; mesh.channel and mesh.stage have neither.
    """
    found = []
    if not layout.stream and not layout.recompute and layout.channel == layout.stage == 1:
        found.append(replace(layout, recompute=True))
    if layout.channel == layout.stage == 1 and layout.shard == 1:
        for each in (2, 4, 8, 16):
            if math.prod(layout.stream) < each**dims:
                found.append(replace(layout, recompute=False, stream=(each, each) if dims == 2 else (each,) * dims))
                break
    return found


def _sizes(ranks: int, *, most_channels: int) -> Iterator[tuple[int, int, int, int]]:
    """(shard, tiles, channel, stage) whose product divides `ranks`, of at most AXES_AT_ONCE axes."""
    for shard in _divisors(ranks, MOST_SHARDS):
        for tiles in _divisors(ranks // shard, ranks):
            for channel in _divisors(ranks // (shard * tiles), most_channels):
                for stage in _divisors(ranks // (shard * tiles * channel), MOST_STAGES):
                    if sum(size > 1 for size in (shard, tiles, channel, stage)) <= AXES_AT_ONCE:
                        yield shard, tiles, channel, stage


def _divisors(number: int, most: int) -> list[int]:
    return [size for size in range(1, min(number, most) + 1) if number % size == 0]


def _cuts(tiles: int, pixels: tuple[int, ...]) -> list[tuple[int, ...]]:
    """Ways to cut an image into so many tiles: the squarest, and along the first dim alone."""
    if tiles == 1:
        return [()]
    fitting = [cut for cut in _products(tiles, len(pixels)) if _fits(cut, pixels)]
    if not fitting:
        return []
    squarest = min(fitting, key=lambda cut: (_surface(cut, pixels), [-size for size in cut]))
    first = (tiles, *[1] * (len(pixels) - 1))
    return list(dict.fromkeys([squarest, first])) if first in fitting else [squarest]


def _products(number: int, dims: int) -> Iterator[tuple[int, ...]]:
    if dims == 1:
        yield (number,)
        return
    for first in _divisors(number, number):
        yield from ((first, *rest) for rest in _products(number // first, dims - 1))


def _fits(cut: tuple[int, ...], pixels: tuple[int, ...]) -> bool:
    return all(size == 1 or length // size >= LEAST_TILE_PX for size, length in zip(cut, pixels, strict=True))


def _surface(cut: tuple[int, ...], pixels: tuple[int, ...]) -> float:
    """Of the cut sides of a tile with neighbours, relative to its pixels: what halos cost."""
    return sum(min(size - 1, 2) * size / length for size, length in zip(cut, pixels, strict=True))
