"""What a user may ask for: RunConfig and its sections.

Typed and frozen; section.py reads them and says what is wrong, with the line.  `null` (or leaving a key out) means that
the program chooses; it then prints the value with its reason.
Precedence, lowest first: defaults here, the recipe file, overrides on the command line.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, model_validator

from widefield.naming import did_you_mean
from widefield.quantity import Duration, DurationField, Every, Memory
from widefield.section import Section, parse_section
from widefield.trust import check_model, run_folder_of


def _finite(value: Any) -> Any:
    """What an option or a transform is given, unless a number in it is none: their own checks often let nan pass."""
    odd = next((number for number in _numbers(value) if not math.isfinite(number)), None)
    if odd is not None:
        raise ValueError(f"it holds {odd}, which is no finite number; give a number, or leave it out")
    return value


def _numbers(value: Any) -> Iterator[float]:
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    yield from (number for part in inner for number in _numbers(part))
    if isinstance(value, float):
        yield value


Options = Annotated[dict[str, Any], AfterValidator(_finite)]
Listed = Annotated[list[Any], AfterValidator(_finite)]
Positive = Annotated[int, Field(ge=1)]
Share = Annotated[float, Field(ge=0, lt=1)]
Spread = Annotated[float, Field(ge=1e-6)]
"""Of pixels from 0 to 1, in 256 levels or 65,536; what is divided by less is no number any more."""


class TaskConfig(Section):
    name: str = "classification"
    """A file in widefield/tasks/."""
    options: Options = {}
    """Arguments of the task: for classification `label_smoothing: 0.1`, for segmentation `ignore_index: 255`."""


class ModelConfig(Section):
    name: str
    """`resnet` or `unet` (ours), `torchvision/resnet50`, `timm/resnet50`, or `package.module:callable`."""
    options: Options = {}
    """Keyword arguments of the model's constructor."""
    weights: str | None = None
    """A .safetensors file to start from; its names must be the model's."""
    channels_last: bool | None = None
    """Memory format of images and weights; chosen by the device where null."""
    compile: bool = False
    """Compile the model with torch.compile."""


class DataConfig(Section):
    name: str
    """A file in widefield/data/formats/: `digits`, `imagefolder`, `page`."""
    path: str | None = None
    """Folder that the format reads; `digits` and `page` need none."""
    options: Options = {}
    """Arguments of the format, for page `size: [4096, 4096]`."""
    batch_size: Positive = 64
    """Samples per optimizer step over all ranks together, so that the number of ranks changes no number."""
    evaluate_batch_size: Positive | None = None
    """Samples per rank and batch in evaluation; changes memory and speed alone."""
    hold_out: Share | None = None
    """Share of samples held out for evaluation where the folder has no val/ of its own."""
    workers: Annotated[int, Field(ge=0)] | None = None
    """Processes per rank that read and decode."""
    read: Listed = []
    """torchvision.transforms.v2 by name, run as an image is read, in training: `[RandomResizedCrop: {size: 224}]`."""
    read_evaluate: Listed = []
    """The same in evaluation and prediction."""
    augment: Listed = []
    """torchvision.transforms.v2 by name, run on uint8 images on the device, in training alone."""
    mean: Annotated[list[Annotated[float, Field(ge=0, le=1)]], Field(min_length=1)] | None = None
    """Per channel, of pixels scaled to 0..1; the format's own where null."""
    std: Annotated[list[Spread], Field(min_length=1)] | None = None
    """Per channel, of pixels scaled to 0..1; the format's own where null."""
    mixup: Annotated[float, Field(ge=0)] = 0.0
    """Alpha of mixup's beta distribution; 0 is off.  Neighbours in the order of samples are mixed."""
    cutmix: Annotated[float, Field(ge=0)] = 0.0
    """Alpha of cutmix's beta distribution; 0 is off.  With mixup on too, each pair draws one of the two."""
    bad_images: Literal["stop", "skip"] = "stop"
    """What an unreadable image does: stop the run and name it, or be left out and counted."""


