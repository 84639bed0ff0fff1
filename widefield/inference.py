"""Uses of a trained run: evaluate it again, predict images, export its weights."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from widefield.comm.failure import FailureWatch
from widefield.comm.mesh import Mesh, World, join, leave
from widefield.config import RunConfig, read_config
from widefield.config.recipe import EVALUATED, PREDICTED
from widefield.data import Dataset
from widefield.data.image import read_image, write_labels
from widefield.data.intensity import in_words
from widefield.data.loader import Batch
from widefield.data.map_style import image_of
from widefield.data.transforms import Transforms
from widefield.naming import did_you_mean
from widefield.plans import Plan, plan_of
from widefield.tasks import is_per_pixel
from widefield.training.assemble import Parts, assemble
from widefield.training.checkpoint import newest_sound_in, read
from widefield.training.disk import replace_text
from widefield.training.evaluate import Evaluation
from widefield.training.given import NOTHING, Given, share_given
from widefield.training.resume import check_state
from widefield.training.run_folder import MODEL, WEIGHTS, existing_folder, load_weights, read_model, save_weights
from widefield.training.state import shapes_of
from widefield.training.trainer import evaluate_parts
from widefield.training.weight_average import weights_of


@dataclass(frozen=True)
class Answer:
    """The prediction for one image: classes with their probabilities, the most likely first.

    Where every pixel has a class: classes with their shares of the pixels, and the class numbers of the pixels: `labels`, the
    path of a file, or `pixels` (H, W) for an image that is no file.
    """

    path: str
    classes: list[str]
    probabilities: list[float]
    labels: str | None = None
    pixels: Tensor | None = None


def evaluate_run(
    folder: Path,
    overrides: Sequence[str],
    world: World,
    *,
    weights: str | None = None,
    trust: bool = False,
    given: Given = NOTHING,
) -> Evaluation:
    """Evaluate a run's weights on its evaluation split, on the ranks of `world`; the same counts on any number of them.

    weights: a .safetensors file in place of the run's own.  trust: let the run folder name code of its own, see trust.py.
    given: objects in place of what the run's config names.
    """
    config = read_config(existing_folder(folder) / "config.yaml", overrides, run=folder, trust=trust, builds=EVALUATED)
    with ExitStack() as stack:
        mesh = join(world, plan_of(config, world.size))
        stack.callback(leave, mesh)
        with FailureWatch(mesh) as watch:
            mesh = replace(mesh, watch=watch)
            parts = mesh.together(lambda: _loaded(folder, config, mesh, weights, given))
            share_given(given, parts.dataset, parts.model, mesh)
            return evaluate_parts(parts, parts.model)


def predict(
    folder: Path,
    images: Sequence[Any],
    overrides: Sequence[str] = (),
    *,
    top: int = 3,
    weights: str | None = None,
    trust: bool = False,
    given: Given = NOTHING,
) -> list[Answer]:
    """Predict images with a run's model, in their order.

    images: paths, PIL images, or tensors (C, H, W) with the dtype and channels of the run's dataset.
    Where every pixel has a class, it writes `scan.labels.png` beside `scan.jpg`; its pixel values are class numbers.
    ValueError: an image cannot be read, is of another kind than the run's, or a written file would overwrite another.
    """
    if top < 1:
        raise ValueError(f"--top is {top}; write how many classes to name, 1 or more")
    parts = _single_rank(folder, weights, overrides, streams=True, trust=trust, given=given)
    if is_per_pixel(parts.task):
        _check_answers([str(image) for image in images if isinstance(image, str | Path)])
    transforms = Transforms(parts.config.data.read_evaluate, field="data.read_evaluate")
    parts.model.eval()
    return [_answer(parts, transforms, image, number, top) for number, image in enumerate(images)]


def _answer(parts: Parts, transforms: Transforms, image: Any, number: int, top: int) -> Answer:
    prepare, classes = parts.preparation(train=False), parts.dataset.classes
    is_file = isinstance(image, str | Path)
    path = str(image) if is_file else f"image {number}"
    pixels = transforms(_pixels_of(image, path, parts), 0).unsqueeze(0)
    prepared, _ = prepare(Batch(pixels, torch.zeros(1, dtype=torch.int64), torch.zeros(1, dtype=torch.int64)))
    with torch.no_grad(), parts.arithmetic.autocast():
        output = parts.model(prepared)
    if not is_per_pixel(parts.task):
        best = parts.task.answers(output.double())[0].topk(min(top, len(classes)))
        return Answer(path, [classes[index] for index in best.indices], best.values.tolist())
    labels = parts.task.answers(output)[0]
    best = (torch.bincount(labels.flatten(), minlength=len(classes)) / labels.numel()).topk(min(top, len(classes)))
    labels_path, class_numbers = (_write_beside(path, labels), None) if is_file else (None, labels.cpu())
    return Answer(path, [classes[index] for index in best.indices], best.values.tolist(), labels_path, class_numbers)


def _pixels_of(image: Any, path: str, parts: Parts) -> Tensor:
    """An image as a tensor.  ValueError: the run was trained on images with other channels or another dtype."""
    dataset = parts.dataset
    if isinstance(image, str | Path):
        if dataset.floating:
            raise ValueError(
                f"{path} is a file, and this run was trained on floating-point tensors that a Python program's dataset made of "
                "its images; pass such tensors, (C, H, W)"
            )
        return read_image(path, dataset.channels)
    pixels = image_of(image, path)
    own, trained = in_words(pixels.dtype), in_words(dataset.dtype)
    if (len(pixels), own) != (dataset.channels, trained):
        raise ValueError(
            f"{path} has {len(pixels)} channels of {own} numbers and this run was trained on "
            f"{dataset.channels} of {trained} ones; pass images as its dataset gives them"
        )
    return pixels


def _check_answers(images: Sequence[str]) -> None:
    """ValueError: the labels of one image would overwrite another image, or the labels of another image."""
    asked = {Path(path).resolve(): path for path in images}
    answers: dict[Path, str] = {}
    for place, path in asked.items():
        other = answers.setdefault(_beside(place), path)
        if other is not path:
            raise ValueError(
                f"{other} and {path} would both be answered in {_beside(path)}; ask about one at a time, or rename one"
            )
    for place in asked.keys() & answers.keys():
        raise ValueError(
            f"the answer to {answers[place]} would overwrite {asked[place]}, which is asked about too; leave that out, or "
            "rename it"
        )


def _beside(path: str | Path) -> Path:
    return Path(path).with_suffix(".labels.png")


def _write_beside(path: str, labels_HW: Tensor) -> str:
    """Write the class numbers of an image's pixels to a file beside it; returns the path."""
    beside = _beside(path)
    try:
        write_labels(labels_HW, beside)
    except OSError as error:
        raise ValueError(f"cannot write {beside} ({error}); copy {path} into a folder that can be written to") from None
    return str(beside)


