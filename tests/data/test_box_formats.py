"""Are the boxes of COCO's, Ultralytics' and VOC's files where their authors drew them, and is a bad file refused by name?"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from widefield.config import DataConfig
from widefield.data import BadImageError, Dataset, open_dataset


def save(path: Path, size: tuple[int, int] = (40, 60)) -> Path:
    """size: height and width."""
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(np.zeros((*size, 3), dtype=np.uint8)).save(path)
    return path


def opened(name: str, place: Path, **more) -> Dataset:
    return open_dataset(DataConfig(name=name, path=str(place), **more))


def refusal(name: str, place: Path, **more) -> str:
    with pytest.raises(ValueError) as caught:
        opened(name, place, **more)
    return str(caught.value)


# ---------------------------------------------------------------------------------------------- COCO


def coco_file(place: Path, *boxes: dict, images: int = 3, categories=((3, "dog"), (1, "cat"))) -> Path:
    place.parent.mkdir(parents=True, exist_ok=True)
    tree = {
        "images": [{"id": 10 + number, "file_name": f"{number}.png"} for number in range(images)],
        "annotations": [{"id": number, **one} for number, one in enumerate(boxes)],
        "categories": [{"id": number, "name": name} for number, name in categories],
    }
    place.write_text(json.dumps(tree))
    return place


DOG = {"image_id": 10, "category_id": 3, "bbox": [2.5, 3, 10, 20], "area": 77.5, "iscrowd": 0}
CROWD = {"image_id": 12, "category_id": 1, "bbox": [0, 0, 60, 40], "iscrowd": 1}
FLAT = {"image_id": 12, "category_id": 1, "bbox": [5, 5, 0, 10]}


def test_cocos_x_y_width_height_become_corners_and_ids_numbers(tmp_path):
    for split in ("train2017", "val2017"):
        coco_file(tmp_path / "annotations" / f"instances_{split}.json", DOG, CROWD, FLAT)
        coco_file(tmp_path / "annotations" / f"person_keypoints_{split}.json")
        for number in range(3):
            save(tmp_path / split / f"{number}.png")
    dataset = opened("coco", tmp_path)
    assert dataset.classes == ["cat", "dog"] and dataset.labels == "boxes" and len(dataset.train) == len(dataset.evaluate) == 3
    first, none, crowd = (dataset.train.read(index)[1] for index in range(3))
    assert first.tolist() == [[2.5, 3, 12.5, 23, 1, 0, 77.5]] and none.shape == (0, 7)
    assert crowd.tolist() == [[0, 0, 60, 40, 0, 1, 2400]]
    assert "8 boxes" not in dataset.about and "4 boxes, 2 boxes without an area left out, the first of 2.png" in dataset.about
    assert dataset.train.name_of(0) == str(tmp_path / "train2017/0.png") and dataset.class_ids == (1, 3)


def test_other_ids_of_the_same_names_are_refused(tmp_path):
    coco_file(tmp_path / "train.json", DOG)
    coco_file(tmp_path / "val.json", {**DOG, "category_id": 5}, categories=((1, "cat"), (5, "dog")))
    save(tmp_path / "0.png")
    with pytest.raises(ValueError, match=r"have other categories; let both have the same, with the same ids"):
        opened("coco", tmp_path)


def test_one_file_is_split_and_roboflows_folders_are_found(tmp_path):
    file = coco_file(tmp_path / "one/boxes.json", DOG, images=20)
    for number in range(20):
        save(tmp_path / "one/images" / f"{number}.png")
    dataset = opened("coco", file, hold_out=0.2)
    assert len(dataset.train) + len(dataset.evaluate) == 20
    for split in ("train", "valid"):
        coco_file(tmp_path / "two" / split / "_annotations.coco.json", DOG)
        for number in range(3):
            save(tmp_path / "two" / split / f"{number}.png")
    assert len(opened("coco", tmp_path / "two").evaluate) == 3
    assert "data.hold_out=0.2 out" in refusal("coco", tmp_path / "two", hold_out=0.2)


@pytest.mark.parametrize(
    ("box", "told"),
    [
        ({"image_id": 99, "category_id": 1, "bbox": [0, 0, 1, 1]}, "has a box of the image 99, which it has not"),
        (
            {"image_id": 10, "category_id": 8, "bbox": [0, 0, 1, 1]},
            "for 0.png the annotation 0 without a bbox of 4 numbers or with a",
        ),
        ({"image_id": 10, "category_id": 1, "bbox": [0, 0, 1]}, "for 0.png the annotation 0 without a bbox of 4 numbers"),
    ],
)
def test_a_bad_annotation_is_refused_with_its_file(tmp_path, box, told):
    file = coco_file(tmp_path / "boxes.json", box)
    for number in range(3):
        save(tmp_path / f"{number}.png")
    text = refusal("coco", file, hold_out=0.5)
    assert told in text and str(file) in text


def test_what_is_no_coco_is_refused(tmp_path):
    (tmp_path / "list.json").write_text("[]")
    assert "is no file of COCO's annotations (TypeError" in refusal("coco", tmp_path / "list.json")
    assert "has 0 JSON files to train on and 0 to evaluate by their names" in refusal("coco", tmp_path)
    assert "name one that exists" in refusal("coco", tmp_path / "nothing")
    assert "where there is no" in refusal("coco", tmp_path, options={"train": "a.json", "evaluate": "b.json"})
    coco_file(tmp_path / "train.json", DOG)
    assert "0.png, of" in refusal("coco", tmp_path / "train.json", hold_out=0.5), "an image that is not there"
    for number in range(3):
        save(tmp_path / f"{number}.png")
    coco_file(tmp_path / "val.json", DOG, categories=((3, "dog"), (1, "bird")))
    assert "have other categories" in refusal("coco", tmp_path)


# ---------------------------------------------------------------------------------------------- YOLO


def yolo_folder(place: Path, text: str | None, names="{0: cat, 1: dog}") -> Path:
    for split in ("train", "val"):
        save(place / "images" / split / "a.png")
        if text is not None:
            (place / "labels" / split).mkdir(parents=True, exist_ok=True)
            (place / "labels" / split / "a.txt").write_text(text)
    (place / "data.yaml").write_text(f"path: .\ntrain: images/train\nval: images/val\nnames: {names}\n")
    return place


def test_yolos_shares_become_pixels_and_outlines_their_boxes(tmp_path):
    dataset = opened("yolo", yolo_folder(tmp_path / "a", "1 0.5 0.5 0.5 0.25\n\n0 0.1 0.1 0.6 0.1 0.5 0.9\n"))
    assert dataset.classes == ["cat", "dog"] and dataset.labels == "boxes"
    rows = dataset.train.read(0)[1]
    assert rows[0].tolist() == [15, 15, 45, 25, 1, 0, 300] and rows[1, :5].tolist() == pytest.approx([6, 4, 36, 36, 0])
    assert opened("yolo", yolo_folder(tmp_path / "b", None, "[cat, dog]") / "data.yaml").train.read(0)[1].shape == (0, 7)
    (tmp_path / "a/list.txt").write_text("images/train/a.png\n")
    (tmp_path / "a/data.yaml").write_text("train: [list.txt, images/val]\nnames: [cat, dog]\n")
    with pytest.raises(ValueError, match="hold_out"):
        opened("yolo", tmp_path / "a")


@pytest.mark.parametrize("line", ["1 0.5 0.5 0.5", "dog 0.5 0.5 0.5 0.5", "0 nan 0.5 0.5 0.5", "0 0.5 0.5 0.5 0.5 0.5"])
def test_a_line_that_is_none_is_named(tmp_path, line):
    dataset = opened("yolo", yolo_folder(tmp_path, f"0 0.5 0.5 0.2 0.2\n{line}\n"))
    with pytest.raises(BadImageError, match=r"line 2 of .*labels/train/a.txt is '"):
        dataset.train.read(0)


def test_what_is_no_yolo_is_refused(tmp_path):
    assert "reads a data.yaml, or a folder with one" in refusal("yolo", tmp_path)
    assert "has the names ['a', 2]" not in refusal("yolo", yolo_folder(tmp_path / "a", None, "{1: cat}"))
    assert "a name for each class is wanted, numbered from 0" in refusal("yolo", tmp_path / "a")
    (tmp_path / "a/data.yaml").write_text("names: [cat]\n")
    assert "has no `train`" in refusal("yolo", tmp_path / "a")
    (tmp_path / "a/data.yaml").write_text("names: [cat]\ntrain: nowhere\n")
    assert "which is no folder of images and no list" in refusal("yolo", tmp_path / "a", hold_out=0.5)
    yolo_folder(tmp_path / "a", None)
    assert "leave data.fold=0 out" in refusal("yolo", tmp_path / "a", fold=0)


# ---------------------------------------------------------------------------------------------- VOC


def voc_folder(place: Path, *objects: str, lists: bool = True) -> Path:
    for stem in ("a", "b"):
        save(place / "JPEGImages" / f"{stem}.png")
        (place / "Annotations").mkdir(parents=True, exist_ok=True)
        (place / "Annotations" / f"{stem}.xml").write_text(f"<annotation>{''.join(objects)}</annotation>")
    if lists:
        (place / "ImageSets/Main").mkdir(parents=True)
        for split, stem in (("train", "a"), ("val", "b")):
            (place / "ImageSets/Main" / f"{split}.txt").write_text(f"{stem} 1\n")
    return place


def voc_object(name: str, *box: float, difficult: int = 0) -> str:
    corners = "".join(f"<{key}>{value}</{key}>" for key, value in zip(("xmin", "ymin", "xmax", "ymax"), box, strict=True))
    return f"<object><name>{name}</name><difficult>{difficult}</difficult><bndbox>{corners}</bndbox></object>"


def test_vocs_inclusive_corners_from_1_become_edges_from_0(tmp_path):
    """The whole image of 60 x 40 px is 1, 1, 60, 40 in VOC."""
    place = voc_folder(tmp_path, voc_object("dog", 1, 1, 60, 40), voc_object("cat", 5, 6, 5, 6, difficult=1))
    dataset = opened("voc", place)
    assert dataset.classes == ["cat", "dog"] and (len(dataset.train), len(dataset.evaluate)) == (1, 1)
    assert dataset.train.read(0)[1].tolist() == [[0, 0, 60, 40, 1, 0, 2400], [4, 5, 5, 6, 0, 1, 1]]
    kept = opened("voc", place, options={"difficult": "keep", "classes": ["dog", "bird", "cat"]})
    assert kept.classes == ["dog", "bird", "cat"] and kept.train.read(0)[1][:, 4:6].tolist() == [[0, 0], [2, 0]]


def test_what_is_no_voc_is_refused(tmp_path):
    assert "reads a folder with Annotations/ and JPEGImages/" in refusal("voc", tmp_path)
    place = voc_folder(tmp_path / "a", voc_object("dog", 1, 1, 6, 4), lists=False)
    assert "hold_out" in refusal("voc", place), "nothing says what to hold out"
    assert "of the class 'dog', which data.options.classes does not list" in refusal("voc", place, options={"classes": ["cat"]})
    assert "ignore or keep is wanted" in refusal("voc", place, options={"difficult": "drop"})
    (place / "Annotations/b.xml").write_text("<annotation><object/></annotation>")
    assert "b.xml is no annotation of VOC (ValueError: an object has no name or no bndbox)" in refusal("voc", place)
    (place / "Annotations/b.xml").write_text("<!DOCTYPE x [<!ENTITY a 'b'>]><annotation/>")
    assert "it defines entities" in refusal("voc", place)
    (place / "Annotations/b.xml").write_text("<annotation/>")
    (place / "JPEGImages/b.png").unlink()
    assert "the image of" in refusal("voc", place) and "b.xml is in none of" in refusal("voc", place)
