"""The command's verbs as functions: `wf.train`, `wf.evaluate`, `wf.predict`, `wf.plan`, `wf.doctor`, `wf.replay`.

Each does what the verb does, on the ranks that the script was started on: one process, or those of torchrun, Slurm, MPI.
Where the script runs on several ranks, every rank calls the function, with equal arguments.

The functions start no ranks, since these would have to run the script again from its first line to have its objects.  So a plan
that needs more ranks than there are is refused, with the command that starts them.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, overload

import torch
from PIL import Image
from torch import Tensor, nn

from widefield.comm.mesh import World, current_world
from widefield.config import RunConfig, config_of, parse_config, read_config
from widefield.config.recipe import EVALUATED, refuse_unused
from widefield.data.map_style import dataset_of
from widefield.inference import evaluate_run, single_rank
from widefield.launchers import world_from
from widefield.naming import did_you_mean
from widefield.plans import Plan, check, plan_of, ranks_asked_for
from widefield.prediction.answers import Answer
from widefield.prediction.labels import Probabilities
from widefield.prediction.session import Wishes, predict_files, predict_objects
from widefield.run import train as train_run
from widefield.section import to_yaml
from widefield.tasks import Task
from widefield.training.evaluate import Evaluation
from widefield.training.given import Given, check_trainable, overrides_for
from widefield.training.replay import Replayed, replay_step
from widefield.training.run_events import check_callbacks
from widefield.training.run_folder import WEIGHTS, existing_folder, fresh_folder, load_weights, stored_dataset
from widefield.training.trainer import Outcome

if TYPE_CHECKING:
    from widefield.diagnosis.finding import Checkup
    from widefield.diagnosis.findings import Diagnosis
    from widefield.planner.agreeing.ask import AgreementAnswer
    from widefield.planner.search.answer import PlanAnswer

Config = str | Path | Mapping[str, Any] | RunConfig
"""A recipe: its path, the name of a packaged one (`digits`), a dict of the same nesting, or a RunConfig."""


def train(
    config: Config,
    *overrides: str,
    run: str | Path | None = None,
    model: nn.Module | None = None,
    data: Sequence[Any] | None = None,
    task: str | Task | None = None,
    loss: str | Callable[..., Any] | None = None,
    classes: Sequence[str] | int | None = None,
    callbacks: Sequence[Any] = (),
    trust: bool = False,
) -> Outcome:
    """Train as `widefield train` does: `wf.train("recipe.yaml", "optimizer.lr=0.2", run="runs/one")`.

    config: a recipe, see Config.  overrides: `key=value`, as on the command line.
    run: the run folder; a run that stopped there is resumed.  None: a new numbered one under runs/, on one rank only.
    model: a module in place of `model.name`.  A copy is trained; at the end the module gets the run's weights, on every rank.
    data: two map-style datasets in place of `data.name`, to train on and to evaluate; see widefield.data.map_style.
    task: a name, `package.module:callable`, or a Task in place of `task.name`.
    loss: a name, `package.module:callable`, or a function or module of (output, target) in place of `task.loss`, which gives
        the losses unreduced: one per sample, or per number of the target.
    classes: the names or the number of the classes of `data`; None: the first dataset's attribute `classes`.
    callbacks: objects with some of the methods on_step, on_evaluate and on_end, called with facts on every rank; see
        widefield.training.run_events.
    trust: let a recipe in a run folder name code of its own.
    Returns how the run ended; an interrupted run raises nothing, see `reason` and `status`.
    ValueError, NotImplementedError: those of the command, on every rank, before any message between ranks.
    """
    given, keys = _given(model, data, task, classes, loss), _keys(overrides, model, data, task, loss)
    read = _read(config, keys, run=run, trust=trust)
    if model is not None:
        check_trainable(model)
    check_callbacks(callbacks)
    world = _world(read, "wf.train")
    outcome = train_run(read, _folder(run, world), world, replace(given, callbacks=tuple(callbacks)))
    if model is not None:
        load_weights(outcome.run / WEIGHTS, model)
    return outcome


def evaluate(
    run: str | Path,
    *overrides: str,
    model: nn.Module | None = None,
    data: Any = None,
    task: str | Task | None = None,
    loss: str | Callable[..., Any] | None = None,
    classes: Sequence[str] | int | None = None,
    weights: str | Path | None = None,
    trust: bool = False,
) -> Evaluation:
    """Evaluate a run's weights as `widefield evaluate` does: every image of the evaluation split exactly once.

    model, data, task, loss, classes: objects that were passed to `train` must be passed again, since the run folder has only
        their names.  data: the pair, or only the dataset to evaluate.  The weights of `model` are not changed.
    weights: best, last, a checkpoint's step, or a .safetensors file; None: the last.  trust: let the run folder name code of
        its own.
    ValueError: an object is missing; and those of the command.
    """
    refuse_unused(overrides)
    given = _given(model, data if data is None or _is_pair(data) else (data, data), task, classes, loss)
    folder, keys = existing_folder(run), _keys(overrides, model, data, task, loss)
    read = read_config(folder / "config.yaml", keys, run=folder, trust=trust, builds=EVALUATED)
    file = None if weights is None else str(weights)
    return evaluate_run(folder, keys, _world(read, "wf.evaluate"), weights=file, trust=trust, given=given)


def replay(
    run: str | Path,
    step: int,
    *overrides: str,
    from_checkpoint: bool = False,
    model: nn.Module | None = None,
    data: Sequence[Any] | None = None,
    task: str | Task | None = None,
    loss: str | Callable[..., Any] | None = None,
    classes: Sequence[str] | int | None = None,
    trust: bool = False,
) -> Replayed:
    """Run one step of a run again, as `widefield replay` does: its loss, the module that first made NaN, norms of gradients.

    step: counted from 1, as in the run's record.  from_checkpoint: without the steps between the checkpoint and it.
    model, data, task, loss, classes: objects that were passed to `train`.  trust: as for `evaluate`.
    Returns what was seen; nothing in the run folder changes.  ValueError: those of the command.
    """
    given, keys = _given(model, data, task, classes, loss), _keys(overrides, model, data, task, loss)
    return replay_step(existing_folder(run), step, keys, from_checkpoint=from_checkpoint, trust=trust, given=given)


def predict(
    run: str | Path,
    images: Any,
    *overrides: str,
    output: str | Path | None = None,
    top: int = 3,
    batch_size: int = 1,
    flips: bool = False,
    probabilities: Probabilities | None = None,
    overlays: bool = False,
    outlines: bool = False,
    sliding: int | Sequence[int] | None = None,
    overlap: float = 0.5,
    compare: bool = False,
    overwrite: bool = False,
    model: nn.Module | None = None,
    task: str | Task | None = None,
    weights: str | Path | None = None,
    trust: bool = False,
) -> list[Answer]:
    """Predict images with a run's model as `widefield predict` does; returns an Answer for each, in their order.

    images: one or several paths, PIL images, or tensors (C, H, W), or (C, D, H, W) of volumes, with the dtype and channels of
        the run's dataset.  overrides: `key=value`, as on the command line.
    output: a folder, into which the answers for paths are written as the command does, and then paths may be folders, patterns
        or lists too.  None: no file is written, and an Answer has the labels of pixels itself.
    top: how many classes to return.  batch_size: images of one size per pass.  flips: the mean over mirror images.
    probabilities: of pixels, in the Answers, or files, `npy` or `png`.  overlays, outlines, overwrite: as the command does.
    sliding: with `output`, blend windows of so many pixels, on every dim or on all alike.  overlap: the share that the next one
        covers too.  compare: say at how many pixels labels are not the whole image's.
    model, task: as passed to `train`.  weights: best, last, a checkpoint's step, or a .safetensors file; None: the best, where
        the run has them.  trust: as for `evaluate`.
    ValueError: an image cannot be read, or is of another kind than the run's; with `output`, after the others are written.
    """
    windows = (sliding,) if isinstance(sliding, int) else None if sliding is None else tuple(sliding)
    wishes = Wishes(top, batch_size, flips, probabilities, overlays, overwrite, outlines, windows, overlap, compare)
    file, given = None if weights is None else str(weights), _given(model, None, task, None)
    refuse_unused(overrides)
    keys, chosen = _keys(overrides, model, None, task), {"weights": file, "trust": trust, "given": given}
    return _predicted(existing_folder(run), images, keys, output, wishes, chosen)


def _predicted(
    folder: Path, images: Any, keys: list[str], output: str | Path | None, wishes: Wishes, chosen: dict[str, Any]
) -> list[Answer]:
    is_single = isinstance(images, str | Path | Image.Image) or (isinstance(images, Tensor) and images.ndim == _ndim(folder))
    things = [images] if is_single else list(images)
    if output is not None:
        return _filed(folder, things, keys, Path(output), wishes, chosen)
    if wishes.sliding is not None:
        raise ValueError("sliding reads files by window and writes their labels so; name a folder, as output='answers'")
    parts, _ = single_rank(folder, chosen.pop("weights"), keys, streams=True, **chosen)
    return predict_objects(parts, things, wishes)


def _ndim(folder: Path) -> int:
    """Of one of the run's images as a tensor: 3, or 4 of volumes."""
    stored = stored_dataset(folder)
    return 3 if stored is None else stored.dims + 1


