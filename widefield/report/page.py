"""The report of a run from its folder: record.jsonl, evaluation.json, config.yaml, events.jsonl, mistakes/, samples/.

Every text on the page is made here; page.html only arranges it.  Equal files give equal bytes.
"""

from __future__ import annotations

import json
import math
import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import yaml
from markupsafe import Markup

from widefield import plans
from widefield.config.strategies import AXES
from widefield.own_code import is_object
from widefield.quantity import bytes_text, count_of
from widefield.report import bytes_read, grids, mistakes, plots, run_whole, samples, stages, workers
from widefield.report.class_scores import class_scores
from widefield.report.evaluations import best_of, metric_name, metric_text, table_of_evaluations
from widefield.report.filling import from_files, render
from widefield.report.guard_events import guard_rows
from widefield.report.history import history
from widefield.report.precision import precision_curve
from widefield.report.predicted import predicted
from widefield.training.disk import replace_text
from widefield.training.record import Line, read
from widefield.training.run_folder import check_own
from widefield.training.terminal import memory_text, rate_text

DATA_BOUND_SHARE = 0.10  # below a tenth, no change to the loader can make the run more than 1.11 times as fast


def write_report(folder: str | Path) -> Path:
    """Write `report.html` into a run folder and return its path.  The page is self-contained: it loads nothing.

    A run that is unfinished, was interrupted or never evaluated has a page too, which says so.
    ValueError: the folder has no record, a file in it is damaged, or a link leads out of it.
    """
    folder = Path(folder)
    if folder.is_dir():
        check_own(folder)
    path = folder / "report.html"
    run = _RunPage(folder, read(folder), _evaluation(folder), _text(folder / "config.yaml"))
    replace_text(path, from_files(lambda: _page(run), folder))
    return path


@dataclass(frozen=True)
class _RunPage:
    """The contents of a run folder.  evaluation: evaluation.json; None before the first evaluation."""

    folder: Path
    lines: list[Line]
    evaluation: dict[str, Any] | None
    config: str

    def of(self, kind: str) -> list[Line]:
        return [line for line in self.lines if line.get("kind") == kind]

    @cached_property
    def start(self) -> Line:
        return (self.of("start") or [{}])[-1]

    @cached_property
    def end(self) -> Line | None:
        """How the last attempt ended; None while it runs, or where it was killed."""
        ends = [line for line in self.lines if line.get("kind") in ("start", "end")]
        return ends[-1] if ends and ends[-1]["kind"] == "end" else None

    @cached_property
    def steps(self) -> list[Line]:
        return self.of("step")

    @cached_property
    def usual_steps(self) -> list[Line]:
        """The steps without the first one of each attempt, which includes warm-up; all steps where that leaves none."""
        before = [{}, *self.lines]
        warm = [line for line, last in zip(self.lines, before, strict=False)
                if line.get("kind") == "step" and last.get("kind") not in (None, "start")]  # fmt: skip
        return warm or self.steps

    @property
    def last_step(self) -> int:
        return self.steps[-1]["step"] if self.steps else 0


def _page(run: _RunPage) -> str:
    return render(
        "page.html",
        title=_title(run.config),
        state=run.end["reason"] if run.end else "open",
        verdict=_verdict(run),
        cards=[card for card in _cards(run) if card],
        bound=_bound(run),
        curves=_curves(run),
        evaluations=table_of_evaluations(run.of("evaluation")),
        plan=_plan(run.start),
        stages=stages.stages(run.start),
        workers=workers.workers(run.folder, run.of("updates")),
        predicted=predicted(run.start, run.usual_steps),
        reasons=run.start.get("reasons", []),
        fallbacks=run_whole.tables(run.start),
        machine=_machine(run.start),
        history=history(run.lines),
        guard=guard_rows(run.lines),
        reads=bytes_read.bytes_of_ranks(run.lines),
        confusion=mistakes.confusion(run.evaluation),
        scores=class_scores(run.evaluation),
        mistakes=mistakes.pictures(run.folder, run.evaluation),
        samples=samples.samples(run.folder, run.evaluation, _space(run.start)),
        grids=grids.grids(run.folder, run.evaluation, run.of("evaluation")),
        shown=(run.evaluation or {}).get("shown"),
        legend=samples.legend(run.evaluation),
        labels=(run.evaluation or {}).get("labels"),
        warnings=_warnings(run),
        skipped=_skipped(run),
        config=run.config,
        version=run.start.get("versions", {}).get("widefield", ""),
    )


