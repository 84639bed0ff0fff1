"""Is every image of a dataset read once, as what it shows, and is a folder that is wrong refused by name?"""

import os
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from pydantic import ValidationError

from widefield.config import DataConfig
from widefield.data import BadImageError, Dataset, open_dataset
from widefield.data.image import read_image, write_image
from widefield.naming import load, names_in

FORMATS = names_in("widefield.data.formats")
CASES = [(name, *case) for name in FORMATS for case in load("widefield.data.formats", name).CASES]
PIXELS = np.random.default_rng(0).integers(0, 256, (6, 9, 3), dtype=np.uint8)


def save(path: Path, pixels: np.ndarray = PIXELS, **options) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(pixels).save(path, **options)
    return path


def folder(place: Path, **images: int) -> Path:
    """Class folders of so many images: `folder(place, train__cat=3)` makes train/cat/0.png to 2.png."""
    for name, count in images.items():
        where = place.joinpath(*name.split("__"))
        where.mkdir(parents=True, exist_ok=True)
        for number in range(count):
            save(where / f"{number}.png", np.full((4, 4, 3), number, dtype=np.uint8))
    return place


def opened(place: Path | str | None, **options) -> Dataset:
    return open_dataset(DataConfig(name="imagefolder", path=None if place is None else str(place), **options))


def names(images) -> list[str]:
    return [os.path.relpath(images.name_of(index), images.root) for index in range(len(images))]


def refusal(place: Path | str | None, **options) -> str:
    with pytest.raises(ValueError) as caught:
        opened(place, **options)
    return str(caught.value)


# ---------------------------------------------------------------------------------------------- every format


def classes_in(target, labels: str) -> list:
    target = torch.as_tensor(target)
    return (target[:, 4] if labels == "boxes" else target).unique().tolist()


@pytest.mark.parametrize(("name", "said", "train", "evaluate", "classes"), CASES, ids=[case[0] for case in CASES])
def test_every_format_gives_its_images_with_a_class_and_a_name(tmp_path, name, said, train, evaluate, classes):
    said = {key: str(value(tmp_path / "images", save)) if callable(value) else value for key, value in said.items()}
    dataset = open_dataset(DataConfig(name=name, **said))
    assert (len(dataset.train), len(dataset.evaluate), len(dataset.classes)) == (train, evaluate, classes)
    assert len(dataset.mean) == len(dataset.std) == dataset.channels
    for images in (dataset.train, dataset.evaluate):
        read = [images.read(index) for index in range(len(images))]
        assert all(
            image.dtype == dataset.dtype and image.ndim == 1 + dataset.dims and len(image) == dataset.channels
            for image, _ in read
        )
        if dataset.labels == "image":
            for image, target in read:
                wanted = (classes, *(dataset.scale * extent for extent in image.shape[1:]))
                assert target.shape == wanted and target.dtype == image.dtype
            continue
        found = {label for _, labels in read for label in classes_in(labels, dataset.labels)}
        assert found - {255} == set(range(classes))  # 255: of pixels that do not count
        assert all(isinstance(labels, int) != (dataset.pixels or dataset.labels == "boxes") for _, labels in read)
        assert not dataset.pixels or all(labels.shape == image.shape[1:] for image, labels in read)
    of = [images.name_of(index) for images in (dataset.train, dataset.evaluate) for index in range(len(images))]
    assert len(set(of)) == train + evaluate, "an image is in both splits"


def test_a_format_that_does_not_exist_is_refused():
    with pytest.raises(ValueError, match=r"formats/ has no imagefoldr\.py; did you mean 'imagefolder'\?"):
        open_dataset(DataConfig(name="imagefoldr"))


# ---------------------------------------------------------------------------------------------- digits


