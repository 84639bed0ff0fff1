"""Classes of ours before a module's own: whatever stands before it, copies and pickles are those of the module's own class."""

from __future__ import annotations

import copy
import io
import pickle
from itertools import permutations

import pytest
import torch
from torch import Tensor, nn

from widefield.capture.interpreter import ForwardOverride, OverriddenModule, install, override_of
from widefield.module_wrapping import wrap_class
from widefield.parallel.strategies.recompute import _Offloaded, _recompute
from widefield.streaming.api import Stream, Streamed

IMAGE = torch.randn(1, 3, 8, 8, generator=torch.Generator().manual_seed(1))


class Net(nn.Module):
    """Nothing of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.note = nn.Conv2d(3, 4, 3), {"made": "here"}
        self.register_forward_hook(double)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)


class Reducing(Net):
    """Says all of its pickles itself, and knows its class by its own."""

    def __reduce_ex__(self, protocol):
        return (
            self.__class__.made_of,
            (self.__dict__["note"],),
            {"_modules": self._modules, "_forward_hooks": self._forward_hooks},
        )

    @classmethod
    def made_of(cls, note):
        made = cls()
        made.note = {**note, "by": "reduce"}
        return made


class Plainly(Net):
    """By `__reduce__`, without a state."""

    def __reduce__(self):
        return _made_of_weights, (type(self), self.layer.weight.detach().clone(), self.layer.bias.detach().clone())


class Choosy(Net):
    """Leaves something out of its state, and sets it by itself."""

    def __getstate__(self):
        return {key: value for key, value in self.__dict__.items() if key != "note"} | {"version": 2}

    def __setstate__(self, state):
        assert state.pop("version") == 2
        super().__setstate__({**state, "note": {"set": "by itself"}})


class Copying(Net):
    def __deepcopy__(self, memo):
        made = self.__class__.__new__(self.__class__)
        memo[id(self)] = made
        made.__dict__.update({key: copy.deepcopy(value, memo) for key, value in self.__dict__.items()})
        made.note["copied"] = "by itself"
        return made


class Slotted(Net):
    __slots__ = ("extra",)

    def __init__(self) -> None:
        super().__init__()
        object.__setattr__(self, "extra", 5)

    def __getstate__(self):
        return self.__dict__, {"extra": self.extra}

    def __setstate__(self, state):
        super().__setstate__(state[0])
        object.__setattr__(self, "extra", state[1]["extra"])


class Meta(type):
    pass


class WithMeta(Net, metaclass=Meta):
    pass


def double(module, inputs, output):
    return output * 2


def _made_of_weights(kind, weight, bias):
    made = kind()
    with torch.no_grad():
        made.layer.weight.copy_(weight), made.layer.bias.copy_(bias)
    return made


class _Apart(ForwardOverride):
    """What no copy may take along."""

    def __init__(self) -> None:
        self.held = (number for number in range(3))  # neither pickles nor deep-copies

    def call(self, module, args, kwargs):
        return super(OverriddenModule, module).forward(*args, **kwargs)


def _streamed(module):
    """As `stream` makes it; that refuses what holds parts of weights, whatever order plans come to allow."""
    wrap_class(module, Streamed)
    module._stream = Stream((2, 2), None, None, None)


WRAPS = {
    "executed": lambda module: install(module, _Apart()),
    "streamed": _streamed,
    "recomputed": lambda module: _recompute(module, "", "nothing"),
    "offloaded": lambda module: wrap_class(module, _Offloaded),
}
ORDERS = [*permutations(WRAPS, 1), *permutations(WRAPS, 2), tuple(WRAPS), tuple(WRAPS)[::-1]]


def _saved(module):
    file = io.BytesIO()
    torch.save(module, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


COPIES = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda module: pickle.loads(pickle.dumps(module)),
    "an old pickle": lambda module: pickle.loads(pickle.dumps(module, 2)),
    "torch.save": _saved,
    "a copy of a copy": lambda module: copy.deepcopy(pickle.loads(pickle.dumps(module))),
}


@pytest.mark.parametrize("way", COPIES)
@pytest.mark.parametrize("kind", [Net, Reducing, Plainly, Choosy, Copying, Slotted, WithMeta])
def test_a_copy_is_that_of_the_modules_own_class_and_streamed_where_it_was(kind, way):
    for order in ORDERS:
        torch.manual_seed(0)
        plain, module = kind(), kind()
        module.load_state_dict(plain.state_dict())
        for name in order:
            WRAPS[name](module)
        before, attributes = type(module), dict(vars(module))
        expected, other = COPIES[way](plain), COPIES[way](module)
        assert type(module) is before and vars(module) == attributes and isinstance(module, kind)
        assert isinstance(other, Streamed) == ("streamed" in order)
        assert type(other).__mro__[2 * isinstance(other, Streamed) + isinstance(other, Streamed)] is type(expected) is kind
        ours = {"_stream"} if "streamed" in order else set()
        assert vars(other).keys() - vars(expected).keys() == ours and vars(expected).keys() <= vars(other).keys()
        assert override_of(other) is None and vars(other)["note"] == expected.note
        assert getattr(other, "extra", None) == getattr(expected, "extra", None)
        if ours:
            assert other._stream.tiles == (2, 2) and other._stream is not module._stream
        with torch.no_grad():
            module.layer.weight.zero_()
            torch.testing.assert_close(other(IMAGE), expected(IMAGE))
            torch.testing.assert_close(expected(IMAGE), plain(IMAGE))


def test_a_block_within_is_copied_as_a_block():
    net = nn.Sequential(Net(), Net())
    _recompute(net[0], "0", "nothing")
    install(net, _Apart())
    for copied in COPIES.values():
        assert [type(part) for part in copied(net).modules()][:2] == [nn.Sequential, Net]


def test_a_copy_that_fails_leaves_the_module_as_it_was():
    net = Net()
    net.lock = (number for number in range(3))
    install(net, _Apart())
    before = type(net)
    for copied in (copy.deepcopy, pickle.dumps):
        with pytest.raises(TypeError, match="generator"):
            copied(net)
    assert type(net) is before and override_of(net) is not None
