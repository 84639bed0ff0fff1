"""Does a full disk end only what cannot go on without it, in words, and after the step's checkpoint is safe?

Every file that a run opens for writing is refused in turn, and then the kernel refuses bytes in earnest.
"""

from __future__ import annotations

import errno
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from command import DIGITS, losses, record
from marks import few
from ranks import on_ranks

from widefield.comm.mesh import World
from widefield.config import read_config
from widefield.run import train
from widefield.training import disk
from widefield.training.disk import Attempts, Lines, free_bytes, in_words, replace_text

pytestmark = pytest.mark.alone

SHORT = ["schedule.length=4step", "schedule.warmup=0step", "evaluate.every=2step", "checkpoint.every=2step",
         "checkpoint.background=false", "data.batch_size=50", "log.every=1", "mesh.replicate=1"]  # fmt: skip
FULL = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

# ---------------------------------------------------------------------------------------------- every file in turn

REFUSE = """
import errno, json, os, re, sys, io, contextlib
from pathlib import Path
from widefield.config import read_config
from widefield.comm.mesh import World
from widefield.run import train

root, settings = Path(sys.argv[1]), sys.argv[2:]
seen, state = [], {"at": None, "folder": None}

def look(event, args):
    folder = state["folder"]
    if folder is None or event not in ("open", "os.mkdir"):
        return
    writes = event == "os.mkdir" or args[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)
    if not isinstance(args[0], (str, os.PathLike)) or not writes or not str(args[0]).startswith(str(folder)):
        return
    seen.append(os.path.relpath(args[0], folder))
    if len(seen) - 1 == state["at"]:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(args[0]))

def trained(number):
    seen.clear()
    state.update(at=number, folder=root / f"run{number}")
    said = io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        try:
            outcome = train(read_config(settings[0], settings[1:]), state["folder"], World())
            end = [outcome.reason, outcome.status]
        except BaseException as error:
            end = [type(error).__name__, str(error)]
    folder = state["folder"]
    state["folder"] = None
    at = seen[number] if number is not None and number < len(seen) else None
    return {"at": at, "end": end, "said": said.getvalue(), "folder": str(folder)}

sys.addaudithook(look)
trained(None)
names, kinds = list(seen), {}
for number, name in enumerate(names):
    kinds.setdefault(re.sub(r"[0-9]+", "#", name.replace("mistakes/23", "mistakes/last")), number)
print(json.dumps([trained(number) for number in kinds.values()]))
"""
NEEDED = r"\.|\.lock|record\.jsonl(\.part)?|config\.yaml\.part|plan\.yaml\.part|model\.json\.part|checkpoints"
SPARED = {
    "tensorboard": "TensorBoard's file", "tensorboard/": "TensorBoard's file", "summary.csv": "summary.csv",
    "evaluation.json": "evaluation.json", "report.html": "report.html", "mistakes": "the pictures of mistakes",
    "mistakes/": "the pictures of mistakes", "best.safetensors": "best.safetensors", "evaluation.csv": "evaluation.csv",
}  # fmt: skip


