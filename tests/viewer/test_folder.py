"""What is written, what is counted, how pixels of any dtype are shown, and what is refused before anything is written."""

from __future__ import annotations

import errno
import shutil
from collections import namedtuple
from pathlib import Path

import numpy as np
import pytest
from image_files.test_formats import each_case, pixels_of
from PIL import Image
from viewer.pages import data, level, shown, write

from widefield.image_files import open_image
from widefield.image_files.image_file import ImageFileError
from widefield.naming import load
from widefield.viewer import Viewer, open_scene
from widefield.viewer.display import display_of
from widefield.viewer.folder import FILES, check_place

RNG = np.random.default_rng(1)
IMAGE = RNG.integers(0, 256, (3, 600, 700), dtype=np.uint8)
TRUTH = RNG.integers(0, 3, (600, 700)).astype(np.uint8)
PREDICTION = np.where(RNG.random(TRUTH.shape) < 0.2, (TRUTH + 1) % 3, TRUTH).astype(np.uint8)


def saved(folder: Path, name: str, array: np.ndarray) -> Path:
    np.save(folder / f"{name}.npy", array)
    return folder / f"{name}.npy"


def scene_of(page: Path) -> dict:
    (scene,) = data(page)["scenes"]
    return scene


# ---------------------------------------------------------------------------------------------- counts


def test_shares_errors_and_iou_are_those_of_the_whole_arrays(tmp_path):
    truth = TRUTH.copy()
    truth[:50] = 255
    scene = scene_of(write(tmp_path, IMAGE, prediction=PREDICTION, truth=truth, settings=shown(classes=["a", "b", "c"])))
    counts = truth != 255
    assert scene["compared"] == counts.sum() and scene["wrong"] == (PREDICTION != truth)[counts].sum()
    for number, one in enumerate(scene["legend"]):
        assert (one["number"], one["name"]) == (number, "abc"[number])
        assert one["prediction"] == pytest.approx((PREDICTION == number).mean(), rel=1e-12)
        assert one["truth"] == pytest.approx((truth == number).sum() / counts.sum(), rel=1e-12)
        both = ((PREDICTION == number) & (truth == number)).sum()
        either = (((PREDICTION == number) | (truth == number)) & counts).sum()
        assert one["iou"] == pytest.approx(both / either, rel=1e-12)


def test_the_worst_windows_come_first_and_their_counts_are_right(tmp_path):
    scene = scene_of(write(tmp_path, IMAGE, prediction=PREDICTION, truth=TRUTH))
    wrong = PREDICTION != TRUTH
    found = [(one["y"], one["x"], one["wrong"], one["of"]) for one in scene["worst"]]
    windows = [(slice(top, top + 512), slice(left, left + 512)) for top in (0, 512) for left in (0, 512)]
    centres = [((one.start + min(one.stop, 600)) / 2, (other.start + min(other.stop, 700)) / 2) for one, other in windows]
    wanted = [(*centre, wrong[one].sum(), wrong[one].size) for centre, one in zip(centres, windows, strict=True)]
    assert found == sorted(wanted, key=lambda one: -one[2]) and sum(one[2] for one in found) == wrong.sum()


def test_worst_slices_of_a_volume_are_apart(tmp_path):
    truth = np.zeros((48, 20, 20), np.uint8)
    prediction = truth.copy()
    prediction[20:24] = 1
    prediction[22, 0, 0] = 0
    prediction[40, 0] = 1
    page = write(tmp_path, truth[None] * 100, prediction=prediction, truth=truth)
    worst = scene_of(page)["worst"]
    assert [(one["slice"], one["wrong"]) for one in worst] == [(20, 400), (40, 20)]
    with Image.open(page / "overview.png") as picture:
        assert (np.asarray(picture) == (255, 64, 48)).all(-1).sum() >= 400  # the slice with most errors


def test_only_classes_that_occur_are_listed_without_names_and_all_with(tmp_path):
    labels = np.where(TRUTH == 1, 7, 2)
    page = write(tmp_path, IMAGE, prediction=labels)
    assert [(one["number"], one["name"]) for one in scene_of(page)["legend"]] == [(2, "2"), (7, "7")]
    page = write(tmp_path, IMAGE, prediction=labels, settings=shown(classes=[f"class {n}" for n in range(9)]))
    assert [one["name"] for one in scene_of(page)["legend"]] == [f"class {n}" for n in range(9)]


