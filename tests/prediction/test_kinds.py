"""Answers of tasks with several classes, values, and layers, from images to tables and files."""

from __future__ import annotations

import csv
import re
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

import widefield as wf
from widefield.data.image import write_image
from widefield.prediction.wishes import Wishes

SHORT = ["schedule.length=2step", "schedule.warmup=0step", "data.batch_size=4", "log.tensorboard=false", "mesh.replicate=1",
         "data.mean=[0.5]", "data.std=[0.25]"]  # fmt: skip


class Scans(torch.utils.data.Dataset):
    """Eight images of 8 x 6 pixels with targets of one kind."""

    classes = ["first", "second one", "third"]

    def __init__(self, kind: str) -> None:
        generator = torch.Generator().manual_seed(0)
        self.images = torch.randint(256, (8, 1, 8, 6), dtype=torch.uint8, generator=generator)
        shape = {"layers": (8, 3, 8, 6)}.get(kind, (8, 3))
        self.targets = torch.randint(2, shape, generator=generator)
        self.targets = self.targets.float() if kind == "values" else self.targets.to(torch.uint8)

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int):
        return self.images[index], self.targets[index]


def _check_page(page: str, kind: str, model: str) -> None:
    assert f"<h1>{model} on Scans</h1>" in page
    assert not re.search(r">\s*(nan|inf|None)\s*[<%]", page), "a figure is missing"
    assert ("A wrong prediction is bold" in page) == (kind == "classes")
    assert ("Where a pixel has several classes, the last of them is shown." in page) == (kind == "layers")
    heads = ["Every value" if kind == "values" else "Every class", "Evaluated images" if kind == "layers" else "Worst mistakes"]
    assert all(f">{head}</h" in page for head in heads)


TASKS = {"classes": "multilabel", "values": "regression", "layers": "multilabel_segmentation"}


@pytest.mark.parametrize("kind", TASKS)
def test_every_kind_of_labels_is_answered_and_filed(kind, tmp_path):
    torch.manual_seed(0)
    net = nn.Conv2d(1, 3, 1) if kind == "layers" else nn.Sequential(nn.Flatten(), nn.Linear(48, 3))
    data = Scans(kind)
    run = wf.train(
        {"model": {"name": "resnet"}, "data": {"name": "digits"}},
        *SHORT,
        model=net,
        data=(data, data),
        task=TASKS[kind],
        run=tmp_path / "run",
    ).run
    _check_page((run / "report.html").read_text(), kind, type(net).__name__)
    for number in range(3):
        write_image(data.images[number], tmp_path / f"{number}.png")
    files = [tmp_path / f"{number}.png" for number in range(3)]
    options = {"model": net, "task": TASKS[kind], "weights": "last"}
    answers = wf.predict(run, files, output=tmp_path / "out", **options)
    net.eval()
    with torch.no_grad():
        wanted = net(((data.images[:3].float() / 255) - 0.5) / 0.25)
    with (tmp_path / "out/predictions.csv").open() as file:
        rows = list(csv.DictReader(file))
    if kind == "values":
        for row, answer, values in zip(rows, answers, wanted, strict=True):
            assert answer.values == pytest.approx(values.tolist(), rel=1e-4) and answer.classes == Scans.classes
            assert [float(row[name]) for name in Scans.classes] == pytest.approx(values.tolist(), rel=1e-4)
        return
    likely = wanted.sigmoid()
    if kind == "classes":
        for row, one in zip(rows, likely, strict=True):
            assert [float(row[name]) for name in Scans.classes] == pytest.approx(one.tolist(), rel=1e-4)
            assert row["classes"].split(" | ") == [
                n for n, p in sorted(zip(Scans.classes, one, strict=True), key=lambda x: -x[1]) if p > 0.5
            ] or [""]
        return
    for number, name in enumerate(("first", "second_one", "third")):
        with Image.open(tmp_path / f"out/0.{name}.png") as layer:
            assert np.array_equal(np.asarray(layer), (likely[0, number] > 0.5).numpy())
    with pytest.raises(ValueError, match="--outlines writes where each class is, and in this run a pixel may have several"):
        wf.predict(run, files, output=tmp_path / "outlines", outlines=True, **options)
    with pytest.raises(ValueError, match="--sliding is for images in which each pixel has one class"):
        dataset = SimpleNamespace(pixels=True, dims=2, classes=Scans.classes)
        Wishes(sliding=(4,)).check(SimpleNamespace(dataset=dataset, task=SimpleNamespace(labels="layers")))
