"""The run folder: what lies where, who may write, and the files that belong to no step.

config.yaml  plan.yaml  record.jsonl  summary.csv  tensorboard/  checkpoints/  report.html
weights.safetensors  evaluation.json  mistakes/  samples/ (of labels per pixel)  nan.json (after a loss that was no number)
"""

from __future__ import annotations

import fcntl
import json
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import IO, Any
from weakref import WeakSet

import safetensors.torch
import torch
from torch import Tensor, nn

from widefield.config import RunConfig, read_config
from widefield.data import Dataset, Images
from widefield.data.image import write_image, write_labels
from widefield.naming import did_you_mean
from widefield.plans import Plan, to_text
from widefield.section import differences, to_yaml
from widefield.training.disk import free_bytes, replace_text
from widefield.training.evaluate import Evaluation, Mistake
from widefield.training.thumbnails import Thumbnail, shown_in_words
from widefield.trust import check_links

WEIGHTS = "weights.safetensors"
MODEL = "model.json"
_WRITTEN = (
    "config.yaml", "plan.yaml", "record.jsonl", "summary.csv", "tensorboard", "checkpoints", "report.html", WEIGHTS, MODEL,
    "evaluation.json", "mistakes", "samples", "nan.json",
)  # fmt: skip
"""What training leaves in its folder."""
_FURTHER = re.compile(
    r"\.lock|wandb_run_id\.txt|timeline-rank\d+\.json|bench\.(json|csv)|model\.(safetensors|pt|onnx)|.*\.part"
)


def fresh_folder(root: Path = Path("runs")) -> Path:
    """Make and give the next free numbered folder, `runs/0001`."""
    root.mkdir(parents=True, exist_ok=True)
    taken = [int(entry.name) for entry in root.iterdir() if entry.name.isdigit()]
    for number in range(max(taken, default=0) + 1, 10**9):
        try:
            (root / f"{number:04}").mkdir()
        except FileExistsError:  # another run took it just now
            continue
        return root / f"{number:04}"
    raise AssertionError("a billion runs")


def existing_folder(path: str | Path) -> Path:
    """`path` as a run folder; ValueError, with the nearest name, where it is none or a link leads out of it."""
    folder = Path(path)
    if (folder / "config.yaml").is_file():
        check_own(folder)
        return folder
    beside = sorted(p.parent.name for p in folder.parent.glob("*/config.yaml")) if folder.parent.is_dir() else []
    hint = did_you_mean(folder.name, beside)
    raise ValueError(f"{folder} is no run folder (it has no config.yaml){hint} Name the --run folder of a training run")


def check_own(folder: Path) -> None:
    """ValueError where a file or folder of a run is a symbolic link that leads out of the run's folder."""
    names = [entry.name for entry in os.scandir(folder)]
    check_links(folder, sorted(name for name in names if name in _WRITTEN or _FURTHER.fullmatch(name)))


def claim(folder: Path) -> IO[str]:
    """Make a run folder of `folder`, or go on with the one it is; see `lock` for what is given back.

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
    """ValueError where training from the start would overwrite what a run came to; with why its checkpoints are none."""
    if (folder / WEIGHTS).exists():
        told = "".join(f"\n  {text}" for text in passed_over)
        raise ValueError(
            f"{folder} holds the {WEIGHTS} of a run and no checkpoint to go on from, so training would begin anew and "
            "overwrite them and the record; name another folder with --run, take checkpoints/ from where it is whole, or "
            f"delete {folder / WEIGHTS}{told}"
        )


def lock(folder: Path) -> IO[str]:
    """Keep other processes from training into `folder` while the file given back is open.

    The lock goes with the process, however it dies, also where children of it live on.  ValueError: somebody else trains there.
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
"""A child that a process forks, such as a loader's worker, has the open file too, and a lock lasts while any process has it."""


def _let_go() -> None:
    for file in list(_LOCKS):
        file.close()  # the parent's stays open, and so does its lock


os.register_at_fork(after_in_child=_let_go)


