"""Following a module: what is refused in which words, and that nothing of it stays, in the module or in memory."""

from __future__ import annotations

import copy
from collections import UserDict
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch
from streaming.both import IMAGE, Doing, conv, made
from torch import Tensor, nn
from torch.nn import functional as F

from widefield.capture.ir import Graph
from widefield.capture.trace import trace
from widefield.streaming.api import stream
from widefield.streaming.storage.windowed_image import from_reader


def _seen_without_gradients(self, x):
    y = self.a(x)
    top = y[:, :, :9]
    with torch.no_grad():
        y.mul_(2)
        total = top.sum()
    return top * total


class _Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, slope: Tensor) -> Tensor:
        return slope * 3


def _branching(self, x):
    return x * 2 if x.mean() > 0 else x


def _replaced_buffer(self, x):
    self.scale = self.scale * 2
    return x * self.scale


def _written_constant(self, x):
    self.scale.add_(1)
    return x * self.scale


def _written_weight(self, x):
    with torch.no_grad():
        self.scale.clamp_(-1, 1)
    return x * self.scale


def _penalized(self, x):
    y = self.a(x)
    (slope,) = torch.autograd.grad(y.sum(), x, create_graph=True)
    return y.mean() + slope.pow(2).mean()


def _hooked(self, x):
    y = self.a(x)
    y.register_hook(lambda slope: slope * 2)
    return y


def _hooked_backward() -> nn.Module:
    net = nn.Sequential(conv())
    net[0].register_full_backward_hook(lambda module, inputs, outputs: None)
    return net


def _scaled(does: Callable[..., Any], kind: Callable[[Tensor], Any] = torch.clone) -> nn.Module:
    """A module whose `scale` is a buffer, a parameter or just a tensor."""
    return Doing(does, scale=kind(torch.ones(3, 1, 1, dtype=torch.float64)))


ASKS = "cannot be streamed: .* in it asks for values of a tensor.* take the parts before and after it alone"
SEES_NOT = "is a torch.autograd.Function, whose backward a stream does not see; write it with torch's operations"
REFUSED: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "a branch on pixels": (lambda: Doing(_branching), ASKS),
    "a number of pixels": (lambda: Doing(lambda self, x: x * x.max().item()), ASKS),
    "an assertion on pixels": (lambda: Doing(lambda self, x: x if not torch.isnan(x).any() else None), ASKS),
    "a shape of pixels": (lambda: Doing(lambda self, x: x[x > 0]), ASKS),
    "an autograd.Function": (lambda: Doing(lambda self, x: _Doubled.apply(x)), SEES_NOT),
    "a view of what was written to without gradients": (
        lambda: Doing(_seen_without_gradients, a=conv()),
        r"a view of \[2, 4, 9, 13\] px was looked at without gradients after its image was written to",
    ),
    "a backward hook inside": (_hooked_backward, SEES_NOT),
    "a hook on a tensor": (lambda: Doing(_hooked, a=conv()), "a hook is registered on a tensor .* inside of the forward"),
    "a backward in the forward": (lambda: Doing(_penalized, a=conv()), "a backward .* runs inside of the forward"),
    "a new buffer": (
        lambda: _scaled(_replaced_buffer, nn.Buffer),
        r"cannot be streamed: .* puts new tensors in place of its buffers; .* as buffer.copy_\(value\)",
    ),
    "a write to a tensor that is no buffer": (
        lambda: _scaled(_written_constant),
        r"aten.add_.Tensor writes to a tensor of \[3, 1, 1\] .* no buffer; register_buffer it",
    ),
    "a write to a parameter": (
        lambda: _scaled(_written_weight, nn.Parameter),
        "cannot be streamed: its forward writes to the parameter scale; write to it after the optimizer's step",
    ),
    "an object of outputs": (
        lambda: Doing(lambda self, x: SimpleNamespace(found=[self.a(x)]), a=conv()),
        "Doing returns a SimpleNamespace, whose .found is a tensor that is not found there: .* pass it in one of those",
    ),
    "a write to windows": (
        lambda: Doing(lambda self, x: (x * 1).unfold(2, 3, 2).mul_(2)),
        r"mul_.* writes to \[2, 3, 8, 13, 3\] px that aten.unfold.default shows",
    ),
}


