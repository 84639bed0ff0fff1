"""COCO's annotations: a JSON file for each split, with images, categories and boxes as x, y, width, height.

annotations/instances_train2017.json, annotations/instances_val2017.json, train2017/*.jpg, val2017/*.jpg
train/_annotations.coco.json, train/*.jpg, valid/_annotations.coco.json, valid/*.jpg
boxes.json                             one file as data.path, which data.hold_out or data.fold splits

An image is looked for beside its JSON file, in `images` there, and in the folder of the split.  Classes are the categories in
the order of their ids, numbered from 0; predictions have the ids again.  A crowd (iscrowd) is not learned and not counted;
`area` decides what is small.  Boxes without width or height are left out, and told.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from widefield.config import DataConfig
from widefield.data import Dataset
from widefield.data.formats._box_files import BoxedFile, dataset_of_boxes, first_file
from widefield.data.mask_layouts import TRAIN, VAL

Tree = dict[str, Any]


def open_dataset(
    config: DataConfig,
    *,
    train: str | None = None,
    evaluate: str | None = None,
    images: str | None = None,
    channels: int | None = None,
    group: str | None = None,
) -> Dataset:
    """train, evaluate: JSON files in data.path; None: those of the layouts above.  images: a folder in data.path with images.

    channels: None: those of the first image.  group: a regular expression whose match in a path is the group.
    ValueError, which names the file: no files, other categories in the two, an annotation of no image or category.
    """
    if config.path is None or not Path(config.path).exists():
        raise ValueError(f"data.path is {config.path}, and data.name=coco reads a folder or a JSON file; name one that exists")
    root = Path(config.path)
    found = [root] if root.is_file() else _annotation_files(root, train, evaluate)
    base = root.parent if root.is_file() else root
    extra = [] if images is None else [base / images]
    trees = [_tree(file) for file in found]
    names = [_categories(tree, file) for tree, file in zip(trees, found, strict=True)]
    if any(list(one.items()) != list(names[0].items()) for one in names):
        raise ValueError(f"{found[0]} and {found[1]} have other categories; let both have the same, with the same ids")
    odd: list[str] = []
    sides = [_images(tree, file, base, extra, list(names[0]), odd) for tree, file in zip(trees, found, strict=True)]
    about: Tree = {"source": str(root), "classes": list(names[0].values()), "channels": channels, "group": group}
    more = [f"{len(odd)} boxes without an area left out, the first of {odd[0]}"] if odd else []
    dataset = dataset_of_boxes(sides[-1], config, train=sides[0] if len(sides) == 2 else None, more=more, **about)
    return replace(dataset, class_ids=tuple(names[0]))


def _annotation_files(root: Path, train: str | None, evaluate: str | None) -> list[Path]:
    """Those to train on and to evaluate, or one of all.  ValueError: none are there."""
    if train is not None or evaluate is not None:
        given = [root / name for name in (train, evaluate) if name is not None]
        missing = [str(file) for file in given if not file.is_file()]
        if missing or len(given) < 2:
            raise ValueError(
                f"data.options has train={train} and evaluate={evaluate}; give two JSON files in {root}"
                f"{f', where there is no {missing[0]}' if missing else ', or name one file as data.path, with data.hold_out'}"
            )
        return given
    files = sorted([*root.glob("*.json"), *root.glob("*/*.json")])
    sides = [[file for file in files if _is_of(file, words)] for words in (TRAIN, VAL[:3])]
    if all(len(side) == 1 for side in sides):
        return [side[0] for side in sides]
    have = [str(file.relative_to(root)) for file in files]
    raise ValueError(
        f"{root} has {len(sides[0])} JSON files to train on and {len(sides[1])} to evaluate by their names; name them: "
        f"data.options.train and data.options.evaluate. It has: {', '.join(have) or 'none'}"
    )


def _is_of(file: Path, words: tuple[str, ...]) -> bool:
    """By the name of the file, as instances_val2017, or of its folder.  Files of persons' joints and captions are not meant."""
    stem = file.stem.lower()
    if stem.startswith(("person_keypoints", "captions", "panoptic", "stuff", "image_info")):
        return False
    parts = [*stem.replace("-", "_").split("_"), file.parent.name.lower()]
    return any(part.rstrip("0123456789") in words for part in parts)