class OptimizerConfig(Section):
    name: str = "sgd"
    """sgd, adamw, lars or lamb; lars and lamb come from timm."""
    lr: Annotated[float, Field(gt=0)] | None = None
    """Peak learning rate; null derives it from the batch size by lr_rule."""
    lr_rule: Literal["linear", "sqrt"] | None = None
    """How the learning rate grows with the batch size (with lr null): linear for sgd and lars, sqrt for adamw and lamb."""
    base_lr: Annotated[float, Field(gt=0)] | None = None
    """Learning rate at base_batch_size; the optimizer's own default where null."""
    base_batch_size: Positive = 256
    """The batch size that `base_lr` is meant for."""
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    """As the optimizer understands it; biases and normalization are spared, see decay_norm_and_bias."""
    decay_norm_and_bias: bool = False
    """Apply weight decay to biases and normalization weights (parameters of one dim) too."""
    momentum: Share = 0.9
    """Of sgd and lars."""
    nesterov: bool = False
    """Nesterov's form of momentum, for sgd and lars."""
    betas: Annotated[list[Share], Field(min_length=2, max_length=2)] = [0.9, 0.999]
    """Of adamw and lamb."""
    clip_norm: Annotated[float, Field(gt=0)] | None = None
    """Clip the norm of the whole gradient to this."""
    options: Options = {}
    """Further arguments of the optimizer's constructor."""


class ScheduleConfig(Section):
    name: str = "cosine"
    """constant, cosine, step, polynomial or onecycle; counted in samples."""
    length: DurationField = Duration(90, "ep")
    """How long the run trains."""
    warmup: DurationField = Duration(0, "step")
    """Linear rise from warmup_from times the peak."""
    warmup_from: Annotated[float, Field(ge=0, le=1)] = 0.01
    """Where the warm-up begins, as a share of the peak."""
    final: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Where cosine, polynomial and onecycle end, as a share of the peak."""
    every: Every | None = None
    """`step`: multiply by gamma this often."""
    gamma: Annotated[float, Field(gt=0)] = 0.1
    """`step`: the factor."""
    power: Annotated[float, Field(gt=0)] = 1.0
    """`polynomial`: the exponent."""


class GradientConfig(Section):
    accumulate: Positive = 1
    """Passes per optimizer step; each takes its share of the batch."""
    bucket_mib: Annotated[float, Field(gt=0)] | None = 25.0
    """Size of the buckets that gradients travel in; null: measured at the start.  From 3 ranks on another size may change the
    last bits of sums, so a run that is to resume bit for bit wants a number."""
    compression: Literal["none", "fp16", "bf16", "powersgd"] = "none"
    """What gradients travel as between ranks; anything but none gives up exactness."""
    agreement: Literal["mean", "adasum"] = "mean"
    """How the gradients of copies become one: their mean, or Adasum (arXiv:2006.02924), which adds up what is orthogonal; it
    wants a power of two of copies, and is not one device's gradient."""
    powersgd_rank: Positive = 1
    """Rank of PowerSGD's factors; higher is closer to exact and more bytes."""
    powersgd_start_step: Annotated[int, Field(ge=2)] = 1000
    """Steps of plain all-reduce before PowerSGD begins."""


