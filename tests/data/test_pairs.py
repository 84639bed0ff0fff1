"""Are inputs and targets paired by name, read by window, of one dtype and one scale, and is a folder that is wrong refused?"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from widefield.config import DataConfig
from widefield.data import Dataset, WindowedImages, open_dataset
from widefield.data.targets import check_target_image
from widefield.geometry import Interval

RANDOM = np.random.default_rng(0)


def save(path: Path, size: tuple[int, ...], dtype: type = np.uint8) -> np.ndarray:
    path.parent.mkdir(parents=True, exist_ok=True)
    pixels = RANDOM.integers(0, np.iinfo(dtype).max, size).astype(dtype)
    if path.suffix == ".npy":
        np.save(path, pixels)
    else:
        Image.fromarray(pixels).save(path)
    return pixels


def folder(place: Path, *, inputs: str = "input", targets: str = "target", names: str = "abcd", scale: int = 1) -> Path:
    for name in names:
        save(place / inputs / f"{name}.png", (6, 9, 3))
        save(place / targets / f"{name}.png", (6 * scale, 9 * scale))
    return place


def opened(place: Path, **options) -> Dataset:
    config = {key: options.pop(key) for key in ("hold_out", "fold") if key in options}
    return open_dataset(DataConfig(name="pairs", path=str(place), options=options, **config))


@pytest.mark.parametrize(("inputs", "targets"), [("input", "target"), ("LR", "HR"), ("noisy", "clean"), ("lq", "GT")])
def test_folders_are_found_by_any_of_their_names(tmp_path, inputs, targets):
    dataset = opened(folder(tmp_path, inputs=inputs, targets=targets, scale=2), hold_out=0.25)
    assert (len(dataset.train), len(dataset.evaluate), dataset.channels, dataset.classes) == (3, 1, 3, ["grey"])
    assert (dataset.scale, dataset.labels, dataset.image_scale) == (2, "image", 2)
    assert dataset.about is not None and "1 channels of targets, targets of 2 times the pixels along each dim" in dataset.about


def test_folders_may_give_the_split(tmp_path):
    for split, names in (("train", "abc"), ("val", "de")):
        folder(tmp_path / "outer" / split, names=names)
        folder(tmp_path / "inner", inputs=f"input/{split}", targets=f"target/{split}", names=names)
    for place in ("outer", "inner"):
        dataset = opened(tmp_path / place)
        assert [Path(dataset.evaluate.name_of(index)).stem for index in range(2)] == ["d", "e"] and len(dataset.train) == 3


@pytest.mark.parametrize("suffix", [".png", ".npy", ".tif"])
def test_a_window_is_that_part_of_the_pair(tmp_path, suffix):
    for name in "ab":
        image = save(tmp_path / f"input/{name}{suffix}", (8, 10), np.uint16)
        target = save(tmp_path / f"target/{name}{suffix}", (24, 30), np.uint16)
    dataset = opened(tmp_path, hold_out=0.5)
    images = next(one for one in (dataset.train, dataset.evaluate) if Path(one.name_of(0)).stem == "b")
    assert isinstance(images, WindowedImages) and dataset.dtype == torch.uint16 and dataset.scale == 3
    whole = images.read(0)
    assert np.array_equal(whole[0][0].numpy(), image) and np.array_equal(whole[1][0].numpy(), target)
    part = images.read_window(0, (Interval(2, 5), Interval(1, 10)))
    assert torch.equal(part[0], whole[0][:, 2:5, 1:10]) and torch.equal(part[1], whole[1][:, 6:15, 3:30])


def test_the_wider_dtype_is_that_of_both_where_it_is_asked_for(tmp_path):
    save(tmp_path / "input/a.png", (4, 4))
    save(tmp_path / "target/a.png", (4, 4), np.uint16)
    save(tmp_path / "input/b.png", (4, 4))
    save(tmp_path / "target/b.png", (4, 4), np.uint16)
    image, target = opened(tmp_path, dtype="uint16", hold_out=0.5).train.read(0)
    assert image.dtype == target.dtype == torch.uint16
    with pytest.raises(ValueError, match="its pixels are uint16 and those of the others uint8"):
        opened(tmp_path, hold_out=0.5).train.read(0)


def test_what_is_wrong_in_a_folder_is_refused_by_name(tmp_path):
    with pytest.raises(ValueError, match=r"data.path is .*none and data.name=pairs reads a folder; name one that exists"):
        opened(tmp_path / "none")
    (tmp_path / "empty/photos").mkdir(parents=True)
    with pytest.raises(ValueError, match=r"has no folders of inputs and targets; put them into .*/input .* It has: photos"):
        opened(tmp_path / "empty")
    lone = folder(tmp_path / "lone")
    save(lone / "input/e.png", (6, 9, 3))
    with pytest.raises(ValueError, match=r"input/e.png has no target: .*target has no file of its stem; add it, or remove"):
        opened(lone, fold=0)
    (lone / "input/e.png").rename(lone / "target/e.png")
    with pytest.raises(ValueError, match=r"target/e.png has no input: .*input has no file of its stem"):
        opened(lone, fold=0)
    odd = folder(tmp_path / "odd", scale=2)
    save(odd / "target/c.png", (12, 17))
    with pytest.raises(ValueError, match=r"c.png is 12 x 17 pixels and .*c.png is 6 x 9, which is no scale of 2; mend one"):
        opened(odd, fold=0)
    split = folder(tmp_path / "split/train").parent
    folder(split / "val")
    with pytest.raises(ValueError, match=r"has folders to train on and to evaluate, so leave data.fold=0 out"):
        opened(split, fold=0)


@pytest.mark.parametrize(
    ("target", "told"),
    [
        (3, "the target of a is a number and an image of 2 channels is wanted"),
        (
            torch.zeros(1, 8, 8, dtype=torch.uint8),
            r"the target of a is of shape \(1, 8, 8\) and an image of 2 channels is wanted",
        ),
        (torch.zeros(2, 8, 6, dtype=torch.uint8), "is 8 x 6 pixels and its input 4 x 4, which with a scale of 2 wants 8 x 8"),
        (torch.zeros(2, 8, 8), "has pixels of torch.float32 and its input of torch.uint8; give both one dtype"),
    ],
)
def test_a_target_that_does_not_fit_its_input_is_refused(target, told):
    with pytest.raises(ValueError, match=told):
        check_target_image("a", torch.zeros(1, 4, 4, dtype=torch.uint8), target, channels=2, scale=2)
