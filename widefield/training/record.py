"""The record of a run, record.jsonl, and the views of it: summary.csv, TensorBoard, W&B and the terminal.

One JSON object per line, each with `kind` and `time` (unix seconds):

    start       versions, machine, ranks, plan (YAML text), reasons, resumed_from, steps, samples_per_epoch, parameters,
                fallbacks (operations that do not run as the plan asks: kind, module, operation, bytes, why, count);
                memory_of (process or GPU: what memory_bytes counts on rank 0);
                prediction, where the plan was chosen or predicted: memory of rank 0 and time of a step, with their parts;
                objects, where a Python program passed any: `model`, `data`, `task` with class, sizes and text
    step        step, epoch (epochs done), loss, lr, samples (over all ranks), seconds, data_seconds, memory_bytes (peak)
    evaluation  step, epoch, images, of, duplicates, skipped, loss, metrics, seconds, best (whether it was the best so far)
    checkpoint  step, name
    read        step, ranks: of each, since it began or was resumed, the bytes of images `asked` for and `decoded` in training,
                the samples it had, and the epochs; where files were read
    guard       action (stop, skip, roll_back, pass_over); of a refused step: found, batch_step (its number), value, loss,
                usual, score, samples, index and images, batch (where it is kept), and step unless the run goes back; of a
                return: left, to, checkpoint; of replicas that differ: found, after_step, part, ranks, replicas, names, is_named
    average     step, replicas (how many averaged their weights among themselves), distance (how far apart all were), bytes
                (that rank 0 gave to be added up)
    warning     text
    fault       rank, at (the step), fault, asked: what was injected on purpose, written by that rank before it came
    end         reason (complete, interrupted or failed), step, text

A number that is not finite is written as the text "nan", "inf" or "-inf", which strict JSON parsers and `float(...)` accept;
`read` returns it as a float.
"""

from __future__ import annotations

import csv
import io
import json
import math
import operator
import os
import platform
import socket
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal, TextIO

from widefield.config import LogConfig
from widefield.cores import usable_cores
from widefield.fallback import Fallback, by_size
from widefield.installed import version_of
from widefield.redaction import redacted
from widefield.refusal import printable
from widefield.training.disk import MOST_BYTES, Attempts, Lines, in_words, replace_text
from widefield.training.scalars import ScalarLog, check_log, scalar_logs
from widefield.training.terminal import GIB, Throughput, clock_text, memory_text, rate_text, terminal

Line = dict[str, Any]
FILE, SUMMARY = "record.jsonl", "summary.csv"
QUIET_SECONDS = 10.0
"""The longest time without a printed line."""


def read(folder: str | Path) -> list[Line]:
    """The lines of the record in a run folder, oldest first, without a last line that a kill left incomplete.

    ValueError: the folder has no record, or a line before the last is damaged.
    """
    path = Path(folder) / FILE
    if not path.is_file():
        raise ValueError(f"{folder} has no {FILE}, so it is no run folder; name the --run folder of a training run")
    rows = path.read_bytes().split(b"\n")
    lines: list[Line] = []
    for number, row in enumerate(rows, start=1):
        line = _decoded(row)
        if line is not None:
            lines.append(line)
        elif row.strip() and number < len(rows):
            raise ValueError(f"{path}, line {number} is not a JSON object: {row[:60]!r}; delete that line to read the others")
    return lines


def versions() -> dict[str, str]:
    """The versions of Python, torch, torchvision and widefield."""
    packages = {name: version_of(name) for name in ("torch", "torchvision", "widefield")}
    return {"python": platform.python_version(), **packages}


def machine() -> dict[str, Any]:
    """This machine: host, cpu, cores this process may use, memory_bytes, gpus."""
    import torch  # here, since a reader of records needs no torch

    gpus = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
    return {
        "host": socket.gethostname(),
        "cpu": _cpu_name(),
        "cores": usable_cores(),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "gpus": [f"{gpu.name}, {gpu.total_memory / GIB:.0f} GiB" for gpu in gpus],
    }