def test_digits_are_scikit_learns_scans_with_their_mean_and_deviation():
    from sklearn.datasets import load_digits

    scans, dataset = load_digits(), open_dataset(DataConfig(name="digits"))
    for images in (dataset.train, dataset.evaluate):
        for index in (0, len(images) - 1):
            number = int(images.name_of(index).removeprefix("digits/"))
            image, label = images.read(index)
            assert label == scans.target[number]
            assert np.array_equal((image[0].numpy() * (16 / 255)).round(), scans.images[number])
    pixels = torch.cat([dataset.train.read(index)[0] for index in range(len(dataset.train))]).double() / 255
    assert [round(pixels.mean().item(), 3), round(pixels.std().item(), 3)] == [*dataset.mean, *dataset.std]


def test_the_split_of_the_digits_holds_out_each_class_alike():
    held = open_dataset(DataConfig(name="digits")).evaluate
    counts = np.bincount([held.read(index)[1] for index in range(len(held))])
    assert counts.min() >= 35 and counts.max() <= 37


@pytest.mark.parametrize("option", [{"path": "x"}, {"hold_out": 0.1}])
def test_digits_take_no_folder_and_no_split(option):
    with pytest.raises(ValueError, match="data.name=digits is built in, with a fixed split; leave data.path and data.hold_out"):
        open_dataset(DataConfig(name="digits", **option))


# ---------------------------------------------------------------------------------------------- imagefolder's shapes


def test_train_and_val_folders_are_the_two_splits(tmp_path):
    dataset = opened(folder(tmp_path, train__cat=2, train__dog=3, val__cat=1, val__dog=2))
    assert dataset.classes == ["cat", "dog"]
    assert names(dataset.train) == ["cat/0.png", "cat/1.png", "dog/0.png", "dog/1.png", "dog/2.png"]
    assert names(dataset.evaluate) == ["cat/0.png", "dog/0.png", "dog/1.png"]
    assert [dataset.train.read(index)[1] for index in range(5)] == [0, 0, 1, 1, 1]
    assert dataset.train.read(4)[0].tolist() == torch.full((3, 4, 4), 2).tolist()


@pytest.mark.parametrize("name", ["validation", "test"])
def test_val_may_go_by_other_names(tmp_path, name):
    folder(tmp_path, train__cat=2, **{f"{name}__cat": 1})
    assert len(opened(tmp_path).evaluate) == 1


CIRCLES = {
    "to itself": [("train/cat/more", "train/cat")],
    "to the split": [("train/cat/more", "train")],
    "to the root, from below": [("train/cat/some/more", ".")],
    "a class that is its split": [("train/owl", "train")],
    "each to the other": [("train/cat/more", "train/dog"), ("train/dog/more", "train/cat")],
}


@pytest.mark.parametrize("name", CIRCLES)
def test_links_that_lead_in_a_circle_are_refused(tmp_path, name):
    """They were followed until the system gave up: 40 times the images, in silence."""
    folder(tmp_path, train__cat__some=2, train__dog=2, val__cat=1, val__dog=1, val__owl=1)
    for link, to in CIRCLES[name]:
        (tmp_path / link).symlink_to(tmp_path / to, target_is_directory=True)
    told = refusal(tmp_path)
    assert told.startswith(f"data.path leads in a circle: {tmp_path}/") and told.endswith("again and again; remove the link")


def test_links_to_folders_elsewhere_are_followed(tmp_path):
    folder(tmp_path / "photos", train__cat=2, train__dog=2, val__cat=1, val__dog=1)
    folder(tmp_path / "elsewhere", cats=3, dogs=1)
    (tmp_path / "photos/train/cat/more").symlink_to(tmp_path / "elsewhere/cats", target_is_directory=True)
    (tmp_path / "photos/train/owl").symlink_to(tmp_path / "elsewhere/dogs", target_is_directory=True)
    (tmp_path / "photos/val/owl").symlink_to(tmp_path / "elsewhere/dogs", target_is_directory=True)
    assert names(opened(tmp_path / "photos").train) == [
        "cat/0.png", "cat/1.png", "cat/more/0.png", "cat/more/1.png", "cat/more/2.png", "dog/0.png", "dog/1.png", "owl/0.png",
    ]  # fmt: skip


