"""The Plan: mesh axes with their sizes and the choices of each strategy, as data.

It is frozen, has a text form that reads back equal, is printed, and is stored with every checkpoint.  A field has the name of
its key in the config, if it has one there (see from_config.py); a strategy's choices are its section of the config.
"""

from __future__ import annotations

import math

from pydantic import field_validator

from widefield.config.agreement import AgreementConfig
from widefield.config.field_types import Positive
from widefield.config.gradient import Compression
from widefield.config.pipeline import PipelineConfig
from widefield.config.recompute import RecomputeConfig
from widefield.config.run import BatchNorm
from widefield.config.sharding import ShardingConfig
from widefield.config.strategies import SECTIONS, DataStrategy, with_sections_of_strategies
from widefield.config.stream import StreamConfig
from widefield.section import Section, parse_section, to_yaml


@with_sections_of_strategies
class Plan(Section):
    """Mesh axes and sizes, and how gradients and statistics are reduced.  Undocumented fields: see their keys in the config."""

    replicate: Positive = 1
    """Full copies of the model, each with its part of the batch."""
    shard: Positive = 1
    space: list[Positive] = []
    """Tiles that every image is cut into, a number per dim; [] where images stay whole, and `[1, 1]` becomes `[]`."""
    channel: Positive = 1
    stage: Positive = 1
    data_strategy: DataStrategy = "data"
    independent: bool = False
    sharding: ShardingConfig = ShardingConfig()
    pipeline: PipelineConfig = PipelineConfig()
    recompute: RecomputeConfig | None = None
    batch_norm: BatchNorm = "synchronized"
    batch_norm_group: Positive = 1
    """Neighbouring copies that share their statistics under batch_norm=averaged."""
    accumulate: Positive = 1
    bucket_mib: float | None = 25.0
    compression: Compression = "none"
    agreement: AgreementConfig = AgreementConfig()
    powersgd_rank: Positive = 1
    powersgd_start_step: int = 1000
    stream: StreamConfig | None = None
    """Tiles in time: every rank runs its images, or its tiles in space, tile after tile; None runs them at once."""

    @field_validator("space", mode="after")
    @classmethod
    def _one_tile_is_none(cls, space: list[int]) -> list[int]:
        """One tile means that images are not cut."""
        return space if math.prod(space) > 1 else []

    @property
    def axes(self) -> dict[str, int]:
        """The size of every axis, outermost first."""
        return {
            "replicate": self.replicate,
            "shard": self.shard,
            "space": math.prod(self.space),
            "channel": self.channel,
            "stage": self.stage,
        }

    @property
    def is_one_batch(self) -> bool:
        """Whether the samples of all copies are treated as one batch; else each copy draws and mixes its own by itself."""
        return self.batch_norm == "synchronized" and not self.independent

    @property
    def has_replicas(self) -> bool:
        """Whether copies of the model have weights of their own between averages; each is a replica, of one rank or several."""
        return self.replicate > 1 and self.agreement.steps_apart

    @property
    def has_server(self) -> bool:
        """Whether the last ranks hold the weights or keep an account, and the others are workers, not in step."""
        return self.agreement.has_server

    @property
    def workers(self) -> int:
        """Copies of the model that learn from samples."""
        return self.replicate * self.shard - (self.agreement.servers if self.has_server else 0)

    def of_replica(self) -> Plan:
        """The plan of the ranks of one replica: one device's numbers on its part of the batch."""
        return self.model_copy(update={"replicate": 1, "batch_norm": "synchronized", "agreement": AgreementConfig()})

    @property
    def ranks(self) -> int:
        """The number of ranks that the plan needs."""
        return math.prod(self.axes.values())

    def __str__(self) -> str:
        """As `replicate=2 x space=[2, 1]`, `shard=4, ZeRO-3`, `one rank, streamed in 4 x 4 tiles`, `one rank`."""
        used = [f"{axis}={self.space if axis == 'space' else size}" for axis, size in self.axes.items() if size > 1]
        further = [f"ZeRO-{self.sharding.zero}"] * (self.shard > 1)
        further += [section for section, axis in SECTIONS.items() if axis is None and getattr(self, section) is not None]
        further += [str(self.agreement)] * self.has_replicas
        further += [f"{self.workers} workers and {self.agreement.last_ranks}"] * self.has_server
        further += [f"streamed in {self.stream}"] if self.stream else []
        return ", ".join([" x ".join(used) or "one rank", *further])


def to_text(plan: Plan) -> str:
    """The plan as YAML, which `from_text` reads back equal."""
    return to_yaml(plan)


def from_text(text: str, *, name: str = "plan") -> Plan:
    """The plan in a YAML text.  ValueError: an unknown key or a wrong value.  name: of the text, for the error."""
    return parse_section(Plan, text, name=name)
