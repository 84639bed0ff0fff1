"""Is a table of images read as it says, and are samples divided alike, by groups, and nearly the same after more are added?"""

import json
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from widefield.config import DataConfig
from widefield.data import Dataset, open_dataset
from widefield.data.splits import Item, split_items

PIXELS = np.arange(4 * 5 * 3, dtype=np.uint8).reshape(4, 5, 3)


def table(place: Path, text: str, *, name: str = "images.csv", images: int = 4) -> Path:
    for number in range(images):
        Image.fromarray(PIXELS + number).save(place / f"{number}.png")
    (place / name).write_text(text)
    return place / name


def opened(path: Path, *, hold_out: float | None = None, fold: int | None = None, **options) -> Dataset:
    return open_dataset(DataConfig(name="manifest", path=str(path), hold_out=hold_out, fold=fold, folds=2, options=options))


def targets(dataset: Dataset) -> list:
    return [torch.as_tensor(dataset.train.target_of(index)).tolist() for index in range(len(dataset.train))]


def test_a_class_a_split_and_a_weight(tmp_path):
    dataset = opened(
        table(tmp_path, "image,label,split,weight\n0.png,b,train,1\n1.png,a,train,0.5\n2.png,a,val,2\n3.png,a,test,1\n")
    )
    assert (dataset.labels, dataset.classes, targets(dataset)) == ("class", ["a", "b"], [1, 0])
    assert [dataset.train.weight_of(index) for index in range(2)] == [1.0, 0.5]
    assert len(dataset.evaluate) == 1 and "1 of the test split left out" in dataset.about
    assert np.array_equal(dataset.train.read(1)[0].permute(1, 2, 0), PIXELS + 1)


def test_several_labels(tmp_path):
    dataset = opened(
        table(tmp_path, "file\tlabels\tsplit\n0.png\tcat;dog\ttrain\n1.png\t\ttrain\n2.png\tdog | owl\tval\n", name="t.tsv")
    )
    assert (dataset.labels, dataset.classes, targets(dataset)) == ("classes", ["cat", "dog", "owl"], [[1, 1, 0], [0, 0, 0]])


def test_values_of_a_regression(tmp_path):
    rows = [{"path": f"{number}.png", "age": number + 0.5, "size": 2, "fold": number % 2} for number in range(4)]
    path = table(tmp_path, "\n".join(map(json.dumps, rows)), name="t.jsonl")
    dataset = opened(path, values=["age", "size"], fold=1)
    assert (dataset.labels, dataset.classes, targets(dataset)) == ("values", ["age", "size"], [[0.5, 2.0], [2.5, 2.0]])
    assert dataset.train.read(0)[1].dtype == torch.float32