class Record:
    """The open record of a run, on rank 0 only.  Call it from one thread; `close` it, or use it in a `with`.

    Every line is written before the call returns, so that killing the process loses none.  Where the disk is full, lines wait
    in memory; views that cannot be written are left out, with a warning.
    """

    def __init__(self, folder: Path, log: LogConfig, resumed_step: int | None, stream: TextIO) -> None:
        self._folder, self._log = folder, log
        lines = _cut_back(folder, resumed_step)
        self._terminal = terminal(stream)
        self.said = time.monotonic()
        """When a line was printed last.  Other threads may read it."""
        self._pace = Throughput()
        self._steps, self._memory_of = 0, "process"
        self._warned_of_lines = False
        self.attempt = Attempts(folder, self.warning)
        """For files beside the record that the run can do without."""
        self._open_files(lines, resumed_step)

    def _open_files(self, lines: list[Line], resumed_step: int | None) -> None:
        """Go on behind `lines`, which the file has."""
        self._resumed_step = resumed_step
        self._evaluations = [line for line in lines if line.get("kind") == "evaluation"]
        self._lines = Lines(self._folder / FILE)
        self._summarize()
        self._scalars: list[tuple[str, ScalarLog]] = []
        for name, begin in scalar_logs(self._folder, self._log, resumed_step).items():
            begun = self.attempt(name, begin)
            self._scalars += [] if begun is None else [(name, begun)]

    def back_to(self, step: int) -> None:
        """Delete the lines of steps after `step`, since those steps run again."""
        self._log_to_scalars(lambda log: log.close())
        self._lines.close()
        self._open_files(_cut_back(self._folder, step), step)

    @classmethod
    def open(
        cls, folder: str | Path, *, log: LogConfig, resumed_step: int | None = None, stream: TextIO | None = None
    ) -> Record:
        """Create the record in `folder`, or continue the one there.

        resumed_step: the step whose checkpoint was loaded.  Lines of later steps are deleted, since those steps run again;
            None: lines of all steps are deleted.  Lines without a step, as starts and warnings, stay.
        stream: for printed lines, standard output by default; with a progress bar where it is a terminal.
        ValueError, with no file changed: see `check_log`, and `read` for a damaged record.
        """
        folder = Path(folder)
        check_log(log, folder)
        folder.mkdir(parents=True, exist_ok=True)
        return cls(folder, log, resumed_step, stream or sys.stdout)

    def start(
        self,
        *,
        plan: str,
        reasons: Sequence[str],
        ranks: int,
        steps: int,
        samples_per_epoch: int,
        parameters: int,
        fallbacks: Sequence[Fallback] = (),
        objects: Mapping[str, Any] | None = None,
        memory_of: Literal["process", "GPU"] = "process",
        prediction: Mapping[str, Any] | None = None,
    ) -> None:
        """Write the line `start`, before the first step.  steps: optimizer steps of the whole run.

        memory_of: what the figures of memory count: the resident pages of rank 0's process, or what torch allocated on its GPU.
        prediction: what the planner said of this plan, see planned.py.
        """
        self._steps, self._memory_of = steps, memory_of
        line = self._write(
            "start", versions=versions(), machine=machine(), ranks=ranks, plan=plan, reasons=list(reasons),
            resumed_from=self._resumed_step, steps=steps, samples_per_epoch=samples_per_epoch, parameters=parameters,
            fallbacks=[asdict(one) for one in by_size(fallbacks)], memory_of=memory_of,
            **({"objects": objects} if objects else {}), **({"prediction": dict(prediction)} if prediction else {}),
        )  # fmt: skip
        self._log_to_scalars(lambda log: log.describe(line))
        self._terminal.begin(self._resumed_step or 0, steps)

    def step(
        self,
        *,
        step: int,
        epoch: float,
        loss: float,
        lr: float,
        samples: int,
        seconds: float,
        data_seconds: float,
        memory_bytes: int,
        losses: Mapping[str, float] | None = None,
    ) -> None:
        """Write the line of one optimizer step; every `log.every` steps, and at the last, print it and log the scalars.

        seconds: the wall time of the step, data_seconds the part of it spent waiting for data.  samples: over all ranks.
        losses: of the modules that learn by turns, if any.
        """
        line = self._write(
            "step", step=step, epoch=epoch, loss=loss, lr=lr, samples=samples, seconds=seconds, data_seconds=data_seconds,
            memory_bytes=memory_bytes, **({"losses": dict(losses)} if losses else {}),
        )  # fmt: skip
        self._pace.add(samples, seconds, data_seconds)
        eta = clock_text(self._pace.seconds_left(self._steps - step))
        self._terminal.advance(step, loss, self._pace.images_per_second, eta)
        if step % self._log.every == 0 or step == self._steps or time.monotonic() - self.said >= QUIET_SECONDS:
            self._report_interval(line, eta)

    def evaluation(
        self,
        *,
        step: int,
        epoch: float,
        images: int,
        of: int,
        duplicates: int,
        skipped: int,
        loss: float,
        metrics: Mapping[str, float],
        seconds: float,
        text: str,
        best: bool = False,
    ) -> None:
        """Write the line of an evaluation and print its sentence `text`, as `98.61 % top-1 on 360/360 images`.

        best: whether it is the best so far.
        """
        line = self._write(
            "evaluation", step=step, epoch=epoch, images=images, of=of, duplicates=duplicates, skipped=skipped,
            loss=loss, metrics=dict(metrics), seconds=seconds, best=best,
        )  # fmt: skip
        self._evaluations.append(line)
        self._summarize()
        self._log_scalars(step, {"val/loss": loss, **{f"val/{name}": value for name, value in metrics.items()}})
        self._pace.add_evaluation(seconds)
        self.say(f"step {step}  ep {epoch:.2f}".removesuffix(".00") + f"  {text}  loss {loss:.4g}")

    def checkpoint(self, *, step: int, name: str) -> None:
        """Write that a checkpoint is complete."""
        self._write("checkpoint", step=step, name=name)

    def note(self, kind: Literal["average", "guard", "read"], **values: Any) -> None:
        """Write a line: replicas averaged (`Averaged`), the guard did something (guarding.py), ranks read (`Reads.to_tree`)."""
        self._write(kind, **values)

    def warning(self, text: str) -> None:
        """Write and print a warning."""
        self._write("warning", text=redacted(text))
        self.say(f"warning: {text}")

    def say(self, text: str) -> None:
        """Print lines that are not part of the record."""
        self.said = time.monotonic()
        self._terminal.say(printable(redacted(text)))

    def end(self, reason: Literal["complete", "interrupted", "failed"], *, step: int, text: str) -> None:
        """Write how the run ended, and print `text`."""
        self._write("end", reason=reason, step=step, text=redacted(text))
        self.say(text)

    @property
    def is_lost(self) -> bool:
        """Whether more than MOST_BYTES of lines wait in memory for a full disk; the run then stops."""
        return self._lines.waiting_bytes > MOST_BYTES

    def close(self) -> None:
        """Close files and terminal; a second call does nothing."""
        if not self._lines.is_open:
            return
        self._log_to_scalars(lambda log: log.close())
        self._lines.close()
        self._terminal.close()

    @property
    def missing(self) -> str | None:
        """A sentence on what the closed record lacks; None where it is complete."""
        if self._lines.error is None:
            return None
        what = f"the last {self._lines.waiting_bytes:,} bytes of {self._lines.path}"
        return f"{in_words(what, self._lines.error, self._folder)}. These lines are lost; free some space there"

    def __enter__(self) -> Record:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _write(self, kind: str, **values: Any) -> Line:
        line = {"kind": kind, "time": time.time(), **values}
        self._lines.add(_encoded(line))  # an os.write: a kill -9 of this process does not lose it
        if self._lines.error is not None and not self._warned_of_lines:
            self._warned_of_lines = True
            problem = in_words(self._lines.path, self._lines.error, self._folder)
            self.warning(f"{problem}. Its lines wait in memory until they can; free some space there, or see to the disk")
        return line

    def _summarize(self) -> None:
        if self._evaluations or (self._folder / SUMMARY).exists():
            self.attempt(SUMMARY, lambda: replace_text(self._folder / SUMMARY, _summary(self._evaluations)))

    def _report_interval(self, line: Line, eta: str) -> None:
        """Print and log the averages since the last printed line.  TensorBoard's five scalars take 0.13 ms."""
        images_per_second, data_share = self._pace.interval()
        memory_gib = line["memory_bytes"] / GIB
        self._log_scalars(line["step"], {
            "train/loss": line["loss"], "train/lr": line["lr"], "perf/img_s": images_per_second,
            "perf/data_wait_frac": data_share, "perf/mem_peak_gib": memory_gib,
            **{f"train/loss of the {name}": loss for name, loss in line.get("losses", {}).items()},
        })  # fmt: skip
        each = "".join(f"{name} {loss:.4g}  " for name, loss in line.get("losses", {}).items())
        self.say(
            f"step {line['step']}/{self._steps}  ep {line['epoch']:.2f}  loss {line['loss']:.4g}  {each}"
            f"{rate_text(images_per_second)} img/s  data {100 * data_share:.1f} %  "
            f"{self._memory_of} {memory_text(line['memory_bytes'])}  lr {line['lr']:.4g}  eta {eta}"
        )

    def _log_scalars(self, step: int, values: Mapping[str, float]) -> None:
        self._log_to_scalars(lambda log: log.scalars(step, values))

    def _log_to_scalars(self, write: Callable[[ScalarLog], None]) -> None:
        """Call `write` with each scalar log; one that fails is dropped."""
        for name, log in list(self._scalars):
            if self.attempt(name, lambda log=log: (write(log), True)) is None:  # type: ignore[misc]
                self._scalars.remove((name, log))


