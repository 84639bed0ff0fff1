"""Is a picture of any image small, sensible, and the same whoever holds which part of it?"""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from command import DIGITS
from ranks import on_ranks
from torch import Tensor

from widefield.comm.mesh import World
from widefield.config import DataConfig, read_config
from widefield.data.batch import Batch
from widefield.data.formats import digits
from widefield.data.image import read_image, write_image
from widefield.geometry import Interval
from widefield.run import train
from widefield.training.record import read
from widefield.training.thumbnails import (
    SMALL_PX,
    Thumbnail,
    channels_shown,
    join_thumbnails,
    shown_in_words,
    small_thumbnail_of,
    thumbnails_of,
)


def image_of(channels: int, height: int, width: int) -> Tensor:
    """Noise on a slope, so that no two places look alike."""
    generator = torch.Generator().manual_seed(channels)
    slope = torch.linspace(0, 200, height * width).view(height, width)
    return (slope + torch.randint(0, 50, (channels, height, width), generator=generator)).to(torch.uint8)


def small(image_CHW: Tensor, window: tuple[Interval, Interval] | None = None) -> Thumbnail:
    """What a rank that holds the window makes of image 7."""
    part = image_CHW if window is None else image_CHW[:, *(slice(run.start, run.stop) for run in window)]
    place = {} if window is None else {"whole_shape": tuple(image_CHW.shape), "window": window}
    piece = small_thumbnail_of(Batch(part.unsqueeze(0), torch.zeros(1), torch.tensor([7]), **place), 0)
    assert piece is not None
    return piece


@pytest.mark.parametrize("channels", [1, 2, 3, 4, 5, 13])
@pytest.mark.parametrize("size", [(8, 8), (200, 400), (1, 3000)])
def test_images_of_any_channels_and_size_have_a_picture_that_a_file_holds(tmp_path, channels, size):
    image = image_of(channels, *size)
    piece = small(image)
    shown = 3 if channels >= 3 else 1
    assert piece.image.shape[0] == shown and max(piece.image.shape[1:]) <= SMALL_PX and piece.image.shape[1:] == piece.shape
    write_image(piece.image, tmp_path / "picture.png")
    assert torch.equal(read_image(tmp_path / "picture.png", shown), piece.image)
    if max(size) <= SMALL_PX:
        assert torch.equal(piece.image, image[:shown])


@pytest.mark.parametrize(
    ("channels", "words"),
    [
        (1, None),
        (2, "channel 1 of 2, in grey"),
        (3, None),
        (4, "channels 1, 2 and 3 of 4, as red, green and blue"),
        (12, "channels 1, 2 and 3 of 12, as red, green and blue"),
    ],
)
def test_which_channels_are_shown_is_said_where_it_is_not_all(channels, words):
    assert shown_in_words(channels) == words
    assert torch.equal(channels_shown(image_of(channels, 2, 2)), image_of(channels, 2, 2)[: 3 if channels >= 3 else 1])


@pytest.mark.parametrize("cuts", [([0, 350, 700], [0, 500]), ([0, 1, 333, 700], [0, 250, 250, 500]), ([0, 700], [0, 499, 500])])
def test_windows_put_together_are_the_picture_of_the_whole(cuts):
    """Of a block that a cut goes through its first window takes the mean of what it has, so beside a cut pixels may differ."""
    image = image_of(5, 700, 500)
    rows, columns = ([Interval(a, b) for a, b in zip(cut, cut[1:], strict=False)] for cut in cuts)
    parts = [small(image, (row, column)) for row in rows for column in columns]
    (whole,), wanted = join_thumbnails(parts), small(image)
    assert whole.shape == wanted.shape and whole.image.shape == wanted.image.shape
    off = (whole.image.int() - wanted.image.int()).abs()
    assert off.max() <= 30 and (off > 0).float().mean() < 0.05
    assert join_thumbnails(parts[1:]) == [], "a picture that lacks a part is left out"


def test_blocks_are_means_and_not_single_pixels():
    stripes = torch.zeros(1, 320, 320, dtype=torch.uint8)
    stripes[:, ::2] = 200
    assert small(stripes).image.unique().tolist() == [100]