def export(folder: Path, to: str, *, output: Path | None = None, weights: str | None = None, trust: bool = False) -> Path:
    """Export a run's model for use without widefield; returns the path, with a .json beside it as model.json of the run.

    to: `safetensors` or `state_dict` (torch.save of tensors), with the names of the plain model; `onnx`, the network for images
        of the evaluation's size and any batch, with normalized pixels as input.
    output: the path; None: model.* in the run folder.  ValueError: unknown format, a path that cannot be written, no weights.
    """
    if to not in _EXPORTS:
        raise ValueError(f"cannot export to '{to}'{did_you_mean(to, _EXPORTS)} It can be: {', '.join(_EXPORTS)}")
    write, suffix = _EXPORTS[to]
    path = output or folder / f"model{suffix}"
    about = path.with_suffix(".json")
    _check_output(path, about)
    parts = _single_rank(folder, weights, trust=trust)
    parts.model.eval()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write(parts, path)
        replace_text(about, (folder / MODEL).read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"cannot write {path} ({error}); name another --output") from None
    return path


def _check_output(path: Path, about: Path) -> None:
    """ValueError: the path is a folder, is the .json itself, or the .json would overwrite another file."""
    if path.is_dir():
        raise ValueError(f"{path} is a folder; name a file in it, as --output {path / 'model.onnx'}")
    if path == about:
        raise ValueError(f"--output {path} is where the classes and the normalization go; name the model's file otherwise")
    if about.is_file() and not _is_about_a_model(about):
        raise ValueError(
            f"{path} is exported with its classes and normalization in {about}, and there is another file of that name; "
            "name another --output, or move that file"
        )


