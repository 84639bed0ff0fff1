"""Does a compiled model bring tiled images to the same rules as an uncompiled one?"""

from __future__ import annotations

import warnings
from functools import partial

import pytest
import torch
from marks import few
from ranks import on_ranks
from torch import nn
from torch.nn import functional as F

import widefield as wf
from widefield.comm import halo
from widefield.config import ModelConfig
from widefield.models import build
from widefield.plans import Plan

RESIZES = {
    "nearest": {"scale_factor": 2},
    "nearest-exact": {"size": (37, 20)},
    "bilinear": {"scale_factor": 2},
    "bicubic": {"size": (37, 20)},
}


def bytes_sent(call, image) -> tuple[int, torch.Tensor]:
    """What this rank sends to peers in a forward and backward pass, and the image's gradient."""
    sent, send = [], halo._send

    def counting(messages, buffers, group_name):
        sent.extend(message.numel() * message.element_size() for message in messages.values())
        return send(messages, buffers, group_name)

    halo._send = counting
    try:
        image.grad = None
        call(image).square().sum().backward()
    finally:
        halo._send = send
    return sum(sent), wf.whole(image.grad)


def both_ways(mesh, call, size) -> tuple[int, int]:
    """Bytes that it sends uncompiled and compiled."""
    torch._dynamo.reset()
    torch._dynamo.config.force_parameter_static_shapes = True
    image = torch.randn(size, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    tiled = wf.tile(image, mesh).detach().requires_grad_()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's compiler warns of its own doings
        compiled, found = bytes_sent(torch.compile(call, fullgraph=True, backend="aot_eager", dynamic=False), tiled)
    uncompiled, expected = bytes_sent(call, tiled)
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)
    return uncompiled, compiled


def resized(mesh, mode, target):
    return both_ways(mesh, partial(F.interpolate, mode=mode, **target), (2, 3, 32, 18))


@pytest.mark.long
@pytest.mark.parametrize("mode", few(RESIZES, next(iter(RESIZES))))
def test_a_compiled_resize_sends_no_more_than_an_uncompiled_one(mode):
    row = 2 * 3 * 18 * 8
    for uncompiled, compiled in on_ranks(2, resized, mode, RESIZES[mode], plan=Plan(space=[2, 1])):
        assert compiled <= uncompiled <= 16 * row, f"{compiled} bytes compiled, {uncompiled} not; a row has {row}"


def unet(mesh):
    torch.manual_seed(0)
    config = ModelConfig(name="unet", options={"widths": [4, 8, 16], "norm": "group"})
    return both_ways(mesh, build(config, in_channels=3, num_classes=4).double(), (1, 3, 43, 24))


@pytest.mark.long
@pytest.mark.sweep
def test_a_compiled_unet_sends_no_more_pixels_than_an_uncompiled_one():
    for uncompiled, compiled in on_ranks(2, unet, plan=Plan(space=[2, 1]), timeout_seconds=300):
        assert 0 < compiled <= uncompiled


# ---------------------------------------------------------------------------------------------- images of several sizes

SIZES = [(2, 32, 30), (3, 41, 30), (5, 20, 22), (3, 41, 30), (4, 9, 9)]
"""Of batches.  Where a size differs from the first time, torch's compiler takes it for a variable if it may."""
MOST_GRAPHS = 3
"""What the sizes above take but for the last one, of which the compiler leaves the model, or some of its functions, alone."""


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.norm = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.down, self.head = nn.Conv2d(8, 4, 3, stride=2, padding=1), nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.rest(self.stem(x) * 1.5)

    def rest(self, x: torch.Tensor) -> torch.Tensor:
        x = self.down(F.interpolate(F.relu(self.norm(x)), scale_factor=2, mode="bilinear"))
        x = x + x.mean(dim=(2, 3), keepdim=True)
        return self.head(F.adaptive_avg_pool2d(x, (2, 2)).flatten(2).mean(2))


def of_model(net, mesh, **options):
    net = wf.parallelize(net, mesh)
    net.compile(**options)
    return lambda x, labels: F.cross_entropy(wf.whole(net(x)), labels)


def of_step(net, mesh, **options):
    return torch.compile(lambda x, labels: F.cross_entropy(net(x), labels), **options)


def of_parts(net, mesh, **options):
    stem, rest = torch.compile(net.stem, **options), torch.compile(net.rest, **options)
    return lambda x, labels: F.cross_entropy(wf.whole(rest(stem(x) * 1.5)), labels)


