"""Uses of a trained run: evaluate it again, load it for predictions, export its weights."""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path

import torch
from torch import nn

from widefield.comm.failure import FailureWatch
from widefield.comm.mesh import Mesh, World, join, leave
from widefield.config import RunConfig, read_config
from widefield.config.recipe import EVALUATED, PREDICTED, on_mesh_of
from widefield.data import Dataset
from widefield.naming import did_you_mean
from widefield.parallel.members import members_of
from widefield.parallel.parallelize import parallelize_average
from widefield.plans import Plan, plan_of
from widefield.tasks import noise_of
from widefield.training.assemble import Parts, assemble, evaluate_parts
from widefield.training.chosen_weights import Chosen, choose
from widefield.training.disk import replace_text
from widefield.training.evaluate import Evaluation
from widefield.training.given import NOTHING, Given, share_given
from widefield.training.run_folder import MODEL, existing_folder, read_model, save_weights, stored_dataset
from widefield.training.second_stage import check_second_stage, stages_named


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

    weights: best, last, a checkpoint's step, or a .safetensors file; None: the last, whose numbers are those at the run's end.
    trust: let the run folder name code of its own, see trust.py.
    given: objects in place of what the run's config names.
    """
    config = read_config(existing_folder(folder) / "config.yaml", overrides, run=folder, trust=trust, builds=EVALUATED)
    if config.data.batch_if_known is None:
        raise ValueError(
            "data.batch_size=auto is found where training begins; set data.evaluate_batch_size to a number in its place"
        )
    with _on_mesh(config, world) as mesh:
        chosen = mesh.together(lambda: choose(folder, weights, default="last"))
        if mesh.is_main:
            print(chosen.text, file=sys.stderr)
        parts = mesh.together(lambda: _loaded(config, mesh, chosen, given, stored=stored_dataset(folder)))
        share_given(given, parts.dataset, parts.model, mesh)
        return evaluate_parts(parts, parts.model)


@contextmanager
def _on_mesh(config: RunConfig, world: World) -> Iterator[Mesh]:
    """The mesh of the config's plan, watched for ranks that fail; it ends with the context.  Every rank calls it."""
    with ExitStack() as stack:
        mesh = join(world, plan_of(config, world.size))
        stack.callback(leave, mesh)
        with FailureWatch(mesh) as watch:
            yield replace(mesh, watch=watch)


@contextmanager
def loaded_on_ranks(
    folder: Path,
    overrides: Sequence[str],
    world: World,
    *,
    weights: str | None,
    trust: bool = False,
    given: Given = NOTHING,
) -> Iterator[tuple[Parts, Chosen]]:
    """A run's parts to predict with, on the ranks of `world`, and which weights they have.  Every rank calls it.

    The mesh is that of the overrides, not that of training.  Where it cuts the model (shard, channel, stage), each rank
    keeps its part of the weights, once it has loaded all of them.
    """
    keys = on_mesh_of(overrides, alone=world.size == 1)
    config = read_config(existing_folder(folder) / "config.yaml", keys, run=folder, trust=trust, builds=PREDICTED)
    with _on_mesh(config, world) as mesh:
        chosen = mesh.together(lambda: choose(folder, weights, default="best"))
        parts = mesh.together(lambda: _loaded(config, mesh, chosen, given, read_model(folder)))
        mesh.together(lambda: _keep_part(parts))
        yield parts, chosen


def _keep_part(parts: Parts) -> None:
    """Leave this rank its part of the model, where the mesh has shards, channels or stages.  Every rank calls it."""
    shape = _shape_of_input(parts)
    like = torch.empty((2, *shape), dtype=parts.arithmetic.dtype, device="meta")
    sample = like.to(memory_format=parts.preparation(train=False).format_of(like))
    parts.model.eval()  # strategies look at the model in the mode in which it will run: without dropout
    check_second_stage(parts.config, parts.task, parts.mesh.plan)
    for member in members_of(parts.model).values() if stages_named(parts.task) else [parts.model]:
        parallelize_average(member, parts.mesh, sample=sample)


def single_rank(
    folder: Path,
    weights: str | None,
    overrides: Sequence[str] = (),
    *,
    streams: bool = False,
    trust: bool = False,
    given: Given = NOTHING,
) -> tuple[Parts, Chosen]:
    """The run's parts on a single rank, without its dataset, and which weights they have: the best where nothing else is said.

    streams: the model is streamed where the run's config says so.
    """
    config = read_config(existing_folder(folder) / "config.yaml", overrides, run=folder, trust=trust, builds=PREDICTED)
    plan = Plan(stream=config.stream if streams else None)
    chosen = choose(folder, weights, default="best")
    return _loaded(config, join(World(), plan), chosen, given, read_model(folder)), chosen


