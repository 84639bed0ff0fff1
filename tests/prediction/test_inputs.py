"""Does every word of a command line mean the files that a user expects, each once and under a name of its own?"""

from __future__ import annotations

from pathlib import Path

import pytest

from widefield.data.image import SUFFIXES
from widefield.prediction.inputs import find_inputs


def made(place: Path, *names: str) -> Path:
    for name in names:
        (place / name).parent.mkdir(parents=True, exist_ok=True)
        (place / name).write_bytes(b"image")
    return place


def names(*words, beside: Path | None = None) -> list[str]:
    return [str(found.name) for found in find_inputs(words, beside=beside)[0]]


def test_a_folder_means_all_images_below_it_and_no_other_files(tmp_path):
    made(tmp_path, "b.png", "a.JPG", "sub/deep/c.tif", "notes.txt", "answers/old.png")
    assert names(tmp_path, beside=tmp_path / "answers") == ["a", "b", "sub/deep/c"]


def test_patterns_lists_and_files_mix_and_each_file_is_there_once(tmp_path, monkeypatch):
    monkeypatch.chdir(made(tmp_path, "x/1.png", "x/y/2.png", "3.png"))
    (tmp_path / "list.txt").write_text("x/1.png\n\n3.png\n")
    assert names("x/**/*.png", "@list.txt", "./3.png") == ["1", "y/2", "3"]


@pytest.mark.parametrize(
    "files, expected",
    [
        (["a/1.png", "a/2.png"], ["1", "2"]),
        (["a/1.png", "a/1.tif", "a/2.png"], ["1.png", "1.tif", "2"]),
        (["a/1.png", "b/1.png"], ["a/1.png", "b/1.png"]),
        (["a/1.png", "a/1.jpg", "a/1.png.jpg"], ["1.png", "1.jpg", "1.png.jpg"]),
    ],
)
def test_answers_have_names_of_their_own(files, expected, tmp_path):
    made(tmp_path, *files)
    assert names(*[tmp_path / file for file in files]) == expected


def test_words_that_mean_no_file_are_named_and_stop_only_when_all_do(tmp_path):
    made(tmp_path, "1.png", "empty/readme.txt")
    words = [tmp_path / "1.png", tmp_path / "2.png", tmp_path / "empty", tmp_path / "*.tif"]
    found, lefts = find_inputs(words)
    assert [one.name for one in found] == [Path("1")]
    assert [left.reason for left in lefts] == [
        "there is no such file or folder",
        f"the folder has no image ({', '.join(SUFFIXES)})",
        "no file fits the pattern",
    ]
    with pytest.raises(ValueError, match=r"no image was found:\n  .*empty: the folder has no image .*\nname files, folders"):
        find_inputs([tmp_path / "empty"])
    with pytest.raises(ValueError, match="the list .*nowhere.txt cannot be read as text"):
        find_inputs([f"@{tmp_path}/nowhere.txt"])


@pytest.mark.parametrize("name", ["shards.tar", "shards.TAR", "shards.tar.gz", "shards.tgz"])
def test_a_tar_of_samples_is_left_out_with_the_command_that_unpacks_it(tmp_path, name):
    made(tmp_path, "1.png", name)
    found, (left,) = find_inputs([tmp_path / name, tmp_path / "1.png"])
    assert [one.path.name for one in found] == ["1.png"] and left.path == str(tmp_path / name)
    assert f"mkdir samples && tar -xf {name} -C samples, and name that folder" in left.reason
