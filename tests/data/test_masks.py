"""Are images and masks of every layout read as what they show, and does each error name its file?"""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from widefield.config import DataConfig
from widefield.data import Dataset, open_dataset
from widefield.geometry import Interval

SIZE = (6, 9)
GREY = np.arange(54, dtype=np.uint8).reshape(SIZE)
LABELS = (np.arange(54) % 3).astype(np.uint8).reshape(SIZE)
PALETTE = [0, 0, 0, 200, 10, 10, 10, 200, 10] + [7] * 759


def save(path: Path, pixels: np.ndarray = GREY, *, palette: bool = False) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".npy":
        np.save(path, pixels)
        return path
    image = Image.fromarray(pixels)
    if palette:
        image.putpalette(PALETTE)
    image.save(path)
    return path


def opened(path: Path, *, hold_out: float | None = None, fold: int | None = None, **options) -> Dataset:
    return open_dataset(DataConfig(name="masks", path=str(path), hold_out=hold_out, fold=fold, folds=3, options=options))


def refusal(path: Path, **options) -> str:
    with pytest.raises(ValueError) as caught:
        dataset = opened(path, **options)
        for images in (dataset.train, dataset.evaluate):
            for index in range(len(images)):
                images.read(index)
    return str(caught.value)


def folders(place: Path, count: int = 4, *, ending: str = "", labels: np.ndarray = LABELS, **options) -> Path:
    for number in range(count):
        save(place / "images" / f"c{number}.png")
        save(place / "masks" / f"c{number}{ending}.png", labels, **options)
    return place


LAYOUTS = {
    "train/images": ("train/images", "train/masks", "val/images", "val/masks"),
    "images/train": ("images/train", "labels/train", "images/valid", "labels/valid"),
    "annotations": ("training/imgs", "training/annotations", "validation/imgs", "validation/annotations"),
}


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("ending", ["", "_mask", "_labels"])
def test_folders_of_two_splits_are_paired_by_stem(tmp_path, name, ending):
    of_train, of_masks, of_val, of_others = LAYOUTS[name]
    for images, masks, count in ((of_train, of_masks, 3), (of_val, of_others, 2)):
        for number in range(count):
            save(tmp_path / images / f"c{number}.tif")
            save(tmp_path / masks / f"c{number}{ending}.png", LABELS)
    dataset = opened(tmp_path)
    assert (len(dataset.train), len(dataset.evaluate), dataset.labels) == (3, 2, "pixels")
    image, labels = dataset.train.read(1)
    assert np.array_equal(image[0], GREY) and np.array_equal(labels, LABELS)
    assert f"{tmp_path}: 3 images to train on, 2 to evaluate, uint8, 1 channel, 3 classes" in dataset.about


def test_one_pair_of_folders_is_divided_by_names(tmp_path):
    folders(tmp_path, 9)
    held = opened(tmp_path, hold_out=0.34)
    assert (len(held.train), len(held.evaluate)) == (6, 3)
    folds = [opened(tmp_path, fold=fold).evaluate for fold in range(3)]
    assert sorted(images.name_of(i) for images in folds for i in range(3)) == sorted(map(str, (tmp_path / "images").iterdir()))


CODINGS = {
    "palette": (LABELS, {"palette": True}, {}, ["0", "1", "2"], LABELS),
    "names": (LABELS, {}, {"classes": ["sky", "road", "car"]}, ["sky", "road", "car"], LABELS),
    "binary": ((LABELS == 1).astype(np.uint8) * 255, {}, {}, ["background", "foreground"], LABELS == 1),
    "named binary": ((LABELS == 1).astype(np.uint8) * 255, {}, {"classes": ["no", "cell"]}, ["no", "cell"], LABELS == 1),
    "255 among others": (np.where(LABELS == 2, 255, LABELS).astype(np.uint8), {}, {}, ["0", "1"],
                         np.where(LABELS == 2, 255, LABELS)),
    "numbers": (LABELS * 50, {}, {"classes": {"a": 0, "b": 50, "c": 100}}, ["a", "b", "c"], LABELS),
    "ignore": (LABELS * 50, {}, {"classes": {"a": 0, "b": 50}, "ignore": 100}, ["a", "b"],
               np.where(LABELS == 2, 255, LABELS)),
    "grey as RGB": (np.dstack([LABELS] * 3), {}, {}, ["0", "1", "2"], LABELS),
    "colours": (np.array([[0, 0, 0], [255, 0, 0], [0, 9, 255]], dtype=np.uint8)[LABELS], {},
                {"classes": {"a": [0, 0, 0], "b": [255, 0, 0], "c": [0, 9, 255]}}, ["a", "b", "c"], LABELS),
    "ignored colour": (np.array([[0, 0, 0], [255, 0, 0], [0, 9, 255]], dtype=np.uint8)[LABELS], {},
                       {"classes": {"a": [0, 0, 0], "b": [255, 0, 0]}, "ignore": [0, 9, 255]}, ["a", "b"],
                       np.where(LABELS == 2, 255, LABELS)),
    "a palette's colours": (LABELS, {"palette": True},
                            {"classes": {"a": [10, 200, 10], "b": [0, 0, 0], "c": [200, 10, 10]}}, ["a", "b", "c"],
                            (LABELS + 1) % 3),
    "16 bits": (LABELS.astype(np.uint16) * 300, {}, {"classes": {"a": 0, "b": 300, "c": 600}}, ["a", "b", "c"], LABELS),
}  # fmt: skip


