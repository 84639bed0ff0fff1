"""Where memory is full the run ends with what takes less, and, where that can be known, with how much."""

from __future__ import annotations

import re

import pytest
import torch
from command import DIGITS, RECIPES, record

from widefield.cli import main
from widefield.comm.failure import PeerFailedError
from widefield.comm.mesh import World
from widefield.config import read_config
from widefield.planner.emulation.world import EmulatedMesh
from widefield.planner.search.relief import in_words, reliefs
from widefield.plans import plan_of
from widefield.run import train
from widefield.training.loop import Learner
from widefield.training.out_of_memory import FullMemoryError, changes, is_full, was_full

SETTINGS = ["schedule.length=4step", "schedule.warmup=0step", "log.tensorboard=false", "data.workers=0", "mesh.replicate=1"]
VOLUME = str(RECIPES / "volume.yaml")
FIRST = ["gradient.accumulate=2", "recompute={}"]
SAID = [
    torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB."),
    MemoryError(),
    RuntimeError("[enforce fail at alloc_cpu.cpp:117] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to ..."),
    RuntimeError("CUDNN_STATUS_ALLOC_FAILED"),
]


@pytest.mark.parametrize("error", SAID, ids=lambda error: type(error).__name__)
def test_full_memory_is_known_by_its_errors(error):
    assert is_full(error) and not was_full(error)
    assert was_full(PeerFailedError("rank 1 failed: OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB."))
    assert not is_full(RuntimeError("planted")) and not is_full(PeerFailedError("rank 1 failed: MemoryError"))


@pytest.mark.parametrize(
    ("ranks", "settings", "expected"),
    [
        (1, [], [*FIRST, "mesh.space=[2,1] mesh.replicate=1", "stream.tiles=[2,2]"]),
        (4, ["mesh.replicate=4"], [*FIRST, "mesh.replicate=2 mesh.space=[2,1]", "stream.tiles=[2,2]"]),
        (3, ["mesh.replicate=3", "data.batch_size=3"], ["recompute={}", "stream.tiles=[2,2]"]),
        (2, ["mesh.shard=2", "recompute={}", "gradient.accumulate=4"], ["gradient.accumulate=8", "stream.tiles=[2,2]"]),
    ],
)
def test_only_what_can_be_changed_is_advised(ranks, settings, expected):
    config = read_config(DIGITS, settings)
    assert [" ".join(overrides) for overrides, _ in changes(config, plan_of(config, ranks), dims=2)] == expected


def test_a_volume_is_advised_to_be_cut_in_three_dims_and_a_run_takes_that(tmp_path, monkeypatch):
    """mesh.space=[2,1] and stream.tiles=[2,2] would be refused for volumes."""
    small = "data.options={size: [8, 16, 16], volumes: [4, 2], vessels: 1, blobs: 1}"
    settings = [*SETTINGS, "schedule.length=2step", "schedule.warmup=1step", "mesh.space=[]", small]
    monkeypatch.setattr("widefield.run._priced", lambda *about: [])
    with monkeypatch.context() as patched, pytest.raises(FullMemoryError) as caught:
        patched.setattr(Learner, "_update", full)
        train(read_config(VOLUME, settings), tmp_path / "full", World())
    said = str(caught.value)
    assert "mesh.space=[2,1,1] mesh.replicate=1 (cut" in said
    (advised,) = re.findall(r"stream\.tiles=\S+", said)
    train(read_config(VOLUME, [*settings, advised]), tmp_path / "streamed", World())


def full(*_, **__):
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB.")


@pytest.mark.long
def test_a_run_that_finds_no_memory_says_where_and_what_takes_less_with_figures(tmp_path, monkeypatch):
    real = Learner._update

    def update(self, scaler, scale):
        return (real if isinstance(self.mesh, EmulatedMesh) else full)(self, scaler, scale)

    monkeypatch.setattr(Learner, "_update", update)
    with pytest.raises(FullMemoryError) as caught:
        train(read_config(DIGITS, SETTINGS), tmp_path / "run", World())
    said = str(caught.value)
    assert said.startswith(
        "rank 0 ran out of memory in step 1: OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB. ("
    )
    assert "test_out_of_memory.py" in said
    assert "What takes less memory: gradient.accumulate=2 (accumulate: passes of 32 samples)" in said
    assert re.search(r"\n +[0-9.]+ [MG]iB  as it is\n +[0-9.]+ [KMG]iB  gradient.accumulate=2", said), said
    (end,) = record(tmp_path / "run", "end")
    assert end["reason"] == "failed" and "ran out of memory in step 1" in end["text"]
    assert main(["train", DIGITS, *SETTINGS, "--run", str(tmp_path / "run")]) == 2


@pytest.mark.long
def test_each_change_is_predicted_to_take_less_than_the_run():
    wide = read_config(DIGITS, ["data.batch_size=256", "model.options={widths: [32, 64], blocks: 2}"])
    now, found = reliefs(wide, 1, seconds=120)
    priced = [one for one in found if one.memory_bytes is not None]
    assert now.memory_bytes and len(priced) >= 2 and all(one.memory_bytes < now.memory_bytes for one in priced)
    assert len(in_words(now, found)) == 2 + len(found)
    late = reliefs(read_config(DIGITS, []), 1, seconds=0)[1]
    assert all(one.memory_bytes is None and one.why == "not priced, for want of time" for one in late) and late