def _tree(file: Path) -> Tree:
    """ValueError: it is no JSON of this kind."""
    try:
        tree = json.loads(file.read_text(encoding="utf-8"))
        parts = {key: tree[key] for key in ("images", "annotations", "categories")}
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise ValueError(
            f"{file} is no file of COCO's annotations ({type(error).__name__}: {error}); a JSON object with images, "
            "annotations and categories is wanted"
        ) from None
    return parts


def _categories(tree: Tree, file: Path) -> dict[int, str]:
    """The names by id, in the order of ids."""
    try:
        return {int(one["id"]): str(one["name"]) for one in sorted(tree["categories"], key=lambda one: int(one["id"]))}
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{file} has a category without id or name ({type(error).__name__}: {error}); mend it") from None


def _images(tree: Tree, file: Path, root: Path, extra: list[Path], ids: list[int], odd: list[str]) -> list[BoxedFile]:
    """odd: gets the names of images with boxes that have no area."""
    of_image: dict[Any, list[Tree]] = defaultdict(list)
    for one in tree["annotations"]:
        of_image[one.get("image_id")].append(one)
    try:
        known = {image["id"]: str(image["file_name"]) for image in tree["images"]}
    except (KeyError, TypeError) as error:
        raise ValueError(f"{file} has an image without {error}; mend it") from None
    lost = next((number for number in of_image if number not in known), None)
    if lost is not None:
        raise ValueError(f"{file} has a box of the image {lost!r}, which it has not; mend it")
    folders = [*extra, file.parent, file.parent / "images", root / "images", root, *_folders_of(file, root)]
    found = {number: first_file([folder / name for folder in folders], f"{name}, of {file},") for number, name in known.items()}
    return [_boxed(image, of_image[number], ids, file, odd) for number, image in found.items()]


def _folders_of(file: Path, root: Path) -> list[Path]:
    """As train2017 for instances_train2017.json."""
    names = [file.stem.rpartition("_")[2], file.stem]
    return [place / name for name in names for place in (root, root / "images", file.parent)]


def _boxed(image: Path, annotations: list[Tree], ids: list[int], file: Path, odd: list[str]) -> BoxedFile:
    """ValueError: an annotation without numbers, or of no category."""
    rows = []
    for one in annotations:
        try:
            x, y, width, height = map(float, one["bbox"])
            label = ids.index(one["category_id"])
            area = float(one.get("area", width * height))
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(
                f"{file} has for {image.name} the annotation {one.get('id')!r} without a bbox of 4 numbers or with a category "
                f"that it has not ({type(error).__name__}: {error}); mend or remove it"
            ) from None
        if width > 0 and height > 0:
            rows.append(((x, y, x + width, y + height), label, bool(one.get("iscrowd", 0)), area))
        else:
            odd.append(image.name)
    boxes, labels, crowd, area = zip(*rows, strict=True) if rows else ((), (), (), ())
    return BoxedFile(image, boxes, labels, crowd, area)


def _sample_coco(place: Path, write: Callable[[Path], None]) -> Path:
    for split, count in (("train", 4), ("val", 2)):
        images = [{"id": number, "file_name": f"{number}.png"} for number in range(count)]
        for image in images:
            write(place / f"{split}2017" / str(image["file_name"]))
        boxes = [{"id": 1 + k, "image_id": k % count, "category_id": 3 + 4 * k, "bbox": [1, 1, 2, 2]} for k in range(2)]
        tree = {"images": images, "annotations": boxes, "categories": [{"id": 7, "name": "b"}, {"id": 3, "name": "a"}]}
        (place / "annotations").mkdir(parents=True, exist_ok=True)
        (place / "annotations" / f"instances_{split}2017.json").write_text(json.dumps(tree))
    return place


CASES = [({"path": _sample_coco}, 4, 2, 2)]
"""As in imagefolder.py."""
