"""Do initial weights from a file arrive where they belong, and is all that is left out named with the reason?"""

import re

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from widefield.config import ModelConfig
from widefield.models import load_weights_file
from widefield.models._weights import renamed
from widefield.tensor_files import read_tensors


class Net(nn.Module):
    def __init__(self, channels: int = 3, classes: int = 4) -> None:
        super().__init__()
        self.stem, self.norm, self.head = nn.Conv2d(channels, 4, 3), nn.BatchNorm2d(4), nn.Linear(4, classes)


def loaded(path, net: nn.Module, **keys) -> list[str]:
    return load_weights_file(ModelConfig(name="x", weights=str(path), **keys), net)


def refusal(path, net: nn.Module, **keys) -> str:
    with pytest.raises(ValueError) as caught:
        loaded(path, net, **keys)
    return str(caught.value)


def saved(path, net: nn.Module, prefix: str = "", **around):
    state = {f"{prefix}{name}": value for name, value in net.state_dict().items()}
    if path.suffix == ".safetensors":
        save_file(state, path)
    else:
        torch.save({**around, "state_dict": state} if around else state, path)
    return path


def differing(one: nn.Module, other: nn.Module) -> list[str]:
    theirs = other.state_dict()
    return [name for name, value in one.state_dict().items() if not value.equal(theirs[name])]


@pytest.mark.parametrize("name", ["a.safetensors", "a.pt", "a.pth"])
def test_weights_of_every_kind_of_file_are_loaded(tmp_path, name):
    old, new = Net(), Net()
    assert loaded(saved(tmp_path / name, old), new) == [] and differing(new, old) == []


def test_a_checkpoint_with_more_in_it_is_unwrapped_and_renamed(tmp_path):
    old, new = Net(), Net()
    path = saved(tmp_path / "last.pt", old, "module.", epoch=3, lr=0.1)
    assert loaded(path, new, weights_map={"module.": ""}) == [] and differing(new, old) == []


def test_names_are_changed_by_prefix_and_by_pattern_one_rule_after_the_other():
    tensors = {name: torch.tensor(float(number)) for number, name in enumerate(["m.a.gamma", "m.b.0.gamma", "m.c.bias", "ema"])}
    rules = {"m.": "", "*.gamma": "*.weight", "a.": "stem.", "ema": None}
    assert {name: float(value) for name, value in renamed(tensors, rules, source="f").items()} == {
        "stem.weight": 0.0, "b.0.weight": 1.0, "c.bias": 2.0,
    }  # fmt: skip


def test_what_does_not_fit_is_left_out_and_listed(tmp_path):
    torch.manual_seed(0)
    old, new, first = Net(), Net(classes=7), Net(classes=7)
    new.extra = nn.Linear(2, 2)
    old.gone = nn.Linear(3, 3)
    first.load_state_dict(new.state_dict(), strict=False)
    path = saved(tmp_path / "a.safetensors", old)
    assert loaded(path, new, weights_strict=False) == [
        f"model.weights={path}: 7 of the model's 11 tensors",
        "  left out, of another shape: head.weight ([4, 4] there, [7, 4] here), head.bias ([4] there, [7] here)",
        "  left out, missing there: extra (2)",
        "  left out, unknown here: gone (2)",
    ]
    assert new.stem.weight.equal(old.stem.weight) and new.head.weight.equal(first.head.weight)


def test_the_first_convolution_is_adapted_where_not_strict(tmp_path):
    old, new = Net(), Net(channels=4)
    path = saved(tmp_path / "a.safetensors", old)
    assert "; stem.weight of 3 channels is repeated to 4" in loaded(path, new, weights_strict=False)[0]
    torch.testing.assert_close(new.stem.weight[:, 3], old.stem.weight[:, 0] * 0.75)
    assert "stem.weight is [4, 3, 3, 3] there and [4, 4, 3, 3] here" in refusal(path, Net(channels=4))


# ---------------------------------------------------------------------------------------------- refusals


class Mine:
    """An object that a pickle would build."""


@pytest.mark.parametrize(
    ("content", "told"),
    [
        ({"model": Mine()}, "cannot be read as tensors (UnpicklingError: "),
        ({"epoch": 3}, "has a dict with epoch and no tensors by name; save model.state_dict()"),
        ([1, 2], "has a list and no tensors by name"),
    ],
)
def test_a_file_with_other_things_than_tensors_is_refused(tmp_path, content, told):
    torch.save(content, tmp_path / "a.pt")
    assert told in refusal(tmp_path / "a.pt", Net())


def test_a_file_that_is_missing_or_damaged_is_refused(tmp_path):
    assert refusal(tmp_path / "a.pt", Net()).startswith(f"there are no weights at {tmp_path}/a.pt; name a .safetensors, .pt")
    (tmp_path / "a.pt").write_bytes(b"nothing that torch knows")
    assert "cannot be read as tensors" in refusal(tmp_path / "a.pt", Net())


@pytest.mark.parametrize(
    ("rules", "told"),
    [
        ({"modul.": ""}, "model.weights_map names 'modul.' and no tensor of f fits; they are called stem.weight, stem.bias,"),
        ({"*.weight": "w"}, "model.weights_map: '*.weight' and 'w' have unequally many stars"),
        ({"stem": "norm"}, "model.weights_map gives two tensors of f the name 'norm.weight'; leave one out with null"),
    ],
)
def test_rules_that_do_nothing_or_too_much_are_refused(rules, told):
    with pytest.raises(ValueError, match=re.escape(told)):
        renamed(Net().state_dict(), rules, source="f")


def test_a_file_of_which_nothing_fits_is_refused_also_where_not_strict(tmp_path):
    path = saved(tmp_path / "a.safetensors", Net(), "module.")
    told = refusal(path, Net(), weights_strict=False)
    assert told.startswith(f"none of the 9 tensors of {path} fits this model, whose 9 are called stem.weight, stem.bias,")
    assert "no sound .safetensors" in refusal(saved(tmp_path / "b.pt", Net()).rename(tmp_path / "b.safetensors"), Net())
    assert read_tensors(path).keys() == {f"module.{name}" for name in Net().state_dict()}


@pytest.mark.parametrize("keys", [{"weights_map": {"a": "b"}}, {"weights_strict": False}])
def test_rules_for_a_file_that_is_not_named_are_refused(keys):
    with pytest.raises(ValueError, match="are for the file model.weights, which is not set; name one"):
        load_weights_file(ModelConfig(name="x", **keys), Net())
    assert load_weights_file(ModelConfig(name="x"), Net()) == []
