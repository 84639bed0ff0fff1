"""Does each fault that WIDEFIELD_FAULTS asks for come, where and when it was asked for, and leave its line in the record?"""

from __future__ import annotations

import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
from command import RECIPES, losses, record
from falling import asking, fall

import widefield as wf
from widefield.comm.mesh import AgreedError
from widefield.faults.fault import VARIABLE
from widefield.faults.injector import InjectedFaultError
from widefield.training.manifest import what_is_wrong

pytestmark = pytest.mark.alone

SHORT = ["model.name=resnet", "model.options={widths: [4], blocks: 1}", "data.batch_size=32", "schedule.length=4step",
         "schedule.warmup=0step", "checkpoint.every=2step", "checkpoint.background=false", "evaluate.every=4step",
         "data.workers=0", "log.tensorboard=false", "data.augment=[]", "optimizer.lr=0.01"]  # fmt: skip


def train(folder: Path, *settings: str) -> None:
    wf.train("digits", *SHORT, *settings, run=folder)


@pytest.fixture(scope="module")
def right(tmp_path_factory) -> list[float]:
    """The losses of an undisturbed run."""
    folder = tmp_path_factory.mktemp("undisturbed")
    train(folder)
    return losses(folder)


@pytest.fixture
def asked(monkeypatch):
    return lambda text: monkeypatch.setenv(VARIABLE, text)


@pytest.mark.parametrize("phase", ["data", "forward", "backward", "optimizer"])
def test_an_exception_comes_at_its_step_and_a_run_that_goes_on_passes_it_over(tmp_path, asked, right, phase):
    asked(f"rank=0 step=3 phase={phase} kind=exception")
    with pytest.raises(InjectedFaultError, match=f"injected on rank 0 in {phase}"):
        train(tmp_path / "run")
    assert len(losses(tmp_path / "run")) == 2
    train(tmp_path / "run")
    (line,) = record(tmp_path / "run", "fault")
    assert line["at"] == 3 and line["rank"] == 0 and line["fault"] == f"rank=0 step=3 phase={phase} kind=exception call=1"
    assert losses(tmp_path / "run") == right


def test_numbers_are_made_wrong_where_it_was_asked(tmp_path, asked, right):
    first_seen = {
        "data": "the loss of step 2",
        "forward": "the loss of step 2",
        "backward": "the norm of the gradient of step 2",
    }
    for phase, where in (first_seen | {"optimizer": "the loss of step 3"}).items():
        asked(f"rank=0 step=2 phase={phase} kind=nan")
        with pytest.raises(AgreedError, match=f"{where} is nan"):
            train(tmp_path / phase, "checkpoint.every=4step")
        assert losses(tmp_path / phase) == right[: 2 if phase == "optimizer" else 1]
    asked("rank=0 step=2 phase=optimizer kind=bit_flip seed=1")
    train(tmp_path / "flipped")
    assert losses(tmp_path / "flipped")[:2] == right[:2] and losses(tmp_path / "flipped")[2:] != right[2:]


def test_a_disk_fails_as_it_was_asked(tmp_path, asked):
    asked("rank=0 step=2 phase=save kind=disk_full")
    train(tmp_path / "full")
    assert "step 2 was not saved" in record(tmp_path / "full", "warning")[0]["text"]
    assert [line["step"] for line in record(tmp_path / "full", "checkpoint")] == [4]
    asked("rank=0 step=4 phase=save kind=truncated_write; rank=0 step=2 phase=load kind=io_error")
    train(tmp_path / "torn")
    assert what_is_wrong(tmp_path / "torn" / "checkpoints" / "step_00000004") is not None
    with pytest.raises(ValueError, match=r"Errno 5\] .* \(injected on rank 0 in load\)"):
        train(tmp_path / "torn", "schedule.length=5step")
    train(tmp_path / "torn", "schedule.length=5step")
    assert len(losses(tmp_path / "torn")) == 5


def test_a_fault_that_never_came_is_told(tmp_path, asked, capfd):
    asked("rank=0 step=9 phase=data kind=kill")
    train(tmp_path / "run")
    assert "widefield: fault: never came: rank=0 step=9 phase=data kind=kill call=1" in capfd.readouterr().err


def test_a_text_that_cannot_be_read_ends_the_run_before_it_begins(tmp_path, asked):
    asked("rank=0 step=1 phase=data kind=skip")
    with pytest.raises(ValueError, match="kind=skip is none of"):
        train(tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_without_the_variable_nothing_is_imported_or_replaced():
    code = "import sys; import widefield.run; sys.exit(any(name.startswith('widefield.faults') for name in sys.modules))"
    subprocess.run([sys.executable, "-c", code], check=True)


# ---------------------------------------------------------------------------------------------- on ranks

PAGE = RECIPES / "page.yaml"
SMALL = ["data.options.size=[48, 40]", "data.options.pages=[6, 3]", "data.batch_size=4", "data.evaluate_batch_size=1",
         "model.options={widths: [4, 6]}", "mesh.space=[]", "mesh.replicate=1", "schedule.length=4step", "data.workers=0",
         "schedule.warmup=1step", "log.tensorboard=false", "evaluate.every=4step"]  # fmt: skip


@pytest.mark.parametrize(
    ("mesh", "fault"),
    [
        ("mesh.space=[2, 1]", "phase=halo kind=exception call=3"),
        ("mesh.replicate=2", "phase=collective kind=exception"),
        ("mesh.stage=2", "phase=halo kind=exception"),
        pytest.param("mesh.stage=2", "phase=backward kind=exception", marks=pytest.mark.sweep),
        pytest.param("mesh.shard=2", "phase=backward kind=out_of_memory", marks=pytest.mark.sweep),
        pytest.param("mesh.channel=2", "phase=collective kind=exception", marks=pytest.mark.sweep),
    ],
)
def test_messages_meet_faults_too(tmp_path, mesh, fault):
    ended = fall(2, ["train", PAGE, "--run", tmp_path / "run", *SMALL, mesh],
                 partial(asking, f"rank=0 step=3 {fault}"), folder=tmp_path / "said")  # fmt: skip
    assert [one.status for one in ended] == [1, 3], ended
    assert all("rank 0 failed: " in one.said for one in ended) and len(losses(tmp_path / "run")) == 2
    assert [line["at"] for line in record(tmp_path / "run", "fault")] == [3]