def test_parquet(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    table(tmp_path, "")
    columns = {"image": [f"{n}.png" for n in range(3)], "labels": [["a"], ["a", "b"], []], "split": ["train", "train", "val"]}
    parquet.write_table(pyarrow.table(columns), tmp_path / "t.parquet")
    assert targets(opened(tmp_path / "t.parquet")) == [[1, 0], [1, 1]]


ROWS = "0.png,a,train\n1.png,b,val\n"
WRONG = [
    ("picture,label,split\n" + ROWS, {}, "has no column for images; name it: data.options.image=picture"),
    ("image,what,split\n" + ROWS, {}, "has no column of labels; set data.options.label, labels or values. It has: image, what"),
    ("image,label,split\n" + ROWS, {"label": "labl"}, "has no such column; did you mean 'label'?"),
    ("image,label,split\n" + ROWS, {"values": "label"}, "row 2: 'a' in the column 'label' is no finite number"),
    ("image,label,split\n" + ROWS, {"classes": ["a"]}, "has the class 'b', which data.options.classes lacks"),
    ("image,label,split\n0.png,,train\n", {}, "row 2, has no label; fill the column 'label'"),
    ("image,label,labels\n" + ROWS, {}, "has the columns 'label' and 'labels'; set data.options.label or"),
    ("image,label,split\n" + ROWS, {"label": "label", "labels": "label"}, "has label and labels, which are different kinds"),
    ("image,label,split\n", {}, "has no rows; give one per image"),
    ("image,label,weight\n0.png,a,-1\n", {}, "row 2: the weight -1 is below 0"),
    ("image,label,group\n0.png,a,\n", {}, "row 2, has no group, and others have one"),
    ("image,image,split\n" + ROWS, {}, "give each a name of its own"),
    ("image,label,split\n0.png,a,train\n", {}, "gives 1 samples to train on and 0 to evaluate"),
    ("image,label,fold\n0.png,a,0\n1.png,a,1\n", {}, "has the folds 0, 1 and data.fold is not set"),
    ("image,label,split\n" + ROWS, {"hold_out": 0.5}, "has a split, so leave data.hold_out=0.5 out"),
    ("image,label\n0.png,a\n1.png,b\n", {}, "so nothing is held out for evaluation; add data.hold_out=0.1"),
]


@pytest.mark.parametrize(("text", "options", "told"), WRONG, ids=[told[:40] for *_, told in WRONG])
def test_tables_that_are_wrong_are_refused(tmp_path, text, options, told):
    with pytest.raises(ValueError) as caught:
        opened(table(tmp_path, text), **options)
    assert told in str(caught.value)


# ---------------------------------------------------------------------------------------------- splits


def items(count: int, *, classes: int = 3, groups: int | None = None) -> list[Item]:
    return [Item(f"image{n}", str(n % classes), None if groups is None else f"g{n % groups}") for n in range(count)]


def sides(some: list[Item], **keys) -> tuple[set[str], set[str]]:
    found = split_items(some, DataConfig(name="manifest", **keys), source="table")
    return {some[i].name for i in found.train}, {some[i].name for i in found.evaluate}


def test_folds_cover_all_once_and_each_class_alike():
    some, seen = items(60), Counter()
    for fold in range(5):
        train, held = sides(some, fold=fold)
        seen.update(held)
        assert not train & held and len(train) + len(held) == 60
        assert Counter(item.stratum for item in some if item.name in held) == {"0": 4, "1": 4, "2": 4}
    assert set(seen.values()) == {1} and len(seen) == 60


def test_no_fold_has_all_images_of_a_small_class():
    some = [*items(60), *(Item(f"rare{n}", "rare") for n in range(3))]
    held = [[item.stratum for item in some if item.name in sides(some, fold=fold)[1]].count("rare") for fold in range(5)]
    assert sorted(held) == [0, 0, 1, 1, 1]


@pytest.mark.parametrize("keys", [{"fold": 2}, {"hold_out": 0.25}])
def test_a_group_is_on_one_side(keys):
    some = items(60, groups=12)
    train, held = sides(some, **keys)
    groups = [{item.group for item in some if item.name in side} for side in (train, held)]
    assert not groups[0] & groups[1] and len(groups[1]) in (2, 3)


@pytest.mark.parametrize("keys", [{"fold": 2}, {"hold_out": 0.2}])
def test_one_more_image_moves_few(keys):
    """At most one over each end of a class's run of hashes."""
    before = sides(items(90), **keys)[1]
    after = sides([*items(90), Item("new", "1")], **keys)[1] - {"new"}
    assert len(before ^ after) <= 2


REFUSED = [
    (items(60), {"fold": 5}, "data.fold is 5 and there are data.folds=5, counted from 0"),
    (items(60), {"fold": 1, "hold_out": 0.1}, "data.fold=1 is set, so leave data.hold_out=0.1 out"),
    (items(60, groups=3), {"fold": 0}, "has 3 groups, fewer than data.folds=5; set data.folds=3 or less"),
    (items(4), {"fold": 0}, "has 4 samples, fewer than data.folds=5"),
    ([*items(60), Item("lone", "x")], {"fold": 0}, "lone is its class's only image, so one fold would never train on it"),
    ([*items(60), Item("lone", "x")], {"hold_out": 0.2}, "lone is its class's only image, so none can be held out"),
    (items(6, classes=1, groups=1), {"hold_out": 0.2}, "has 1 groups, each the only one of its class"),
    ([Item("a", fold="0"), Item("b")], {"fold": 0}, "gives b no fold, and others one"),
]


@pytest.mark.parametrize(("some", "keys", "told"), REFUSED, ids=[told[:30] for *_, told in REFUSED])
def test_divisions_that_cannot_be_are_refused(some, keys, told):
    with pytest.raises(ValueError, match="table") if "data.fold" not in told[:10] else pytest.raises(ValueError) as caught:
        sides(some, **keys)
    assert told in str(caught.value)