@pytest.mark.parametrize("name", CODINGS)
def test_masks_of_every_coding_give_class_numbers(tmp_path, name):
    stored, how, options, classes, wanted = CODINGS[name]
    dataset = opened(folders(tmp_path, labels=stored, **how), hold_out=0.25, **options)
    labels = dataset.train.read(0)[1]
    assert dataset.classes == classes and labels.dtype == torch.uint8 and np.array_equal(labels, wanted)
    window = (Interval(1, 4), Interval(2, 9))
    image, part = dataset.train.read_window(0, window)
    assert torch.equal(part, labels[1:4, 2:9]) and np.array_equal(image[0], GREY[1:4, 2:9])


@pytest.mark.parametrize(("name", "text"), [
    ("classes.txt", "sky\nroad\ncar\n"), ("classes.csv", "name,number\nsky,0\nroad,1\ncar,2\n"),
    ("classes.json", '{"sky": 0, "road": 1, "car": 2}'), ("classes.yaml", "[sky, road, car]"),
])  # fmt: skip
def test_classes_may_be_in_a_file(tmp_path, name, text):
    folders(tmp_path)
    (tmp_path / name).write_text(text)
    assert opened(tmp_path, hold_out=0.25, classes=name).classes == ["sky", "road", "car"]


def test_a_folder_per_class_gives_layers(tmp_path):
    for number in range(4):
        save(tmp_path / "images" / f"{number}.png")
        for name, mask in (("road", LABELS == 1), ("wet", LABELS > 0)):
            save(tmp_path / "masks" / name / f"{number}.png", mask.astype(np.uint8) * 255)
    dataset = opened(tmp_path, hold_out=0.25)
    layers = dataset.train.read(0)[1]
    assert (dataset.labels, dataset.classes) == ("layers", ["road", "wet"]) and layers.dtype == torch.uint8
    assert np.array_equal(layers, np.stack([LABELS == 1, LABELS > 0]))
    (tmp_path / "masks/wet/2.png").unlink()
    assert "images/2.png has no mask" in refusal(tmp_path, hold_out=0.25)
    empty = opened(tmp_path, hold_out=0.25, missing="empty")
    both = [(images, index) for images in (empty.train, empty.evaluate) for index in range(len(images))]
    (found,) = [images.read(index)[1] for images, index in both if images.name_of(index).endswith("/2.png")]
    assert not found[1].any() and found[0].any()


def nnunet(place: Path, labels: dict, **more) -> Path:
    for number in range(4):
        for channel in range(2):
            save(place / "imagesTr" / f"case_{number}_{channel:04}.png", GREY + channel)
        save(place / "labelsTr" / f"case_{number}.png", LABELS)
    (place / "dataset.json").write_text(json.dumps({"labels": labels, "file_ending": ".png", **more}))
    return place


def test_nnunets_folder_gives_channels_and_classes(tmp_path):
    dataset = opened(nnunet(tmp_path, {"background": 0, "cell": 1, "ignore": 2}), hold_out=0.25)
    image, labels = dataset.train.read(0)
    assert dataset.classes == ["background", "cell"] and dataset.channels == 2
    assert np.array_equal(image, np.stack([GREY, GREY + 1]))
    assert np.array_equal(labels, np.where(LABELS == 2, 255, LABELS))


SPLITS = [{"train": ["case_0", "case_1"], "val": ["case_2"]}, {"train": ["case_2", "case_3"], "val": ["case_0", "case_1"]}]


@pytest.mark.parametrize(("fold", "train", "val"), [(0, "01", "2"), (1, "23", "01")])
def test_nnunets_splits_are_the_folds(tmp_path, fold, train, val):
    place = nnunet(tmp_path, {"background": 0, "cell": 1})
    (place / "splits_final.json").write_text(json.dumps(SPLITS))
    dataset = opened(place, fold=fold)
    named = [[split.name_of(index) for index in range(len(split))] for split in (dataset.train, dataset.evaluate)]
    assert ["".join(name.rpartition("case_")[2][0] for name in names) for names in named] == [train, val]


