"""Does `widefield list` show the names that a recipe can have, at once, and say what is near a name that is none?"""

from __future__ import annotations

import subprocess
import sys

import pytest

from widefield.cli import main
from widefield.cli.list import _KINDS, fits
from widefield.naming import names_in


def listed(capsys, *words: str) -> list[str]:
    assert main(["list", *words]) == 0
    return [line.split()[0] for line in capsys.readouterr().out.splitlines()]


@pytest.mark.parametrize(
    ("kind", "package"), [("tasks", "widefield.tasks"), ("data", "widefield.data.formats"), ("losses", "widefield.losses")]
)
def test_what_a_folder_has_is_listed(capsys, kind, package):
    assert listed(capsys, kind) == names_in(package)


@pytest.mark.parametrize(
    ("words", "some"),
    [
        (["models"], {"resnet", "unet", "timm/NAME", "torchvision/NAME", "smp/NAME", "monai/NAME"}),
        (["models", "torchvision"], {"torchvision/resnet50", "torchvision/fcn_resnet50"}),
        (["models", "timm/resnet1*"], {"timm/resnet18", "timm/resnet101"}),
        (["metrics", "f1"], {"f1", "MulticlassF1Score"}),
        (["transforms", "flip"], {"RandomHorizontalFlip", "RandomVerticalFlip"}),
        (["optimizers"], {"sgd", "adamw", "lars", "lamb"}),
        (["schedules"], {"constant", "cosine", "onecycle"}),
        (["recipes"], {"digits", "page"}),
    ],
)  # fmt: skip
def test_names_are_listed_by_kind_and_filter(capsys, words, some):
    found = listed(capsys, *words)
    assert some <= set(found)
    assert len(words) == 1 or all(fits(name, words[1]) for name in found)


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["taks"], f"there are no 'taks' to list; did you mean 'tasks'? It can be: {', '.join(_KINDS)}"),
        (["tasks", "segmentatio_"], "of the 9 tasks has 'segmentatio_' in its name; did you mean 'segmentation'?"),
        (
            ["models", "torchvison/resnet"],
            "there is no library 'torchvison'; did you mean 'torchvision'? It can be: monai, smp,",
        ),
    ],
)
def test_what_there_is_not_is_refused_with_the_nearest(capsys, words, told):
    assert main(["list", *words]) == 2 and told in capsys.readouterr().err


@pytest.mark.long
def test_files_are_listed_without_importing_torch():
    code = "import sys; from widefield.cli import main; main(['list', 'tasks']); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, check=False).returncode == 0