def of_variable_sizes(net, mesh, **options):
    net = torch.compile(net, dynamic=True, **options)
    return lambda x, labels: F.cross_entropy(wf.whole(net(x)), labels)


def of_everything(net, mesh, **options):
    """Images are cut, and the backward runs, in what is compiled."""

    def step(x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        loss = F.cross_entropy(wf.whole(net(wf.tile(x, mesh))), labels)
        loss.backward()
        return loss.detach()

    return torch.compile(step, **options)


class Interrupted(nn.Module):
    """The compiler leaves a GRU alone and goes on behind it: a graph before, one after, and a gradient through all."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.rows, self.head = nn.Conv2d(3, 4, 3, padding=1), nn.GRU(4, 5, batch_first=True), nn.Linear(5, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.pad(self.stem(x), [1, 1, -1, 1])
        x = (x * x.sum([0, 1, 2], keepdim=True))[..., ::2]
        found, _ = self.rows(x.mean(3).transpose(1, 2))
        return self.head(found.mean(1))


HOW = {
    "the model": (of_model, 1, Net),
    "a step": (of_step, 1, Net),
    "parts": (of_parts, 2, Net),
    "dynamic=True": (of_variable_sizes, 1, Net),
    "everything": (of_everything, None, Net),
    "interrupted": (of_step, None, Interrupted),
}
"""What is compiled, how many graphs a size takes (None: not counted), and the net."""


def of_several_sizes(mesh) -> list[str]:
    with torch._dynamo.config.patch(recompile_limit=MOST_GRAPHS), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's compiler warns of its own doings
        return [f"{name}: {problem}" for name, case in HOW.items() for problem in problems_of(mesh, *case)]


def problems_of(mesh, how, graphs: int | None, make) -> list[str]:
    """Where losses or gradients are not those of the whole, uncompiled; and where a size did not take as many graphs."""
    torch._dynamo.reset()
    nets, compiled, problems = [], [], []
    for _ in range(2):
        torch.manual_seed(0)
        nets.append(make().double())
    whole, cut = nets

    def counting(graph, inputs):
        compiled.append(graph)
        return torch._dynamo.lookup_backend("aot_eager")(graph, inputs)

    call = how(cut, mesh, backend=counting)
    for number, (batch, *size) in enumerate(SIZES):
        generator = torch.Generator().manual_seed(number)
        image = torch.randn(batch, 3, *size, generator=generator, dtype=torch.float64)
        labels = torch.randint(3, (batch,), generator=generator)
        x, before = image if how is of_everything else wf.tile(image, mesh), len(compiled)
        for net in nets:
            net.zero_grad()
        losses = F.cross_entropy(whole(image), labels), wf.whole(call(x, labels))
        new = len(compiled) - before
        for loss in losses:
            if loss.requires_grad:
                loss.backward()
        grads = [(a.grad, wf.whole(b.grad)) for a, b in zip(whole.parameters(), cut.parameters(), strict=True)]
        off = max(float((a - b).abs().max().detach()) for a, b in (losses, *grads))
        problems += [f"{batch} x {size}: off by {off}"] if off > 1e-12 else []
        expected = 0 if SIZES[number] in SIZES[:number] else graphs
        is_counted = graphs and 0 < number < len(SIZES) - 1  # a first graph may be made twice, the last one not or in parts
        problems += [f"{batch} x {size}: {new} graphs, not {expected}"] if is_counted and new != expected else []
    return problems


@pytest.mark.long
def test_a_compiled_model_takes_images_of_any_size():
    assert on_ranks(2, of_several_sizes, plan=Plan(space=[2, 1]), timeout_seconds=300) == [[], []]


class TwoHeads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.heads = nn.ModuleList(nn.Conv2d(3, 2, 1) for _ in range(2))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(head(x) for head in self.heads)


def with_a_head_that_is_not_used(mesh) -> str:
    torch._dynamo.reset()
    with warnings.catch_warnings(), pytest.raises(RuntimeError) as said:
        warnings.simplefilter("ignore")
        used, _ = torch.compile(TwoHeads(), backend="aot_eager")(wf.tile(torch.randn(1, 3, 8, 8), mesh))
        used.sum().backward()
    return str(said.value)


@pytest.mark.long
def test_a_compiled_output_without_gradient_is_refused():
    words = "encountered a tensor subclass where we guessed its\nmetadata incorrectly"
    assert all(words in text for text in on_ranks(2, with_a_head_that_is_not_used, plan=Plan(space=[2, 1])))
