"""What this package changes of torch for the whole process: nothing by an import, kernels with the first tiled tensor."""

from __future__ import annotations

import subprocess
import sys
import weakref

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.optim.optimizer import _global_optimizer_pre_hooks

import widefield as wf
from widefield.comm.mesh import Mesh, World
from widefield.geometry.layout import Cut, Grid, layout_of
from widefield.parallel.strategies import _reducer
from widefield.plans import Plan
from widefield.tiled import api, overrides
from widefield.tiled.dispatch import load_rules, prepare
from widefield.tiled.tensor import TiledTensor

ROOMS = """
import importlib, pkgutil, sys, warnings
def import_rooms():
    import widefield
    for module in pkgutil.walk_packages(widefield.__path__, "widefield."):
        if module.name != "widefield.__main__":
            importlib.import_module(module.name)
"""
LISTED = ROOMS + "import_rooms(); print(*(name for name in sys.modules if name.partition('.')[0] != 'widefield'))"
COMPARED = (
    ROOMS
    + """
import torch
warnings.simplefilter("ignore")  # some of torch's names warn when they are asked for
for name in sys.stdin.read().split():  # so that what others do when they are imported is not ours
    try:
        importlib.import_module(name)
    except ImportError:
        pass
def standing():
    torchs = {name: module for name, module in list(sys.modules.items()) if name.partition(".")[0] == "torch"}
    found = {("kernels", name): torch._C._dispatch_dump(name) for name in torch._C._dispatch_get_all_op_names()}
    for name, module in torchs.items():
        found |= {(name, key): id(value) for key, value in vars(module).items()}
        for kind in (value for value in vars(module).values() if isinstance(value, type)):
            found |= {(kind, key): id(value) for key, value in vars(kind).items()}
    hooks = sys.modules["torch.optim.optimizer"]
    found |= {("hooks", key): len(value) for key, value in vars(hooks).items() if key.startswith("_global")}
    return found
before = standing()
import_rooms()
after = standing()
print(*(key for key in {*before, *after} if before.get(key) != after.get(key)), sep="\\n")
"""
)
"""Prints what of torch's kernels, modules, classes and global hooks is another once every file of the package was imported."""

OWN_NAMESPACE = "widefield"


def run_python(code: str, given: str = "") -> str:
    done = subprocess.run([sys.executable, "-c", code], input=given, capture_output=True, text=True, check=False, timeout=500)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.long
def test_importing_every_file_changes_nothing_of_torch():
    """But that our own operators are there, under our own name."""
    changed = run_python(COMPARED, run_python(LISTED)).splitlines()
    assert [line for line in changed if f"'{OWN_NAMESPACE}" not in line] == []
    assert any(f"'kernels', '{OWN_NAMESPACE}::" in line for line in changed)


# ---------------------------------------------------------------------------------------------- kernels before torch's


def kernels() -> dict[str, str]:
    """The table of each operator for which there is an override."""
    load_rules()
    return {name: torch._C._dispatch_dump(f"aten::{name}") for name in overrides.OVERRIDES}


@pytest.fixture
def untouched():
    """The tables without overrides; which are there again afterwards."""
    load_rules()
    overrides.remove_overrides()
    yield kernels()
    prepare()


IMAGE = torch.arange(2 * 3 * 8 * 6.0).reshape(2, 3, 8, 6)
MESH = Mesh(Plan(space=[1, 2]), World(0, 2), torch.device("cpu"), grid=Grid((1, 2)))
LAYOUT = layout_of(tuple(IMAGE.shape), (None, None, Cut((0,), (0, 8)), None), Grid((1,)))


def stream_once() -> None:
    wf.stream(nn.Conv2d(3, 2, 3, padding=1), tiles=[2, 2])(IMAGE)


FIRST = {
    "tile": lambda: wf.tile(IMAGE, MESH),
    "from_tile": lambda: wf.from_tile(IMAGE[..., :3], MESH, IMAGE.shape),
    "as_tile": lambda: api.as_tile(IMAGE, LAYOUT),
    "cut_by": lambda: api.cut_by(IMAGE, LAYOUT),
    "a capture": stream_once,
}


@pytest.mark.parametrize("first", FIRST)
def test_the_first_tiled_tensor_and_the_first_capture_bring_them(untouched, first):
    FIRST[first]()
    now = kernels()
    assert all(now[name] != before for name, before in untouched.items())
    assert all("PythonTLSSnapshot" in table for table in now.values())


def test_they_can_be_taken_away_again(untouched):
    prepare()
    assert kernels() != untouched
    overrides.remove_overrides()
    assert kernels() == untouched


def test_a_tiled_tensor_that_is_resized_first_of_all_is_resized_by_ours(untouched):
    """As its first operation: the override is there before anything was dispatched."""
    tiled = api.as_tile(IMAGE, LAYOUT)
    with torch.inference_mode():
        found = F.interpolate(tiled, scale_factor=2, mode="bilinear")
    assert type(found) is TiledTensor
    torch.testing.assert_close(wf.whole(found), F.interpolate(IMAGE, scale_factor=2, mode="bilinear"))


def test_plain_tensors_go_on_as_always(untouched):
    classes = torch.zeros(2, 8, 6, dtype=torch.long)
    calls = {
        "resize": lambda: F.interpolate(IMAGE, scale_factor=1.7, mode="bicubic"),
        "pad": lambda: F.pad(IMAGE, (1, 2, 1, 0), mode="circular"),
        "loss": lambda: F.cross_entropy(IMAGE, classes, torch.ones(3), label_smoothing=0.1),
        "split": lambda: torch.tensor_split(IMAGE, torch.tensor([1, 3]), 2)[1],
    }
    before = {name: call() for name, call in calls.items()}
    prepare()
    for name, call in calls.items():
        assert torch.equal(call(), before[name]), name


def test_two_overrides_of_one_operator_are_refused():
    load_rules()
    with pytest.raises(AssertionError, match="aten::_pad_circular has two overrides"):
        overrides.override("_pad_circular")(print)


# ---------------------------------------------------------------------------------------------- hooks of optimizers


def test_steps_are_looked_at_while_somebody_averages_gradients(monkeypatch):
    monkeypatch.setattr(_reducer, "_ALIVE", weakref.WeakSet())  # without those of other tests
    monkeypatch.setattr(_reducer, "_STEP_HOOKS", [])
    before = dict(_global_optimizer_pre_hooks)
    reducer = _reducer.Reducer(nn.Linear(2, 2), bucket_bytes=1024)
    assert len(_global_optimizer_pre_hooks) == len(before) + 1
    reducer.close()
    assert dict(_global_optimizer_pre_hooks) == before