# ---------------------------------------------------------------------------------------------- reading


def _text(path: Path) -> str:
    return path.read_text(encoding="utf-8", errors="replace") if path.is_file() else ""


def _evaluation(folder: Path) -> dict[str, Any] | None:
    path = folder / "evaluation.json"
    if not path.is_file():
        return None
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
        numbers = {"loss": float(values["loss"]), "metrics": {key: float(value) for key, value in values["metrics"].items()}}
        return {**values, **numbers}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(
            f"{path} is damaged ({type(error).__name__}: {error}); delete it, then run `widefield evaluate {folder}`"
        ) from None


def _title(config: str) -> str:
    """`resnet on digits`, from the config."""
    try:
        values = yaml.safe_load(config)
        return " on ".join(_short(str(values[section]["name"])) for section in ("model", "data"))
    except (yaml.YAMLError, TypeError, LookupError, RecursionError):
        return "Training run"


def _short(name: str) -> str:
    """Of an object that a Python program passed, which a config has as `<package.module.Class>`, the class alone."""
    return name[1:-1].split(".")[-1] if is_object(name) else name


# ---------------------------------------------------------------------------------------------- words


def _duration(seconds: float) -> str:
    """`4.2 s`, `1 min 12 s`, `2 h 03 min`."""
    if round(seconds, 1) < 60:
        return f"{seconds:.1f} s"
    minutes, second = divmod(round(seconds), 60)
    return f"{minutes} min {second:02d} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60:02d} min"


def _epochs(epoch: float) -> str:
    text = f"{epoch:.2f}".rstrip("0").rstrip(".")
    return f"{text} {'epoch' if text == '1' else 'epochs'}"


def _verdict(run: _RunPage) -> str:
    """How the run ended, in a sentence or two."""
    total = run.start.get("steps", run.last_step)
    at = f"at step {run.last_step:,} of {total:,}"
    done = f"{_epochs(run.steps[-1]['epoch'])} ({count_of(run.last_step, 'step')})" if run.steps else "no step"
    ends = {
        "complete": f"Trained {done} on {count_of(run.start.get('ranks', 1), 'rank')} in {_duration(_wall_seconds(run))}.",
        "interrupted": f"Interrupted {at}. The same command again goes on from the newest checkpoint.",
        "failed": f"Failed {at}: {run.end['text'].rstrip('.') if run.end else ''}.",
        "open": f"Still running, or killed: the record ends {at}. The same command again goes on from the newest checkpoint.",
    }
    text = ends[run.end["reason"] if run.end else "open"]
    if run.end and run.end["reason"] == "complete" and run.last_step < total:
        text += f" It ended early, {at}, for want of a better evaluation."
    return f"{text} {_reached(run)}"


def _reached(run: _RunPage) -> str:
    if run.evaluation is None:
        return "No evaluation was made."
    late = run.evaluation["step"] != run.last_step
    where = f", measured at step {run.evaluation['step']:,}" if late else ""
    evaluations = run.of("evaluation")
    best = best_of(evaluations)
    text = f"It reached {run.evaluation['sentence']}{where}."
    if best is not None and evaluations[best]["step"] != run.evaluation["step"]:
        text += f" The best evaluation was that of step {evaluations[best]['step']:,}."
    return text


# ---------------------------------------------------------------------------------------------- figures


def _cards(run: _RunPage) -> list[dict[str, str]]:
    """Headline figures: value, label and detail."""
    start, steps = run.start, run.steps
    cards = [_metric_card(run), _loss_card(run)]
    if steps:
        total = start.get("steps", run.last_step)
        share = _data_share(run.usual_steps)
        cards += [
            _card(_epochs(steps[-1]["epoch"]), "trained", f"step {run.last_step:,} of {total:,}"),
            _card(_duration(_wall_seconds(run)), "wall time", _time_parts(run)),
            _card(_median_rate(run), "throughput", "median step, all ranks together"),
            _card(f"{100 * share:.1f} %", "waiting for data", _kind(share)),
            _card(memory_text(max(line["memory_bytes"] for line in steps)), *_memory_of(start)),
        ]
    if start:
        axes = ", ".join(f"{axis} {size}" for axis, size, strategy in _plan(start)["axes"] if strategy)
        cards.append(_card(f"{start['ranks']:,}", "rank" if start["ranks"] == 1 else "ranks", axes or "one device"))
    return cards