def write_config(folder: Path, config: RunConfig, plan: Plan) -> list[str]:
    """Leave the config and the plan in the folder; what differs from the config that was there, as sentences."""
    path = folder / "config.yaml"
    changed = [] if not path.is_file() else differences(read_config(path, trust=True), config)  # compared, never built
    replace_text(path, to_yaml(config))
    replace_text(folder / "plan.yaml", to_text(plan))
    return changed


@dataclass(frozen=True)
class NoImages:
    """Stands for a split whose images are not at hand; `shape` is what one of them was, (C, H, W)."""

    shape: list[int]

    def __len__(self) -> int:
        return 0

    def read(self, index: int) -> tuple[Tensor, int | Tensor]:
        raise AssertionError("this split holds no images")

    def name_of(self, index: int) -> str:
        raise AssertionError("this split holds no images")


def write_model(folder: Path, dataset: Dataset, *, shape: list[int], mean: list[float], std: list[float], name: str) -> None:
    """Leave what using the model takes beside its weights: classes and of what, image shape (C, H, W), normalization."""
    told = {
        "model": name,
        "classes": dataset.classes,
        "image": shape,
        "labels": "pixels" if dataset.pixels else "images",
        "pixels": "(value / 255 - mean) / std",
        "mean": mean,
        "std": std,
    }
    replace_text(folder / MODEL, json.dumps(told, indent=1) + "\n")


def read_model(folder: Path, *, name: str = MODEL) -> Dataset:
    """What `write_model` left, as a dataset without images; ValueError where the run never came so far, or it is damaged."""
    path = folder / name
    if not path.is_file():
        raise ValueError(f"{folder} has no {name}, so its run never began to train; train it first")
    try:
        told = json.loads(path.read_text(encoding="utf-8"))
        shape, classes = [int(length) for length in told["image"]], [str(name) for name in told["classes"]]
        mean, std = ([float(value) for value in told[name]] for name in ("mean", "std"))
        channels, pixels = shape[0], told.get("labels") == "pixels"
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(
            f"{path} is damaged ({type(error).__name__}: {error}); take it from where the run was trained"
        ) from None
    none = NoImages(shape)
    return Dataset(none, none, classes, channels, mean, std, in_memory=True, pixels=pixels)


def write_weights(folder: Path, weights: Mapping[str, Tensor]) -> Path:
    """Save a run's weights where `widefield evaluate` and others look for them; the path."""
    save_weights(folder / WEIGHTS, weights)
    return folder / WEIGHTS


def save_weights(path: Path, weights: Mapping[str, Tensor]) -> None:
    """Save parameters and buffers under the plain model's own names, whole or not at all; equal weights, equal bytes."""
    beside = path.with_suffix(".part")
    tensors = {name: value.detach().cpu().contiguous() for name, value in weights.items()}
    try:
        safetensors.torch.save_file(_unshared(tensors), beside, metadata={"format": "pt"})
        with beside.open("rb") as file:
            os.fsync(file.fileno())
        beside.replace(path)
    except Exception:
        beside.unlink(missing_ok=True)  # what there is of it takes room
        raise


