"""Are the views of a volume its middle plane and its largest values, the same whoever holds which part of it?"""

from __future__ import annotations

import base64
import io
import json
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from ranks import on_ranks
from torch import Tensor

from widefield.comm.mesh import World
from widefield.config import parse_config
from widefield.data import open_dataset
from widefield.data.batch import Batch
from widefield.geometry import Interval
from widefield.report import write_report
from widefield.report.samples import cuts, samples
from widefield.run import train
from widefield.training.thumbnails import SHOWN, Thumbnail, join_thumbnails, small_thumbnail_of
from widefield.training.volume_thumbnails import LONGEST_PX, VIEWS, volume_thumbnails_of

IGNORED = 255


def volume(size: tuple[int, ...], channels: int = 1) -> tuple[Tensor, Tensor, Tensor]:
    """Noise, its classes and answers, with voxels that do not count."""
    generator = torch.Generator().manual_seed(sum(size))
    image = torch.randint(0, 256, (channels, *size), generator=generator, dtype=torch.uint8)
    truth, answers = (torch.randint(0, 4, size, generator=generator) for _ in range(2))
    truth[torch.rand(size, generator=generator) < 0.1] = IGNORED
    return image, truth, answers


def views(whole: tuple[Tensor, Tensor, Tensor], window: tuple[Interval, ...] | None = None, index: int = 1) -> list[Thumbnail]:
    """What a rank that holds the window makes of it."""
    image, truth, answers = whole
    cut = tuple(slice(run.start, run.stop) for run in window) if window else (slice(None),) * 3
    place = {} if window is None else {"whole_shape": tuple(image.shape), "window": window}
    batch = Batch(image[:, *cut][None], torch.zeros(1), torch.tensor([index]), **place)
    return volume_thumbnails_of(batch, answers[cut][None], truth[cut][None], ignore=IGNORED)


@pytest.mark.parametrize("size", [(5, 9, 7), (1, 30, 4), (12, 1, 1)])
@pytest.mark.parametrize("channels", [1, 2, 3])
def test_views_are_the_middle_plane_and_the_largest_values_along_each_axis(size, channels):
    image, truth, answers = whole = volume(size, channels)
    found = {view.view: view for view in views(whole)}
    assert tuple(found) == VIEWS
    shown = image[: 3 if channels == 3 else 1]
    plane = size[0] // 2
    assert torch.equal(found["plane"].image, shown[:, plane]) and torch.equal(found["plane"].truth, truth[plane])
    assert torch.equal(found["plane"].prediction, answers[plane])
    counted = truth != IGNORED
    for axis, name in enumerate(VIEWS[1:]):
        view = found[name]
        assert torch.equal(view.image, shown.amax(axis + 1)) and view.size == size
        assert torch.equal(view.truth, torch.where(counted, truth, 0).amax(axis))
        assert torch.equal(view.prediction, torch.where(counted, answers, 0).amax(axis))
        assert view.counted == counted.sum() and view.right == ((truth == answers) & counted).sum()


@pytest.mark.parametrize(
    "cut", [([0, 3, 9], [0, 11], [0, 8]), ([0, 4, 5, 9], [0, 5, 11], [0, 8]), ([0, 9], [0, 0, 11], [0, 3, 8])]
)
def test_windows_put_together_are_the_views_of_the_whole(cut):
    whole = volume((9, 11, 8))
    runs = [[Interval(a, b) for a, b in zip(one, one[1:], strict=False)] for one in cut]
    parts = [views(whole, (planes, rows, columns)) for planes in runs[0] for rows in runs[1] for columns in runs[2]]
    joined, wanted = join_thumbnails([view for part in parts for view in part]), join_thumbnails(views(whole))
    assert [one.view for one in joined] == [one.view for one in wanted] == sorted(VIEWS)
    for ours, theirs in zip(joined, wanted, strict=True):
        for name in ("image", "truth", "prediction"):
            assert torch.equal(getattr(ours, name), getattr(theirs, name))
        assert ours.view == "plane" or (ours.right, ours.counted) == (theirs.right, theirs.counted)
    missing = join_thumbnails([view for part in parts[1:] for view in part])
    assert len(missing) < len(wanted) or not parts[0], "a view that lacks a part is left out"


def test_large_volumes_have_small_views():
    image = torch.zeros(1, 1, 1, 1, dtype=torch.uint8).expand(1, 40, 900, 700)
    labels = torch.zeros(1, 1, 1, dtype=torch.uint8).expand(40, 900, 700)
    found = {view.view: view for view in views((image, labels, labels))}
    assert all(max(view.image.shape) <= LONGEST_PX for view in found.values())
    assert found["height"].image.shape[1:] == found["height"].shape == (14, 234)


def test_values_of_any_dtype_become_grey_before_the_largest_is_taken():
    image = torch.tensor([-1000.0, 0.0, float("nan"), 500.0]).view(1, 1, 4, 1, 1)
    batch = Batch(image, torch.zeros(1), torch.tensor([0]), shown=(-500.0, 500.0))
    labels = torch.zeros(1, 4, 1, 1, dtype=torch.uint8)
    found = {view.view: view.image.flatten().tolist() for view in volume_thumbnails_of(batch, labels, labels, ignore=IGNORED)}
    assert found["depth"] == [255] and found["height"] == [0, 128, 0, 255] and found["plane"] == [0]


def test_only_the_first_volumes_are_shown():
    assert views(volume((3, 4, 5)), index=SHOWN) == []


