"""A streamed module among modules: names, hooks, copies, modes and changes as of any other, and what it refuses."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from streaming.both import IMAGE, Doing, assert_close, both, conv, differences, gradients, made, net, ran
from torch import nn
from torch.nn import functional as F

from widefield.streaming.api import stream
from widefield.verification.verdict import TOLERANCE

# ---------------------------------------------------------------------------------------------- a module among modules


def test_hooks_of_the_streamed_module_run_once_with_whole_tensors():
    seen, found = [], []
    for module in both(lambda: nn.Sequential(conv(), nn.Tanh())):
        module.register_forward_pre_hook(lambda module, inputs: (inputs[0] + 1,))
        module.register_forward_hook(lambda module, inputs, output: seen.append(output.shape) or output * 2)
        module.register_full_backward_hook(lambda module, inputs, outputs: (inputs[0] * 3,))
        module[0].weight.register_hook(lambda slope: slope * 5)
        x = IMAGE.clone().requires_grad_()
        module(x).pow(2).sum().backward()
        found.append([x.grad, *gradients(module)])
    torch.testing.assert_close(found[1], found[0], rtol=TOLERANCE, atol=TOLERANCE * 1e3)  # sums of 2e3 numbers near 1, times 15
    assert seen == [(2, 4, 17, 13)] * 2


def test_names_and_kind_stay():
    plain, streamed = both()
    assert list(streamed.state_dict()) == list(plain.state_dict())
    assert [name for name, _ in streamed.named_modules()] == [name for name, _ in plain.named_modules()]
    assert isinstance(streamed, nn.Sequential) and len(streamed) == 5 and type(streamed[1:3][0]) is nn.BatchNorm2d


@pytest.mark.parametrize(
    "copied", [copy.deepcopy, lambda module: pickle.loads(pickle.dumps(module))], ids=["deepcopy", "pickle"]
)
def test_a_copy_is_streamed_and_apart(copied):
    plain, streamed = both()
    expected = ran(plain, IMAGE)
    streamed(IMAGE)
    streamed.load_state_dict(made(net).state_dict())
    other = copied(streamed)
    with torch.no_grad():
        streamed[0].weight.zero_()
    assert type(other) is type(streamed)
    assert list(differences(ran(other, IMAGE), expected)) == []


def test_loaded_weights_are_used_after_the_first_call():
    streamed = made(net, tiles=(2, 2)).eval()
    streamed(IMAGE)
    torch.manual_seed(5)
    other = net().double().eval()
    streamed.load_state_dict(other.state_dict())
    assert_close(streamed(IMAGE), other(IMAGE))


def test_modes_may_change_between_calls():
    plain, streamed = both()
    for module in (plain, streamed):
        torch.manual_seed(1)
        module(IMAGE).sum().backward()
        module.eval()
    assert_close(streamed(IMAGE), plain(IMAGE))
    before = [buffer.clone() for buffer in streamed.buffers()]
    with torch.no_grad():
        assert not streamed(IMAGE).requires_grad
    assert all(torch.equal(a, b) for a, b in zip(streamed.buffers(), before, strict=True))
    plain[1].train(), streamed[1].train()
    assert_close(streamed(IMAGE), plain(IMAGE))


def _set_number(module):
    module.scale = 3.0


def _set_tensor(module):
    module.shift = torch.full((1,), 4.0, dtype=torch.float64)


def _set_function(module):
    module.act = torch.sin


def _set_entry(module):
    module.options["power"] = 3


def _set_layer(module):
    torch.manual_seed(9)
    module.layer = nn.Conv2d(3, 2, 5).double()


def _set_hook(module):
    module.layer.register_forward_hook(lambda module, inputs, output: output * 7)


def _set_rate(module):
    module.drop.p = 1.0


@pytest.mark.parametrize("change", [_set_number, _set_tensor, _set_function, _set_entry, _set_layer, _set_hook, _set_rate])
def test_what_a_module_holds_may_change_between_calls(change):
    def forward(self, x):
        return self.act(self.drop(self.layer(x)) * self.scale + self.shift) ** self.options["power"]

    def make():
        shift = torch.ones(1, dtype=torch.float64)
        return Doing(forward, layer=conv(), drop=nn.Dropout(0.0), scale=2.0, shift=shift, act=torch.tanh, options={"power": 2})

    plain, streamed = both(make)
    assert_close(streamed(IMAGE), plain(IMAGE))
    change(plain), change(streamed)
    assert_close(streamed(IMAGE), plain(IMAGE))


def test_programs_of_shapes_long_gone_are_forgotten():
    streamed = made(lambda: nn.Sequential(conv()), tiles=(2, 2))
    for extent in range(10, 60):
        streamed(IMAGE[:1, :, :9].repeat(1, 1, 1, 5)[..., :extent])
    assert len(streamed._stream.known) < 40


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # torch's, of any break in a graph
def test_a_net_around_a_stream_may_be_compiled():
    torch.manual_seed(0)
    whole = nn.Sequential(conv(), nn.Sequential(nn.Conv2d(4, 4, 3), nn.Tanh()), nn.Conv2d(4, 2, 1)).double()
    around = copy.deepcopy(whole)
    stream(around[1], tiles=(2, 2))
    compiled = torch.compile(around, backend="eager")
    found = []
    for module in (whole, compiled):
        out = module(IMAGE)
        out.pow(2).mean().backward()
        found.append([out, *gradients(module)])
    assert_close(found[1], found[0])


# ---------------------------------------------------------------------------------------------- refusals


def test_a_second_backward_is_refused():
    streamed = made(net, tiles=(2, 2))
    loss = streamed(IMAGE).sum()
    loss.backward()
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        loss.backward()
    loss = streamed(IMAGE).sum()
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="a stream's backward was called twice; it frees what it has stored"):
        loss.backward()


@pytest.mark.parametrize("what", ["weight", "image", "output"])
def test_what_the_backward_reads_may_not_be_written_to(what):
    def two(self, x):
        y = self.a(x).sigmoid()
        return y, self.c(self.b(y))

    streamed = made(lambda: Doing(two, a=conv(), b=nn.BatchNorm2d(4), c=nn.Conv2d(4, 2, 3)), tiles=(2, 2))
    x = IMAGE.clone()
    y, z = streamed(x)
    with torch.no_grad():
        {"weight": streamed.c.weight, "image": x, "output": y}[what].mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        z.sum().backward()


def test_an_output_that_the_backward_does_not_read_may_be_written_to():
    plain, streamed = both(lambda: nn.Sequential(conv(), nn.BatchNorm2d(4)))
    for module in (plain, streamed):
        out = module(IMAGE)
        out.add_(1)
        F.relu(out, inplace=True).pow(2).mean().backward()
    assert_close(gradients(streamed), gradients(plain))


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (
            lambda: stream(F.relu, tiles=(2, 2)),
            "wants a torch.nn.Module, not a function; wrap a function",
        ),
        (lambda: stream(made(net, tiles=(2, 2)), tiles=(2, 2)), "StreamedSequential is streamed already"),
        (lambda: stream(net()), r"give tiles, as \(4, 4\), or memory, as '6GiB', or both"),
        (lambda: stream(net(), tiles=(2, 2), keep="disk"), "keep='disk' is no place .* device, host, file"),
        (lambda: stream(net(), tiles=(2, 0)), r"tiles=\(2, 0\) is to give a positive number for each image dim"),
        (lambda: stream(net(), tiles=(2.0, 2)), r"tiles=\(2.0, 2\) is to give a positive number"),
        (lambda: stream(net(), tiles=3), r"tiles=3 is to give a positive number for each image dim, as \(3, 3\)"),
        (lambda: stream(net(), tiles=()), r"tiles=\(\) is to give a positive number"),
    ],
)
def test_the_door_says_what_to_change(call, words):
    with pytest.raises(ValueError, match=words):
        call()