def test_a_class_may_be_nested_and_hidden_things_and_other_files_do_not_count(tmp_path):
    folder(tmp_path, train__cat__deep__deeper=2, train__cat=1, val__cat=1)
    (tmp_path / "train" / ".cache").mkdir()
    (tmp_path / "train" / "cat" / "notes.txt").write_text("no image")
    save(tmp_path / "train" / "cat" / "upper.PNG")
    dataset = opened(tmp_path)
    assert dataset.classes == ["cat"]
    assert names(dataset.train) == ["cat/0.png", "cat/deep/deeper/0.png", "cat/deep/deeper/1.png", "cat/upper.PNG"]


def test_a_share_of_flat_class_folders_is_held_out_of_each_class(tmp_path):
    dataset = opened(folder(tmp_path, cat=10, dog=20), hold_out=0.2)
    held = names(dataset.evaluate)
    assert sorted(names(dataset.train) + held) == sorted(
        [f"cat/{number}.png" for number in range(10)] + [f"dog/{number}.png" for number in range(20)]
    )
    assert [sum(name.startswith(part) for name in held) for part in ("cat/", "dog/")] == [2, 4]


def test_train_without_val_is_split_as_well(tmp_path):
    dataset = opened(folder(tmp_path, train__cat=10), hold_out=0.3)
    assert (len(dataset.train), len(dataset.evaluate)) == (7, 3)


def test_which_images_are_held_out_depends_on_their_names_alone(tmp_path):
    here = opened(folder(tmp_path / "here", cat=10, dog=8), hold_out=0.25)
    folder(tmp_path / "there", dog=8)
    shutil.copytree(tmp_path / "here" / "cat", tmp_path / "there" / "cat")
    folder(tmp_path / "there", ape=4)
    there = opened(tmp_path / "there", hold_out=0.25)
    assert set(names(here.evaluate)) < set(names(there.evaluate))
    first = [f"cat/{number}.png" for number in range(10)][: len(names(here.evaluate)) - 2]
    assert not set(first) <= set(names(here.evaluate)), "the first by name are often frames of one scene"


@pytest.mark.parametrize(("share", "held"), [(0.01, 1), (0.99, 1)])
def test_each_side_of_a_split_keeps_at_least_one_image_of_a_class(tmp_path, share, held):
    dataset = opened(folder(tmp_path, cat=2), hold_out=share)
    assert (len(dataset.train), len(dataset.evaluate)) == (1, held)


# ---------------------------------------------------------------------------------------------- imagefolder's refusals


def test_no_path_says_to_add_one():
    assert refusal(None) == "data.name=imagefolder reads a folder and data.path is not set; add data.path=DIR"


def test_a_folder_that_is_not_there_suggests_its_neighbour(tmp_path):
    (tmp_path / "flowers").mkdir()
    told = refusal(tmp_path / "flower")
    assert told == f"data.path is {tmp_path}/flower and there is no such folder; did you mean 'flowers'?"
    assert "there is no such folder" in refusal(tmp_path / "nowhere" / "flowers")


def test_a_folder_without_classes_says_where_images_go(tmp_path):
    save(tmp_path / "0.png")
    assert refusal(tmp_path, hold_out=0.1) == (f"{tmp_path} holds no class folders; images go into {tmp_path}/CLASS/image.jpg")


@pytest.mark.parametrize("split", ["train", "val"])
def test_an_empty_class_is_named(tmp_path, split):
    folder(tmp_path, train__cat=2, train__dog=2, val__cat=2, val__dog=2)
    for image in (tmp_path / split / "dog").iterdir():
        image.unlink()
    assert re.match(rf"the class 'dog' is empty: {tmp_path}/{split}/dog holds no image \(\.jpg, ", refusal(tmp_path))


def test_a_class_that_val_lacks_is_named(tmp_path):
    told = refusal(folder(tmp_path, train__cat=2, train__dog=2, val__cat=2))
    assert told.startswith(f"the class 'dog' is empty: {tmp_path}/val/dog holds no image")


def test_a_class_that_val_alone_has_is_named(tmp_path):
    told = refusal(folder(tmp_path, train__cat=2, val__cat=1, val__cats=1))
    assert told == (f"{tmp_path}/val has the class 'cats', which train/ lacks; did you mean 'cat'? Move or rename that folder")


