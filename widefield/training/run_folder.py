"""The run folder: which files it has, the lock of the process that trains there, and reading and writing of its files.

config.yaml  plan.yaml  record.jsonl  summary.csv  tensorboard/  checkpoints/  report.html  model.json
weights.safetensors  best.safetensors  evaluation.json  evaluation.csv  mistakes/  samples/ (of labels per pixel)
nan.json (after NaN)  guard/ (batches that the guard refused)  planned.json (where the planner chose the plan)
stopped.json (after a stop, see endings.py)
"""

from __future__ import annotations

import fcntl
import json
import math
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, get_args
from weakref import WeakSet

import safetensors.torch
import torch
from torch import Tensor, nn

from widefield.config import RunConfig, read_config
from widefield.data import Dataset, Labels
from widefield.data.intensity import OF_VALUES, Intensity
from widefield.data.spatial.resampling import Resampling
from widefield.data.statistics import SplitStatistics
from widefield.models._weights import load_state
from widefield.naming import did_you_mean
from widefield.plans import Plan, to_text
from widefield.redaction import is_secret, redacted_tree
from widefield.section import differences, to_yaml
from widefield.tensor_files import read_tensors
from widefield.training.disk import free_bytes, replace_text
from widefield.trust import check_links

WEIGHTS, BEST = "weights.safetensors", "best.safetensors"
MODEL = "model.json"
STATISTICS = "statistics.json"
"""Of the images to train on, where data.intensity needs them."""
TISSUE = "tissue.json"
"""What of each slide counts, where data.tissue asks for it."""
_WRITTEN = (
    "config.yaml", "plan.yaml", "record.jsonl", "summary.csv", "tensorboard", "checkpoints", "report.html", WEIGHTS, BEST,
    MODEL, STATISTICS, TISSUE, "evaluation.json", "evaluation.csv", "mistakes", "samples", "nan.json",
)  # fmt: skip
"""The files and folders that training writes."""
_FURTHER = re.compile(
    r"\.lock|evaluated\.(json|csv)|(wandb|mlflow)_run_id\.txt|timeline-rank\d+\.json|bench\.(json|csv)|predictions|"
    r"model\.(safetensors|pt|onnx)|planned\.json|guard|stopped\.json|.*\.part"
)


def fresh_folder(root: Path = Path("runs")) -> Path:
    """Create the next free numbered folder, as `runs/0001`, and return it."""
    root.mkdir(parents=True, exist_ok=True)
    while True:
        folder = next_free(root)
        try:
            folder.mkdir()
        except FileExistsError:  # another run took it just now
            continue
        return folder


def next_free(root: Path = Path("runs")) -> Path:
    """The next free numbered folder, as `runs/0001`, which is not created."""
    taken = [int(entry.name) for entry in root.iterdir() if entry.name.isdigit()] if root.is_dir() else []
    return root / f"{max(taken, default=0) + 1:04}"


def existing_folder(path: str | Path) -> Path:
    """`path` as a run folder.  ValueError: it is none, with the nearest name, or a link leads out of it."""
    folder = Path(path)
    if (folder / "config.yaml").is_file():
        check_own(folder)
        return folder
    beside = sorted(p.parent.name for p in folder.parent.glob("*/config.yaml")) if folder.parent.is_dir() else []
    hint = did_you_mean(folder.name, beside)
    raise ValueError(f"{folder} is no run folder (it has no config.yaml){hint} Name the --run folder of a training run")


def check_own(folder: Path) -> None:
    """ValueError: a file or folder of the run is a symbolic link that leads out of the run folder."""
    names = [entry.name for entry in os.scandir(folder)]
    check_links(folder, sorted(name for name in names if name in _WRITTEN or _FURTHER.fullmatch(name)))


