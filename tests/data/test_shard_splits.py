"""Which shards are meant, which are to train on, and which of their samples where they do not say it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from shard_files import opened, png, samples, tar

from widefield.config import DataConfig, parse_config
from widefield.data.shards.dividing import divided, mark_of
from widefield.data.shards.patterns import expanded, shards_of
from widefield.data.splits import Item, split_items
from widefield.training.balance import check_sampling


def refused(path: Path | str | None, **config) -> str:
    with pytest.raises(ValueError) as caught:
        opened(path, **{"hold_out": 0.5, **config})
    return str(caught.value)


def test_braces_are_those_of_a_shell():
    assert expanded("a-{9..11}.tar") == ["a-9.tar", "a-10.tar", "a-11.tar"]
    assert expanded("a-{009..11..2}.tar") == ["a-009.tar", "a-011.tar"]
    assert expanded("{x}{a,b}.tar") == ["{x}a.tar", "{x}b.tar"]
    with pytest.raises(ValueError, match="counts from 9 to 1 by 1; write the lower number first"):
        expanded("a-{9..1}.tar")


def test_patterns_lists_and_folders_name_shards_in_order(tmp_path):
    paths = [tar(tmp_path / f"x/a-{number}.tar", samples(range(2))) for number in range(3)]
    for given in ("x", "x/a-{0..2}.tar", "x/a-*.tar", "x/a-?.tar", ["x/a-0.tar", "x/a-[12].tar"]):
        assert shards_of(given, tmp_path, option="data.path") == paths
    bracket = tar(tmp_path / "[x]/a{b,c}.tar", samples(range(2)))
    assert shards_of(str(bracket), Path(), option="data.path") == [bracket]
    assert shards_of("*.tar", tmp_path / "[x]", option="data.path") == [bracket]


PATTERNS = {
    "gap": ("train-{0..3}.tar", {}, "there is no file {place}/train-2.tar; did you mean 'train-"),
    "glob": ("trian-*.tar", {}, "no file in {place} is of that name"),
    "folder": ("empty", {}, "{place}/empty has no .tar file"),
    "nowhere": ("train-0.tra", {}, "there is no such folder or tar; did you mean 'train-0.tar'?"),
    "address": ("s3://bucket/train-{0..3}.tar", {}, "and shards are files here; copy them"),
    "twice": ("train-{0,1,0}.tar", {}, "train-0.tar twice, so that its samples would be read twice an epoch"),
    "both": ("train-0.tar", {"val": "train-0.tar"}, "is of the shards to train on and of those to evaluate (1 are)"),
    "val alone": ("", {"val": "val-0.tar"}, "data.options.val is 'val-0.tar' and data.options.train is not set; set both"),
    "no list": ("", {"train": [3], "val": "val-0.tar"}, "data.options.train is [3]; give a tar"),
    "nothing": ("", {"train": [], "val": "val-0.tar"}, "data.options.train is []; give a tar"),
    "odd name": ("", {}, "the name of {place}/other.tar does not say whether it is to train on"),
    "two words": ("words", {}, "has train and val in its name"),
}


@pytest.mark.parametrize("name", PATTERNS)
def test_patterns_that_name_no_shards_are_refused(tmp_path, monkeypatch, name):
    more = {"odd name": ["other"], "two words": ["words/train-val-0"]}.get(name, [])
    for file in ("train-0", "train-1", "val-0", *more):
        tar(tmp_path / f"{file}.tar", samples(range(4)))
    (tmp_path / "empty").mkdir()
    path, options, words = PATTERNS[name]
    given = path if "//" in path else str(tmp_path / path)
    assert words.replace("{place}", str(tmp_path)) in refused(given, hold_out=None, options=options)


def test_no_path_and_a_share_beside_a_split_are_refused(tmp_path):
    assert "data.path is not set; add data.path=DIR" in refused(None)
    for split in ("train", "val"):
        tar(tmp_path / f"{split}.tar", samples(range(4)))
    assert f"there are shards to evaluate, as {tmp_path}/val.tar, so leave data.hold_out=0.5 out" in refused(tmp_path)
    assert "so leave data.fold=0 out" in refused(tmp_path, hold_out=None, fold=0)
    assert "leave it out, or name shards that say no split" in refused(tmp_path, hold_out=None, options={"group": "0"})
    assert "nothing is held out for evaluation" in refused(tmp_path / "train.tar", hold_out=None)


def test_a_test_split_is_left_out_where_there_is_another(tmp_path):
    for split in ("train", "val", "test"):
        tar(tmp_path / split / "0.tar", samples(range(4)))
    assert "1 shards of the test split left out" in opened(tmp_path).about
    (tmp_path / "val/0.tar").unlink()
    assert len(opened(tmp_path).evaluate) == 4


@pytest.mark.parametrize(
    "config", [{"hold_out": 0.01}, {"hold_out": 0.3}, {"hold_out": 0.95}, *({"fold": n} for n in range(5))], ids=str
)
@pytest.mark.parametrize("has_classes", [True, False])
def test_sides_in_arrays_are_those_of_lists_of_names(config, has_classes):
    """Classes of 2 to 41 samples, whose numbers are in another order than their names."""
    config = DataConfig(name="webdataset", **config)
    names = [f"{number % 5}.tar/{number:05}" for number in range(100)]
    classes = ["9", "10", "owl", "cat"]
    strata = np.array([0, 0, *[1] * 3, *[2] * 54, *[3] * 41])[np.random.default_rng(0).permutation(100)]
    items = [Item(name, classes[number] if has_classes else None) for name, number in zip(names, strata.tolist(), strict=True)]
    wanted = split_items(items, config, source="here")
    marks = np.array([mark_of(name) for name in names])
    train, evaluate = divided(marks, strata if has_classes else None, classes, config)
    assert (train.tolist(), evaluate.tolist()) == (wanted.train, wanted.evaluate)


@pytest.mark.parametrize("config", [{}, {"hold_out": 0.5, "fold": 0}, {"fold": 7}, {"fold": 0, "folds": 40}])
def test_sides_that_cannot_be_made_are_left_to_what_says_why(config):
    marks = np.array([mark_of(str(number)) for number in range(20)])
    config = DataConfig(name="webdataset", **config)
    assert divided(marks, None, [], config) is None
    assert divided(marks, np.array([0] * 19 + [1]), ["a", "b"], DataConfig(name="webdataset", hold_out=0.5)) is None


def test_a_class_of_one_sample_cannot_be_divided(tmp_path):
    members = [*samples([0, 3, 6]), ("x.png", png(0)), ("x.cls", b"1")]
    assert "a.tar/x is its class's only image, so none can be held out" in refused(tar(tmp_path / "a.tar", members))


def test_groups_are_not_divided(tmp_path):
    members = [(f"p{key // 3}_{key}.{end}", data) for key in range(30) for end, data in (("png", png(key)), ("cls", b"0"))]
    dataset = opened(tar(tmp_path / "a.tar", members), hold_out=0.3, options={"group": r"(p\d+)_"})
    sides = [{Path(images.name_of(index)).name.partition("_")[0] for index in range(len(images))}
             for images in (dataset.train, dataset.evaluate)]  # fmt: skip
    assert not sides[0] & sides[1] and len(dataset.evaluate) == 9


def test_drawing_samples_and_reading_blocks_of_them_are_refused_together(tmp_path):
    path = tar(tmp_path / "a.tar", samples(range(12)))
    dataset = opened(path, hold_out=0.5, options={"shuffle": {"block": 2, "blocks": 2}})
    config = parse_config(f"model: {{name: resnet}}\ndata: {{name: webdataset, path: {path}, sampling: balanced}}")
    with pytest.raises(ValueError, match="data.sampling=balanced draws samples from everywhere, and data.options.shuffle"):
        check_sampling(config, dataset, labels="class")
