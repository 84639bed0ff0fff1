"""A training run from beginning to end: config -> plan -> mesh -> data and model -> loop -> checkpoints -> report."""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from widefield import sharded_state
from widefield.asynchrony import checks as server_checks
from widefield.asynchrony import ranks as server_ranks
from widefield.comm.coming_back import came_back
from widefield.comm.failure import FailureWatch
from widefield.comm.fingerprints import why_not_compared
from widefield.comm.mesh import AgreedError, Mesh, World, join, leave
from widefield.comm.stall_watch import StallWatch
from widefield.comm.timeline import Timeline
from widefield.config import RunConfig
from widefield.data.loader import Batch
from widefield.launchers._restarting import may_change_ranks, restart_in_words
from widefield.parallel.parallelize import fallbacks
from widefield.plans import check, plan_of, refit, to_text
from widefield.quantity import count_of
from widefield.refusal import TO_BE_CONTINUED
from widefield.streaming import progress
from widefield.streaming.storage.heap import keep_memory_of_steps
from widefield.training.assemble import Parts, assemble, learner_of, rebuilt, training_batches, write_model_of
from widefield.training.batch_finder import find_batch_size, without_model
from widefield.training.checkpoint import Checkpoints, Found
from widefield.training.checkpoint_directory import steps_in
from widefield.training.disk import Attempts, in_words
from widefield.training.endings import forget_stopped, stop_that_stands
from widefield.training.given import NOTHING, Given, share_given
from widefield.training.guard import Guard
from widefield.training.guarding import Guarding, check_guard
from widefield.training.heartbeat import Heartbeat
from widefield.training.interrupt import Interrupt
from widefield.training.learning_rate_finder import find_learning_rate
from widefield.training.loop import Learner
from widefield.training.out_of_memory import FullMemoryError, advice, full_memory_error, is_full, was_full
from widefield.training.passes import Passes
from widefield.training.planned import read_planned
from widefield.training.record import Record
from widefield.training.replicas_trainer import ReplicasTrainer
from widefield.training.resume import resume
from widefield.training.run_folder import check_fresh, claim, stored_dataset, with_batch_of_run, write_config
from widefield.training.state import load_random_state
from widefield.training.terminal import ignoring_closed
from widefield.training.trainer import Outcome, Trainer

T = TypeVar("T")


def train(config: RunConfig, folder: Path, world: World, given: Given = NOTHING) -> Outcome:
    """Train as `config` says, on the ranks of `world`, into `folder`; a run that stopped there is resumed.

    given: objects in place of what the config names.  Every rank calls it.
    AgreedError, on every rank: config, data or checkpoints do not allow the run, or the loss is not finite; checkpoints stay.
    Any other error of one rank is a PeerFailedError on the others, within seconds.
    """
    server_checks.check_recipe(config, given)
    config, why_refitted = _refitted(config, folder, world)
    if config.mesh.auto:
        from widefield.planner.search.starting import planned_together  # imported late, as most runs need no planner

        config = planned_together(config, folder, world, given)
    elif config.log.predict and not came_back(os.environ):
        from widefield.planner.search.starting import predicted_first

        predicted_first(config, folder, world, given)
    plan = plan_of(config, world.size)
    check(plan, ranks=world.size, samples_per_step=config.data.batch_if_known)
    check_guard(config)
    if plan.has_server:
        return server_ranks.train(config, folder, world, plan, run=_train, timeout_seconds=_longest_wait(config))
    try:
        with ExitStack() as stack:
            # A signal until then ends this rank at once, as there is nothing to save.
            mesh = join(world, plan, timeout_seconds=_longest_wait(config))
            interrupt = stack.enter_context(Interrupt(watch_parent=world.launcher == "torchrun", tells=world.rank == 0))
            stack.callback(leave, mesh)
            with FailureWatch(mesh) as watch:  # ends before the contexts of the stack, so it sees an error first
                _with_faults(stack, folder, mesh)
                return _train(config, folder, replace(mesh, watch=watch), interrupt, stack, given, why_refitted)
    except FullMemoryError as error:
        if world.size > 1:
            raise
        raise FullMemoryError("\n".join([str(error), *_priced(config, 1, given)])) from error