@pytest.fixture(scope="module")
def refused(tmp_path_factory) -> list[dict]:
    """One run for each kind of file that a run opens for writing: the first of its kind is refused."""
    place = tmp_path_factory.mktemp("refused")
    done = subprocess.run(
        [sys.executable, "-c", REFUSE, str(place), DIGITS, *SHORT], capture_output=True, text=True, timeout=900
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def kind_of(name: str) -> str:
    if re.fullmatch(NEEDED, name):
        return "needed"
    if name.startswith("checkpoints/"):
        return "checkpoint"
    if name.startswith("weights.safetensors"):
        return "weights"
    return next(
        (told for begins, told in SPARED.items() if name.removesuffix(".part").startswith(begins)), f"not known: {name}"
    )


@pytest.mark.long
def test_all_that_a_run_writes_is_refused_in_turn(refused):
    kinds = {kind_of(run["at"]) for run in refused}
    assert kinds == {"needed", "checkpoint", "weights", *SPARED.values()} and len(refused) > 15


@pytest.mark.long
def test_what_a_run_can_do_without_is_warned_of_once_and_ends_nothing(refused):
    for run in refused:
        told = kind_of(run["at"])
        if told in ("needed", "checkpoint", "weights"):
            continue
        assert run["end"] == ["complete", 0], run
        assert len(re.findall(rf"warning: {told} cannot be written: .*No space left on device", run["said"])) == 1, run["said"]
        assert "bytes are free in" in run["said"] and "The run goes on without" in run["said"]
        folder = Path(run["folder"])
        assert len(losses(folder)) == 4 and (folder / "checkpoints/step_00000004").is_dir()
        assert (folder / "weights.safetensors").is_file() and not list(folder.rglob("*.part"))


@pytest.mark.long
def test_a_checkpoint_that_is_refused_is_a_warning_and_the_next_one_is_written(refused):
    runs = [run for run in refused if kind_of(run["at"]) == "checkpoint"]
    assert len(runs) >= 4
    for run in runs:
        assert run["end"] == ["complete", 0] and "was not saved: " in run["said"], run
        assert [one.name for one in (Path(run["folder"]) / "checkpoints").iterdir()] == ["step_00000004"]


@pytest.mark.long
def test_what_a_run_cannot_begin_without_refuses_it_in_words(refused):
    runs = [run for run in refused if kind_of(run["at"]) == "needed"]
    assert len(runs) >= 6
    for run in runs:
        kind, words = run["end"]
        name = Path(run["folder"], run["at"])
        assert kind == "AgreedError" and f"No space left on device: '{name}'" in words, run
        assert "bytes are free in" in words or run["at"] == "checkpoints"


@pytest.mark.long
def test_weights_that_are_refused_end_the_run_in_words(refused):
    (run,) = [run for run in refused if kind_of(run["at"]) == "weights"]
    kind, words = run["end"]
    assert kind == "AgreedError" and "The last checkpoint has them" in words and "No space left on device" in words


# ---------------------------------------------------------------------------------------------- weights and records


def test_weights_that_do_not_fit_end_the_run_in_words_after_its_checkpoint(tmp_path, monkeypatch):
    import safetensors.torch

    def full(tensors, path, metadata):
        Path(path).write_bytes(b"half")
        raise safetensors.SafetensorError("I/O error: No space left on device (os error 28)")

    with monkeypatch.context() as patch:
        patch.setattr(safetensors.torch, "save_file", full)
        with pytest.raises(ValueError) as caught:
            train(read_config(DIGITS, SHORT), tmp_path / "run", World())
    told = str(caught.value)
    assert re.search(
        r"weights.safetensors cannot be written: .*No space left.*; [\d,]+ bytes are free in .*, and the weights take", told
    )
    assert told.endswith("The last checkpoint has them: free some space there and give the same command again")
    folder = tmp_path / "run"
    assert (folder / "checkpoints/step_00000004").is_dir() and not list(folder.glob("*.part"))
    assert record(folder, "end")[-1]["reason"] == "failed" and record(folder, "end")[-1]["text"] == told
    assert train(read_config(DIGITS, SHORT), folder, World()).status == 0 and (folder / "weights.safetensors").is_file()


def test_weights_that_no_checkpoint_has_are_saved_where_there_is_room(tmp_path, monkeypatch):
    """Neither the last checkpoint nor weights.safetensors fits: the weights go where temporary files go."""
    import safetensors.torch

    from widefield.training import tensors
    from widefield.training.run_folder import existing_folder

    real, folder = safetensors.torch.save_file, tmp_path / "run"

    def full(named, path, metadata):
        if str(path).startswith(str(folder)):
            raise safetensors.SafetensorError("I/O error: No space left on device (os error 28)")
        real(named, path, metadata)

    def no_checkpoint(place, rank, named):
        raise FULL

    (tmp_path / "elsewhere").mkdir()
    monkeypatch.setenv("TMPDIR", str(tmp_path / "elsewhere"))
    monkeypatch.setattr("tempfile.tempdir", None)
    monkeypatch.setattr(safetensors.torch, "save_file", full)
    monkeypatch.setattr(tensors, "write", no_checkpoint)
    with pytest.raises(
        ValueError, match=r"The last checkpoint was not saved either, so the weights are in .*elsewhere"
    ) as caught:
        train(read_config(DIGITS, SHORT), folder, World())
    path = re.search(r"the weights are in (\S+) ", str(caught.value))[1]
    monkeypatch.undo()
    train(read_config(DIGITS, SHORT), tmp_path / "other", World())
    mine, other = (safetensors.torch.load_file(file) for file in (path, tmp_path / "other/weights.safetensors"))
    assert all((mine[name] == other[name]).all() for name in other) and existing_folder(folder) == folder


class Disk:
    """Stands for os.write on a disk that is full while `full`; else it takes `most` bytes at a time."""

    def __init__(self, most: int = 10**9) -> None:
        self.full, self.most, self.write = False, most, os.write

    def __call__(self, file: int, text: bytes) -> int:
        if self.full:
            raise FULL
        return self.write(file, bytes(text[: self.most]))


def test_lines_wait_for_room_and_come_whole_and_in_order(tmp_path, monkeypatch):
    faulty = Disk(most=7)
    monkeypatch.setattr(disk.os, "write", faulty)
    lines = Lines(tmp_path / "lines")
    lines.add("the first line\n")
    assert (tmp_path / "lines").read_text() == "the first line\n" and lines.error is None
    faulty.full = True
    lines.add("the second line\n")
    lines.add("the third line\n")
    assert lines.error is FULL and lines.waiting_bytes == 31
    faulty.full = False
    lines.add("the last line\n")
    lines.close()
    assert lines.error is None and lines.waiting_bytes == 0
    assert (tmp_path / "lines").read_text() == "the first line\nthe second line\nthe third line\nthe last line\n"


def test_a_record_that_finds_no_room_for_a_while_is_whole_in_the_end(tmp_path, monkeypatch, capsys):
    """From the first evaluation to the last step nothing is written."""
    faulty, folder = Disk(), tmp_path / "run"
    monkeypatch.setattr(disk.os, "write", faulty)
    wrote = disk.replace_text

    def replace(path: Path, text: str) -> None:
        faulty.full = text.count("\n") == 2 if path.name == "summary.csv" else faulty.full
        wrote(path, text)

    monkeypatch.setattr("widefield.training.record.replace_text", replace)
    assert train(read_config(DIGITS, SHORT), folder, World()).status == 0
    assert [line["step"] for line in record(folder, "step")] == [1, 2, 3, 4]
    assert [line["reason"] for line in record(folder, "end")] == ["complete"]
    assert capsys.readouterr().out.count("Its lines wait in memory until they can") == 1


@pytest.mark.parametrize("most", [disk.MOST_BYTES, 500])
def test_a_record_that_cannot_be_written_any_more_is_told_with_its_bytes(tmp_path, monkeypatch, capsys, most):
    """Where too many lines wait the run stops, after a checkpoint; else it goes on to its end."""
    faulty, folder = Disk(), tmp_path / "run"
    monkeypatch.setattr(disk.os, "write", faulty)
    monkeypatch.setattr("widefield.training.record.MOST_BYTES", most)
    real, stopped = Lines.add, most < 10**6

    def add(self: Lines, text: str) -> None:
        faulty.full = faulty.full or '"step": 1,' in text
        real(self, text)

    monkeypatch.setattr(Lines, "add", add)
    outcome = train(read_config(DIGITS, [*SHORT, "checkpoint.every=3step"]), folder, World())
    assert (outcome.status, outcome.reason) == (1, "interrupted" if stopped else "complete")
    assert (outcome.step < 4) == stopped and (folder / f"checkpoints/step_{outcome.step:08}").is_dir()
    told = re.search(
        r"widefield: the last ([\d,]+) bytes of .*record.jsonl cannot be written: .*No space left", capsys.readouterr().err
    )
    assert told and int(told[1].replace(",", "")) > 500


def go(mesh, folder: Path, settings: list[str]) -> list:
    from widefield.training import record

    if mesh.is_main:
        record.MOST_BYTES, before, os.write = 500, (record.MOST_BYTES, os.write), Disk()
        os.write.full = True
    try:
        outcome = train(read_config(DIGITS, settings), folder, mesh.world)
        return [outcome.reason, outcome.step]
    finally:
        if mesh.is_main:
            record.MOST_BYTES, os.write = before


def test_a_lost_record_stops_all_ranks_at_one_step(tmp_path):
    first, second = on_ranks(2, go, tmp_path / "run", [*SHORT, "mesh.replicate=2", "schedule.length=40step"])
    assert first == second and first[0] == "interrupted" and first[1] < 10
    assert (tmp_path / f"run/checkpoints/step_{first[1]:08}").is_dir()


# ---------------------------------------------------------------------------------------------- the kernel refuses


LIMITED = """
import resource, sys
from widefield.cli import main
resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[1]), resource.RLIM_INFINITY))
sys.exit(main(sys.argv[2:]))
"""


@pytest.mark.parametrize("limit", few([600, 4000], 600))
def test_files_that_the_kernel_cuts_off_end_no_training(tmp_path, limit):
    """No file may grow beyond so many bytes, as if the disk were full by then."""
    folder = tmp_path / "run"
    train(read_config(DIGITS, [*SHORT, "schedule.length=2step"]), folder, World())
    (folder / "record.jsonl").write_bytes((folder / "record.jsonl").read_bytes()[:0])
    command = [sys.executable, "-c", LIMITED, str(limit), "train", DIGITS, "--run", str(folder), *SHORT]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=200)
    assert "Traceback" not in ended.stderr + ended.stdout
    if limit == 600:  # config.yaml does not fit
        assert ended.returncode == 2 and "config.yaml" in ended.stderr and "so the run cannot begin" in ended.stderr
        return
    assert ended.returncode == 2, ended.stderr
    assert "step 4/4" in ended.stdout and "step 4  ep" in ended.stdout
    assert ended.stdout.count("the checkpoint of step 4 was not saved") == 1
    assert "weights.safetensors cannot be written: " in ended.stderr and "older ones stand" in ended.stderr
    assert (folder / "checkpoints/step_00000002").is_dir()


