"""Checkpoints: the same bits come back, a changed bit is found, and nothing that goes wrong loses what was saved."""

import math
import os
import resource
import struct
import subprocess
import threading
import time

import pytest
import torch
from faults import (
    Flip,
    about_of,
    checkpoints_in,
    every_bit_of,
    kill_saves,
    missed,
    names_in,
    no_warning,
    random_flips,
    save_two,
    state_of,
)
from ranks import on_ranks
from safetensors.torch import load_file

from widefield.sharded_state import RemoteTensor
from widefield.training import checkpoint_directory, manifest, tensors, tree_json
from widefield.training.checkpoint import read
from widefield.training.checkpoint_directory import newest_sound_in, steps_in

DTYPES = [*tensors._STORED, *tensors._PAIRS]


def bits_of(value):
    """`value` with every tensor as dtype, shape, strides and bytes, and every float as its bits: equal is bit for bit equal."""
    if isinstance(value, torch.Tensor):
        memory = torch.empty_like(value, memory_format=torch.contiguous_format).copy_(value).reshape(-1)
        return (value.dtype, tuple(value.shape), value.stride(), memory.view(torch.uint8).numpy().tobytes())
    if isinstance(value, float):
        return struct.pack(">d", value)
    if isinstance(value, dict):
        return {(type(key), key): bits_of(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value), [bits_of(item) for item in value]
    return type(value), value


def everything() -> dict:
    """A state with each kind of leaf, key and tensor that there is."""
    random = torch.Generator().manual_seed(1)
    noise = torch.randint(0, 256, (3, 16), generator=random, dtype=torch.uint8)
    kinds = {str(dtype): noise.view(dtype) if dtype != torch.bool else noise > 99 for dtype in DTYPES}
    model = {"weight": torch.randn(4, 3, 5, 7).to(memory_format=torch.channels_last), "turned": torch.randn(3, 4).T}
    odd = {
        "0-dim": torch.tensor(math.nan),
        "empty": torch.empty(0, 3),
        "part": torch.arange(9)[2:5],
        "wide": torch.ones(1).expand(4),
    }
    optimizer = {"state": {0: {"step": torch.tensor(3.0)}, 7: {}}, "param_groups": [{"betas": (0.9, 0.999), "params": [0, 7]}]}
    floats = [0.1 + 0.2, 1e-323, -0.0, math.inf, -math.inf, math.nan, -math.nan, 1e308, 3.0]
    plain = {"floats": floats, "big": 2**70, "no": None, "yes": True, "text": "§ \ud800", "nested": ((), [], {}, ({1: ()},))}
    clash = {
        "a": {"b": torch.zeros(2)},
        "a.b": torch.ones(2),
        "$tensor": {"name": "a"},
        "$tuple": [1],
        "own_0": {"x": torch.ones(3)},
    }
    return {"tensors": kinds, "model": model, "odd": odd, "optimizer": optimizer, "plain": plain, "clash": clash}


@pytest.fixture
def two_saved(tmp_path):
    """A folder with sound checkpoints of steps 1 and 2."""
    return save_two(tmp_path)


# ---------------------------------------------------------------------------------------------- the same bits


@pytest.mark.parametrize("background", [True, False])
def test_what_is_saved_comes_back_bit_for_bit(tmp_path, background):
    state, own = everything(), {"x": torch.get_rng_state(), "python": (3, (1, 2), None)}
    state["odd"]["wide"] = state["odd"]["wide"].clone()  # an expanded tensor comes back as a full one: see below
    checkpoints = checkpoints_in(tmp_path, background=background)
    about = about_of(12, metric=math.nan)
    checkpoints.save(state, about, own=own)
    found = checkpoints.newest_sound()
    assert found.folder == tmp_path / "step_00000012" and bits_of(vars(found.about)) == bits_of(vars(about))
    assert [bits_of(value) for value in checkpoints.load(found)] == [bits_of(state), bits_of(own)]
    assert checkpoints.failure is None and names_in(tmp_path) == ["step_00000012"]


def test_an_expanded_tensor_comes_back_full(tmp_path):
    checkpoints = checkpoints_in(tmp_path)
    checkpoints.save({"wide": torch.ones(1).expand(4)}, about_of(1))
    assert bits_of(checkpoints.load(checkpoints.newest_sound())[0]["wide"]) == bits_of(torch.ones(4))


def saves_and_loads(mesh, folder):
    state, own = everything(), {"rank": mesh.rank, "noise": torch.full((3,), float(mesh.rank))}
    state["odd"].pop("wide")
    checkpoints = checkpoints_in(folder, mesh)
    checkpoints.save(state, about_of(5, ranks=mesh.size), own=own)
    mesh.sum_(torch.ones(3))  # training's own messages go on meanwhile
    found = checkpoints.newest_sound()
    loaded = checkpoints.load(found)
    return bits_of(loaded[0]) == bits_of(state), bits_of(loaded[1]) == bits_of(own), names_in(found.folder)


def test_ranks_share_the_writing_and_each_gets_its_own_back(tmp_path):
    (equal, own_equal, names), second = on_ranks(2, saves_and_loads, tmp_path)
    assert equal and own_equal and second == (True, True, names)
    assert {"tensors.json", "tensors_0.safetensors", "tensors_1.safetensors", "own_0.json", "own_1.json"} <= set(names)
    checkpoints = checkpoints_in(tmp_path)  # one rank resumes what two saved: the state, but no rank's own
    state, own = checkpoints.load(checkpoints.newest_sound())
    assert own is None and state["optimizer"]["param_groups"][0]["betas"] == (0.9, 0.999)


def test_a_background_save_does_not_see_what_training_does_next(tmp_path, monkeypatch):
    go, write = threading.Event(), tensors.write
    monkeypatch.setattr(tensors, "write", lambda *a: (go.wait(30), write(*a))[1])
    state = {"weight": torch.ones(64), "list": [1]}
    checkpoints = checkpoints_in(tmp_path)
    checkpoints.save(state, about_of(1))
    assert steps_in(tmp_path) == []  # it returned while nothing is written
    state["weight"].fill_(-1)
    state["list"].append(2)
    go.set()
    loaded, _ = checkpoints.load(checkpoints.newest_sound())
    assert loaded["list"] == [1] and torch.equal(loaded["weight"], torch.ones(64))


def test_a_save_waits_for_the_one_in_flight(tmp_path, monkeypatch):
    inside, most, write = [], [], tensors.write

    def slowly(*given):
        inside.append(1)
        most.append(len(inside))
        time.sleep(0.1)
        inside.pop()
        return write(*given)

    monkeypatch.setattr(tensors, "write", slowly)
    checkpoints = checkpoints_in(tmp_path)
    for step in (1, 2, 3):
        checkpoints.save(state_of(step), about_of(step))
    checkpoints.wait()
    assert most == [1, 1, 1] and len(steps_in(tmp_path)) == 3


def test_sha256sum_checks_a_checkpoint(two_saved):
    subprocess.run(["sha256sum", "--strict", "--status", "-c", "manifest.sha256"], cwd=two_saved / "step_00000002", check=True)


def test_the_tensors_are_plain_safetensors(two_saved):
    found = load_file(two_saved / "step_00000002" / "tensors_0.safetensors")
    assert torch.equal(found["model.weight"], state_of(2)["model"]["weight"])
    assert sorted(found) == ["model.weight", "own_0.seed"]


def test_every_file_is_on_the_disk_before_the_checkpoint_counts(tmp_path, monkeypatch):
    """A power cut cannot be staged here; the order of the calls that guard against it can be seen."""
    done, fsync, rename = [], os.fsync, checkpoint_directory.Path.rename
    monkeypatch.setattr(os, "fsync", lambda handle: (done.append(os.readlink(f"/proc/self/fd/{handle}")), fsync(handle))[1])
    monkeypatch.setattr(
        checkpoint_directory.Path, "rename", lambda path, to: (done.append(f"{path} becomes {to}"), rename(path, to))[1]
    )
    checkpoints_in(tmp_path).save(state_of(1), about_of(1), own={"x": torch.ones(2)}, wait=True)
    partial, current = tmp_path / ".step_00000001.partial", tmp_path / "step_00000001"
    named = done.index(f"{partial} becomes {current}")
    assert {str(partial / name) for name in names_in(current)} | {str(partial)} <= set(done[:named])
    assert str(tmp_path) in done[named:]


# ---------------------------------------------------------------------------------------------- changed bits


@pytest.mark.long
def test_every_flipped_bit_is_found_and_its_file_named(two_saved):
    newest = two_saved / "step_00000002"
    flips = [*every_bit_of(newest / "manifest.sha256"), *random_flips(newest, 200)]
    assert {flip.file.name for flip in flips} == set(names_in(newest))
    assert missed(newest, flips) == []
    assert manifest.what_is_wrong(newest) is None


@pytest.mark.parametrize("name", ["tensors_0.safetensors", "tensors.json", "about.json", "plain.json", "own_0.json"])
@pytest.mark.parametrize("harm", ["flip", "truncate", "empty", "remove"])
def test_the_older_sound_one_is_taken_and_the_bad_file_named(two_saved, name, harm):
    bad = two_saved / "step_00000002" / name
    if harm == "flip":
        Flip(bad, 8 * (bad.stat().st_size // 2)).do()
    elif harm == "remove":
        bad.unlink()
    else:
        os.truncate(bad, 0 if harm == "empty" else bad.stat().st_size - 1)
    warnings = []
    found = checkpoints_in(two_saved, warn=warnings.append).newest_sound()
    assert found.folder.name == "step_00000001" and read(found)[0]["step"] == 1
    assert len(warnings) == 1 and name in warnings[0] and "step_00000002" in warnings[0]


@pytest.mark.parametrize("harm", ["missing", "empty", "plain.json", "tensors_0.safetensors"])
def test_a_checkpoint_with_no_whole_manifest_is_passed_over(two_saved, harm):
    path = two_saved / "step_00000002" / "manifest.sha256"
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(line for line in lines if harm != "empty" and harm not in line))
    if harm == "missing":
        path.unlink()
    warnings = []
    assert newest_sound_in(two_saved, warn=warnings.append).about.step == 1
    assert "manifest.sha256" in warnings[0] and (harm in warnings[0] or harm == "empty")


def test_a_checkpoint_of_another_version_is_passed_over(two_saved):
    newest = two_saved / "step_00000002"
    (newest / "about.json").write_text('{"version": 3}')
    manifest.write_manifest(newest, manifest.hashes_of(newest, [n for n in names_in(newest) if n != "manifest.sha256"]))
    warnings = []
    assert newest_sound_in(two_saved, warn=warnings.append).about.step == 1
    assert "about.json is whole, and not what this version" in warnings[0]


def test_none_is_found_where_none_is_sound(two_saved):
    assert newest_sound_in(two_saved / "nowhere", warn=no_warning) is None
    for place in steps_in(two_saved):
        (place / "plain.json").unlink()
    warnings = []
    assert newest_sound_in(two_saved, warn=warnings.append) is None and len(warnings) == 2


# ---------------------------------------------------------------------------------------------- failing saves


class _SmallFiles:
    """No file may grow past `limit_bytes` meanwhile: writes fail as on a full disk, here with EFBIG."""

    def __init__(self, limit_bytes):
        self.limit_bytes = limit_bytes

    def __enter__(self):
        self.before = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (self.limit_bytes, self.before[1]))

    def __exit__(self, *_):
        resource.setrlimit(resource.RLIMIT_FSIZE, self.before)


def saves_on_a_full_disk(mesh, folder, full_rank, limit_bytes):
    warnings = []
    checkpoints = checkpoints_in(folder, mesh, warn=warnings.append)
    big = {f"part{i}": torch.randn(30_000) for i in range(4)}
    checkpoints.save(big, about_of(1), wait=True)
    own = {"noise": torch.randn(10)}
    with _SmallFiles(limit_bytes if mesh.rank == full_rank else resource.RLIM_INFINITY):
        checkpoints.save(big, about_of(2), own=own, wait=True)
    failure, found, left = checkpoints.failure, checkpoints.newest_sound(), names_in(folder)
    mesh.barrier()
    checkpoints.save(big, about_of(3), own=own, wait=True)
    return failure, warnings, found.about.step, left, checkpoints.failure, checkpoints.newest_sound().about.step


@pytest.mark.parametrize(
    "size, full_rank, limit_bytes", [(1, 0, 200_000), (1, 0, 100), (2, 0, 200_000), (2, 1, 200_000), (2, 1, 10)]
)
def test_a_full_disk_in_the_middle_of_a_save_loses_nothing(tmp_path, size, full_rank, limit_bytes):
    answers = on_ranks(size, saves_on_a_full_disk, tmp_path, full_rank, limit_bytes)
    for rank, (failure, warnings, newest, left, later, newest_later) in enumerate(answers):
        assert "step 2 was not saved" in failure and "File too large" in failure and "are free in" in failure
        assert (
            "480,0" in failure
            and "step_00000001 stays the newest" in failure
            and (size == 1 or f"rank {full_rank}: " in failure)
        )
        assert warnings == ([failure] if rank == 0 else [])
        assert (newest, left, later, newest_later) == (1, ["step_00000001"], None, 3)


def saves_into_two_folders(mesh, folder):
    checkpoints = checkpoints_in(folder / str(mesh.rank), mesh, warn=lambda text: None)
    checkpoints.save(state_of(1), about_of(1), wait=True)
    return checkpoints.failure


def test_a_folder_that_ranks_do_not_share_is_said_to_be_so(tmp_path):
    for failure in on_ranks(2, saves_into_two_folders, tmp_path):
        assert "rank 1: " in failure and "name a run folder that all machines share" in failure


def refuses_a_leaf(mesh, folder):
    checkpoints = checkpoints_in(folder, mesh)
    with pytest.raises(ValueError, match=r"rank 1: a checkpoint cannot hold own_1.seen, a builtins.set; make it"):
        checkpoints.save({}, about_of(1), own={"seen": {1} if mesh.rank == 1 else 1})
    return steps_in(folder)


def test_what_one_rank_cannot_save_is_refused_on_all(tmp_path):
    assert on_ranks(2, refuses_a_leaf, tmp_path) == [[], []]


@pytest.mark.parametrize(
    "leaf, says",
    [
        (object(), "a builtins.object"),
        (torch.empty(2, device="meta"), "on meta"),
        (torch.ones(2).to_sparse(), "torch.sparse_coo"),
        ({1.5: 0}, "the key 1.5"),
    ],
)
def test_a_leaf_that_no_checkpoint_can_hold_is_refused(leaf, says):
    with pytest.raises(ValueError, match=f"cannot hold.*{says}"):
        tree_json.to_json({"it": leaf})


def test_a_tensor_that_no_file_can_hold_is_refused(tmp_path):
    scales = torch.ones(2).to(torch.float8_e8m0fnu)
    with pytest.raises(ValueError, match="cannot hold it, a tensor of torch.float8_e8m0fnu; give it as float64, "):
        checkpoints_in(tmp_path).save({"it": scales}, about_of(1))


@pytest.mark.parametrize("whole", [torch.arange(6.0).view(2, 3), torch.arange(6.0).view(3, 2).T])
def test_a_tensor_that_another_rank_has_is_named_and_comes_back(whole):
    absent = RemoteTensor(tuple(whole.shape), whole.dtype, whole.stride())
    here, tensors = tree_json.to_json({"model": {"w": whole}})
    there, none = tree_json.to_json({"model": {"w": absent}})
    assert there == here and none == {}
    assert tree_json.from_json(there, tensors)["model"]["w"] is tensors["model.w"]


def test_a_failing_disk_is_told_in_its_own_words(two_saved, monkeypatch):
    def fails(*_):
        raise OSError(5, "Input/output error")

    warnings = []
    checkpoints = checkpoints_in(two_saved, warn=warnings.append)
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", fails)
        checkpoints.save(state_of(2), about_of(2), wait=True)
    assert "[Errno 5] Input/output error" in checkpoints.failure and warnings == [checkpoints.failure]
    assert names_in(two_saved) == ["step_00000001", "step_00000002"] and checkpoints.newest_sound().about.step == 2


# ---------------------------------------------------------------------------------------------- other models


@pytest.mark.parametrize("shapes", [{"weight": [9, 16]}, {"weight": [8, 16], "bias": [8]}, {}])
def test_a_checkpoint_of_another_model_is_refused(two_saved, shapes):
    checkpoints = checkpoints_in(two_saved)
    found = checkpoints.newest_sound()
    with pytest.raises(ValueError, match=r"of another model: 1 of . names differ. .* is .* there and .* here. Build the model"):
        checkpoints.load(found, model=shapes)
    assert checkpoints.load(found, model={"weight": (8, 16)})[0]["step"] == 2


# ---------------------------------------------------------------------------------------------- killed runs


@pytest.mark.long
def test_kill_minus_nine_at_any_moment_leaves_a_sound_checkpoint(tmp_path):
    began = time.monotonic()
    kills = kill_saves(tmp_path, 20)
    assert [kill.problem for kill in kills if kill.problem] == []
    assert any(kill.inside_a_save for kill in kills), f"no kill fell inside a save in {time.monotonic() - began:.0f} s"