class MeshConfig(Section):
    replicate: Positive | None = None
    """Whole copies of the model (data parallelism); where null, all ranks that the other axes leave."""
    shard: Positive = 1
    """Copies of the model that share its weights, gradients and optimizer state, each holding a part; see `sharding`."""
    space: list[Positive] = []
    """Tiles that every image is cut into, one number per dim, each tile on a rank of its own: `[2, 1]` gives the upper half to
    one rank and the lower to another.  The numbers stay one device's.  `[]` leaves images whole, and so do ones alone."""
    channel: Positive = 1
    """Ranks that share every large layer: each computes a part of its channels and holds that part of its weights."""
    stage: Positive = 1
    """Ranks that the layers are dealt out to, first to last; see `pipeline`."""
    data_strategy: Literal["data", "data_parallel"] = "data"
    """A file in widefield/parallel/strategies/: `data` averages gradients over processes, `data_parallel` is
    torch.nn.DataParallel in one process."""
    independent: bool = False
    """Let every copy and stage draw random numbers (dropout), write to buffers and mix samples by itself.  It is faster for
    models that do, and not one device's numbers: those are what copies give as rows of one batch."""


class ShardingConfig(Section):
    """How `mesh.shard` copies of a model share it."""

    zero: Literal[1, 2, 3] = 3
    """What each rank holds a part of: 1 optimizer state; 2 gradients too; 3 weights too, gathered where they are used."""
    units: list[str] | None = None
    """Modules whose weights are gathered and freed together, by name or pattern, as `layer*`; one per stage of a
    convolutional net where null."""
    offload: bool = False
    """Keep the parts in the CPU's memory, and let the optimizer run there."""


class PipelineConfig(Section):
    """How `mesh.stage` ranks share the layers of a model."""

    micro_batches: Positive | None = None
    """Parts that a pass is cut into along the batch, so that ranks work at the same time; 2 per stage where null, and 1 where
    a BatchNorm or an operation needs the whole batch."""
    schedule: Literal["gpipe", "1f1b", "interleaved", "zero_bubble"] = "1f1b"
    """The order of forwards and backwards of micro-batches; all give the same numbers."""
    stages: list[str] = []
    """The module that each stage but the first begins with, by name or pattern, as `[layer3]`; by `balance` where empty."""
    balance: Literal["time", "memory"] = "time"
    """What stages are to have alike: seconds, counted in operations, or bytes of weights."""


class RecomputeConfig(Section):
    """What is computed again in the backward, or fetched from the CPU's memory, rather than kept on the device."""

    blocks: list[str] | None = None
    """Modules that keep their input alone, by name or pattern, as `layer*.*`; by `memory` where null, else all blocks."""
    keep: Literal["nothing", "convolutions"] = "nothing"
    """What of a block is kept all the same: the results of convolutions and matrix products cost most to make again."""
    memory: Memory | None = None
    """What the activations of a pass may take on the device, as `6GiB`: as few blocks are computed again as fit."""
    offload: bool = False
    """Move what is kept to the CPU's memory until the backward needs it."""


class StreamConfig(Section):
    tiles: Annotated[list[Positive], Field(min_length=1)] | None = None
    """Tiles that every image is run in, one number per dim: `[4, 4]` runs 16 of them; chosen by `memory` where null."""
    memory: Memory | None = None
    """What a step may take on the device, as `6GiB`: tiles, unless given, and what is kept are chosen to fit."""
    keep: Literal["device", "host", "file"] | None = None
    """Where what is kept between the passes over an image lies; chosen by what fits where null."""
    compile: bool = False
    """Compile runs of pointwise operations on a tile with torch.compile."""
    strict: bool = False
    """Refuse a model of which an operation would run on the whole image, since no rule cuts it, rather than run it so and say
    so."""

    @model_validator(mode="after")
    def _tiles_or_memory(self) -> StreamConfig:
        if self.tiles is None and self.memory is None:
            raise ValueError("a stream needs to know its tiles or its memory; write stream.tiles=[4, 4] or stream.memory=6GiB")
        return self

    def __str__(self) -> str:
        """`4 x 4 tiles`, `tiles within 6GiB`, or `4 x 4 tiles within 6GiB`."""
        tiles = "tiles" if self.tiles is None else f"{' x '.join(map(str, self.tiles))} tiles"
        return tiles if self.memory is None else f"{tiles} within {self.memory}"