@pytest.mark.parametrize("what", REFUSED)
def test_refused_in_words(what):
    make, words = REFUSED[what]
    module = made(make, tiles=(2, 2))
    before = _state_of(module)
    with pytest.raises(NotImplementedError, match=words):
        module(IMAGE.clone().requires_grad_())
    assert _state_of(module) == before


@dataclass
class Noted:
    pages: dict[str, Tensor]
    names: tuple[str, ...] = ("one",)


@pytest.mark.parametrize(
    "hide", [lambda x: UserDict(page=x), lambda x: SimpleNamespace(inner=Noted({"page": x})), lambda x: {x}]
)
def test_an_image_inside_of_what_no_pytree_knows_is_refused(hide):
    net = made(conv, tiles=(2, 2))
    doing = Doing(lambda self, given, like: net(like), net=net)
    stream(doing, tiles=(2, 2))
    with pytest.raises(NotImplementedError, match="Doing is given a .*, whose .* is a tensor that is not found there"):
        doing(hide(IMAGE), IMAGE)


def test_objects_without_images_are_given_as_they_are():
    doing = Doing(lambda self, x, kept, loss: loss(self.a(x) * len(kept.names)), a=conv())
    plain, streamed = doing.double(), stream(copy.deepcopy(doing), tiles=(2, 2))
    given = IMAGE, Noted({}, ("one", "two")), nn.Hardtanh()
    torch.testing.assert_close(streamed(*given), plain(*given))


def test_a_matrix_that_has_no_inverse_is_told_in_each_pass():
    def forward(self, x):
        return x * torch.linalg.inv(self.mix).sum()

    doing = made(lambda: Doing(forward, mix=nn.Parameter(torch.eye(3))), tiles=(2, 2))
    assert doing(IMAGE).shape == IMAGE.shape
    with torch.no_grad():
        doing.mix[1, 1] = 0
    with pytest.raises(torch.linalg.LinAlgError, match="linalg.inv: The diagonal element 2 is zero"):
        doing(IMAGE)


def test_an_array_of_pixels_is_refused_by_torch():
    with pytest.raises(RuntimeError, match=r"\.numpy\(\) is not supported"):
        made(lambda: Doing(lambda self, x: x * float(x.numpy().mean())), tiles=(2, 2))(IMAGE)


@pytest.mark.parametrize("make", [lambda: nn.ReLU(inplace=True), lambda: Doing(lambda self, x: x[:, :1].zero_() + x)])
def test_a_write_to_what_it_is_given_is_refused(make):
    given = IMAGE.clone()
    with pytest.raises(NotImplementedError, match="writes in place to the tensor it is given.*give it a copy"):
        made(make, tiles=(2, 2))(given)
    assert torch.equal(given, IMAGE)


def test_attention_with_dropout_in_one_kernel_is_refused():
    def forward(self, q):
        return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, q, q, 0.3)[0]

    with pytest.raises(NotImplementedError, match="drops 30% of the attention inside of one kernel.*SDPBackend.MATH"):
        stream(Doing(forward), tiles=(2, 2))(IMAGE)


# ---------------------------------------------------------------------------------------------- nothing stays


def _state_of(module: nn.Module) -> dict[str, Any]:
    """All that a forward could have changed: objects by identity, pixels by value, the generator's place."""
    parts = dict(module.named_modules())
    held = {f"{name}.{key}": _known(value) for name, part in parts.items() for key, value in part.__dict__.items()}
    tensors = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    held |= {name: (id(t), t._version, t.requires_grad, t.grad is None, t.tolist()) for name, t in tensors.items()}
    return held | {"generator": torch.get_rng_state().tolist()}