def _filed(
    folder: Path, things: list[Any], keys: list[str], output: Path, wishes: Wishes, chosen: dict[str, Any]
) -> list[Answer]:
    if not all(isinstance(thing, str | Path) for thing in things):
        raise ValueError("output is for answers about files, and not all images are paths; leave it out, or pass paths")
    world = current_world() or world_from(os.environ) or World()
    found = predict_files(folder, things, keys, world, output=output, wishes=wishes, **chosen)
    if found.lefts:
        raise ValueError("; ".join(f"{left.path}: {left.reason}" for left in found.lefts[:5]))
    return found.answers


@overload
def plan(config: Config, *overrides: str, ranks: int | None = None, trust: bool = False) -> Plan: ...


@overload
def plan(config: Config, *overrides: str, agreement: str, **request: Any) -> AgreementAnswer: ...


@overload
def plan(config: Config, *overrides: str, cluster: str, **request: Any) -> PlanAnswer: ...


def plan(
    config: Config,
    *overrides: str,
    ranks: int | None = None,
    cluster: str | None = None,
    agreement: str | None = None,
    trust: bool = False,
    model: nn.Module | None = None,
    **request: Any,
) -> Plan | PlanAnswer | AgreementAnswer:
    """The plan that a recipe asks for; with `cluster`, all plans that these machines have, as `widefield plan` gives them.

    Without `cluster`: the plan on `ranks` ranks, checked as for a run; `str(plan)` describes it.  ranks: None: those of the
    mesh, or as many as this machine has GPUs where mesh.replicate is null.

    cluster: as `4x8xH100-80G` or `cpu:2`.  config: also the name of a model, where `image` is given.
    model: a module in place of `model.name`.
    request: further fields of widefield.planner.search.ask.PlanRequest: image=(C, *pixels), classes, batch, task, network,
        largest=("image", "batch"), fewest, dollars_per_hour, seconds, scales.
    Returns a PlanAnswer: `best`, `estimates`, `verdict`, `reasons`, `changes`, `scaling`, `answers`; `to_tree()` is --json's.

    agreement: `all` or one way for workers to agree, compared in virtual time as by `widefield plan --agreement`.  request:
        then fields of widefield.planner.agreeing.ask.AgreementRequest, as workers=256, stragglers=("3x",), step_seconds.
    Returns an AgreementAnswer: `estimates`, `notes`, `to_tree()`.
    Starts nothing.
    ValueError, NotImplementedError: the plan cannot be carried out; no such device; the model cannot be emulated.
    """
    if cluster is not None or agreement is not None:
        return _planned(config, overrides, cluster, agreement, trust=trust, model=model, request=request)
    if model is not None or request:
        names = ", ".join([*(["model"] if model is not None else []), *request])
        raise ValueError(f"{names}: for plans of machines; name them too, as wf.plan(..., cluster='8xH100')")
    read = _read(config, _keys(overrides, None, None, None), trust=trust)
    found = plan_of(read, ranks or ranks_asked_for(read) or torch.cuda.device_count() or 1)
    check(found, ranks=ranks or found.ranks, samples_per_step=read.data.batch_if_known)
    return found