@pytest.mark.parametrize(
    ("settings", "nothing"),
    [({}, (255,)), ({"ignored": [0, 9]}, (0, 9)), ({"classes": ["a", "b", "c"]}, (3, 9, 255, 300)), ({"ignored": []}, ())],
)
def test_numbers_that_are_no_class_are_left_out(tmp_path, settings, nothing):
    labels = TRUTH.astype(np.int32)
    labels[0, :6] = (-1, 0, 3, 9, 255, 300)
    page = write(tmp_path, IMAGE, prediction=labels, settings=shown(**settings))
    is_none = np.isin(labels, (-1, *nothing))
    assert np.array_equal(level(page, "prediction", 0, TRUTH.shape), np.where(is_none, 0, labels + 1))


@pytest.mark.long
def test_labels_above_255_are_shown_too(tmp_path):
    labels = RNG.integers(0, 60_000, TRUTH.shape).astype(np.uint32)
    page = write(tmp_path, IMAGE, prediction=labels, settings=shown(ignored=[]))
    assert scene_of(page)["wide"] and np.array_equal(level(page, "prediction", 0, TRUTH.shape), labels + 1)


# ---------------------------------------------------------------------------------------------- display


@pytest.mark.parametrize("dtype", ["uint16", "int16", "float32"])
def test_other_dtypes_are_shown_between_percentiles_of_a_sample(tmp_path, dtype):
    values = RNG.normal(500, 100, (2, 900, 800)).clip(-1000, 1000).astype(dtype)
    display = display_of(open_image(saved(tmp_path, "a", values)), [2], None)
    assert display.bands == (1,) and display.low[0] == pytest.approx(np.percentile(values[1], 1), abs=5)
    assert display.high[0] == pytest.approx(np.percentile(values[1], 99), abs=5)
    page = write(tmp_path, values, settings=shown(bands=[2], limits=(400, 600)))
    wanted = np.floor(255 * np.clip((values[1].astype(float) - 400) / 200, 0, 1) + 0.5)
    assert np.array_equal(level(page, "image", 0, (900, 800)), wanted)
    assert scene_of(page)["shown"] == "band 2 from 400 to 600"


def test_pixels_without_data_do_not_count_in_percentiles(tmp_path):
    values = np.full((1, 300, 300), np.nan, np.float32)
    values[0, :10] = np.linspace(5, 6, 3000).reshape(10, 300)
    display = display_of(open_image(saved(tmp_path, "a", values)), None, None)
    assert 5 <= display.low[0] < 5.02 and 5.98 < display.high[0] <= 6
    empty = display_of(open_image(saved(tmp_path, "b", np.full_like(values, np.nan))), None, None)
    assert (empty.low, empty.high) == ((0.0,), (1.0,))


def test_a_flat_image_has_a_range(tmp_path):
    display = display_of(open_image(saved(tmp_path, "a", np.full((40, 50), 7, np.uint16))), None, None)
    assert (display.low, display.high) == ((7.0,), (8.0,))


def test_bands_are_shown_in_the_order_that_is_asked_for(tmp_path):
    bands = RNG.integers(0, 256, (5, 40, 30), dtype=np.uint8)
    page = write(tmp_path, bands.transpose(1, 2, 0)[..., :4], settings=shown(bands=[4, 3, 2]))
    assert np.array_equal(level(page, "image", 0, (40, 30)), bands[[3, 2, 1]].transpose(1, 2, 0))
    assert scene_of(page)["shown"] == "bands 4, 3, 2 from 0 to 255"


def test_a_palette_is_shown_in_its_colours(tmp_path):
    table = RNG.integers(0, 256, (4, 3), dtype=np.uint8)
    numbers = RNG.integers(0, 4, (30, 40), dtype=np.uint8)
    picture = Image.fromarray(numbers)
    picture.putpalette(table.ravel().tolist())
    picture.save(tmp_path / "a.png")
    Viewer([open_scene("a", tmp_path / "a.png", {})], shown()).write(tmp_path / "page")
    assert np.array_equal(level(tmp_path / "page", "image", 0, (30, 40)), table[numbers])


def test_transparent_pixels_are_transparent(tmp_path):
    pixels = RNG.integers(1, 256, (30, 40, 4), dtype=np.uint8)
    pixels[:10, :, 3] = 0
    Image.fromarray(pixels).save(tmp_path / "a.png")
    Viewer([open_scene("a", tmp_path / "a.png", {})], shown()).write(tmp_path / "page")
    found = level(tmp_path / "page", "image", 0, (30, 40))
    assert np.array_equal(found[10:, :, :3], pixels[10:, :, :3])
    assert (found[:10, :, 3] == 0).all() and (found[10:, :, 3] == 255).all()