def _memory_of(start: Line) -> tuple[str, str]:
    """What the figure of memory counts: label and detail."""
    if start.get("memory_of") == "GPU":
        return "peak memory of the GPU", "allocated by torch, on rank 0; highest of any step"
    return "peak memory of the process", "of rank 0, with libraries and mapped files; highest of any step"


def _card(value: str, label: str, detail: str) -> dict[str, str]:
    return {"value": value, "label": label, "detail": detail}


def _metric_card(run: _RunPage) -> dict[str, str]:
    if run.evaluation is None or not run.evaluation["metrics"]:
        return _card("–", "no evaluation yet", "one is due after evaluate.every")
    evaluation, matrix = run.evaluation, run.evaluation.get("confusion") or []
    name, value = next(iter(evaluation["metrics"].items()))
    unit = " pixels" if evaluation.get("unit") == "pixels" else ""
    right = f"{sum(row[i] for i, row in enumerate(matrix)):,} of {sum(map(sum, matrix)):,}{unit} right; " if matrix else ""
    seen = f"{evaluation['images']:,}/{evaluation['of']:,} images"
    seen += f", {count_of(evaluation['duplicates'], 'duplicate')}" if evaluation["duplicates"] else ""
    return _card(metric_text(name, value), metric_name(name), right + seen)


def _loss_card(run: _RunPage) -> dict[str, str]:
    last = f"training loss {run.steps[-1]['loss']:.4g}" if run.steps else ""
    if run.evaluation is not None:
        return _card(f"{run.evaluation['loss']:.4g}", "evaluation loss", last)
    return _card(last.removeprefix("training loss "), "training loss", "at the last step") if last else {}


def _wall_seconds(run: _RunPage) -> float:
    """The sum over attempts of the time from the start to the last line."""
    seconds, began, last = 0.0, None, None
    for line in run.lines:
        if line.get("kind") == "start":
            seconds += last - began if began is not None and last is not None else 0.0
            began = line["time"]
        last = line["time"]
    return seconds + (last - began if began is not None and last is not None else 0.0)


def _time_parts(run: _RunPage) -> str:
    training = sum(line["seconds"] for line in run.steps)
    evaluation = sum(line["seconds"] for line in run.of("evaluation"))
    return f"steps {_duration(training)}, evaluation {_duration(evaluation)}"


def _median_rate(run: _RunPage) -> str:
    return f"{rate_text(statistics.median(line['samples'] / max(line['seconds'], 1e-9) for line in run.usual_steps))} img/s"


def _data_share(steps: Sequence[Line]) -> float:
    return sum(line["data_seconds"] for line in steps) / max(sum(line["seconds"] for line in steps), 1e-9)


def _kind(share: float) -> str:
    return "data-bound" if share >= DATA_BOUND_SHARE else "compute-bound"


def _bound(run: _RunPage) -> str:
    if not run.steps:
        return "No step was recorded."
    share = _data_share(run.usual_steps)
    advice = ""
    if share >= DATA_BOUND_SHARE:
        advice = "; raise data.workers, store smaller images, or move work from data.read to data.augment"
    return f"{_kind(share)}: {100 * share:.1f} % of the time of steps went into waiting for data{advice}."


