"""What a run writes down survives a kill, reads back equal, and is cut back on resume."""

from __future__ import annotations

import csv
import io
import json
import math
import re
import subprocess
import sys
import warnings
from pathlib import Path

import pytest

from widefield.config import LogConfig
from widefield.fallback import Fallback
from widefield.training.record import Record, read
from widefield.training.scalars import check_log
from widefield.training.terminal import Throughput, clock_text, memory_text, rate_text

QUIET = LogConfig(tensorboard=False)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def started(folder: Path, log: LogConfig = QUIET, *, resumed_step: int | None = None, stream=None, steps: int = 6) -> Record:
    record = Record.open(folder, log=log, resumed_step=resumed_step, stream=stream or io.StringIO())
    record.start(plan="replicate: 2", reasons=["lr 0.1: r"], ranks=2, steps=steps, samples_per_epoch=128, parameters=77000)
    return record


def test_what_runs_whole_stands_in_the_record_the_largest_first(tmp_path):
    told = {"plan": "", "reasons": [], "ranks": 1, "steps": 1, "samples_per_epoch": 1, "parameters": 1}
    small, large = Fallback("drawn whole", "drop", "bernoulli_", 5), Fallback("run whole", "up.attention", "bmm", 7, "why", 2)
    with Record.open(tmp_path, log=QUIET, stream=io.StringIO()) as record:
        record.start(**told, fallbacks=[small, small, large])
    first, second = read(tmp_path)[0]["fallbacks"]
    assert first == {"kind": "drawn whole", "module": "drop", "operation": "bernoulli_", "bytes": 10, "why": "", "count": 2}
    assert second == {"kind": "run whole", "module": "up.attention", "operation": "bmm", "bytes": 7, "why": "why", "count": 2}


def take(record: Record, step: int, *, loss: float = 0.1, seconds: float = 0.01, data_seconds: float = 0.0) -> None:
    record.step(
        step=step, epoch=step / 2, loss=loss, lr=0.0873, samples=64, seconds=seconds, data_seconds=data_seconds,
        memory_bytes=3 * 2**29,
    )  # fmt: skip


def evaluate(record: Record, step: int, *, top1: float = 98.61, loss: float = 0.0612) -> None:
    record.evaluation(
        step=step, epoch=step / 2, images=360, of=360, duplicates=0, skipped=0, loss=loss, metrics={"top1": top1},
        seconds=0.5, text=f"{top1} % top-1 on 360/360 images",
    )  # fmt: skip


def run(folder: Path, steps: range, *, resumed_step: int | None = None, log: LogConfig = QUIET) -> None:
    """Steps, an evaluation after every second one."""
    with started(folder, log, resumed_step=resumed_step) as record:
        for step in steps:
            take(record, step, loss=1 / step)
            if step % 2 == 0:
                evaluate(record, step)


def losses(folder: Path) -> list[tuple[int, float]]:
    return [(line["step"], line["loss"]) for line in read(folder) if line["kind"] == "step"]


# ---------------------------------------------------------------------------------------------- lines


def test_every_kind_of_line_reads_back_as_written(tmp_path):
    with started(tmp_path) as record:
        take(record, 1, loss=1 / 3)
        evaluate(record, 1)
        record.checkpoint(step=1, name="step-1")
        record.warning("a.png is empty")
        record.end("interrupted", step=1, text="saved at step 1")
    start, step, evaluation, checkpoint, warning, end = read(tmp_path)
    assert start["kind"] == "start" and start["resumed_from"] is None and start["steps"] == 6
    assert set(start["versions"]) == {"python", "torch", "torchvision", "widefield"}
    assert set(start["machine"]) == {"host", "cpu", "cores", "memory_bytes", "gpus"} and start["machine"]["cores"] >= 1
    assert step["loss"] == 1 / 3 and step["samples"] == 64 and step["memory_bytes"] == 3 * 2**29
    assert evaluation["metrics"] == {"top1": 98.61} and evaluation["images"] == evaluation["of"] == 360
    assert (checkpoint["step"], checkpoint["name"]) == (1, "step-1")
    assert warning["text"] == "a.png is empty"
    assert (end["reason"], end["step"], end["text"]) == ("interrupted", 1, "saved at step 1")