def claim(folder: Path) -> IO[str]:
    """Create the run folder, or take the existing one, and lock it; returns the lock, see `lock`.

    ValueError: it cannot be written, or training would overwrite files there that are no run's.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        check_own(folder)
        if not (folder / ".lock").exists() and not (folder / "record.jsonl").exists():
            _check_free(folder)
        return lock(folder)
    except OSError as error:
        raise ValueError(
            f"{folder} cannot be a run folder ({error}), and {free_bytes(folder):,} bytes are free in it; name another "
            "one with --run"
        ) from None


def _check_free(folder: Path) -> None:
    taken = [name for name in _WRITTEN if (folder / name).exists()]
    if taken:
        raise ValueError(
            f"{folder} is no run folder (it has no record.jsonl) and has {', '.join(taken)}, which training would overwrite; "
            "name another folder with --run, or move what is there"
        )


def check_fresh(folder: Path, *, passed_over: Sequence[str]) -> None:
    """ValueError: training from the start would overwrite the weights of a run without a usable checkpoint.

    passed_over: why its checkpoints are not usable, for the error.
    """
    if (folder / WEIGHTS).exists():
        why = "".join(f"\n  {text}" for text in passed_over)
        raise ValueError(
            f"{folder} holds the {WEIGHTS} of a run and no checkpoint to go on from, so training would begin anew and "
            "overwrite them and the record; name another folder with --run, take checkpoints/ from where it is whole, or "
            f"delete {folder / WEIGHTS}{why}"
        )


def lock(folder: Path) -> IO[str]:
    """Lock `folder` for training while the returned file is open.

    The lock ends with the process, however it dies, even where its children live on.  ValueError: another process has it.
    """
    file = (folder / ".lock").open("a+")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        file.seek(0)
        owner = file.read().strip() or "unknown"
        file.close()
        raise ValueError(
            f"process {owner} is training into {folder}; wait for it, stop it, or name another folder with --run"
        ) from None
    file.truncate(0)
    file.write(str(os.getpid()))
    file.flush()
    _LOCKS.add(file)
    return file


_LOCKS: WeakSet[IO[str]] = WeakSet()
"""Forked children, such as a loader's workers, inherit the open file, and a lock lasts while any process has it open."""


def _close_locks() -> None:
    for file in list(_LOCKS):
        file.close()  # the parent's stays open, and so does its lock


os.register_at_fork(after_in_child=_close_locks)


def write_config(folder: Path, config: RunConfig, plan: Plan) -> list[str]:
    """Write the config and the plan; returns the differences to the config that was there, as texts without secrets."""
    path = folder / "config.yaml"
    changed = [] if not path.is_file() else differences(read_config(path, trust=True), config)  # compared, never built
    write_recipe(path, config)
    replace_text(folder / "plan.yaml", to_text(plan))
    keys = [line.partition(":")[0] for line in changed]
    return [f"{key}: another secret" if is_secret(key) else line for key, line in zip(keys, changed, strict=True)]


def write_recipe(path: Path, config: RunConfig) -> None:
    """Write a config, with which a run goes on, so whole: where it holds a secret, only its owner can read the file."""
    values = config.model_dump(mode="json")
    replace_text(path, to_yaml(config), is_private=redacted_tree(values) != values)


def with_batch_of_run(folder: Path, config: RunConfig) -> RunConfig:
    """The config with the batch size that the run in `folder` trains with.  ValueError: its config.yaml has none."""
    path = folder / "config.yaml"
    batch = read_config(path, trust=True).data.batch_if_known if path.is_file() else None  # read, never built
    if batch is None:
        raise ValueError(
            f"data.batch_size=auto goes on with the batch size in {path}, and there is none; set data.batch_size to the one "
            "that the run was trained with"
        )
    return config.model_copy(update={"data": config.data.model_copy(update={"batch_size": batch})})


@dataclass(frozen=True)
class NoImages:
    """A split without images, where only a run's metadata is known.  shape: of one of its images, (C, *pixels)."""

    shape: list[int]

    def __len__(self) -> int:
        return 0

    def read(self, index: int) -> tuple[Tensor, int | Tensor]:
        raise AssertionError("this split holds no images")

    def name_of(self, index: int) -> str:
        raise AssertionError("this split holds no images")


def write_model(folder: Path, dataset: Dataset, *, shape: list[int], mean: list[float], std: list[float], name: str) -> None:
    """Write model.json: classes, kind of labels, image shape (C, *pixels) and normalization, needed to use the weights."""
    values = {
        "model": name,
        "classes": dataset.classes,
        "image": shape,
        "labels": dataset.labels,
        "dtype": str(dataset.dtype).removeprefix("torch."),
        "pixels": dataset.intensity.formula(dataset.dtype),
        "intensity": dataset.intensity.to_tree(),
        "resampling": None if dataset.resampling is None else dataset.resampling.to_tree(),
        "channel_files": dataset.channel_files,
        "mean": mean,
        "std": std,
    } | ({"scale": dataset.scale} if dataset.labels == "image" else {})
    replace_text(folder / MODEL, json.dumps(values, indent=1) + "\n")


def write_tissue(folder: Path, tissue: dict[str, Any]) -> None:
    """Write what of each slide counted, by the slide's name."""
    replace_text(folder / TISSUE, json.dumps(tissue, indent=1) + "\n")


def write_statistics(folder: Path, statistics: SplitStatistics) -> None:
    replace_text(folder / STATISTICS, json.dumps(statistics.to_tree(), indent=1) + "\n")


def stored_dataset(folder: Path) -> Dataset | None:
    """What the folder has of a run's dataset; None before it began.  ValueError: damaged."""
    return read_model(folder) if (folder / MODEL).is_file() else None