@pytest.mark.long
def test_a_terminal_that_takes_no_more_ends_no_training(tmp_path):
    command = [sys.executable, "-m", "widefield", "train", DIGITS, "--run", str(tmp_path / "run"), *SHORT]
    with open("/dev/full", "w") as full:
        ended = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, timeout=200)
    assert ended.returncode == 0 and "Traceback" not in ended.stderr, ended.stderr
    assert record(tmp_path / "run", "end")[-1]["reason"] == "complete"


# ---------------------------------------------------------------------------------------------- in words


def test_a_refusal_says_which_file_why_and_how_much_is_free(tmp_path):
    told = in_words(tmp_path / "x", FULL, tmp_path / "not" / "there")
    assert re.fullmatch(
        rf"{tmp_path}/x cannot be written: \[Errno 28\] No space left on device; [\d,]+ bytes are free in .*", told
    )
    assert free_bytes(tmp_path / "not" / "there") > 0


def test_each_thing_is_warned_of_once(tmp_path):
    warned: list[str] = []
    attempt = Attempts(tmp_path, warned.append)

    def fails():
        raise TypeError("of another kind")

    assert [attempt("a", fails), attempt("a", fails), attempt("b", fails), attempt("c", lambda: 3)] == [None, None, None, 3]
    assert [text.partition(";")[0] for text in warned] == [f"{n} cannot be written: TypeError: of another kind" for n in "ab"]


def test_a_text_that_could_not_be_written_leaves_the_old_one_and_no_rest(tmp_path, monkeypatch):
    replace_text(tmp_path / "a", "old")
    monkeypatch.setattr(disk.os, "fsync", lambda file: (_ for _ in ()).throw(FULL))
    with pytest.raises(OSError, match="No space left"):
        replace_text(tmp_path / "a", "new")
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("a", "old")]