def export(folder: Path, to: str, *, output: Path | None = None, weights: str | None = None, trust: bool = False) -> Path:
    """Export a run's model for use without widefield; returns the path, with a .json beside it as model.json of the run.

    to: `safetensors` or `state_dict` (torch.save of tensors), with the names of the plain model; `onnx`, the network for images
        of the evaluation's size and any batch, with normalized pixels as input.
    output: the path; None: model.* in the run folder.  weights: None: the best, where the run has them.
    ValueError: unknown format or no weights; or, before anything is loaded, a path that cannot be written.
    """
    if to not in _EXPORTS:
        raise ValueError(f"cannot export to '{to}'{did_you_mean(to, _EXPORTS)} It can be: {', '.join(_EXPORTS)}")
    write, suffix = _EXPORTS[to]
    path = output or folder / f"model{suffix}"
    about = path.with_suffix(".json")
    _check_output(path, about)
    parts, chosen = single_rank(folder, weights, trust=trust)
    print(chosen.text, file=sys.stderr)
    parts.model.eval()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write(parts, path)
        replace_text(about, (folder / MODEL).read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"cannot write {path} ({error}); name another --output") from None
    return path


def _check_output(path: Path, about: Path) -> None:
    """ValueError: the path is a folder, is the .json itself, cannot be written, or the .json would overwrite another file."""
    if path.is_dir():
        raise ValueError(f"{path} is a folder; name a file in it, as --output {path / 'model.onnx'}")
    if path == about:
        raise ValueError(f"--output {path} is where the classes and the normalization go; name the model's file otherwise")
    if about.is_file() and not _is_about_a_model(about):
        raise ValueError(
            f"{path} is exported with its classes and normalization in {about}, and there is another file of that name; "
            "name another --output, or move that file"
        )

    place = next(place for place in (path.parent, *path.parent.absolute().parents) if place.exists())
    taken = [file for file in (path, about) if file.exists() and not os.access(file, os.W_OK)]
    if not place.is_dir() or not os.access(place, os.W_OK | os.X_OK) or taken:
        why = f"{place} is no folder" if not place.is_dir() else f"{taken[0] if taken else place} cannot be written to"
        raise ValueError(f"cannot write {path} ({why}); name another --output")


def _is_about_a_model(path: Path) -> bool:
    """Whether the file was written by an export, or by training."""
    try:
        read_model(path.parent, name=path.name)
    except ValueError:
        return False
    return True


def _shape_of_input(parts: Parts) -> Sequence[int]:
    """(C, *pixels) of an image, or of the noise that images are made of."""
    return noise_of(parts.task, dims=parts.dataset.dims) or parts.dataset.evaluate.shape  # type: ignore[attr-defined]


def _exported(model: nn.Module) -> nn.Module:
    """The part of a model that is for use: all of it, or what it says by its attribute `exported`, as without a projector."""
    return getattr(model, "exported", model)


def _safetensors(parts: Parts, path: Path) -> None:
    save_weights(path, _exported(parts.model).state_dict())


def _state_dict(parts: Parts, path: Path) -> None:
    torch.save({name: value.cpu() for name, value in _exported(parts.model).state_dict().items()}, path)


def _onnx(parts: Parts, path: Path) -> None:
    try:
        import onnxscript  # noqa: F401  (torch.onnx needs it)
    except ImportError:
        raise ValueError("exporting to onnx needs onnx and onnxscript; pip install 'widefield[onnx]'") from None
    if stages := stages_named(parts.task):
        raise NotImplementedError(
            f"onnx would have the first of the two stages of this model, {stages[0]}, alone: the second one, {stages[1]}, sees "
            "boxes that the task chooses; take --to safetensors, or predict with widefield"
        )
    shape = _shape_of_input(parts)
    pair = torch.zeros(2, *shape, dtype=parts.arithmetic.dtype, device=parts.mesh.device)  # 1 would be exported as a constant
    batch = torch.export.Dim("batch", min=1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch.onnx warns about its own internals
        torch.onnx.export(
            _exported(parts.model), (pair,), str(path), dynamo=True, dynamic_shapes=({0: batch},), input_names=["image"],
            output_names=["output"], external_data=False, verbose=False,
        )  # fmt: skip


_EXPORTS: dict[str, tuple[Callable[[Parts, Path], None], str]] = {
    "safetensors": (_safetensors, ".safetensors"),
    "state_dict": (_state_dict, ".pt"),
    "onnx": (_onnx, ".onnx"),
}


def _loaded(
    config: RunConfig,
    mesh: Mesh,
    chosen: Chosen,
    given: Given = NOTHING,
    dataset: Dataset | None = None,
    stored: Dataset | None = None,
) -> Parts:
    """Data and model of a run, with the chosen weights."""
    parts = assemble(config, mesh, dataset, given=given, initial_weights=False, stored=stored)
    chosen.load(parts.model)
    return parts