@pytest.mark.parametrize("options", [{}, {"hold_out": 0.0}])
def test_nothing_to_evaluate_on_is_refused(tmp_path, options):
    told = refusal(folder(tmp_path, cat=3), **options)
    assert told.startswith(
        f"{tmp_path} has no train/ and val/ folders or split, so nothing is held out for evaluation; add data.hold_out"
    )


def test_holding_out_where_val_exists_is_refused(tmp_path):
    told = refusal(folder(tmp_path, train__cat=3, val__cat=1), hold_out=0.1)
    assert told == f"{tmp_path} has val/, so leave data.hold_out=0.1 out"


def test_a_class_of_one_image_cannot_be_split(tmp_path):
    told = refusal(folder(tmp_path, cat=3, dog=1), hold_out=0.5)
    assert told == f"{tmp_path}: dog/0.png is its class's only image, so none can be held out; add images"


def test_a_share_of_all_images_is_no_share():
    with pytest.raises(ValidationError, match="less than 1"):
        DataConfig(name="imagefolder", hold_out=1.0)


# ---------------------------------------------------------------------------------------------- image files


GREY = PIXELS[:, :, 0]
WIDE = np.random.default_rng(1).integers(0, 2**16, (6, 9), dtype=np.uint16)
RGBA = np.dstack([PIXELS, GREY])
GREY_RGB = np.dstack([GREY] * 3)
EXACT = {
    "rgb.png": (PIXELS, {}, PIXELS),
    "grey.png": (GREY, {}, GREY_RGB),
    "rgba.png": (RGBA, {}, PIXELS),
    "wide.png": (WIDE, {}, np.dstack([WIDE] * 3)),
    "dark.png": (WIDE >> 8, {}, np.dstack([WIDE >> 8] * 3)),
    "rgb.tif": (PIXELS, {}, PIXELS),
    "packed.tif": (PIXELS, {"compression": "tiff_lzw"}, PIXELS),
    "grey.tiff": (GREY, {}, GREY_RGB),
    "rgba.tif": (RGBA, {}, PIXELS),
    "wide.tif": (WIDE, {}, np.dstack([WIDE] * 3)),
    "big_endian.tif": (WIDE.astype(">u2"), {}, np.dstack([WIDE] * 3)),
    "rgb.webp": (PIXELS, {"lossless": True}, PIXELS),
    "rgb.bmp": (PIXELS, {}, PIXELS),
}


@pytest.mark.parametrize("name", EXACT)
def test_lossless_files_are_read_exactly_as_rgb(tmp_path, name):
    pixels, options, wanted = EXACT[name]
    image = read_image(save(tmp_path / name, pixels, **options), 3)
    assert str(image.dtype) == f"torch.{wanted.dtype}" and image.is_contiguous()
    assert np.array_equal(image.permute(1, 2, 0).numpy(), wanted)


@pytest.mark.parametrize("name", ["grey.png", "grey.tif", "grey.webp", "grey.bmp"])
def test_one_channel_is_grey(tmp_path, name):
    image = read_image(save(tmp_path / name, GREY, **({"lossless": True} if name.endswith("webp") else {})), 1)
    assert np.array_equal(image.numpy(), GREY[None])


def test_a_palette_is_looked_up(tmp_path):
    palette = Image.fromarray(PIXELS).quantize(64)
    palette.save(tmp_path / "palette.png")
    assert np.array_equal(read_image(tmp_path / "palette.png", 3).permute(1, 2, 0).numpy(), np.array(palette.convert("RGB")))


@pytest.mark.parametrize(
    ("name", "options"), [("a.jpg", {"quality": 95}), ("a.JPEG", {"quality": 95}), ("a.webp", {"quality": 95})]
)
def test_lossy_files_are_near_what_was_saved(tmp_path, name, options):
    smooth = np.linspace(0, 240, 32 * 40 * 3).reshape(32, 40, 3).astype(np.uint8)
    image = read_image(save(tmp_path / name, smooth, **options), 3).permute(1, 2, 0).numpy()
    # quality 95 quantizes a smooth ramp by few levels; a swapped channel or dim is off by tens
    assert np.abs(image.astype(int) - smooth).mean() < 3