def _known(value: Any) -> Any:
    if isinstance(value, Tensor):
        return id(value), value.tolist()
    if isinstance(value, dict):
        return {key: _known(item) for key, item in value.items()}
    return [_known(item) for item in value] if isinstance(value, (list, tuple)) else id(value)


def _remembering(self, x):
    self.calls += 1
    self.last = self.seen[0] = x
    self.all.append(x)
    return F.dropout(self.norm(self.a(x)), 0.5)


def test_following_leaves_the_module_as_it_was():
    module = made(lambda: Doing(_remembering, a=nn.utils.parametrizations.weight_norm(conv()), norm=nn.BatchNorm2d(4)))
    module.calls, module.seen, module.all = 0, {}, []
    before = _state_of(module)
    with pytest.raises(NotImplementedError, match=r"its forward changes Doing.calls in every call"):
        trace(module, module.forward, (IMAGE,), {})
    assert _state_of(module) == before


def test_following_takes_no_memory():
    """100,000 x 100,000 px of float32 are 120 GB as an image, and 2.6 TB after the first layer."""

    def read(window):
        raise AssertionError("following reads no pixels")

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stem = nn.Sequential(nn.Conv2d(3, 64, 3, padding=1), nn.BatchNorm2d(64), nn.ReLU(True), nn.Dropout(0.1))
            self.down, self.head = nn.Sequential(nn.MaxPool2d(2), nn.Conv2d(64, 64, 3, padding=1)), nn.Conv2d(128, 2, 1)

        def forward(self, x: Tensor) -> Tensor:
            skip = self.stem(x)
            low = F.interpolate(self.down(skip), scale_factor=2, mode="bilinear")
            return self.head(torch.cat([skip, low + low.mean((2, 3), keepdim=True)], 1))

    module, process = Net(), psutil.Process()
    before = process.memory_info().rss
    graph = trace(module, module.forward, (from_reader(read, (1, 3, 100_000, 100_000)),), {})
    assert graph.outputs.shape == (1, 2, 100_000, 100_000)
    assert process.memory_info().rss - before < 200e6


# ---------------------------------------------------------------------------------------------- where an operation is


class Block(nn.Module):
    """Calls a part, a part of a part, and a part's forward by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Sequential(nn.Conv2d(3, 3, 1), nn.ReLU()), nn.Sigmoid()

    def forward(self, x: Tensor) -> Tensor:
        return self.head.forward(self.body(x)) + self.body[1](x).tanh()


def test_every_operation_knows_the_innermost_part_that_called_it():
    net = nn.Sequential(Block(), nn.Softmax(1))
    graph = trace(net, net.forward, (torch.randn(1, 3, 4, 4),), {})
    assert [(node.path, node.name) for node in graph.nodes] == [
        ("0.body.0", "convolution"), ("0.body.1", "relu"), ("0", "sigmoid"), ("0.body.1", "relu"), ("0", "tanh"), ("0", "add"),
        ("1", "_softmax"),
    ]  # fmt: skip


def test_names_are_those_of_the_module_that_is_followed_wherever_it_stands():
    class Around(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Sequential(nn.Conv2d(3, 3, 1), nn.Dropout(0.5))

        def forward(self, x: Tensor) -> Graph:
            return trace(self.inner, self.inner.forward, (x,), {})

    paths = [(node.path, node.name) for node in Around()(torch.randn(1, 3, 4, 4)).nodes]
    assert paths[0] == ("0", "convolution") and ("1", "bernoulli_") in paths and {path for path, _ in paths} == {"0", "1"}


def test_a_part_that_failed_is_not_taken_for_the_one_that_runs():
    class Tries(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fails, self.works = nn.Conv2d(5, 3, 1), nn.Conv2d(3, 3, 1)

        def forward(self, x: Tensor) -> Tensor:
            try:
                return self.fails(x)
            except RuntimeError:
                return self.works(x) * 2

    net = Tries()
    graph = trace(net, net.forward, (torch.randn(1, 3, 4, 4),), {})
    assert [(node.path, node.name) for node in graph.nodes] == [("works", "convolution"), ("", "mul")]