def read_model(folder: Path, *, name: str = MODEL) -> Dataset:
    """What `write_model` wrote, as a Dataset without images.  ValueError: the file is missing or damaged."""
    path = folder / name
    if not path.is_file():
        raise ValueError(f"{folder} has no {name}, so its run never began to train; train it first")
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
        shape, classes = [int(length) for length in values["image"]], [str(name) for name in values["classes"]]
        dims = _dims_of(shape)
        mean, std = ([float(value) for value in values[name]] for name in ("mean", "std"))
        _check_normalization(mean, std, channels=shape[0])
        labels, dtype = _labels_of(values), _dtype_of(values)
        intensity = Intensity.from_tree(values["intensity"]) if "intensity" in values else Intensity()
        grid, channel_files = values.get("resampling"), int(values.get("channel_files", 0))
        resampling = None if grid is None else Resampling.from_tree(grid)
        scale = max(1, int(values.get("scale", 1)))
    except (ValueError, LookupError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        raise ValueError(
            f"{path} is damaged ({type(error).__name__}: {error}); take it from where the run was trained"
        ) from None
    none = NoImages(shape)
    about = {"dims": dims, "resampling": resampling, "channel_files": channel_files, "scale": scale}
    return Dataset(none, none, classes, shape[0], mean, std, True, labels, dtype, intensity, **about)


def _dims_of(shape: list[int]) -> int:
    """ValueError: no shape of an image, (C, H, W), or of a volume, (C, D, H, W)."""
    if len(shape) not in (3, 4) or min(shape) < 1:
        raise ValueError(f"image is {shape}")
    return len(shape) - 1


def _check_normalization(mean: list[float], std: list[float], *, channels: int) -> None:
    """ValueError: no numbers for so many channels, or for all alike."""
    for name, values in (("mean", mean), ("std", std)):
        if len(values) not in (1, channels) or not all(math.isfinite(value) for value in values):
            raise ValueError(f"{name} is {values} for {channels} channels")
    if min(std) <= 0:
        raise ValueError(f"std is {std}")


def _labels_of(values: dict[str, Any]) -> Labels:
    """ValueError: no kind of labels.  Before there were five kinds, "class" was written as "images"."""
    kind = values.get("labels", "class")
    if kind not in (*get_args(Labels), "images"):
        raise ValueError(f"labels are {kind!r}")
    return "class" if kind == "images" else kind


def _dtype_of(values: dict[str, Any]) -> torch.dtype:
    """ValueError: no dtype of images.  Before it was written, it was uint8, or floating-point by the formula."""
    name = values.get("dtype", "float32" if values.get("pixels") == OF_VALUES else "uint8")
    if name not in ("uint8", "uint16", "int16", "float16", "bfloat16", "float32", "float64"):
        raise ValueError(f"dtype is {name!r}")
    return getattr(torch, name)


def write_weights(folder: Path, weights: Mapping[str, Tensor]) -> Path:
    """Save a run's weights in its folder; returns the path."""
    save_weights(folder / WEIGHTS, weights)
    return folder / WEIGHTS


def save_weights(path: Path, weights: Mapping[str, Tensor], *, about: Mapping[str, str] | None = None) -> None:
    """Save parameters and buffers by the plain model's names, atomically; equal weights give equal bytes.

    about: further texts for the file's metadata.
    """
    beside = path.with_name(path.name + ".part")
    tensors = {name: value.detach().cpu().contiguous() for name, value in weights.items()}
    try:
        beside.touch()
        mode = beside.stat().st_mode  # as the umask says; safetensors makes files that only their owner can read
        safetensors.torch.save_file(_unshared(tensors), beside, metadata={"format": "pt", **(about or {})})
        beside.chmod(mode)
        with beside.open("rb") as file:
            os.fsync(file.fileno())
        beside.replace(path)
    except Exception:
        beside.unlink(missing_ok=True)  # a partial file would take space on a full disk
        raise


def _unshared(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Copies of tensors that share memory (tied weights, views), which safetensors refuses."""
    seen: set[int] = set()
    copies = {}
    for name, value in tensors.items():
        memory = value.untyped_storage().data_ptr()
        copies[name] = value.clone() if memory in seen else value
        seen.add(memory)
    return copies


def load_weights(path: str | Path, model: nn.Module) -> None:
    """Load a .safetensors file into a model that is not parallelized.

    ValueError: no such file, or names or shapes that are not the model's.
    """
    load_state(read_tensors(path), model, source=str(path))


def write_nan(folder: Path, values: dict[str, Any]) -> Path:
    """Write the images of a step whose loss was NaN or infinite; returns the path."""
    replace_text(folder / "nan.json", json.dumps(values, indent=1) + "\n")
    return folder / "nan.json"