def _unshared(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """safetensors refuses two names for one memory (tied weights, or a view of another), so each gets a copy of its own."""
    seen: set[int] = set()
    copies = {}
    for name, value in tensors.items():
        memory = value.untyped_storage().data_ptr()
        copies[name] = value.clone() if memory in seen else value
        seen.add(memory)
    return copies


def load_weights(path: str | Path, model: nn.Module) -> None:
    """Load a .safetensors file into the plain model; ValueError names what is missing, unknown or of another shape."""
    path = Path(path)
    if not path.is_file():
        raise ValueError(f"there are no weights at {path}; name a .safetensors file")
    try:
        tensors = safetensors.torch.load_file(path)
    except (safetensors.SafetensorError, OSError) as error:
        raise ValueError(f"{path} is no sound .safetensors file ({error}); export it again") from None
    check_names(
        {name: list(value.shape) for name, value in tensors.items()},
        {name: list(value.shape) for name, value in model.state_dict().items()},
        str(path),
    )
    model.load_state_dict(tensors)


def check_names(given: dict[str, list[int]], wanted: dict[str, list[int]], source: str) -> None:
    """ValueError where names or shapes differ, naming the first of each kind."""
    problems = [
        f"{name} is {given[name]} there and {shape} here"
        for name, shape in wanted.items()
        if name in given and given[name] != shape
    ]
    problems += [f"{name} is missing there" for name in wanted if name not in given]
    problems += [f"{name} is unknown here" for name in given if name not in wanted]
    if problems:
        more = f" and {len(problems) - 3} more differences" if len(problems) > 3 else ""
        raise ValueError(
            f"{source} is of another model: {'; '.join(problems[:3])}{more}; "
            "set model.name and model.options to what it was trained with"
        )


@dataclass(frozen=True)
class Picture:
    """One of the worst mistakes, as the report shows it."""

    id: str
    picture: str
    truth: str
    prediction: str
    probability: float
    loss: float


def write_evaluation(
    folder: Path,
    evaluation: Evaluation,
    *,
    step: int,
    epoch: float,
    classes: list[str],
    images: Images,
    attempt: Callable[[str, Callable[[], Any]], Any] = lambda what, work: work(),
) -> None:
    """Leave an evaluation in the folder with pictures of its worst mistakes or, of labels per pixel, of some images.

    attempt: does what is to be written, by name; what it gives None for is left out.
    """
    pieces = {piece.index: piece for piece in evaluation.pictures}
    left = ("mistakes", "pieces", "pictures", "channels", "seconds")
    values = {key: value for key, value in vars(evaluation).items() if key not in left}
    values |= {"step": step, "epoch": epoch, "classes": classes, "shown": shown_in_words(evaluation.channels)}
    values["mistakes"] = [
        asdict(_picture(folder, number, mistake, pieces.get(mistake.index), classes, images, attempt))
        for number, mistake in enumerate(evaluation.mistakes)
    ]
    for stale in sorted((folder / "mistakes").glob("*.png"))[len(evaluation.mistakes) :]:
        stale.unlink(missing_ok=True)
    samples = [
        attempt("the pictures of evaluated images", partial(_write_sample, folder, piece, images.name_of(piece.index)))
        for piece in evaluation.pieces
    ]
    values["samples"] = [sample for sample in samples if sample is not None]
    attempt("evaluation.json", lambda: replace_text(folder / "evaluation.json", json.dumps(values) + "\n"))


def _picture(
    folder: Path, number: int, mistake: Mistake, piece: Thumbnail | None, classes: list[str], images: Images, attempt: Any
) -> Picture:
    """What the report wants to know of a mistake, its picture in mistakes/; "" where there is none."""
    file = folder / f"mistakes/{number:02}.png"
    written = None if piece is None else attempt("the pictures of mistakes", partial(_write_picture, piece, file))
    return Picture(
        images.name_of(mistake.index),
        "" if written is None else f"mistakes/{file.name}",
        classes[mistake.truth],
        classes[mistake.prediction],
        mistake.probability,
        mistake.loss,
    )


def _write_picture(piece: Thumbnail, file: Path) -> Path:
    file.parent.mkdir(exist_ok=True)
    write_image(piece.image, file)
    return file


def _write_sample(folder: Path, piece: Thumbnail, name: str) -> dict[str, Any]:
    """Leave the three pictures of an image in samples/; what the report wants to know of them."""
    place = folder / "samples"
    place.mkdir(exist_ok=True)
    files = {kind: f"samples/{piece.index:02}_{kind}.png" for kind in ("image", "truth", "prediction")}
    write_image(piece.image, folder / files["image"])
    write_labels(piece.truth, folder / files["truth"])
    write_labels(piece.prediction, folder / files["prediction"])
    return {"id": name, "size": list(piece.size), "right": piece.right, "counted": piece.counted, **files}


def write_nan(folder: Path, values: dict[str, Any]) -> Path:
    """Leave which images a loss that is no number came from."""
    replace_text(folder / "nan.json", json.dumps(values, indent=1) + "\n")
    return folder / "nan.json"


def peak_memory_bytes(device: torch.device) -> int:
    """Most memory this rank has held: allocated on its GPU, or resident in its process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024  # Linux counts KiB