@pytest.mark.parametrize(
    ("text", "options", "told"),
    [
        (json.dumps(SPLITS), {}, "has 2 folds, counted from 0, and data.fold is not set"),
        (json.dumps(SPLITS), {"fold": 2}, "has 2 folds, counted from 0, and data.fold is 2"),
        (json.dumps(SPLITS), {"fold": 0, "hold_out": 0.2}, "has a split, so leave data.hold_out=0.2 out"),
        (json.dumps([{"train": ["case_9"], "val": ["case_0"]}]), {"fold": 0}, "names the case 'case_9'"),
        (json.dumps([{"train": ["case_0"], "val": ["case_0"]}]), {"fold": 0}, "'case_0' on both sides of fold 0"),
        (json.dumps([{"train": [], "val": ["case_0"]}]), {"fold": 0}, "0 samples to train on and 1 to evaluate"),
        ('{"train": []}', {"fold": 0}, "cannot be read"),
        ("[", {"fold": 0}, "cannot be read"),
    ],
)
def test_nnunets_splits_that_do_not_fit_are_refused(tmp_path, text, options, told):
    place = nnunet(tmp_path, {"background": 0, "cell": 1})
    (place / "splits_final.json").write_text(text)
    assert told in refusal(place, **options)


def test_nnunets_regions_are_layers(tmp_path):
    dataset = opened(nnunet(tmp_path, {"background": 0, "whole": [1, 2], "core": 2}), hold_out=0.25)
    assert (dataset.labels, dataset.classes) == ("layers", ["whole", "core"])
    assert np.array_equal(dataset.train.read(0)[1], np.stack([LABELS > 0, LABELS == 2]))


def table(place: Path, *, columns: str = "image,mask,split,patient", rows: list[str] | None = None) -> Path:
    folders(place)
    some = [f"images/c{i}.png,masks/c{i}.png,{'train' if i < 3 else 'val'},p{i}" for i in range(4)]
    (place / "table.csv").write_text("\n".join([columns, *(rows or some)]) + "\n")
    return place / "table.csv"


def test_a_table_names_images_masks_splits_and_groups(tmp_path):
    dataset = opened(table(tmp_path))
    assert (len(dataset.train), len(dataset.evaluate), dataset.train.group_of(2)) == (3, 1, "p2")
    assert np.array_equal(dataset.evaluate.read(0)[1], LABELS)


def test_several_columns_of_masks_are_layers(tmp_path):
    save(tmp_path / "masks/b.png", (LABELS > 0).astype(np.uint8))
    rows = ["images/c0.png,masks/b.png,,train", "images/c1.png,masks/b.png,masks/b.png,val"]
    dataset = opened(table(tmp_path, columns="image,road,wet,split", rows=rows), mask=["road", "wet"])
    assert dataset.labels == "layers" and dataset.train.read(0)[1].flatten(1).sum(1).tolist() == [36, 0]


def with_images(place: Path, change) -> Path:
    folders(place)
    change(place)
    return place