@pytest.mark.parametrize("loss", [math.nan, math.inf, -math.inf])
def test_a_loss_that_is_not_finite_stays_readable_for_strict_parsers_and_comes_back(tmp_path, loss):
    with started(tmp_path) as record:
        take(record, 1, loss=loss)
        evaluate(record, 1, top1=loss)

    def refuse(token):
        raise AssertionError(f"{token} is no JSON")

    for row in (tmp_path / "record.jsonl").read_text().splitlines():
        json.loads(row, parse_constant=refuse)
    step, evaluation = read(tmp_path)[1:]
    assert repr(step["loss"]) == repr(evaluation["metrics"]["top1"]) == repr(loss)


def test_a_warning_that_says_nan_stays_text(tmp_path):
    with started(tmp_path) as record:
        record.warning("nan")
    assert read(tmp_path)[-1]["text"] == "nan"


def test_a_path_that_is_no_unicode_is_recorded_and_printed(tmp_path):
    name = b"caf\xe9.png".decode("utf-8", "surrogateescape")
    stream = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    with started(tmp_path, stream=stream) as record:
        record.warning(name + "é")
    assert read(tmp_path)[-1]["text"] == name + "é"
    assert stream.buffer.getvalue() == b"warning: caf\\udce9.png\\xe9\n"