# ---------------------------------------------------------------------------------------------- lines


def _encoded(line: Line) -> str:
    return json.dumps(_finite(line), allow_nan=False) + "\n"


def _finite(value: Any) -> Any:
    """`value` with numbers that are not finite as text."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    return [_finite(item) for item in value] if isinstance(value, list | tuple) else value


def _decoded(row: bytes) -> Line | None:
    """The line in a row of the file; None where it is no JSON object."""
    try:
        line = json.loads(row)
    except (ValueError, RecursionError):
        return None
    if not isinstance(line, dict):
        return None
    return _numbers_back(line) if line.get("kind") in ("step", "evaluation") else line  # these two have only numbers


def _numbers_back(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _numbers_back(item) for key, item in value.items()}
    return float(value) if value in ("nan", "inf", "-inf") else value


def _cut_back(folder: Path, resumed_step: int | None) -> list[Line]:
    """Delete the lines of steps after `resumed_step`, and an incomplete last line; returns the lines that stay."""
    if not (folder / FILE).exists():
        return []
    last, lines = -1 if resumed_step is None else resumed_step, read(folder)
    try:
        lines = [line for line in lines if operator.index(line.get("step", -1)) <= last]
        text = "".join(map(_encoded, lines))
        _summary([line for line in lines if line.get("kind") == "evaluation"])
    except (LookupError, TypeError, AttributeError, ValueError) as error:
        raise ValueError(
            f"{folder / FILE} holds values that widefield does not write ({type(error).__name__}: {error}); take it from where "
            "it was written, or begin a run of its own with another --run folder"
        ) from None
    replace_text(folder / FILE, text)
    return lines


def _summary(evaluations: Sequence[Line]) -> str:
    """The evaluations as CSV, metrics after the loss."""
    metrics = list(dict.fromkeys(name for line in evaluations for name in line["metrics"]))
    columns = ["step", "epoch", "loss", *metrics, "images", "of", "duplicates", "skipped", "seconds"]
    text = io.StringIO()
    writer = csv.DictWriter(text, columns, extrasaction="ignore", lineterminator="\n")
    writer.writeheader()
    writer.writerows({**line, **line["metrics"]} for line in evaluations)
    return text.getvalue()


def _cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    rows = info.read_text(errors="replace").splitlines() if info.is_file() else []
    names = [row.partition(":")[2].strip() for row in rows if row.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()
