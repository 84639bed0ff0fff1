"""The commands of the guide's page on volumes, one after the other, in an empty folder."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import numpy as np
import pytest

from widefield.cli import main

nibabel = pytest.importorskip("nibabel")
PAGE = Path(__file__).parent.parent / "docs/guide/volumes.md"
SHORT = ["schedule.length=2step", "schedule.warmup=0step", "evaluate.every=2step", "data.workers=0", "log.tensorboard=false"]
OWN = {"runs/vessels_tiled": ["mesh.space=[]", "stream.tiles=[2,1,1]"]}
"""Two ranks are tried elsewhere."""


def commands() -> list[list[str]]:
    """The words behind `widefield`, of every line of the page's shell blocks."""
    blocks = re.findall(r"```bash\n(.*?)```", PAGE.read_text(), re.DOTALL)
    lines = [shlex.split(line) for block in blocks for line in block.splitlines()]
    return [words[1:] for words in lines if words[:1] == ["widefield"]]


def series(place: Path) -> None:
    """A DICOM series like a case of the folder."""
    from widefield.image_files.formats.dicom import write_example

    image = np.asarray(nibabel.load("Dataset001_Vessels/imagesTs/case_000_0000.nii.gz").dataobj).T
    place.parent.mkdir(parents=True)
    write_example(place, np.ascontiguousarray(image)[None])


@pytest.mark.long
def test_the_guides_commands_run_one_after_the_other(tmp_path, monkeypatch, capsys):
    pytest.importorskip("monai"), pytest.importorskip("pydicom")
    monkeypatch.chdir(tmp_path)
    found = commands()
    assert [words[0] for words in found].count("predict") == 2 and len(found) >= 9
    for words in found:
        if "scans/series_7/" in words:
            series(Path("scans/series_7"))
        more = []
        if words[0] == "train":
            more = [*SHORT, "mesh.replicate=1", *OWN.get(words[words.index("--run") + 1], [])]
        assert main([*words, *more]) == 0, (words, capsys.readouterr().err)
    labels = nibabel.load("answers/case_000.nii.gz")
    assert np.array_equal(labels.affine, nibabel.load("Dataset001_Vessels/imagesTs/case_000_0000.nii.gz").affine)
    assert Path("answers/series_7.nii.gz").is_file() and Path("page/index.html").is_file()