def _planned(
    config: Config, overrides: Sequence[str], cluster: str | None, agreement: str | None, *, trust: bool,
    model: nn.Module | None, request: dict[str, Any],
) -> PlanAnswer | AgreementAnswer:  # fmt: skip
    from widefield.planner.agreeing.ask import AgreementRequest, ask_agreement
    from widefield.planner.search.ask import PlanRequest, ask

    of, kind = ("cluster", PlanRequest) if agreement is None else ("agreement", AgreementRequest)
    known = {field.name for field in fields(kind)} - {"recipe", "cluster", "agreement", "overrides", "trust", "given"}
    for name in request:
        if name not in known:
            raise ValueError(
                f"wf.plan takes no {name}{did_you_mean(name, known)} With {of} it takes: {', '.join(sorted(known))}"
            )
    if model is not None:
        check_trainable(model)
    keys = _keys(overrides, model, None, None)
    recipe, given = config_of(config) if isinstance(config, Mapping) else config, _given(model, None, None, None)
    if agreement is not None:
        return ask_agreement(
            AgreementRequest(recipe, agreement, cluster=cluster, overrides=keys, trust=trust, given=given, **request)
        )
    assert cluster is not None, "plans are of machines"
    return ask(PlanRequest(recipe, cluster, keys, trust=trust, given=given, **request))