WRONG = {
    "no folder": (lambda p: None, "has no folder images/; images go into"),
    "no masks": (lambda p: save(p / "images/a.png"), "has no folder masks/; images go into"),
    "empty": (lambda p: (save(p / "images/a.png"), (p / "masks").mkdir()), "/masks is empty: it has no file of .png"),
    "no partner": (lambda p: save(folders(p) / "images/d.png"), "images/d.png has no mask: "),
    "no image": (lambda p: save(folders(p) / "masks/d.png"), "the mask {}/masks/d.png has no image of its stem in"),
    "two masks": (lambda p: save(folders(p) / "masks/c1_mask.png"), "images/c1.png has two masks, "),
    "one stem": (lambda p: save(folders(p) / "images/c1.jpg"), "have one stem, so it is not known which is meant"),
    "size": (lambda p: save(folders(p) / "masks/c1.png", LABELS[:4]),
             "{}/masks/c1.png is 4 x 9 pixels and {}/images/c1.png is 6 x 9 (height x width); mend one of them"),
    "jpeg": (lambda p: (save(folders(p) / "masks/c1.jpg", LABELS), (p / "masks/c1.png").unlink()),
             "the mask {}/masks/c1.jpg is .jpg, which changes the numbers of pixels; save masks as PNG"),
    "colours": (lambda p: save(folders(p) / "masks/c1.png", np.dstack([LABELS, LABELS, LABELS * 0])),
                "the mask {}/masks/c1.png has colours; say which class each is"),
    "objects": (lambda p: save(folders(p) / "masks/c1.png", LABELS.astype(np.uint16) * 300), "masks have the number 600"),
    "broken": (lambda p: (folders(p) / "masks/c1.png").write_bytes(b"no"), "cannot read the mask {}/masks/c1.png ("),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_folders_that_are_wrong_are_refused_by_name(tmp_path, name):
    make, told = WRONG[name]
    make(tmp_path)
    assert told.replace("{}", str(tmp_path)) in refusal(tmp_path, hold_out=0.25)


OPTIONS = [
    ({"classes": ["a", "b"], "ignore": 9}, "the mask {}/masks/c1.png has the number 2 in 18 pixels, and data.options.classes"),
    ({"classes": {"a": [0, 0, 0]}}, "has the colour [1, 1, 1] in 36 pixels"),
    ({"classes": {"a": 0, "b": [1, 2, 3]}}, "have numbers and colours; give all of them one or the other"),
    ({"classes": {"a": 0, "b": 0}}, "two of the same number or colour"),
    ({"classes": 3}, "data.options.classes is 3; give names"),
    ({"classes": "lost.txt"}, "lost.txt and there is no such file"),
    ({"missing": "empty"}, "missing=empty is for masks in one folder per class"),
    ({"missing": "all"}, "missing is 'all'; it is stop, skip or empty"),
    ({"group": "x(.)"}, "does not match it; let it match every name"),
    ({"dtype": "int64"}, "data.options.dtype is 'int64'; it is one of"),
    ({"channels": 5}, "it has 1 channels of uint8 and 5 are wanted"),
]


@pytest.mark.parametrize(("options", "told"), OPTIONS, ids=[str(options) for options, _ in OPTIONS])
def test_options_that_do_not_fit_are_refused(tmp_path, options, told):
    assert told.replace("{}", str(tmp_path)) in refusal(folders(tmp_path), hold_out=0.25, **options)


def test_images_without_masks_are_left_out_by_choice_and_counted(tmp_path):
    save(folders(tmp_path) / "images/d.png")
    dataset = opened(tmp_path, hold_out=0.25, missing="skip")
    assert len(dataset.train) + len(dataset.evaluate) == 4 and "1 images without mask left out" in dataset.about


def test_groups_of_names_stay_together(tmp_path):
    for number in range(8):
        save(tmp_path / "images" / f"P{number // 2}_{number}.png")
        save(tmp_path / "masks" / f"P{number // 2}_{number}.png", LABELS)
    dataset = opened(tmp_path, hold_out=0.25, group="(P[0-9]+)_")
    sides = [{images.group_of(i) for i in range(len(images))} for images in (dataset.train, dataset.evaluate)]
    assert len(sides[1]) == 1 and not sides[0] & sides[1]


@pytest.mark.parametrize(("rows", "told"), [
    (["images/c0.png,,train,p"], "table.csv, row 2, names no mask; fill the column 'mask'"),
    (["images/c0.png,masks/x.png,train,p"], "table.csv, row 2, is of the mask {}/masks/x.png, and there is no such file"),
    (["images/x.png,masks/c0.png,train,p"], "row 2, is of the image {}/images/x.png, and there is no such file"),
    (["images/c0.png,masks/c0.png,train,p"] * 2, "row 3, and {}/table.csv, row 2, are of the same image"),
    (["images/c0.png,masks/c0.png,left,p"], "the split 'left'; it is one of train"),
    (["images/c0.png,masks/c0.png,train,p", "images/c1.png,masks/c1.png,val,p"], "of the group 'p' on both sides"),
    (["images/c0.png,masks/c0.png,train"], "row 2, has not the 4 cells of the first line"),
])  # fmt: skip
def test_rows_that_are_wrong_are_refused_by_number(tmp_path, rows, told):
    assert told.replace("{}", str(tmp_path)) in refusal(table(tmp_path, rows=rows))


@pytest.mark.parametrize(("labels", "more", "told"), [
    ({"a": 0}, {"file_ending": ".mha"}, "file_ending '.mha'; files of .png"),
    ({"a": 0}, {"file_ending": ".nii.gz"}, "has no .nii.gz files in imagesTr/"),
    ({"a": "x"}, {}, "gives 'a' the number 'x'"),
    ({"a": 0, "b": 1}, {}, "has the number 2 in 18 pixels"),
    ({"a": 0, "b": [1], "ignore": 2}, {}, "has regions and a label to ignore"),
])  # fmt: skip
def test_a_dataset_json_that_is_wrong_is_refused(tmp_path, labels, more, told):
    assert told in refusal(nnunet(tmp_path, labels, **more), hold_out=0.25)


def test_a_channel_that_is_missing_is_named(tmp_path):
    (nnunet(tmp_path, {"a": 0}) / "imagesTr/case_1_0001.png").unlink()
    assert "lacks case_1_0001.png, and other cases have 2 channels" in refusal(tmp_path, hold_out=0.25)