class EmaConfig(Section):
    decay: Annotated[float, Field(gt=0, lt=1)]
    """Weight of the old average at each step; the average is what is evaluated and exported."""


class EvaluateConfig(Section):
    every: Every = Duration(1, "ep")
    """How often the model is evaluated; always at the end."""


class CheckpointConfig(Section):
    every: Every = Duration(1, "ep")
    """How often a checkpoint is written; always at the end and when the run is asked to stop."""
    keep_last: Positive = 3
    """How many of the newest checkpoints stay."""
    keep_best: Annotated[int, Field(ge=0)] = 1
    """How many of the best by the task's headline metric stay besides."""
    background: bool = True
    """Write while training goes on."""


class LogConfig(Section):
    every: Positive = 10
    """Steps between lines."""
    tensorboard: bool = True
    """Write TensorBoard's files into the run folder."""
    wandb: str | None = None
    """A Weights & Biases project to log to (needs the extra `wandb`)."""
    timeline: bool = False
    """Record steps 3 to 12 of this process, each operation and collective, as a Chrome trace per rank in the run folder."""
    stall_seconds: Annotated[float, Field(ge=0.1)] | None = 60.0
    """After how long a step that does not end makes rank 0 say which ranks are missing; null never."""


class RunConfig(Section):
    """A whole run.  Every key of a recipe is a field here."""

    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0
    """Everything drawn at random follows from it: initial weights, the order of images, augmentation, dropout."""
    task: TaskConfig = TaskConfig()
    model: ModelConfig
    data: DataConfig
    optimizer: OptimizerConfig = OptimizerConfig()
    schedule: ScheduleConfig = ScheduleConfig()
    gradient: GradientConfig = GradientConfig()
    batch_norm: Literal["synchronized", "averaged", "broadcast", "per_micro_batch"] = "synchronized"
    """synchronized: statistics of the whole batch, as on one device.  averaged: those of each copy of the model, running
    statistics averaged once per epoch.  broadcast: those of each copy, the first's running statistics win (what DDP does).
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
    """Compute activations again in the backward rather than keep them; off where null."""
    stream: StreamConfig | None = None
    """Run images tile after tile, with the numbers of the whole and a part of its memory; off where null."""
    ema: EmaConfig | None = None
    evaluate: EvaluateConfig = EvaluateConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    log: LogConfig = LogConfig()


def read_config(
    path: str | Path, overrides: Sequence[str] = (), *, run: str | Path | None = None, trust: bool = False
) -> RunConfig:
    """The recipe at `path` with dotted overrides (`optimizer.lr=0.2`) as a RunConfig.

    run: the run folder in question, which needs no other sign of being one.
    trust: let a recipe that lies in a run folder name code of its own, see trust.py.
    ValueError where the file does not exist, is no YAML mapping, asks for what does not exist, or for code it may not name.
    """
    path = Path(path)
    if not path.is_file():
        beside = sorted(p.name for p in path.parent.glob("*.yaml")) if path.parent.is_dir() else []
        have = f" {path.parent}/ has: {', '.join(beside)}." if beside else ""
        raise ValueError(f"no recipe at {path}{did_you_mean(path.name, beside)}{have}")
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} cannot be read as text ({error}); name a recipe, a YAML file in UTF-8") from None
    config = parse_config(text, overrides, name=str(path))
    folder = None if trust else run_folder_of(path, run=run)
    if folder is not None:
        check_model(config.model.name, config.model.options, overrides=overrides, source=str(path), folder=folder)
    return config


def parse_config(text: str, overrides: Sequence[str] = (), *, name: str = "config") -> RunConfig:
    """As `read_config`, from text."""
    return parse_section(RunConfig, text, overrides, name=name)


def json_schema() -> str:
    """JSON Schema of a recipe, for editors (`# yaml-language-server: $schema=...`)."""
    return json.dumps(RunConfig.model_json_schema(), indent=2) + "\n"
