"""What the command says of shards: inspect, data stats, list, and a first recipe."""

from __future__ import annotations

from pathlib import Path

import pytest
from shard_files import opened, png, same_images, samples, tar

from widefield.cli import main
from widefield.config import parse_config
from widefield.first_recipe import recipe_for
from widefield.first_recipe.look import format_of


@pytest.fixture(scope="module")
def both(tmp_path_factory) -> tuple[Path, Path]:
    return same_images(tmp_path_factory.mktemp("same"))


def test_inspect_says_what_is_in_a_shard(tmp_path, capsys):
    path = tar(tmp_path / "a.tar", [*samples(range(5), classes=2), ("README", b"hello")])
    assert main(["inspect", str(path)]) == 0
    told = capsys.readouterr().out
    assert "5: 000000, 000001 to 000004" in told and "png 5 of " in told and "cls 5 of 5 bytes" in told, told
    assert "1 files that belong to no sample" in told and "7 x 9, 3 channels of uint8" in told and "not yet" in told
    assert not (tmp_path / ".widefield").exists()
    opened(path, hold_out=0.5)
    assert main(["inspect", str(path)]) == 0 and "indexed  yes" in capsys.readouterr().out
    tar(tmp_path / "b.tar", [("0.jpg", png(0)), ("0.txt", b"x"), ("0.json", b'{"kind": 1, "age": 2}'), ("1.json", b"{")])
    assert main(["inspect", str(tmp_path / "b.tar")]) == 0
    told = capsys.readouterr().out
    assert "labels   in txt, json.kind, json.age; say which: data.options.label=txt, or labels" in told
    assert "image    " in told and "the sample 1 (its members are .json) has no image" in told
    path.write_bytes(path.read_bytes()[:2000])
    assert main(["inspect", str(path)]) == 1 and "is cut short" in capsys.readouterr().out


def test_statistics_of_a_folder_of_shards_of_one_and_of_a_pattern(both, tmp_path, capsys):
    assert main(["data", "stats", str(both[1])]) == 0
    told = capsys.readouterr().out
    assert "14 images to train on, uint8, 7 x 9" in told and "ant" in told
    assert main(["data", "stats", str(both[1] / "train-{0000..0002}.tar")]) == 0
    assert "12 images to train on" in capsys.readouterr().out
    assert main(["data", "stats", str(both[1] / "train-*.tar"), "options={val: val-0000.tar}"]) == 0
    assert "14 images to train on" in capsys.readouterr().out


def test_a_folder_of_shards_gets_a_first_recipe(both, tmp_path):
    assert format_of(both[1]) == ("webdataset", both[1])
    config = parse_config(recipe_for(both[1]))
    assert (config.data.name, config.data.path, config.task.name) == ("webdataset", str(both[1]), "classification")
    tar(tmp_path / "own/a.tar", samples(range(30)))
    assert parse_config(recipe_for(tmp_path / "own")).data.hold_out == 0.2


def test_the_format_is_listed(capsys):
    assert main(["list", "data"]) == 0
    assert "webdataset" in (told := capsys.readouterr().out) and "samples in tars (shards)" in told