def _is_about_a_model(path: Path) -> bool:
    """Whether the file was written by an export, or by training."""
    try:
        read_model(path.parent, name=path.name)
    except ValueError:
        return False
    return True


def _safetensors(parts: Parts, path: Path) -> None:
    save_weights(path, parts.model.state_dict())


def _state_dict(parts: Parts, path: Path) -> None:
    torch.save({name: value.cpu() for name, value in parts.model.state_dict().items()}, path)


def _onnx(parts: Parts, path: Path) -> None:
    try:
        import onnxscript  # noqa: F401  (torch.onnx needs it)
    except ImportError:
        raise ValueError("exporting to onnx needs onnx and onnxscript; pip install 'widefield[onnx]'") from None
    shape = parts.dataset.evaluate.shape  # type: ignore[attr-defined]
    pair = torch.zeros(2, *shape, dtype=parts.arithmetic.dtype, device=parts.mesh.device)  # 1 would be exported as a constant
    batch = torch.export.Dim("batch", min=1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch.onnx warns about its own internals
        torch.onnx.export(
            parts.model, (pair,), str(path), dynamo=True, dynamic_shapes=({0: batch},), input_names=["image"],
            output_names=["output"], external_data=False, verbose=False,
        )  # fmt: skip


_EXPORTS: dict[str, tuple[Callable[[Parts, Path], None], str]] = {
    "safetensors": (_safetensors, ".safetensors"),
    "state_dict": (_state_dict, ".pt"),
    "onnx": (_onnx, ".onnx"),
}


def _single_rank(
    folder: Path,
    weights: str | None,
    overrides: Sequence[str] = (),
    *,
    streams: bool = False,
    trust: bool = False,
    given: Given = NOTHING,
) -> Parts:
    """The run's parts on a single rank, without its dataset.  streams: the model is streamed where the run's config says so."""
    config = read_config(existing_folder(folder) / "config.yaml", overrides, run=folder, trust=trust, builds=PREDICTED)
    plan = Plan(stream=config.stream if streams else None)
    return _loaded(folder, config, join(World(), plan), weights, given, read_model(folder))


def _loaded(
    folder: Path,
    config: RunConfig,
    mesh: Mesh,
    weights: str | None,
    given: Given = NOTHING,
    dataset: Dataset | None = None,
) -> Parts:
    """Data and model of a run, with `weights`, or the run's own weights, or those of its newest undamaged checkpoint."""
    parts = assemble(config, mesh, dataset, given=given, initial_weights=False)
    if weights is not None:
        load_weights(weights, parts.model)
    elif (folder / WEIGHTS).is_file():
        load_weights(folder / WEIGHTS, parts.model)
    else:
        _load_newest(folder, parts.model)
    return parts


def _load_newest(folder: Path, model: nn.Module) -> None:
    found = newest_sound_in(folder / "checkpoints", warn=lambda text: print(text, file=sys.stderr))
    if found is None:
        raise ValueError(f"{folder} has neither {WEIGHTS} nor a sound checkpoint; train it first, or name --weights FILE")
    state, _ = read(found, model=shapes_of(model))
    check_state(state, found)
    model.load_state_dict(weights_of(state["ema"]) or state["model"])