def _refitted(config: RunConfig, folder: Path, world: World) -> tuple[RunConfig, list[str]]:
    """The config with a mesh for the ranks that are left, where a launcher restarts a run that has begun; and why.

    ValueError: no mesh of the recipe's has so many ranks.
    """
    if not may_change_ranks(os.environ, has_begun=bool(steps_in(folder / "checkpoints"))):
        return config, []
    found, why = refit(config, world.size)
    return found, [] if why is None else [why]


def _train(
    config: RunConfig,
    folder: Path,
    mesh: Mesh,
    interrupt: Interrupt,
    stack: ExitStack,
    given: Given,
    why_mesh: list[str],
    trains: Callable[..., Trainer] | None = None,
) -> Outcome:
    mesh.together(lambda: _on_disk(folder, lambda: stack.enter_context(claim(folder))) if mesh.is_main else None)
    stop = mesh.gather_objects(stop_that_stands(folder) if mesh.is_main else None)[0]
    if stop is not None:
        _say_that_a_stop_stands(mesh, stop)
        return Outcome("interrupted", stop, TO_BE_CONTINUED, None, folder)
    warnings: list[str] = []  # from checkpoints, also from their thread; the trainer records them
    checkpoints = Checkpoints(
        folder / "checkpoints",
        mesh,
        keep_last=config.checkpoint.keep_last,
        keep_best=config.checkpoint.keep_best,
        background=config.checkpoint.background,
        warn=warnings.append,
    )
    found = checkpoints.newest_sound()
    mesh.together(lambda: check_fresh(folder, passed_over=warnings) if mesh.is_main and found is None else None)
    parts, why_batch = _parts_of(config, folder, mesh, interrupt, given, goes_on=found is not None)
    config = parts.config
    keep_memory_of_steps(mesh)
    learner, reasons = mesh.together(lambda: learner_of(parts))
    learner.guard = Guard(config.guard)
    last = config.schedule.length.in_steps(learner.steps.per_epoch)
    own = None if found is None else mesh.together(lambda: resume(learner, checkpoints, found))
    if config.optimizer.lr == "find" and found is None:
        reasons += find_learning_rate(parts, learner, is_asked_to_stop=lambda: bool(interrupt.asked))
    batches_from = partial(_batches_from, parts, learner, last)
    batches = batches_from(learner.step)

    def open_record() -> Record:
        record = stack.enter_context(Record.open(folder, log=config.log, resumed_step=found and learner.step))
        forget_stopped(folder)
        changed = write_config(folder, config, mesh.plan)
        write_model_of(folder, parts)
        planned = read_planned(folder)
        chosen = [] if planned is None else [f"mesh.auto: {text}" for text in planned.reasons]
        why = [*why_mesh, *chosen, *why_batch, *parts.reasons, *reasons, *_unwatched(mesh, config)]
        _begin(record, parts, learner, why, {} if planned is None else planned.prediction, last=last)
        _say_how_it_goes_on(record, learner, found, changed, has_random=own is not None)
        return record

    record = mesh.together(lambda: _on_disk(folder, open_record) if mesh.is_main else None)
    stack.callback(checkpoints.wait)
    passes = _watched(stack, folder, learner, batches)
    if record is not None:
        stack.enter_context(Heartbeat(record, learner, passes, last=last, stream=sys.stdout.fileno))
    mesh.together(lambda: None if own is None else load_random_state(own["random"]))  # last: all of the above may draw
    guarding = Guarding(learner, folder, checkpoints, record, parts.dataset.train, batches_from)
    trains = trains or (Trainer if learner.replicas is None else ReplicasTrainer)
    trainer = trains(config, folder, parts, learner, checkpoints, record, last, warnings, guarding)
    return _fit(trainer, passes, interrupt)


def _priced(config: RunConfig, ranks: int, given: Given) -> list[str]:
    """What the planner predicts of changes that take less memory, in lines; none where it cannot."""
    from widefield.planner.search.relief import in_words, reliefs  # imported late, as most runs need no planner

    try:
        return in_words(*reliefs(config, ranks, given=given))
    except Exception:  # advice is extra: the error is told without it
        return []


def _batches_from(parts: Parts, learner: Learner, last: int, step: int) -> Iterator[Batch]:
    return training_batches(parts, first=step, last=last, dummy_batch=learner.dummy_batch)


def _moved_in_words(found: Found, mesh: Mesh, *, has_random: bool) -> str:
    if found.about.ranks == mesh.size:
        return ""
    anew = "" if has_random else ", so random states begin anew, since each copy draws by itself"
    return f"; it was written by {found.about.ranks} ranks{anew}"