def _curves(run: _RunPage) -> list[dict[str, str | Markup]]:
    """Title, SVG and caption of every picture the record has points for."""
    steps, evaluations = run.steps, run.of("evaluation")
    curves = []
    if steps:
        x = [line["step"] for line in steps]
        curves.append(_curve("Training loss", *plots.loss_curve(x, [line["loss"] for line in steps])))
        for name in dict.fromkeys(name for line in steps for name in line.get("losses", {})):
            turns = [(line["step"], line["losses"][name]) for line in steps if name in line.get("losses", {})]
            curves.append(_curve(f"Training loss of the {name}", *plots.loss_curve(*map(list, zip(*turns, strict=True)))))
    if evaluations:
        metrics = {metric_name(name): [line["metrics"].get(name, float("nan")) for line in evaluations]
                   for name in evaluations[-1]["metrics"]}  # fmt: skip
        epochs, losses = [line["epoch"] for line in evaluations], [line["loss"] for line in evaluations]
        best = best_of(evaluations)
        caption = f"{count_of(len(evaluations), 'evaluation')}; metrics above, loss below."
        if best is not None and len(evaluations) > 1:
            caption += f" The dashed line marks the best, at epoch {epochs[best]:.4g} (step {evaluations[best]['step']:,})."
        curves.append(_curve("Evaluation", plots.evaluation_curve(epochs, metrics, losses, best), caption))
    if (precision := precision_curve(run.evaluation)) is not None:
        curves.append(_curve("Precision by recall", *precision))
    if steps:
        split = plots.time_curve(x, [line["seconds"] for line in steps], [line["data_seconds"] for line in steps])
        curves.append(_curve("Time per step", split[0], f"Median {_median_rate(run)}." + split[1]))
        rates = [line["lr"] for line in steps]
        caption = f"Highest {max(rates):.4g}, last {rates[-1]:.4g}."
        curves.append(_curve("Learning rate", plots.rate_curve(x, rates), caption))
    if averages := run.of("average"):
        sent = sum(line["bytes"] for line in averages)
        caption = (
            f"The root of the mean of |weights - mean|² over replicas, before each of {count_of(len(averages), 'average')}; "
            f"each rank sent {bytes_text(sent)} of weights in all."
        )
        of_averages = [line["step"] for line in averages], [line["distance"] for line in averages]
        curves.append(_curve("Distance between replicas", plots.distance_curve(*of_averages), caption))
    return curves


def _curve(title: str, svg: str, caption: str) -> dict[str, str | Markup]:
    return {"title": title, "svg": Markup(svg), "caption": caption}  # matplotlib escapes the names that it draws


# ---------------------------------------------------------------------------------------------- plan and machine


def _plan(start: Line) -> dict[str, Any]:
    """Axes as (name, size, strategy if it is used), and the text; the text alone where this version cannot read it."""
    text = start.get("plan", "")
    try:
        plan = plans.from_text(text)
    except ValueError:
        return {"axes": [], "text": text}
    names = {axis: name for name, axis in AXES.items()} | {"replicate": plan.data_strategy}
    sizes = {axis: str(size) for axis, size in plan.axes.items()} | {"space": " x ".join(map(str, plan.space)) or "1"}
    axes = [(axis, sizes[axis], names[axis] if size > 1 else "") for axis, size in plan.axes.items()]
    stream = ("stream", str(plan.stream), "tile after tile") if plan.stream else ("stream", "–", "")
    return {"axes": [*axes, stream], "text": text}


def _space(start: Line) -> list[int]:
    """Tiles along each dim of an image; none where the plan has none or cannot be read."""
    try:
        space = plans.from_text(start.get("plan", "")).space
    except ValueError:
        return []
    return space if math.prod(space) <= 10**6 else []  # a forged record could ask for millions of lines


def _machine(start: Line) -> list[tuple[str, str]]:
    if not start:
        return []
    machine = start["machine"]
    gpus = [f"{count} × {name}" for name, count in Counter(machine["gpus"]).items()]
    return [
        ("host", machine["host"]),
        ("processor", f"{machine['cpu']}, {count_of(machine['cores'], 'core')}"),
        ("memory", memory_text(machine["memory_bytes"])),
        ("GPUs", ", ".join(gpus) or "none"),
        ("parameters", f"{start['parameters']:,}"),
        ("samples per epoch", f"{start['samples_per_epoch']:,}"),
        *start["versions"].items(),
    ]


# ---------------------------------------------------------------------------------------------- warnings


def _warnings(run: _RunPage) -> list[str]:
    """Texts of warnings, each once, with how often it came."""
    texts = Counter(line["text"] for line in run.of("warning"))
    return [text if count == 1 else f"{text} ({count} times)" for text, count in texts.items()]


def _skipped(run: _RunPage) -> list[str]:
    """Paths of the images that the newest evaluation could not read."""
    return list((run.evaluation or {}).get("skipped") or [])
