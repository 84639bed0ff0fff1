"""Is the run folder one run's own, and do the files it leaves read back as what was written?"""

import json
import os
import re
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
import safetensors.torch
import torch
from PIL import Image
from torch import nn

from widefield.config import parse_config, read_config
from widefield.data import Dataset
from widefield.data.batch import Batch
from widefield.data.image import read_image
from widefield.models._weights import check_names
from widefield.plans import Plan, from_text
from widefield.training.evaluate import Evaluation, Mistake
from widefield.training.evaluation_files import write_evaluation
from widefield.training.memory import peak_memory_bytes
from widefield.training.run_folder import (
    claim,
    existing_folder,
    fresh_folder,
    load_weights,
    lock,
    read_model,
    write_config,
    write_model,
    write_nan,
    write_weights,
)
from widefield.training.thumbnails import Thumbnail, small_thumbnail_of

RECIPE = "model: {name: resnet}\ndata: {name: digits}\n"


def refusal(call, *args) -> str:
    with pytest.raises(ValueError) as caught:
        call(*args)
    return str(caught.value)


# ---------------------------------------------------------------------------------------------- folders


def test_fresh_folders_are_numbered_after_the_highest(tmp_path):
    root = tmp_path / "some" / "runs"
    assert [fresh_folder(root).name for _ in range(3)] == ["0001", "0002", "0003"]
    (root / "0041").mkdir()
    (root / "notes").mkdir()
    (root / "0002").rmdir()
    assert fresh_folder(root) == root / "0042" and (root / "0042").is_dir()


def test_runs_that_start_at_once_get_folders_of_their_own(tmp_path):
    with ThreadPoolExecutor(16) as pool:
        folders = list(pool.map(lambda _: fresh_folder(tmp_path), range(64)))
    assert len(set(folders)) == 64


def test_a_folder_with_a_config_is_a_run_folder(tmp_path):
    folder = fresh_folder(tmp_path)
    write_config(folder, parse_config(RECIPE), Plan())
    assert existing_folder(str(folder)) == folder


def test_a_folder_that_is_no_run_folder_suggests_its_neighbour(tmp_path):
    for name in ("digits_a", "other"):
        (tmp_path / name).mkdir()
    write_config(tmp_path / "digits_a", parse_config(RECIPE), Plan())
    told = refusal(existing_folder, tmp_path / "digits_b")
    assert told.startswith(f"{tmp_path}/digits_b is no run folder (it has no config.yaml); did you mean 'digits_a'? Name the")
    assert "no run folder" in refusal(existing_folder, tmp_path / "other")
    assert "no run folder" in refusal(existing_folder, tmp_path / "nowhere" / "digits_a")


# ---------------------------------------------------------------------------------------------- the lock


HOLD = """
import sys, time
from pathlib import Path
from widefield.training.run_folder import lock
held = lock(Path(sys.argv[1]))
print("held", flush=True)
time.sleep(60)
"""


@pytest.mark.long
def test_a_folder_is_one_processs_until_it_ends_however_it_ends(tmp_path):
    with subprocess.Popen([sys.executable, "-c", HOLD, str(tmp_path)], stdout=subprocess.PIPE, text=True) as holder:
        try:
            assert holder.stdout.readline() == "held\n"
            told = refusal(lock, tmp_path)
        finally:
            holder.send_signal(signal.SIGKILL)
    assert told == (
        f"process {holder.pid} is training into {tmp_path}; wait for it, stop it, or name another folder with --run"
    )
    with lock(tmp_path):
        assert f"process {os.getpid()} is training" in refusal(lock, tmp_path)
    lock(tmp_path).close()


def test_a_folder_is_made_and_taken_again(tmp_path):
    for _ in range(2):
        claim(tmp_path / "runs" / "one").close()


@pytest.mark.parametrize("name", ["config.yaml", "model.json", "report.html", "checkpoints", "weights.safetensors"])
def test_a_folder_with_somebody_elses_files_is_not_trained_into(name, tmp_path):
    (tmp_path / "notes.txt").touch()
    claim(tmp_path).close()
    (tmp_path / ".lock").unlink()
    (tmp_path / name).mkdir()
    told = refusal(claim, tmp_path)
    assert told.startswith(
        f"{tmp_path} is no run folder (it has no record.jsonl) and has {name}, which training would overwrite"
    )
    assert not (tmp_path / ".lock").exists()
    (tmp_path / "record.jsonl").touch()
    claim(tmp_path).close()


def test_a_file_is_no_run_folder(tmp_path):
    (tmp_path / "file").touch()
    for place in (tmp_path / "file", tmp_path / "file" / "run"):
        assert refusal(claim, place).startswith(f"{place} cannot be a run folder (")


HOLD_AND_FORK = """
import os, sys, time
from pathlib import Path
from widefield.training.run_folder import lock
held = lock(Path(sys.argv[1]))
if os.fork() == 0:
    print("forked", os.getpid(), flush=True)
time.sleep(60)
"""


