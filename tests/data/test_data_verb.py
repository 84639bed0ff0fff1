"""What `widefield data stats` prints of labels of every kind."""

import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from widefield.cli import main

RAMP = np.arange(54, dtype=np.uint8).reshape(6, 9)
LABELS = (np.arange(54) % 3).astype(np.uint8).reshape(6, 9)


def save(path: Path, pixels: np.ndarray = RAMP) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(pixels).save(path)


def printed(capsys, *arguments: str | Path) -> list[str]:
    assert main(["data", "stats", *map(str, arguments)]) == 0
    return capsys.readouterr().out.splitlines()


def test_classes_of_folders(tmp_path, capsys):
    for split, counts in (("train", (3, 1)), ("val", (1, 1))):
        for name, count in zip(("cat", "dog"), counts, strict=True):
            for number in range(count):
                save(tmp_path / split / name / f"{number}.png", RAMP + (split == "val"))
    lines = printed(capsys, tmp_path, "data.options={channels: 1}")
    assert lines[0] == "4 images to train on, uint8, 6 x 9 (height x width)"
    assert lines[1].split() == "channel mean std 0% 0.5% 1% 5% 25% 50% 75% 95% 99% 99.5% 100%".split()
    (number, mean, std, *percentiles) = map(float, lines[2].split())
    assert (number, mean, std) == (0, 26.5, pytest.approx(RAMP.std(), rel=1e-5)) and len(percentiles) == 11
    assert percentiles[0] == 0 and percentiles[5] == 26.5 and percentiles[-1] == 53
    assert [line.split() for line in lines[3:]] == [
        ["class", "images", "share"], ["cat", "3", "75.00", "%"], ["dog", "1", "25.00", "%"],
    ]  # fmt: skip


def test_classes_of_pixels_and_pixels_that_do_not_count(tmp_path, capsys):
    marks = LABELS.copy()
    marks[0] = 255
    for number in range(2):
        save(tmp_path / f"images/{number}.png", np.vstack([RAMP] * (number + 1)))
        save(tmp_path / f"masks/{number}.png", np.vstack([marks] * (number + 1)))
    lines = printed(capsys, tmp_path, "data.hold_out=0.5", "data.options={classes: [sky, road, car]}")
    pixels = 54 * (2 if "12 x 9" in lines[1] else 1)
    assert lines[1].startswith("1 images to train on, uint8, ")
    share = f"{100 * 15 / 54:.2f}"
    assert [line.split() for line in lines[-5:]] == [
        ["class", "pixels", "share"], *([name, str(pixels * 15 // 54), share, "%"] for name in ("sky", "road", "car")),
        ["ignored", str(pixels * 9 // 54), "16.67", "%"],
    ]  # fmt: skip


def test_several_classes_of_a_pixel(tmp_path, capsys):
    for number in range(4):
        save(tmp_path / f"images/{number}.png")
        for name, mask in (("road", LABELS == 1), ("wet", LABELS > 0)):
            save(tmp_path / f"masks/{name}/{number}.png", mask.astype(np.uint8) * 255)
    lines = printed(capsys, tmp_path, "data.hold_out=0.25")
    assert [line.split()[:2] for line in lines[-3:]] == [["class", "pixels"], ["road", "54"], ["wet", "108"]]


def table(place: Path, name: str, text: str) -> Path:
    for number in range(4):
        save(place / f"{number}.png", RAMP + number)
    (place / name).write_text(text)
    return place / name


def test_several_classes_of_an_image(tmp_path, capsys):
    path = table(tmp_path, "t.csv", "image,labels,split\n0.png,cat;dog,train\n1.png,,train\n2.png,dog,train\n3.png,cat,val\n")
    lines = printed(capsys, path)
    assert [line.split()[:2] for line in lines[-3:]] == [["class", "images"], ["cat", "1"], ["dog", "2"]]


def test_values(tmp_path, capsys):
    rows = [{"image": f"{number}.png", "age": number + 0.5, "split": "val" if number == 3 else "train"} for number in range(4)]
    path = table(tmp_path, "t.jsonl", "\n".join(map(json.dumps, rows)))
    assert printed(capsys, path, "data.options={values: [age]}")[-1] == "values: age"


def test_an_image_that_cannot_be_read_stops_or_is_counted(tmp_path, capsys):
    for split in ("train", "val"):
        for number in range(3):
            save(tmp_path / split / "cat" / f"{number}.png")
    (tmp_path / "train/cat/1.png").write_text("no image")
    assert main(["data", "stats", str(tmp_path)]) == 2
    assert "train/cat/1.png" in (told := capsys.readouterr().err) and "data.bad_images=skip" in told
    lines = printed(capsys, tmp_path, "data.bad_images=skip")
    assert lines[0].startswith("2 images to train on") and lines[1].startswith("1 unreadable left out: ")


def test_statistics_of_a_recipe(capsys):
    lines = printed(capsys, "digits")
    assert lines[0] == "1,437 images to train on, uint8, 8 x 8 (height x width)"
    counts = [int(line.split()[1]) for line in lines[4:]] if lines[3].startswith("class") else []
    assert len(counts) == 10 and sum(counts) == 1437