def test_a_picture_of_a_large_image_takes_little_memory():
    """400 million pixels, as a view of one: what is made of them must not grow with them."""
    image = torch.zeros(1, 1, 1, dtype=torch.uint8).expand(5, 20_000, 20_000)
    with torch.profiler.profile(profile_memory=True, activities=[torch.profiler.ProfilerActivity.CPU]) as recorded:
        assert small(image).image.shape == (3, 157, 157)
    assert sum(max(0, event.self_cpu_memory_usage) for event in recorded.key_averages()) < 64 * 2**20


@dataclass(frozen=True)
class Five:
    """The same digits in five channels; `seen` counts how often each was read."""

    images: Any
    seen: Counter = field(default_factory=Counter)

    def __len__(self) -> int:
        return 40

    def read(self, index: int) -> tuple[Tensor, int]:
        self.seen[index] += 1
        image, label = self.images.read(index)
        return image.expand(5, -1, -1).contiguous(), label

    def name_of(self, index: int) -> str:
        return f"five/{index}"


def of_five_channels(monkeypatch) -> Five:
    plain = digits.open_dataset(DataConfig(name="digits"))
    evaluated = Five(plain.evaluate)
    given = replace(plain, train=Five(plain.train), evaluate=evaluated, channels=5, mean=[0.5] * 5, std=[0.25] * 5)
    monkeypatch.setattr(digits, "open_dataset", lambda config: given)
    return evaluated


def test_a_run_on_images_of_five_channels_pictures_its_mistakes_without_reading_them_again(tmp_path, monkeypatch):
    evaluated, folder = of_five_channels(monkeypatch), tmp_path / "run"
    settings = ["schedule.length=2step", "schedule.warmup=0step", "data.batch_size=20", "log.tensorboard=false"]
    train(read_config(DIGITS, settings), folder, World())
    evaluations = sum(line["kind"] == "evaluation" for line in read(folder))
    assert evaluated.seen.total() == 40 * evaluations + 1, "the one is read for its shape"
    told = json.loads((folder / "evaluation.json").read_text())
    assert told["shown"] == "channels 1, 2 and 3 of 5, as red, green and blue" and len(told["mistakes"]) == 24
    for mistake in told["mistakes"]:
        index = int(mistake["id"].rpartition("/")[2])
        assert torch.equal(read_image(folder / mistake["picture"], 3), evaluated.read(index)[0][:3])
    assert "Shown: channels 1, 2 and 3 of 5, as red, green and blue." in (folder / "report.html").read_text()


def tiled(mesh, folder: Path, settings: list[str]) -> str:
    return train(read_config(DIGITS, settings), folder, mesh.world).reason


@pytest.mark.long
@pytest.mark.sweep
def test_mistakes_have_the_same_pictures_where_images_are_cut(tmp_path):
    settings = ["schedule.length=2step", "schedule.warmup=0step", "log.tensorboard=false", "precision=float64"]
    train(read_config(DIGITS, [*settings, "mesh.replicate=1"]), tmp_path / "whole", World())
    for name, size, layout in (("cut", 3, ["mesh.space=[3,1]"]), ("channels", 2, ["mesh.channel=2"])):
        assert on_ranks(size, tiled, tmp_path / name, [*settings, "mesh.replicate=1", *layout]) == ["complete"] * size
        told = [json.loads((tmp_path / one / "evaluation.json").read_text())["mistakes"] for one in (name, "whole")]
        assert [mistake["id"] for mistake in told[0]] == [mistake["id"] for mistake in told[1]] and len(told[0]) == 24
        for mistake in told[1]:
            file = mistake["picture"]
            assert torch.equal(read_image(tmp_path / name / file, 1), read_image(tmp_path / "whole" / file, 1))


def test_pictures_with_labels_show_three_channels_too():
    image, labels = image_of(5, 90, 80), torch.zeros(1, 90, 80, dtype=torch.int64)
    (piece,) = thumbnails_of(Batch(image.unsqueeze(0), labels, torch.tensor([0])), labels, labels, ignore=255)
    assert torch.equal(piece.image, image[:3]) and (piece.right, piece.counted) == (7200, 7200)
