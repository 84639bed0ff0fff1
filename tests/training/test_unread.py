"""A checkpoint is read by each rank for its own part: nobody holds the whole of it."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
from faults import ONE_RANK, about_of, checkpoints_in, save_two
from ranks import on_ranks
from torch import nn

from widefield import sharded_state
from widefield.parallel.parallelize import parallelize
from widefield.plans import Plan
from widefield.sharded_state import UnreadTensor, load_full, opened
from widefield.training import tensors as files
from widefield.training.checkpoint import newest_sound_in, read

MIB = 2**20


def test_the_state_is_unread_and_a_ranks_own_is_not(tmp_path):
    found = newest_sound_in(save_two(tmp_path), warn=pytest.fail)
    state, own = read(found, unread=True)
    weight = state["model"]["weight"]
    assert isinstance(weight, UnreadTensor) and weight.shape == (2048,) and weight.nbytes == 8192
    assert opened(weight).tolist() == [2.0] * 2048 and own["seed"].tolist() == [0, 1, 2, 3, 4]
    assert opened(own["seed"]) is own["seed"]


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.int64, torch.bool, torch.complex64])
def test_what_is_mapped_is_what_was_saved_and_its_file_is_not_written(tmp_path, dtype):
    value = torch.arange(6).reshape(2, 3).to(dtype)
    checkpoints = checkpoints_in(tmp_path)
    checkpoints.save({"value": value, "none": torch.zeros(0, 3)}, about_of(1), wait=True)
    found = checkpoints.newest_sound()
    state, _ = read(found, unread=True)
    mapped = opened(state["value"])
    assert torch.equal(mapped, value) and mapped.dtype == dtype and opened(state["none"]).shape == (0, 3)
    mapped.zero_()
    assert torch.equal(opened(state["value"]), value)
    assert newest_sound_in(tmp_path, warn=pytest.fail) is not None


def test_what_is_not_as_the_index_says_is_refused_when_it_is_read(tmp_path):
    folder = save_two(tmp_path) / "step_00000002"
    index = json.loads((folder / files.INDEX).read_text())
    index["model.weight"]["dtype"] = "int32"
    (folder / files.INDEX).write_text(json.dumps(index))
    unread = files.unread(folder, {"model.weight": None})["model.weight"]
    with pytest.raises(files.FormatError, match=r"a tensor is \[2048\] of torch.float32 there, and tensors.json says"):
        opened(unread)
    with pytest.raises(files.FormatError, match="tensors.json has no tensor 'other'"):
        files.unread(folder, {"other": None})


def test_a_model_is_loaded_in_runs_of_modules(monkeypatch):
    monkeypatch.setattr(sharded_state, "LOADED_BYTES", 100)
    model, other = (nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4), nn.Linear(4, 3)) for _ in range(2))
    asked: list[list[str]] = []
    real = nn.Module.load_state_dict

    def load(self, state, **options):
        asked.append(list(state))
        return real(self, state, **options)

    monkeypatch.setattr(nn.Module, "load_state_dict", load)
    load_full(model, other.state_dict())
    assert [sorted({name[0] for name in names}) for names in asked] == [["0", "1"], ["2"]] or len(asked) > 1
    assert sum(map(len, asked)) == len(other.state_dict())
    assert all(torch.equal(a, b) for a, b in zip(model.state_dict().values(), other.state_dict().values(), strict=True))


# ---------------------------------------------------------------------------------------------- memory


WIDE = 2048


def _peak_bytes() -> int:
    return 1024 * int(re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())[1])


def _forget_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5")


def loaded(mesh, folder: Path) -> tuple[int, int, bool]:
    """Bytes that a rank's peak grew by while it loaded, the bytes of its part, and whether it has what was saved."""
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Sequential(nn.Linear(WIDE, WIDE), nn.ReLU()) for _ in range(8)])
    model = parallelize(model, mesh)
    mine = sum(sharded_state.local(p).nbytes for p in model.parameters())
    found = newest_sound_in(folder, warn=pytest.fail)
    _forget_peak()
    before = _peak_bytes()
    state, _ = read(found, unread=True)
    load_full(model, state["model"])
    grown = _peak_bytes() - before
    rows = [sharded_state.local(p).float().mean().item() for n, p in model.named_parameters() if n.endswith("weight")]
    return grown, mine, rows == [float(number) for number in range(8)]


@pytest.mark.parametrize("plan", [Plan(shard=2), Plan(shard=4)], ids=str)
def test_a_rank_reads_its_part_and_holds_little_more_than_its_model(tmp_path, plan):
    """128 MiB of weights: a whole on every rank would be that, and a mapped run is 64 MiB times the rank's part."""
    state = {f"{number}.0.weight": torch.full((WIDE, WIDE), float(number)) for number in range(8)}
    state |= {f"{number}.0.bias": torch.zeros(WIDE) for number in range(8)}
    checkpoints = checkpoints_in(tmp_path, ONE_RANK)
    checkpoints.save({"model": state}, about_of(1), wait=True)
    for grown, mine, same in on_ranks(plan.ranks, loaded, tmp_path, plan=plan):
        assert same and mine < 130 * MIB / plan.ranks
        assert grown < 64 * MIB / plan.ranks + 24 * MIB  # what is mapped at a time, and pages that come along
