"""The config: a file per section of a recipe; run.py has RunConfig, the whole, and recipe.py reads one."""

from widefield.config.agreement import AgreementConfig
from widefield.config.checkpoint import CheckpointConfig
from widefield.config.data import DataConfig
from widefield.config.ema import EmaConfig
from widefield.config.evaluate import EvaluateConfig
from widefield.config.gradient import GradientConfig
from widefield.config.guard import GuardConfig
from widefield.config.log import LogConfig
from widefield.config.mesh import MeshConfig
from widefield.config.model import ModelConfig
from widefield.config.optimizer import OptimizerConfig
from widefield.config.pipeline import PipelineConfig
from widefield.config.recipe import config_of, json_schema, parse_config, read_config
from widefield.config.recompute import RecomputeConfig
from widefield.config.run import RunConfig
from widefield.config.schedule import ScheduleConfig
from widefield.config.sharding import ShardingConfig
from widefield.config.stream import StreamConfig
from widefield.config.task import TaskConfig

__all__ = [
    "AgreementConfig",
    "CheckpointConfig",
    "DataConfig",
    "EmaConfig",
    "EvaluateConfig",
    "GradientConfig",
    "GuardConfig",
    "LogConfig",
    "MeshConfig",
    "ModelConfig",
    "OptimizerConfig",
    "PipelineConfig",
    "RecomputeConfig",
    "RunConfig",
    "ScheduleConfig",
    "ShardingConfig",
    "StreamConfig",
    "TaskConfig",
    "config_of",
    "json_schema",
    "parse_config",
    "read_config",
]