def _say_that_a_stop_stands(mesh: Mesh, step: int) -> None:
    if mesh.is_main:
        text = f"the run was asked to stop at step {step}, and torchrun restarts it all the same: it ends, to be continued"
        print(f"widefield: {text}", file=sys.stderr, flush=True)


def _longest_wait(config: RunConfig) -> float:
    """Seconds after which a message fails by itself: later than the watch ends a run that hangs, which knows more."""
    return max(600.0, 60.0 + (config.log.hang_seconds or 0.0))


def _with_faults(stack: ExitStack, folder: Path, mesh: Mesh) -> None:
    """Let befall this rank what WIDEFIELD_FAULTS asks for.  ValueError: it cannot be read."""
    text = os.environ.get("WIDEFIELD_FAULTS")
    if text:
        from widefield.faults.points import faults_of, planted  # imported late, as other runs have no use for it

        faults = faults_of(text, ranks=mesh.size, goes_on=(folder / "record.jsonl").is_file())
        stack.enter_context(planted(faults, mesh, folder))


def _parts_of(
    config: RunConfig, folder: Path, mesh: Mesh, interrupt: Interrupt, given: Given, *, goes_on: bool
) -> tuple[Parts, list[str]]:
    """The parts of the run, with a batch size that is found where the config asks for it, and its reasons.

    goes_on: the run has a checkpoint, and so a batch size.
    """
    why_batch: list[str] = []
    finds = config.data.batch_if_known is None
    if finds and goes_on:
        config = mesh.together(lambda: _with_batch_of_run(folder, config, mesh))
        finds, why_batch = False, [f"data.batch_size={config.data.batch}: as the run found it when it began"]
    parts = mesh.together(lambda: assemble(config, mesh, given=given, stored=stored_dataset(folder)))
    share_given(given, parts.dataset, parts.model, mesh)
    _check_sizes(parts)
    if finds:
        parts = without_model(parts)
        batch, why_batch = find_batch_size(parts, is_asked_to_stop=lambda: bool(interrupt.asked))
        parts = mesh.together(lambda: rebuilt(parts, mesh, batch=batch))
        share_given(given, parts.dataset, parts.model, mesh)
    return parts, why_batch


def _with_batch_of_run(folder: Path, config: RunConfig, mesh: Mesh) -> RunConfig:
    """The config with the run's batch size.  ValueError: there is none, or it is too small for the copies of this mesh."""
    found = with_batch_of_run(folder, config)
    check(mesh.plan, ranks=mesh.size, samples_per_step=found.data.batch)
    return found


def _fit(trainer: Trainer, passes: Passes, interrupt: Interrupt) -> Outcome:
    """Train to the end, and write the report, also after an error."""
    assert trainer.mesh.watch is not None
    trainer.mesh.watch.stuck = trainer.fail
    try:
        outcome = trainer.fit(passes, interrupt)
    except Exception as error:
        raised = trainer.mesh.watch.report(error)
        step, about = trainer.learner.step + 1, {"plan": trainer.mesh.plan, "dims": trainer.parts.dataset.dims}
        if raised is error and is_full(error):
            raised = full_memory_error(error, rank=trainer.mesh.rank, step=step, config=trainer.config, **about)
        trainer.fail(f"{raised}. {advice(trainer.config, **about)}" if was_full(raised) else raised)
        _report(trainer.folder, trainer.mesh)
        if raised is error:
            raise
        raise raised from error
    _report(trainer.folder, trainer.mesh)
    if outcome.reason == "interrupted":
        trainer.mesh.barrier()  # a launcher that sees one rank end with another status than 0 kills the others
    return outcome


def _watched(stack: ExitStack, folder: Path, learner: Learner, batches: Iterator[Batch]) -> Passes:
    """The passes of the run's steps, with a timeline and a watch for missing ranks where the config asks for them."""
    log, mesh = learner.config.log, learner.mesh
    warn = partial(print, "warning:", file=sys.stderr, flush=True)
    attempt, begins = Attempts(folder, warn), list[Callable[[], object]]()
    if log.timeline:
        timeline = Timeline(folder, rank=mesh.rank)
        begins.append(partial(attempt, timeline.path.name, timeline.step))
        stack.callback(attempt, timeline.path.name, timeline.close)
    passes = Passes(batches, learner.config.gradient.accumulate, begins=lambda: [begin() for begin in begins])
    stack.callback(passes.close)
    if _is_watched(mesh, learner.config):
        assert mesh.watch is not None
        watch = StallWatch(
            mesh,
            seconds=math.inf if log.stall_seconds is None else log.stall_seconds,
            at=lambda: (learner.step, passes.in_step_since),
            within=lambda: (learner.pass_number, progress.in_words()),
            warn=warn,
            hang_seconds=log.hang_seconds,
            end=mesh.watch.end,
        )
        begins.append(stack.enter_context(watch).begin_step)
        mesh.watch.evidence = watch.oddity
    return passes