def test_a_kill_loses_no_written_line(tmp_path):
    program = (
        "import os, signal, sys, io\n"
        "from widefield.config import LogConfig\n"
        "from widefield.training.record import Record\n"
        "record = Record.open(sys.argv[1], log=LogConfig(tensorboard=False), stream=io.StringIO())\n"
        "for step in range(1, 51):\n"
        "    record.step(step=step, epoch=0.1, loss=0.5, lr=0.1, samples=8, seconds=0.1, data_seconds=0.0, memory_bytes=1)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    done = subprocess.run([sys.executable, "-c", program, str(tmp_path)], check=False)
    assert done.returncode == -9
    assert [step for step, _ in losses(tmp_path)] == list(range(1, 51))


def test_a_last_line_torn_by_a_kill_is_left_out_and_the_next_run_writes_after_it(tmp_path):
    run(tmp_path, range(1, 3))
    path = tmp_path / "record.jsonl"
    whole = read(tmp_path)
    path.write_bytes(path.read_bytes() + b'{"kind": "step", "step": 2, "lo')
    assert read(tmp_path) == whole
    run(tmp_path, range(3, 4), resumed_step=2)
    assert [step for step, _ in losses(tmp_path)] == [1, 2, 3]


def test_a_damaged_line_inside_is_refused_by_number(tmp_path):
    run(tmp_path, range(1, 3))
    path = tmp_path / "record.jsonl"
    rows = path.read_text().splitlines()
    path.write_text("\n".join([rows[0], "{oops", *rows[1:]]) + "\n")
    with pytest.raises(ValueError, match=r"record\.jsonl, line 2 is not a JSON object: b'{oops'; delete that line"):
        read(tmp_path)
    with pytest.raises(ValueError, match="line 2"):
        Record.open(tmp_path, log=QUIET, resumed_step=1)


def test_a_folder_without_a_record_says_what_to_name(tmp_path):
    with pytest.raises(ValueError, match=f"{re.escape(str(tmp_path))} has no record.jsonl.*name the --run folder"):
        read(tmp_path)


# ---------------------------------------------------------------------------------------------- resume


def test_a_resumed_record_has_each_step_and_evaluation_once(tmp_path):
    run(tmp_path / "whole", range(1, 7))
    run(tmp_path / "resumed", range(1, 6))
    run(tmp_path / "resumed", range(4, 7), resumed_step=3)
    assert losses(tmp_path / "resumed") == losses(tmp_path / "whole")
    assert (tmp_path / "resumed/summary.csv").read_text() == (tmp_path / "whole/summary.csv").read_text()
    starts = [line["resumed_from"] for line in read(tmp_path / "resumed") if line["kind"] == "start"]
    assert starts == [None, 3]


def test_what_later_steps_wrote_is_dropped_and_warnings_stay(tmp_path):
    with started(tmp_path) as record:
        for step in (1, 2):
            take(record, step)
            record.checkpoint(step=step, name=f"step-{step}")
        evaluate(record, 2)
        record.warning("checkpoint step-2 is damaged")
        record.end("failed", step=2, text="no space left")
    Record.open(tmp_path, log=QUIET, resumed_step=1, stream=io.StringIO()).close()
    assert [(line["kind"], line.get("step")) for line in read(tmp_path)] == [
        ("start", None), ("step", 1), ("checkpoint", 1), ("warning", None),
    ]  # fmt: skip
    assert len((tmp_path / "summary.csv").read_text().splitlines()) == 1  # the header


def test_beginning_again_without_a_checkpoint_drops_every_step(tmp_path):
    with started(tmp_path) as record:
        evaluate(record, 0)
        take(record, 1)
    Record.open(tmp_path, log=QUIET, stream=io.StringIO()).close()
    assert [line["kind"] for line in read(tmp_path)] == ["start"]


def test_a_step_that_is_no_whole_number_is_refused_and_the_record_stays(tmp_path):
    """JSON's -Infinity is below every step, would be written as text, and could then be compared with none."""
    run(tmp_path, range(1, 3))
    path = tmp_path / "record.jsonl"
    path.write_text(path.read_text() + '{"kind": "start", "step": -Infinity}\n')
    before = path.read_bytes()
    with pytest.raises(ValueError, match="holds values that widefield does not write"):
        Record.open(tmp_path, log=QUIET, resumed_step=2)
    assert path.read_bytes() == before


def test_a_kill_while_the_record_is_cut_back_leaves_it_as_it_was(tmp_path, monkeypatch):
    run(tmp_path, range(1, 5))
    before = (tmp_path / "record.jsonl").read_bytes()

    def killed(self, target):
        raise KeyboardInterrupt

    monkeypatch.setattr(Path, "replace", killed)
    with pytest.raises(KeyboardInterrupt):
        Record.open(tmp_path, log=QUIET, resumed_step=2)
    assert (tmp_path / "record.jsonl").read_bytes() == before


def test_the_summary_has_a_row_per_evaluation(tmp_path):
    run(tmp_path, range(1, 5))
    rows = list(csv.DictReader((tmp_path / "summary.csv").read_text().splitlines()))
    assert [row["step"] for row in rows] == ["2", "4"]
    assert rows[0] == {
        "step": "2", "epoch": "1.0", "loss": "0.0612", "top1": "98.61", "images": "360", "of": "360", "duplicates": "0",
        "skipped": "0", "seconds": "0.5",
    }  # fmt: skip


# ---------------------------------------------------------------------------------------------- people


def test_a_step_line_says_what_matters_once_per_interval(tmp_path):
    stream = io.StringIO()
    with started(tmp_path, LogConfig(every=2, tensorboard=False), stream=stream, steps=1205) as record:
        for step in range(1, 5):
            take(record, step, loss=0.12344, data_seconds=0.00021)
        evaluate(record, 4)
        for step in (5, 6):
            take(record, step, loss=0.12344, data_seconds=0.00021)
        record.end("complete", step=6, text="done")
    assert stream.getvalue().splitlines() == [
        "step 2/1205  ep 1.00  loss 0.1234  6,400 img/s  data 2.1 %  process 1.5 GiB  lr 0.0873  eta 0:12",
        "step 4/1205  ep 2.00  loss 0.1234  6,400 img/s  data 2.1 %  process 1.5 GiB  lr 0.0873  eta 0:12",
        "step 4  ep 2  98.61 % top-1 on 360/360 images  loss 0.0612",
        "step 6/1205  ep 3.00  loss 0.1234  6,400 img/s  data 2.1 %  process 1.5 GiB  lr 0.0873  eta 2:12",
        "done",
    ]


def test_the_last_step_prints_a_line_wherever_it_falls(tmp_path):
    stream = io.StringIO()
    with started(tmp_path, stream=stream, steps=3) as record:
        for step in (1, 2, 3):
            take(record, step)
    assert [line.split("  ")[0] for line in stream.getvalue().splitlines()] == ["step 3/3"]


def test_a_slow_first_step_fools_neither_throughput_nor_time_left():
    pace = Throughput()
    pace.add(64, 30.0, 20.0)
    assert pace.seconds_left(10) is None
    pace.add(64, 0.5, 0.125)
    pace.add(64, 0.5, 0.125)
    assert pace.seconds_left(10) == 5.0
    assert pace.interval() == (128.0, 0.25)


def test_a_slow_first_step_counts_where_there_is_no_other():
    pace = Throughput()
    pace.add(64, 2.0, 1.0)
    assert pace.interval() == (32.0, 0.5)
    pace.add(64, 0.5, 0.0)
    assert pace.interval() == (128.0, 0.0)


def test_time_left_includes_evaluations_to_come():
    pace = Throughput()
    for _ in range(3):
        pace.add(64, 1.0, 0.0)
    pace.add_evaluation(2.0)
    assert pace.seconds_left(10) == 20.0  # 2 steps and 1 evaluation took 4 s


def test_a_file_gets_no_control_characters(tmp_path):
    stream = io.StringIO()
    with started(tmp_path, LogConfig(every=1, tensorboard=False), stream=stream) as record:
        take(record, 1)
        record.warning("\x1b[31mred\r.png")
    assert all(char.isprintable() or char == "\n" for char in stream.getvalue())
    assert "warning: \\x1b[31mred\\r.png\n" in stream.getvalue()


def test_a_terminal_gets_a_bar_with_the_lines_above_it(tmp_path, monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "120")
    stream = Terminal()
    with started(tmp_path, LogConfig(every=2, tensorboard=False), stream=stream) as record:
        for step in range(1, 7):
            take(record, step)
        record.say("[bold]as it is[/bold]")
    text = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", stream.getvalue())
    assert "[bold]as it is[/bold]" in text
    assert "step 2/6  ep 1.00  loss 0.1" in text
    assert re.search(r"step 6/6 ━+ loss 0.1  6,400 img/s  eta 0:00", text.splitlines()[-1])


def test_a_dumb_terminal_gets_plain_lines(tmp_path, monkeypatch):
    monkeypatch.setenv("TERM", "dumb")
    stream = Terminal()
    with started(tmp_path, LogConfig(every=1, tensorboard=False), stream=stream) as record:
        take(record, 1)
    assert stream.getvalue() == "step 1/6  ep 0.50  loss 0.1  6,400 img/s  data 0.0 %  process 1.5 GiB  lr 0.0873  eta -:--\n"


def test_times_rates_and_sizes_read_well_at_every_scale():
    assert [clock_text(s) for s in (None, 0, 23, 83, 3723, 183840)] == ["-:--", "0:00", "0:23", "1:23", "1:02:03", "2d 03:04"]
    assert [rate_text(r) for r in (0.123, 12.34, 5120.4)] == ["0.123", "12.3", "5,120"]
    assert [memory_text(m) for m in (310 * 2**20, 3 * 2**29)] == ["310 MiB", "1.5 GiB"]


# ---------------------------------------------------------------------------------------------- TensorBoard and W&B


def curves(folder: Path) -> dict[str, list[tuple[int, float]]]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # tensorboard's own reader, not our writer
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

        events = EventAccumulator(str(folder))
        events.Reload()
    return {tag: [(event.step, event.value) for event in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


def test_tensorboard_has_every_curve_and_no_step_twice_after_a_resume(tmp_path):
    log = LogConfig(every=1)
    run(tmp_path, range(1, 6), log=log)
    run(tmp_path, range(4, 7), resumed_step=3, log=log)
    have = curves(tmp_path / "tensorboard")
    assert set(have) == {
        "train/loss", "train/lr", "perf/img_s", "perf/data_wait_frac", "perf/mem_peak_gib", "val/loss", "val/top1",
    }  # fmt: skip
    assert [step for step, _ in have["train/loss"]] == [1, 2, 3, 4, 5, 6]
    assert [value for _, value in have["train/loss"]] == pytest.approx([1 / step for step in range(1, 7)], rel=1e-7)  # float32
    assert [step for step, _ in have["val/top1"]] == [2, 4, 6]
    assert have["perf/mem_peak_gib"][0] == (1, 1.5)


def test_tensorboard_off_writes_no_folder(tmp_path):
    run(tmp_path, range(1, 3))
    assert not (tmp_path / "tensorboard").exists()


def test_wandb_missing_is_said_before_any_file_is_touched(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    log = LogConfig(wandb="digits", tensorboard=False)
    with pytest.raises(ValueError, match=r"log\.wandb=digits needs the package wandb.*pip install 'widefield\[wandb\]'"):
        check_log(log, tmp_path)
    with pytest.raises(ValueError, match="wandb"):
        Record.open(tmp_path / "run", log=log)
    assert not (tmp_path / "run").exists()


FAKE_WANDB = """
calls = []
class Config:
    def update(self, values, allow_val_change): calls.append(("config", dict(values)))
class Run:
    config = Config()
    def define_metric(self, name, step_metric): calls.append(("metric", name, step_metric))
    def log(self, values): calls.append(("log", values))
    def finish(self): calls.append(("finish",))
def init(**options):
    calls.append(("init", options))
    return Run()
"""


def test_wandb_gets_config_and_curves_and_the_same_run_again_on_resume(tmp_path, monkeypatch):
    (tmp_path / "wandb.py").write_text(FAKE_WANDB)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "wandb", raising=False)
    folder, log = tmp_path / "run", LogConfig(every=1, wandb="digits", tensorboard=False)
    folder.mkdir()
    (folder / "config.yaml").write_text("seed: 3\n")
    run(folder, range(1, 3), log=log)
    run(folder, range(3, 4), log=log, resumed_step=2)
    calls = sys.modules.pop("wandb").calls  # monkeypatch would bring it back
    inits = [call[1] for call in calls if call[0] == "init"]
    assert [options["project"] for options in inits] == ["digits", "digits"] and inits[0]["id"] == inits[1]["id"]
    assert ("config", {"seed": 3}) in calls and calls.count(("finish",)) == 2
    logged = [call[1] for call in calls if call[0] == "log"]
    assert [values["step"] for values in logged if "train/loss" in values] == [1, 2, 3]
    assert {"step": 2, "val/loss": 0.0612, "val/top1": 98.61} in logged


def test_an_id_of_wandb_that_would_be_a_path_is_refused(tmp_path, monkeypatch):
    (tmp_path / "wandb.py").write_text(FAKE_WANDB)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "wandb", raising=False)
    (tmp_path / "wandb_run_id.txt").write_text("../../somebody/else")
    with pytest.raises(
        ValueError, match="wandb_run_id.txt holds no id of a W&B run: '../../somebody/else'; write it there, or"
    ):
        started(tmp_path, LogConfig(wandb="digits", tensorboard=False))
    assert "wandb" not in sys.modules
