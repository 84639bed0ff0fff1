"""What one does with a trained run: evaluate it again, ask it about images, take its weights elsewhere."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor, nn

from widefield.comm.failure import FailureWatch
from widefield.comm.mesh import Mesh, World, join, leave
from widefield.config import RunConfig, read_config
from widefield.data import Dataset
from widefield.data.image import read_image, write_labels
from widefield.data.loader import Batch
from widefield.data.transforms import Transforms
from widefield.naming import did_you_mean
from widefield.plans import Plan, plan_of
from widefield.tasks import is_per_pixel
from widefield.training.assemble import Parts, assemble
from widefield.training.checkpoint import newest_sound_in, read
from widefield.training.disk import replace_text
from widefield.training.evaluate import Evaluation
from widefield.training.resume import check_state
from widefield.training.run_folder import MODEL, WEIGHTS, existing_folder, load_weights, read_model, save_weights
from widefield.training.state import shapes_of
from widefield.training.trainer import evaluate_parts
from widefield.training.weight_average import weights_of


@dataclass(frozen=True)
class Answer:
    """What the model says of one image: classes with their probabilities, likeliest first.

    Of a model that answers for every pixel: classes with their shares of the pixels, and the file of the pixels' classes.
    """

    path: str
    classes: list[str]
    probabilities: list[float]
    labels: str | None = None


def evaluate_run(
    folder: Path, overrides: Sequence[str], world: World, *, weights: str | None = None, trust: bool = False
) -> Evaluation:
    """Evaluate a run's weights on its evaluation split, over the ranks of `world`; the same counts on any number of them.

    trust: here and below, let the run folder name code of its own, see trust.py; ValueError where it does without.
    """
    config = read_config(existing_folder(folder) / "config.yaml", overrides, run=folder, trust=trust)
    with ExitStack() as stack:
        mesh = join(world, plan_of(config, world.size))
        stack.callback(leave, mesh)
        with FailureWatch(mesh) as watch:
            mesh = replace(mesh, watch=watch)
            parts = mesh.together(lambda: _loaded(folder, config, mesh, weights))
            return evaluate_parts(parts, parts.model)


def predict(
    folder: Path, images: Sequence[str], *, top: int = 3, weights: str | None = None, trust: bool = False
) -> list[Answer]:
    """What a run's model says of image files, in their order.  ValueError names an image that cannot be read.

    A model that answers for every pixel leaves `scan.labels.png` beside `scan.jpg`, its pixels being class numbers.
    """
    if top < 1:
        raise ValueError(f"--top is {top}; write how many classes to name, 1 or more")
    parts = _alone(folder, weights, streams=True, trust=trust)
    if is_per_pixel(parts.task):
        _check_answers(images)
    transforms = Transforms(parts.config.data.read_evaluate, field="data.read_evaluate")
    prepare, classes = parts.preparation(train=False), parts.dataset.classes
    parts.model.eval()
    answers = []
    for path in images:
        pixels = transforms(read_image(path, parts.dataset.channels), 0).unsqueeze(0)
        image, _ = prepare(Batch(pixels, torch.zeros(1, dtype=torch.int64), torch.zeros(1, dtype=torch.int64)))
        with torch.no_grad(), parts.arithmetic.autocast():
            output = parts.model(image)
        if is_per_pixel(parts.task):
            labels = parts.task.answers(output)[0]
            shares, written = (
                torch.bincount(labels.flatten(), minlength=len(classes)) / labels.numel(),
                _write_beside(path, labels),
            )
        else:
            shares, written = parts.task.answers(output.double())[0], None
        best = shares.topk(min(top, len(classes)))
        answers.append(Answer(path, [classes[index] for index in best.indices], best.values.tolist(), written))
    return answers


def _check_answers(images: Sequence[str]) -> None:
    """ValueError where the answer to one image would overwrite another of the images, or the answer to another."""
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
    """Leave the classes of an image's pixels in a file beside it; its path."""
    beside = _beside(path)
    try:
        write_labels(labels_HW, beside)
    except OSError as error:
        raise ValueError(f"cannot write {beside} ({error}); copy {path} into a folder that can be written to") from None
    return str(beside)


def export(folder: Path, to: str, *, output: Path | None = None, weights: str | None = None, trust: bool = False) -> Path:
    """Write a run's model for use without widefield; the path written.

    to: `safetensors` or `state_dict` (torch.save of tensors alone): names and shapes of the plain model; `onnx`: the
    network for images of the evaluation's size, any batch, pixels normalized as the run did (a .json beside it says how).
    """
    if to not in _EXPORTS:
        raise ValueError(f"cannot export to '{to}'{did_you_mean(to, _EXPORTS)} It can be: {', '.join(_EXPORTS)}")
    write, suffix = _EXPORTS[to]
    path = output or folder / f"model{suffix}"
    about = path.with_suffix(".json")
    _check_output(path, about)
    parts = _alone(folder, weights, trust=trust)
    parts.model.eval()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write(parts, path)
        replace_text(about, (folder / MODEL).read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"cannot write {path} ({error}); name another --output") from None
    return path


def _check_output(path: Path, about: Path) -> None:
    """ValueError where an export would have no file of its own, or overwrite one that the user has not named."""
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
    """Whether an earlier export, or training, left the file."""
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
    pair = torch.zeros(2, *shape, dtype=parts.arithmetic.dtype, device=parts.mesh.device)  # torch takes 1 for a constant
    batch = torch.export.Dim("batch", min=1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch.onnx warns of its own internals
        torch.onnx.export(
            parts.model, (pair,), str(path), dynamo=True, dynamic_shapes=({0: batch},), input_names=["image"],
            output_names=["output"], external_data=False, verbose=False,
        )  # fmt: skip


_EXPORTS: dict[str, tuple[Callable[[Parts, Path], None], str]] = {
    "safetensors": (_safetensors, ".safetensors"),
    "state_dict": (_state_dict, ".pt"),
    "onnx": (_onnx, ".onnx"),
}


def _alone(folder: Path, weights: str | None, *, streams: bool = False, trust: bool = False) -> Parts:
    """The run's parts on this process alone, without its dataset; the model tile after tile where the run does so."""
    config = read_config(existing_folder(folder) / "config.yaml", run=folder, trust=trust)
    plan = Plan(stream=config.stream if streams else None)
    return _loaded(folder, config, join(World(), plan), weights, read_model(folder))


def _loaded(folder: Path, config: RunConfig, mesh: Mesh, weights: str | None, dataset: Dataset | None = None) -> Parts:
    """Data and model of a run, with the weights named, or the run's own, or those of its newest sound checkpoint."""
    model = config.model.model_copy(update={"weights": None})  # what training started from is of no use any more
    parts = assemble(config.model_copy(update={"model": model}), mesh, dataset)
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