def _is_watched(mesh: Mesh, config: RunConfig) -> bool:
    return mesh.size > 1 and not (config.log.stall_seconds is None and config.log.hang_seconds is None)


def _unwatched(mesh: Mesh, config: RunConfig) -> list[str]:
    return why_not_compared(mesh.group) if _is_watched(mesh, config) else []


def _report(folder: Path, mesh: Mesh) -> None:
    if mesh.is_main:
        from widefield.report import write_report  # imported late, as matplotlib takes a second

        attempt = Attempts(folder, partial(print, "warning:", file=sys.stderr, flush=True))
        path = attempt("report.html", lambda: write_report(folder))
        with ignoring_closed(sys.stdout):
            print(*([] if path is None else [f"report: {path}\n"]), sep="", end="", flush=True)


def _on_disk(folder: Path, work: Callable[[], T]) -> T:
    """Call `work`, which begins a run in its folder.  ValueError: the disk refuses it."""
    try:
        return work()
    except OSError as error:
        what = error.filename or folder
        raise ValueError(
            f"{in_words(what, error, folder)}, so the run cannot begin; free some space there, see to the disk, or name "
            "another folder with --run"
        ) from None


def _check_sizes(parts: Parts) -> None:
    """AgreedError: more copies of the model than training images."""
    samples, copies = len(parts.dataset.train), parts.mesh.copies
    if samples < copies:
        raise AgreedError(
            f"{copies} ranks are more than the {samples} training images; use at most mesh.replicate={samples}, or more images"
        )


def _say_how_it_goes_on(record: Record, learner: Learner, found: Found | None, changed: list[str], *, has_random: bool) -> None:
    """Say what is other than at the beginning of the run.  changed: lines of the config."""
    if (restarted := restart_in_words(os.environ)) is not None:
        record.warning(restarted)
    for line in changed:
        record.warning(f"the config has changed since this run began: {line}")
    if found is None:
        return
    moved = _moved_in_words(found, learner.mesh, has_random=has_random)
    record.say(f"resumed from {found.folder} at step {learner.step}{moved}")
    if learner.replicas is not None and learner.replicas.begin_anew:
        record.warning(
            f"{found.folder} is of others, so these {learner.mesh.plan.replicate} replicas begin from the mean of those and "
            "with an outer momentum of 0"
        )


def _begin(
    record: Record, parts: Parts, learner: Learner, reasons: list[str], prediction: Mapping[str, Any], *, last: int
) -> None:
    """Print what is about to run, with the reasons of chosen values, and write the record's start line."""
    mesh, steps, dataset = parts.mesh.of_all or parts.mesh, learner.steps, parts.dataset  # a server is one of all ranks
    whole = sharded_state.shapes(learner.model)
    parameters = sum(math.prod(whole[name]) for name, _ in learner.model.named_parameters())
    record.say(
        f"{parts.config.model.name}, {parameters:,} parameters, on {mesh.plan} ({mesh.device.type}); "
        f"{count_of(steps.samples, 'image')} to train on, {len(dataset.evaluate):,} to evaluate, "
        f"{count_of(len(dataset.classes), 'class', 'classes')}; "
        f"{count_of(last, 'step')} of {count_of(steps.batch, 'image')}, {steps.per_epoch:,} an epoch"
    )
    for reason in reasons:
        record.say(f"  {reason}")
    record.start(
        plan=to_text(mesh.plan),
        reasons=reasons,
        ranks=mesh.size,
        steps=last,
        samples_per_epoch=steps.samples,
        parameters=parameters,
        fallbacks=fallbacks(learner.model),
        objects=parts.given.described(dataset),
        memory_of="process" if mesh.device.type == "cpu" else "GPU",
        prediction=prediction if prediction.get("plan") == str(mesh.plan) else {},
    )