def test_a_small_picture_of_a_volume_is_its_middle_plane():
    image, _, _ = volume((7, 20, 30))
    wanted = small_thumbnail_of(Batch(image[None], torch.zeros(1), torch.tensor([0])), 0)
    assert torch.equal(wanted.image, image[:, 3])
    parts = []
    for planes in (Interval(0, 3), Interval(3, 7)):
        for rows in (Interval(0, 11), Interval(11, 20)):
            window = (planes, rows, Interval(0, 30))
            cut = image[:, planes.start : planes.stop, rows.start : rows.stop]
            batch = Batch(cut[None], torch.zeros(1), torch.tensor([0]), whole_shape=(1, 7, 20, 30), window=window)
            parts.append(small_thumbnail_of(batch, 0))
    assert [part is None for part in parts] == [True, True, False, False]
    (joined,) = join_thumbnails([part for part in parts if part is not None])
    assert torch.equal(joined.image, wanted.image)


# ---------------------------------------------------------------------------------------------- the report

CONFIG = """
model: {name: unet, options: {widths: [4], norm: group}}
data: {name: volume, options: {size: [8, 20, 14], volumes: [2, 2], spacing: [3, 1, 0.5]}, batch_size: 1, workers: 0}
task: {name: segmentation}
schedule: {name: constant, length: 2step}
precision: float64
mesh: {replicate: 1}
log: {tensorboard: false}
"""


def go(mesh, folder: Path, settings: list[str]) -> str:
    return train(parse_config(CONFIG, settings), folder, mesh.world).reason


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("whole") / "run"
    assert train(parse_config(CONFIG), folder, World()).reason == "complete"
    return folder


def told(folder: Path) -> dict:
    return json.loads((folder / "evaluation.json").read_text())


def test_a_run_leaves_the_views_of_its_first_volumes(whole):
    images, found = open_dataset(parse_config(CONFIG).data).evaluate, told(whole)["samples"]
    assert [one["id"] for one in found] == ["volume/evaluate/0", "volume/evaluate/1"]
    for number, one in enumerate(found):
        image, labels = images.read(number)
        assert (one["size"], one["spacing"], one["counted"]) == ([8, 20, 14], [3.0, 1.0, 0.5], 8 * 20 * 14)
        assert [view["view"] for view in one["views"]] == list(VIEWS)
        for axis, view in enumerate(one["views"][1:]):
            assert np.array_equal(np.asarray(Image.open(whole / view["image"])), image[0].amax(axis).numpy())
            assert np.array_equal(np.asarray(Image.open(whole / view["truth"])), labels.amax(axis).numpy())
        assert np.array_equal(np.asarray(Image.open(whole / one["views"][0]["image"])), image[0, 4].numpy())


@pytest.mark.long
def test_ranks_that_share_volumes_leave_the_same_files(whole, tmp_path):
    folder, settings = tmp_path / "run", ["mesh.space=[2,2,1]"]
    assert on_ranks(4, go, folder, settings) == ["complete"] * 4
    assert told(folder)["samples"] == told(whole)["samples"]
    files = sorted((whole / "samples").iterdir())
    assert len(files) == 2 * 4 * 3
    for file in files:
        assert np.array_equal(np.asarray(Image.open(file)), np.asarray(Image.open(folder / "samples" / file.name))), file.name
    page = (folder / "report.html").read_text()
    assert "plane 4</div>" in page and "row 10</div>" in page and "Dashed lines are the plan's cuts" in page


def test_the_report_shows_each_view_with_the_proportions_of_the_volume(whole):
    (first, *rest) = samples(whole, told(whole), [2, 1, 1])
    assert first["caption"].endswith("; plane 4 of 8") and "8 x 20 x 14 voxels" in first["caption"]
    assert [one["caption"] for one in rest[:3]] == [f"largest along the {axis}" for axis in ("depth", "height", "width")]
    assert [one["shape"] for one in (first, *rest[:3])] == ["7 / 20", "7 / 20", "7 / 24", "20 / 24"]
    assert (first["rows"], rest[1]["rows"], rest[1]["names"]) == ([], [("50.000", "4")], ("plane", "column"))
    png = Image.open(io.BytesIO(base64.b64decode(rest[1]["page"].partition(",")[2])))
    assert png.size == (14, 8)
    page = (whole / "report.html").read_text()
    assert page.count('<figure class="sample"') == 8
    assert "Of each volume there is its middle plane, and the largest value along each axis" in re.sub(r"\s+", " ", page)


def test_cuts_of_a_view_are_those_of_its_own_axes():
    assert cuts([8, 20, 14], [2, 1, 2], axes=(1, 2)) == ([], [("50.000", "7")])
    assert cuts([8, 20, 14], [2, 4], axes=(0, 1)) == ([("50.000", "4")], [(f"{at}.000", f"{at // 5}") for at in (25, 50, 75)])


@pytest.mark.parametrize("spoiled", [{"spacing": ["a", 1, 1]}, {"spacing": [1]}, {"views": [{"view": "plane"}]}, {"size": []}])
def test_a_forged_sample_of_a_volume_is_refused_in_words(whole, tmp_path, spoiled):
    (tmp_path / "record.jsonl").write_text((whole / "record.jsonl").read_text())
    values = told(whole)
    values["samples"][0] |= spoiled
    (tmp_path / "evaluation.json").write_text(json.dumps(values))
    with pytest.raises(ValueError, match="holds values that widefield does not write"):
        write_report(tmp_path)