@each_case
def test_images_of_every_format_are_shown_as_they_are_read(tmp_path, name, file, shape, dtype):
    path = tmp_path / file
    load("widefield.image_files.formats", name).write_example(path, pixels_of(shape, dtype))
    with open_image(path) as image:
        pixels, valid, info = image.read(), image.valid(), image.info
    bands = [1, 1, 1] if info.palette else [1]
    Viewer([open_scene("a", path, {})], shown(bands=bands, limits=(0, 255))).write(tmp_path / "page")
    depth, *size = scene_of(tmp_path / "page")["extents"]
    values = pixels[0].reshape(depth, *size).astype(float)
    holds = np.isfinite(values) & (True if valid is None else valid.reshape(values.shape))
    if info.colours in ("LA", "RGBA"):
        holds &= pixels[-1].reshape(values.shape) > 0
    for at in range(depth):
        seen = level(tmp_path / "page", "image", 0, tuple(size), at=f"0-{at}")
        grey, alpha = (seen[..., 0], seen[..., -1]) if seen.ndim == 3 and seen.shape[2] % 2 == 0 else (seen, None)
        grey = grey[..., 0] if grey.ndim == 3 else grey
        assert np.array_equal(holds[at], np.ones_like(holds[at]) if alpha is None else alpha > 0)
        assert np.array_equal(grey[holds[at]], np.floor(np.clip(values[at], 0, 255) + 0.5)[holds[at]])


# ---------------------------------------------------------------------------------------------- the overview


@pytest.mark.parametrize("size", [(40, 30), (3000, 40), (1100, 4600), (2500, 2500)])
def test_the_overview_has_four_panels_of_at_most_2048_pixels(tmp_path, size):
    image = np.full((3, *size), 9, np.uint8)
    labels = np.ones(size, np.uint8)
    page = write(tmp_path, image, prediction=labels, truth=2 * labels)
    with Image.open(page / "overview.png") as picture:
        assert max(picture.size) <= 2048
        seen = np.asarray(picture).reshape(-1, 3)
    counts = [(seen == colour).all(1).sum() for colour in ((9, 9, 9), (86, 146, 214), (255, 145, 30), (255, 64, 48))]
    assert len(set(counts)) == 1 and counts[0] > 0


# ---------------------------------------------------------------------------------------------- the folder


def test_a_viewer_is_replaced_and_nothing_else_is(tmp_path):
    page = write(tmp_path, IMAGE)
    (page / "tiles" / "old").mkdir()
    assert write(tmp_path, IMAGE) == page and not (page / "tiles" / "old").exists()
    assert sorted(path.name for path in page.iterdir()) == sorted([*FILES, "data.js", "overview.png", "tiles"])
    (page / "data.js").write_text("my own")
    with pytest.raises(ValueError, match="is there and is no viewer, so it is not replaced; name another --output"):
        write(tmp_path, IMAGE)
    (tmp_path / "file").write_text("mine")
    with pytest.raises(ValueError, match="is no viewer"):
        check_place(tmp_path / "file")


def test_a_full_disk_leaves_the_old_viewer_as_it_was(tmp_path, monkeypatch):
    page = write(tmp_path, IMAGE)
    before = {path: path.read_bytes() for path in page.rglob("*.*")}
    write_bytes = Path.write_bytes

    def refuse(self, content):
        if self.suffix == ".webp" and "tiles" in self.parts:
            raise OSError(errno.ENOSPC, "No space left on device")
        return write_bytes(self, content)

    monkeypatch.setattr(Path, "write_bytes", refuse)
    with pytest.raises(ValueError, match="cannot be written to .*page .*No space left on device.*; free some space"):
        write(tmp_path, IMAGE[:, :100])
    assert {path: path.read_bytes() for path in page.rglob("*.*")} == before
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


def test_the_estimate_counts_the_tiles(tmp_path):
    scenes = [open_scene("a", saved(tmp_path, "a", IMAGE), {"prediction": saved(tmp_path, "p", PREDICTION)})]
    viewer = Viewer(scenes, shown())
    done = []
    cost = viewer.estimate(tmp_path / "page")
    written = viewer.write(tmp_path / "page", lambda: done.append(1))
    assert cost.tiles == written.tiles == 2 * (4 + 1) and len(done) == viewer.steps == 5
    assert written.size == sum(path.stat().st_size for path in (tmp_path / "page" / "tiles").rglob("*.*"))
    assert 0.9 * written.size < cost.size < 4 * written.size  # tiles at the border are smaller than that which is tried


