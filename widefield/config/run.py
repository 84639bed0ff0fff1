"""RunConfig, a whole recipe: its sections, and the keys outside of sections.

It is typed and frozen; section.py reads it, with errors that name the line.  Where `null` means that the program chooses, it
prints the chosen value with the reason.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from widefield.config.agreement import AgreementConfig
from widefield.config.checkpoint import CheckpointConfig
from widefield.config.data import DataConfig
from widefield.config.ema import EmaConfig
from widefield.config.evaluate import EvaluateConfig
from widefield.config.field_types import Positive
from widefield.config.gradient import GradientConfig
from widefield.config.guard import GuardConfig
from widefield.config.log import LogConfig
from widefield.config.mesh import MeshConfig
from widefield.config.model import ModelConfig
from widefield.config.optimizer import OptimizerConfig
from widefield.config.pipeline import PipelineConfig
from widefield.config.recompute import RecomputeConfig
from widefield.config.schedule import ScheduleConfig
from widefield.config.sharding import ShardingConfig
from widefield.config.strategies import with_sections_of_strategies
from widefield.config.stream import StreamConfig
from widefield.config.task import TaskConfig
from widefield.section import Section

BatchNorm = Literal["synchronized", "averaged", "broadcast", "per_micro_batch"]


@with_sections_of_strategies
class RunConfig(Section):
    """The config of a run.  Every key of a recipe is a field here."""

    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0
    """All random numbers depend on it: initial weights, the order of images, augmentation, dropout."""
    task: TaskConfig = TaskConfig()
    model: ModelConfig
    data: DataConfig
    optimizer: OptimizerConfig = OptimizerConfig()
    schedule: ScheduleConfig = ScheduleConfig()
    gradient: GradientConfig = GradientConfig()
    agreement: AgreementConfig = AgreementConfig()
    """How copies of the model come to agree on its weights."""
    batch_norm: BatchNorm = "synchronized"
    """synchronized: statistics of the whole batch, as on one device.  averaged: those of each copy of the model, with running
    statistics averaged once per epoch.  broadcast: those of each copy, with the running statistics of the first (as DDP does).
    per_micro_batch: with mesh.stage, those of each micro-batch, synchronized over copies."""
    batch_norm_group: Positive = 1
    """With batch_norm=averaged: how many neighbouring copies of the model share the statistics of their part of the batch."""
    precision: Literal["float64", "float32", "tf32", "bfloat16", "float16"] | None = None
    """Arithmetic of the model; bfloat16 and float16 are autocast over float32 weights.  Chosen by the device where null."""
    deterministic: bool = False
    """Ask torch for deterministic kernels, so that runs on a GPU repeat bit for bit; slower."""
    mesh: MeshConfig = MeshConfig()
    sharding: ShardingConfig = ShardingConfig()
    pipeline: PipelineConfig = PipelineConfig()
    recompute: RecomputeConfig | None = None
    """Recompute activations in the backward instead of saving them; off where null."""
    stream: StreamConfig | None = None
    """Run images tile after tile, with the same numbers and less memory; off where null."""
    ema: EmaConfig | None = None
    evaluate: EvaluateConfig = EvaluateConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    guard: GuardConfig = GuardConfig()
    log: LogConfig = LogConfig()