def doctor(
    *what: str | Path,
    config: Config | None = None,
    cluster: str | None = None,
    run: str | Path | None = None,
    seconds: float = 60.0,
    trust: bool = False,
) -> Checkup | Diagnosis:
    """What would stop a run on the ranks of this script; with `what`, what stopped one, as `widefield doctor` says it.

    what: a run's folder, or logs, tracebacks and batch scripts: they are read as text, on this rank alone.
    config: a recipe, whose plan and data are looked at too.  cluster: the machines that should be here, as `2x8xH100-80G`.
    run: the folder that the run is to be written to.  seconds: until all ranks must have met.
    Without `what` every rank calls it, and each gets the same Checkup.  It is true where nothing is bad, `print` shows the
    table, and `to_tree()` is --json's; `checkup["ports"]` is one finding.
    ValueError: a path is not there, or has no logs; no such cluster; logs and a recipe are named at once.
    """
    if what:
        if config is not None or cluster is not None or run is not None:
            raise ValueError("after a run its folder or logs are all that is looked at; leave config, cluster and run out")
        from widefield.diagnosis.findings import diagnose

        return diagnose(*what)
    from widefield.diagnosis.checkup import CheckupRequest, check_up

    read = None if config is None else _read(config, [], run=run, trust=trust)
    name = str(config) if isinstance(config, str | Path) else None
    request = CheckupRequest(name, read, cluster, None if run is None else Path(run))
    return check_up(request, current_world() or world_from(os.environ) or World(), seconds=seconds)


def _read(config: Config, overrides: Sequence[str], *, run: str | Path | None = None, trust: bool = False) -> RunConfig:
    if isinstance(config, str | Path):
        return read_config(config, overrides, run=run, trust=trust)
    if isinstance(config, RunConfig):
        return parse_config(to_yaml(config), overrides, name="the config") if overrides else config
    if isinstance(config, Mapping):
        return config_of(config, overrides)
    raise ValueError(
        f"the config is a {type(config).__name__}; give the path of a recipe, the name of a packaged one, a dict or a RunConfig"
    )


def _keys(overrides: Sequence[str], model: object, data: object, task: object, loss: object = None) -> list[str]:
    """Overrides that put the names of passed objects into the config, then the user's own."""
    wrong = next((override for override in overrides if not isinstance(override, str)), None)
    if wrong is not None:
        raise ValueError(f"{wrong!r} is no override; write texts, as 'optimizer.lr=0.2', and pass objects by keyword")
    texts = {"task.name": task, "task.loss": loss}
    named = [f"{key}={text}" for key, text in texts.items() if isinstance(text, str)]
    samples: Any = data[0] if isinstance(data, tuple | list) and len(data) == 2 else data
    passed = {kind: None if isinstance(thing, str) else thing for kind, thing in (("task", task), ("loss", loss))}
    return overrides_for([*named, *overrides], model=model, data=samples, **passed)


def _is_pair(data: Any) -> bool:
    return isinstance(data, tuple | list) and len(data) == 2


def _given(model: Any, data: Any, task: Any, classes: Sequence[str] | int | None, loss: Any = None) -> Given:
    if model is not None and not isinstance(model, nn.Module):
        raise ValueError(
            f"model is a {type(model).__name__}; pass a torch.nn.Module, or name what makes one: "
            "model.name=package.module:callable"
        )
    if data is not None and not _is_pair(data):
        raise ValueError(f"data is a {type(data).__name__}; pass two datasets: data=(train_set, evaluation_set)")
    if data is None and classes is not None:
        raise ValueError("classes are those of data, and data is not passed; leave classes out")
    opened = None if data is None else partial(dataset_of, *data, classes=classes)
    passed = (None if isinstance(thing, str) else thing for thing in (task, loss))
    return Given(model, opened, next(passed), loss=next(passed))


def _world(config: RunConfig, function: str) -> World:
    """This process's World.  ValueError: the script runs on one rank, and the plan needs several."""
    world = current_world() or world_from(os.environ)
    if world is not None:
        return world
    mesh, gpus = plan_of(config, ranks_asked_for(config) or 1), torch.cuda.device_count()
    if mesh.ranks > 1:
        one = [f"mesh.{axis}={'[]' if axis == 'space' else 1}" for axis, size in mesh.axes.items() if size > 1]
        raise ValueError(
            f"the mesh ({mesh}) needs {mesh.ranks} ranks, and this script runs on one; {function} starts none, for they would "
            f"have to run the script from its first line. Start it on {mesh.ranks} (torchrun --nproc-per-node {mesh.ranks} "
            f"SCRIPT.py), or set {' '.join(one)}, or use the command, which starts ranks itself"
        )
    if gpus > 1:
        print(f"1 rank of {gpus} GPUs: as the script was started; torchrun --nproc-per-node {gpus} uses all", flush=True)
    return World()


def _folder(run: str | Path | None, world: World) -> Path:
    if run is not None:
        return Path(run)
    if world.size > 1:
        raise ValueError(
            f"{world.size} ranks run this script, and each would make a run folder of its own; name one, as run='runs/one'"
        )
    return fresh_folder()