@pytest.mark.long
def test_a_child_that_outlives_its_parent_does_not_keep_the_folder(tmp_path):
    """A loader's worker, say, after kill -9 of the run: it was forked with the open file."""
    command = [sys.executable, "-c", HOLD_AND_FORK, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as parent:
        word, child = parent.stdout.readline().split()
        try:
            assert word == "forked" and f"process {parent.pid} is training" in refusal(lock, tmp_path)
            parent.kill()
            parent.wait()
            os.kill(int(child), 0)  # it lives
            lock(tmp_path).close()
        finally:
            os.kill(int(child), signal.SIGKILL)


# ---------------------------------------------------------------------------------------------- config


def test_config_and_plan_read_back_and_what_changed_is_told(tmp_path):
    config = parse_config(RECIPE)
    assert write_config(tmp_path, config, Plan(replicate=2)) == []
    assert read_config(tmp_path / "config.yaml") == config
    assert from_text((tmp_path / "plan.yaml").read_text()) == Plan(replicate=2)
    changed = parse_config(RECIPE, ["seed=3", "optimizer.lr=0.5"])
    assert write_config(tmp_path, changed, Plan()) == ["seed: 0 -> 3", "optimizer.lr: None -> 0.5"]
    assert read_config(tmp_path / "config.yaml") == changed


# ---------------------------------------------------------------------------------------------- weights


class Tied(nn.Module):
    """Two names for one weight, a slice of another, a buffer, and a number that is no tensor of floats."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.second.weight = self.first.weight
        self.norm = nn.BatchNorm1d(4)
        self.register_buffer("bias_view", self.first.bias.detach()[1:3])
        self.register_buffer("empty", torch.zeros(0))
        self.register_buffer("nothing", torch.zeros(0, 3))


def fresh_tied() -> nn.Module:
    model = Tied()
    with torch.no_grad():
        for value in model.state_dict().values():
            value.zero_()
    return model


def bits(model: nn.Module) -> dict[str, bytes]:
    return {name: value.contiguous().numpy().tobytes() for name, value in model.state_dict().items()}


def test_weights_come_back_bit_for_bit_tied_ones_too(tmp_path):
    model, other = Tied(), fresh_tied()
    load_weights(write_weights(tmp_path, model.state_dict()), other)
    assert bits(other) == bits(model) and other.second.weight is other.first.weight
    assert {path.name for path in tmp_path.iterdir()} == {"weights.safetensors"}


def test_weights_in_any_memory_format_are_the_same_file(tmp_path):
    (tmp_path / "last").mkdir()
    torch.manual_seed(0)
    model = nn.Conv2d(3, 4, 3)
    plain = write_weights(tmp_path, model.state_dict()).read_bytes()
    assert write_weights(tmp_path / "last", model.to(memory_format=torch.channels_last).state_dict()).read_bytes() == plain


def test_weights_load_into_the_plain_model_without_us(tmp_path):
    model, other = Tied(), fresh_tied()
    other.load_state_dict(safetensors.torch.load_file(write_weights(tmp_path, model.state_dict())))
    assert bits(other) == bits(model)


def test_a_failed_write_leaves_the_old_weights(tmp_path, monkeypatch):
    path = write_weights(tmp_path, Tied().state_dict())
    before = path.read_bytes()

    def full(tensors, path, metadata):
        Path(path).write_bytes(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(safetensors.torch, "save_file", full)
    with pytest.raises(OSError, match="No space left"):
        write_weights(tmp_path, fresh_tied().state_dict())
    assert path.read_bytes() == before


def test_weights_that_are_not_there_or_not_sound_are_refused(tmp_path):
    assert refusal(load_weights, tmp_path / "no.safetensors", Tied()) == (
        f"there are no weights at {tmp_path}/no.safetensors; name a .safetensors, .pt or .pth file"
    )
    path = write_weights(tmp_path, Tied().state_dict())
    for damaged in (b"", path.read_bytes()[:100], path.read_bytes()[:-8], b"\xff" * 64):
        path.write_bytes(damaged)
        assert refusal(load_weights, path, Tied()).startswith(f"{path} is no sound .safetensors file (")


def test_weights_of_another_model_name_what_differs_and_change_nothing(tmp_path):
    path = write_weights(tmp_path, nn.Sequential(nn.Linear(4, 3)).state_dict())
    model = nn.Sequential(nn.Linear(4, 2), nn.Linear(2, 2, bias=False))
    before = bits(model)
    told = refusal(load_weights, path, model)
    assert told == (
        f"{path} is of another model: 0.weight is [3, 4] there and [2, 4] here; 0.bias is [3] there and [2] here; "
        "1.weight is missing there; set model.name and model.options to what it was trained with"
    )
    assert bits(model) == before


def test_many_differences_are_counted():
    told = refusal(check_names, {"a": [1], "b": [1], "c": [1]}, {"d": [1], "e": [2]}, "the file")
    assert told.startswith("the file is of another model: d is missing there; e is missing there; a is unknown here and 2 more")
    check_names({"a": [1]}, {"a": [1]}, "the file")


# ---------------------------------------------------------------------------------------------- the model


class Twelve:
    """Twelve wide images whose brightness is their number."""

    def __len__(self) -> int:
        return 12

    def read(self, index: int):
        return torch.full((3, 200, 400), index, dtype=torch.uint8), index % 2

    def name_of(self, index: int) -> str:
        return f"images/{index}.png"


def test_what_using_a_model_takes_reads_back(tmp_path):
    dataset = Dataset(Twelve(), Twelve(), ["cät", "dog"], 3, [0.5], [0.25], in_memory=True)
    write_model(tmp_path, dataset, shape=[3, 20, 40], mean=[0.1, 0.2, 1 / 3], std=[0.3, 0.4, 0.5], name="resnet")
    read = read_model(tmp_path)
    assert (read.classes, read.channels, read.mean, read.std) == (["cät", "dog"], 3, [0.1, 0.2, 1 / 3], [0.3, 0.4, 0.5])
    assert read.train.shape == [3, 20, 40] and len(read.train) == len(read.evaluate) == 0


def test_a_dataset_without_images_gives_none(tmp_path):
    dataset = Dataset(Twelve(), Twelve(), ["a", "b"], 3, [0.5], [0.25], in_memory=True)
    write_model(tmp_path, dataset, shape=[3, 2, 2], mean=[0.5], std=[0.25], name="resnet")
    images = read_model(tmp_path).train
    for call in (images.read, images.name_of):
        with pytest.raises(AssertionError, match="holds no images"):
            call(0)


def test_a_run_that_never_began_has_no_model(tmp_path):
    assert refusal(read_model, tmp_path) == f"{tmp_path} has no model.json, so its run never began to train; train it first"


# ---------------------------------------------------------------------------------------------- evaluation


def evaluation(*mistakes: int) -> Evaluation:
    worst = [Mistake(index, truth=index % 2, prediction=1 - index % 2, probability=0.75, loss=2.5) for index in mistakes]
    pictures = [picture_of(index) for index in mistakes]
    told = {"mistakes": worst, "pictures": pictures}
    return Evaluation({"top1": 75.0}, [[3, 1], [0, 4]], 0.5, 8, 8, 0, [], "75.00 % top-1 on 8/8", 1.5, **told)


def picture_of(index: int) -> Thumbnail:
    image = Twelve().read(index)[0].unsqueeze(0)
    piece = small_thumbnail_of(Batch(image, torch.zeros(1), torch.tensor([index])), 0)
    assert piece is not None
    return piece


def leave(folder: Path, *mistakes: int) -> dict:
    write_evaluation(folder, evaluation(*mistakes), step=7, epoch=1.5, classes=["cat", "dog"], images=Twelve())
    return json.loads((folder / "evaluation.json").read_text())


def test_an_evaluation_is_left_with_its_worst_mistakes_as_pictures(tmp_path):
    left = leave(tmp_path, 5, 2)
    assert (left["step"], left["epoch"], left["metrics"], left["confusion"]) == (7, 1.5, {"top1": 75.0}, [[3, 1], [0, 4]])
    assert left["mistakes"][0] == {
        "id": "images/5.png",
        "picture": "mistakes/00.png",
        "truth": "dog",
        "prediction": "cat",
        "probability": 0.75,
        "loss": 2.5,
    }
    for picture, brightness in zip(left["mistakes"], (5, 2), strict=True):
        image = read_image(tmp_path / picture["picture"], 3)
        assert image.shape == (3, 67, 134) and image.unique().tolist() == [brightness]


def test_a_mistake_whose_picture_is_missing_or_cannot_be_written_is_told_all_the_same(tmp_path):
    told = evaluation(5, 2)
    write_evaluation(tmp_path, replace(told, pictures=told.pictures[1:]), step=7, epoch=1.5, classes=["cat", "dog"],
                     images=Twelve(), attempt=lambda what, work: None if "pictures" in what else work())  # fmt: skip
    left = json.loads((tmp_path / "evaluation.json").read_text())
    assert [mistake["id"] for mistake in left["mistakes"]] == ["images/5.png", "images/2.png"]
    assert [mistake["picture"] for mistake in left["mistakes"]] == ["", ""] and left["shown"] is None


def test_pictures_of_earlier_mistakes_are_taken_away(tmp_path):
    leave(tmp_path, 1, 2, 3)
    leave(tmp_path, 4)
    assert [path.name for path in (tmp_path / "mistakes").iterdir()] == ["00.png"]
    assert Image.open(tmp_path / "mistakes" / "00.png").getpixel((0, 0)) == (4, 4, 4)
    assert leave(tmp_path)["mistakes"] == [] and not list((tmp_path / "mistakes").iterdir())


def test_the_images_of_a_loss_that_is_no_number_are_listed(tmp_path):
    path = write_nan(tmp_path, {"step": 3, "index": [1, 2]})
    assert path == tmp_path / "nan.json" and json.loads(path.read_text()) == {"step": 3, "index": [1, 2]}


def test_peak_memory_is_the_kernels_in_bytes():
    (told,) = re.findall(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
    # the kernel counts pages per core and adds them up now and then; a unit mistaken is off by 1,024
    assert peak_memory_bytes(torch.device("cpu")) == pytest.approx(1024 * int(told), rel=0.1)