UPRIGHT = [
    lambda a: a, np.fliplr, lambda a: np.rot90(a, 2), np.flipud,
    lambda a: a.swapaxes(0, 1), lambda a: np.rot90(a, -1), lambda a: np.rot90(a, 2).swapaxes(0, 1), np.rot90,
]  # fmt: skip
"""What to do to an image of EXIF orientation 1 to 8 (EXIF 2.32, table 6)."""


@pytest.mark.parametrize("suffix", [".png", ".tif", ".webp"])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_an_image_is_turned_upright_as_its_exif_says(tmp_path, suffix, orientation):
    exif = Image.Exif()
    exif[0x0112] = orientation
    options = {"lossless": True} if suffix == ".webp" else {}
    image = read_image(save(tmp_path / f"turned{suffix}", PIXELS, exif=exif, **options), 3)
    assert np.array_equal(image.permute(1, 2, 0).numpy(), UPRIGHT[orientation - 1](PIXELS))


def test_a_turned_photograph_is_turned_upright(tmp_path):
    exif = Image.Exif()
    exif[0x0112] = 6
    assert read_image(save(tmp_path / "photo.jpg", PIXELS, exif=exif), 3).shape == (3, 9, 6)


@pytest.mark.parametrize("channels", [1, 3])
def test_a_picture_that_is_written_reads_back(tmp_path, channels):
    pixels = torch.from_numpy(PIXELS).permute(2, 0, 1)[:channels]
    write_image(pixels, tmp_path / "a.png")
    assert torch.equal(read_image(tmp_path / "a.png", channels), pixels)


# ---------------------------------------------------------------------------------------------- files that are bad


def bad(path: Path) -> str:
    with pytest.raises(BadImageError, match=re.escape(str(path))) as caught:
        read_image(path, 3)
    return str(caught.value)


@pytest.mark.parametrize("suffix", [".jpg", ".png", ".tif", ".webp", ".bmp"])
@pytest.mark.parametrize("share", [0.0, 0.02, 0.5])
def test_a_file_that_is_empty_or_cut_short_is_named_with_its_size(tmp_path, suffix, share):
    whole = save(tmp_path / f"whole{suffix}", np.random.default_rng(2).integers(0, 256, (64, 64, 3), dtype=np.uint8))
    size = int(whole.stat().st_size * share)
    cut = tmp_path / f"cut{suffix}"
    cut.write_bytes(whole.read_bytes()[:size])
    assert f"({size} bytes; " in bad(cut) or bad(cut) == f"{cut} is empty; copy it again"


def test_a_text_named_as_an_image_and_a_missing_file_are_named(tmp_path):
    (tmp_path / "a.png").write_text("no image")
    assert "(8 bytes; cannot identify image file" in bad(tmp_path / "a.png")
    assert "(there is no such file)" in bad(tmp_path / "b.png")


def test_a_header_that_promises_terabytes_is_a_bad_image(tmp_path):
    """Flipped bits of a header make decoders run out of memory or overflow, which must not end a run that skips."""
    path = save(tmp_path / "a.bmp")
    for width in (0x7FFFFFF0, 0x3FFFFFF0):
        path.write_bytes(path.read_bytes()[:18] + width.to_bytes(4, "little") * 2 + path.read_bytes()[26:])
        bad(path)


@pytest.mark.parametrize(
    ("pixels", "told"),
    [
        (np.full((4, 4), 70000, dtype=np.int32), "pixels from 0 to 70000 do not fit 16 bits"),
        (np.full((4, 4), -32769, dtype=np.int32), "pixels from -32769 to 0 do not fit 16 bits"),
    ],
)
def test_pixels_that_sixteen_bits_cannot_hold_are_refused(tmp_path, pixels, told):
    assert told in bad(save(tmp_path / "wide.tif", pixels))