def test_too_many_tiles_are_refused_with_the_level_that_fits(tmp_path):
    image = saved(tmp_path, "a", np.broadcast_to(np.arange(3000, dtype=np.uint16), (3000, 3000)))
    viewer = Viewer([open_scene("a", image, {})], shown(most_tiles=20))
    with pytest.raises(ValueError, match="of 1 image would be 50 tiles and about .*, and 20 tiles are allowed; ") as refused:
        viewer.estimate(tmp_path / "page")
    assert "; add --level 1 (pixels of 2 x 2: 14 tiles and about " in str(refused.value)
    assert "), or --most-tiles 50. A server " in str(refused.value)
    assert not (tmp_path / "page").exists()
    many = Viewer([open_scene("a", saved(tmp_path, "b", IMAGE[:, :50, :50]), {})] * 201, shown(most_tiles=200))
    with pytest.raises(ValueError, match="of 201 images .* add --first N for the first N images, or --most-tiles 201"):
        many.estimate(tmp_path / "page")


def test_a_volume_that_has_too_many_slices_is_told_what_to_leave_out(tmp_path):
    scene = open_scene("a", saved(tmp_path, "a", np.zeros((1, 30, 40, 50), np.uint8)), {})
    for planes, words in ((True, "120 tiles .*; leave --planes out, or"), (False, "30 tiles .*; leave layers out, or")):
        with pytest.raises(ValueError, match=words):
            Viewer([scene], shown(most_tiles=20, planes=planes)).estimate(tmp_path / "page")


def test_a_disk_without_room_is_said_before(tmp_path, monkeypatch):
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(10**9, 10**9, 1000))
    with pytest.raises(ValueError, match="would be 5 tiles and about .* and the disk of .* has 1 KiB left; free some space"):
        Viewer([open_scene("a", saved(tmp_path, "a", IMAGE), {})], shown()).estimate(tmp_path / "page")


# ---------------------------------------------------------------------------------------------- files that do not fit


@pytest.mark.parametrize(
    ("labels", "words"),
    [
        (TRUTH[:-1], r"p.npy has 1 x 599 x 700 pixels \(depth, height, width\) and .*a.npy has 1 x 600 x 700; name files of"),
        (TRUTH.astype(np.float32), "p.npy has 1 channels of float32, and labels are one whole number per pixel; name a file"),
        (IMAGE, "p.npy has 3 channels of uint8, and labels are one whole number per pixel"),
    ],
)
def test_labels_of_another_size_or_kind_are_refused(tmp_path, labels, words):
    with pytest.raises(ValueError, match=words):
        open_scene("a", saved(tmp_path, "a", IMAGE), {"prediction": saved(tmp_path, "p", labels)})


@pytest.mark.parametrize(
    ("likely", "words"),
    [
        (np.zeros((3, 600, 699), np.float16), "q.npy has 1 x 600 x 699 pixels"),
        (
            np.zeros((3, 600, 700), np.uint8),
            r"q.npy is uint8 of shape \(3, 600, 700\); name floats of \(classes, height, width\)",
        ),
        (np.zeros((600, 700), np.float32), "name floats of"),
        (None, r"cannot read .*q.npy \(.*\); name a .npy file of"),
    ],
)
def test_probabilities_of_another_size_or_kind_are_refused(tmp_path, likely, words):
    path = tmp_path / "q.npy"
    path.write_bytes(b"no array") if likely is None else np.save(path, likely)
    with pytest.raises(ValueError, match=words):
        open_scene("a", saved(tmp_path, "a", IMAGE), {}, path)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"bands": [1, 2]}, "--bands names 2 bands; write one for grey, or three for red, green and blue, as 4,3,2"),
        ({"bands": [1, 2, 4]}, "--bands is 1,2,4 and .*image.npy has bands 1 to 3; name some of these"),
        ({"bands": [0]}, "has bands 1 to 3"),
    ],
)
def test_bands_that_are_not_there_are_refused(tmp_path, settings, words):
    with pytest.raises(ValueError, match=words):
        write(tmp_path, IMAGE, settings=shown(**settings))


def test_numbers_that_are_too_great_are_refused(tmp_path):
    labels = TRUTH.astype(np.uint32)
    labels[3, 3] = 70_000
    with pytest.raises(ValueError, match="prediction.npy has the number 70,000 and the page has numbers up to 65,534; number"):
        write(tmp_path, IMAGE, prediction=labels)


def test_a_damaged_file_is_named(tmp_path):
    (tmp_path / "a.png").write_bytes(b"\x89PNG\r\n\x1a\nno more")
    with pytest.raises(ImageFileError, match="a.png"):
        open_scene("a", tmp_path / "a.png", {})
