"""Pascal VOC: an XML file per image, with corners counted from 1 of which the last pixel is inside.

Annotations/a.xml, JPEGImages/a.jpg, ImageSets/Main/train.txt and val.txt with a stem per line; without these, data.hold_out or
data.fold splits all.  VOC's box (xmin, ymin, xmax, ymax) is (xmin - 1, ymin - 1, xmax, ymax) here.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal
from xml.etree import ElementTree

from widefield.config import DataConfig
from widefield.data import Dataset
from widefield.data.formats._box_files import BoxedFile, dataset_of_boxes, first_file
from widefield.data.mask_layouts import IMAGES
from widefield.data.pixel_files import SUFFIXES

Difficult = Literal["ignore", "keep"]
_Named = tuple[Path, list[tuple[str, tuple[float, ...], bool]]]
"""An image with the names, boxes and whether they are difficult."""


def open_dataset(
    config: DataConfig,
    *,
    classes: list[str] | None = None,
    difficult: Difficult = "ignore",
    channels: int | None = None,
    group: str | None = None,
) -> Dataset:
    """classes: names in their order; None: all that occur, by alphabet.  difficult: `ignore` what is marked so, as a crowd,
    which is neither learned nor counted, or `keep` it as the others.

    channels: None: those of the first image.  group: a regular expression whose match in a path is the group.
    ValueError, which names the file: no folders, an XML file that is none, a box without numbers, a class that is not listed.
    """
    root = Path(config.path or "")
    if config.path is None or not (root / "Annotations").is_dir():
        raise ValueError(
            f"data.path is {config.path}, and data.name=voc reads a folder with Annotations/ and JPEGImages/; name one"
        )
    if difficult not in ("ignore", "keep"):
        raise ValueError(f"data.options.difficult is {difficult!r}; ignore or keep is wanted")
    lists = [root / "ImageSets" / "Main" / f"{split}.txt" for split in ("train", "val")]
    sides = [_stems(file) for file in lists] if all(file.is_file() for file in lists) else [_all_stems(root)]
    read = [[_annotated(root, stem) for stem in side] for side in sides]
    found = sorted({name for side in read for _, objects in side for name, *_ in objects})
    names = found if classes is None else list(classes)
    unknown = next((name for name in found if name not in names), None)
    if unknown is not None:
        raise ValueError(
            f"{root / 'Annotations'} has objects of the class '{unknown}', which data.options.classes does not list"
        )
    boxed = [[_boxed(one, names, difficult) for one in side] for side in read]
    about: dict[str, Any] = {"source": str(root), "classes": names, "channels": channels, "group": group}
    return dataset_of_boxes(boxed[-1], config, train=boxed[0] if len(boxed) == 2 else None, **about)


def _stems(file: Path) -> list[str]:
    """The first word of each line."""
    return [line.split()[0] for line in file.read_text(encoding="utf-8").splitlines() if line.strip()]


def _all_stems(root: Path) -> list[str]:
    found = sorted(file.stem for file in (root / "Annotations").glob("*.xml"))
    if not found:
        raise ValueError(f"{root / 'Annotations'} has no .xml file; put one for each image there")
    return found


def _annotated(root: Path, stem: str) -> _Named:
    file = root / "Annotations" / f"{stem}.xml"
    try:
        text = file.read_text(encoding="utf-8")
        if "<!DOCTYPE" in text or "<!ENTITY" in text:
            raise ValueError("it defines entities, which can be made to fill the memory")
        tree = ElementTree.fromstring(text)
        objects = [_object(one) for one in tree.iter("object")]
    except (OSError, ValueError, ElementTree.ParseError) as error:
        raise ValueError(f"{file} is no annotation of VOC ({type(error).__name__}: {error}); mend it") from None
    name = tree.findtext("filename") or ""
    folders = [root / folder for folder in ("JPEGImages", *IMAGES)]
    names = [Path(name).name, *(stem + suffix for suffix in SUFFIXES)] if name else [stem + suffix for suffix in SUFFIXES]
    return first_file([folder / one for folder in folders for one in names], f"the image of {file}"), objects


def _object(tree: ElementTree.Element) -> tuple[str, tuple[float, ...], bool]:
    """ValueError: no name, or a corner that is no number."""
    name, box = tree.findtext("name"), tree.find("bndbox")
    if name is None or box is None:
        raise ValueError("an object has no name or no bndbox")
    x1, y1, x2, y2 = (float(box.findtext(corner) or "nan") for corner in ("xmin", "ymin", "xmax", "ymax"))
    return name.strip(), (x1 - 1, y1 - 1, x2, y2), (tree.findtext("difficult") or "0").strip() == "1"


def _boxed(one: _Named, names: list[str], difficult: Difficult) -> BoxedFile:
    image, objects = one
    labels, boxes = tuple(names.index(name) for name, *_ in objects), tuple(box for _, box, _ in objects)
    return BoxedFile(image, boxes, labels, tuple(hard and difficult == "ignore" for *_, hard in objects))


def _sample_voc(place: Path, write: Callable[[Path], None]) -> Path:
    for folder in ("Annotations", "ImageSets/Main"):
        (place / folder).mkdir(parents=True, exist_ok=True)
    for split, numbers in (("train", range(4)), ("val", range(4, 6))):
        for number in numbers:
            write(place / "JPEGImages" / f"{number}.png")
            box = "<bndbox><xmin>1</xmin><ymin>2</ymin><xmax>3</xmax><ymax>4</ymax></bndbox>"
            objects = "".join(f"<object><name>{name}</name>{box}</object>" for name in "ba")
            xml = f"<annotation><filename>{number}.png</filename>{objects}</annotation>"
            (place / "Annotations" / f"{number}.xml").write_text(xml)
        (place / "ImageSets/Main" / f"{split}.txt").write_text("\n".join(map(str, numbers)) + "\n")
    return place


CASES = [({"path": _sample_voc}, 4, 2, 2)]
"""As in imagefolder.py."""
