"""Do copies of a model that draws, writes to buffers or mixes samples give one device's numbers?"""

from __future__ import annotations

import pickle
import random
import warnings
import weakref
from contextlib import nullcontext
from copy import deepcopy
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from marks import few
from ranks import close_all, on_ranks
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.parametrizations import spectral_norm
from torch.utils.checkpoint import checkpoint

import widefield as wf
from widefield.comm import halo
from widefield.geometry.interval import even_cut, parts_of
from widefield.geometry.layout import Cut, layout_of
from widefield.models import unet
from widefield.parallel.inactive import inactive
from widefield.parallel.parallelize import share_states
from widefield.parallel.strategies import _shared_forward
from widefield.parallel.strategies._forward_state import ForwardState
from widefield.parallel.strategies._sample_probe import writes_without_samples
from widefield.plans import Plan
from widefield.sharded_state import gather_full_on_main
from widefield.tiled.sample_mixing import SampleMixingWatch
from widefield.tiled.tensor import TiledTensor, wrap

close = partial(torch.testing.assert_close, rtol=1e-10, atol=1e-12)
SHAPE = (5, 3, 11, 8)


class Functional(nn.Module):
    """Masks that only functions draw, of several shapes, and a choice for all samples at once."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.head = nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(4, 4, 3), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = F.dropout2d(self.first(x), 0.3, self.training)
        keep = torch.rand(len(x), 1, 1, 1, dtype=x.dtype, device=x.device) < 0.7
        x = x + torch.randn(4, 1, 1, dtype=x.dtype) * 0.1 + torch.rand_like(x) * keep
        x = self.second(x) if torch.rand(()) < 0.5 else self.second(x.flip(1))
        tokens = F.dropout(x.flatten(2).permute(2, 0, 1), 0.2, self.training).mean(0)
        return self.head(tokens[torch.randperm(len(tokens))])


class MinibatchDeviation(nn.Module):
    """As in StyleGAN's discriminator: the deviation over groups of samples is one more channel (Karras et al. 2018)."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Conv2d(3, 4, 3), nn.Conv2d(5, 2, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        deviation = (x - x.mean(0)).square().mean(0).add(1e-8).sqrt().mean()
        return self.last(torch.cat([x, deviation.expand(len(x), 1, *x.shape[2:])], 1))


class Remembers(nn.Module):
    """A queue of features, a counter, and a running mean that is a new tensor each time."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 4, 3, 2)
        self.register_buffer("queue", torch.zeros(12, 4))
        self.register_buffer("passes", torch.zeros((), dtype=torch.int64))
        self.register_buffer("mean", torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x).mean((2, 3))
        logits = x @ self.queue.clone().t()
        with torch.no_grad():
            self.queue.copy_(wf.whole(torch.cat([x.detach(), wf.whole(self.queue)])[:12]))
            self.passes += 1
            self.mean = wf.whole(self.mean * 0.9 + x.detach().mean(0) * 0.1)
        return torch.cat([logits.sin(), x - self.mean], 1)


class Summaries(nn.Module):
    """A loss of its own, a summary of the batch, values per sample and groups of them, plain ones beside."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.drop = nn.Conv2d(3, 4, 3, 2), nn.Dropout(0.4)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        x = self.drop(self.net(x))
        return {"loss": x.square().mean(), "centre": x.mean((0, 2, 3)), "each": x.amax((2, 3)),
                "rows": x.reshape(-1, x.shape[3]).sin(), "weight": self.net.weight.sum()}  # fmt: skip


class CountsSamples(nn.Module):
    """Copies write the same where they have equally many samples, and one device writes another number."""

    def __init__(self) -> None:
        super().__init__()
        self.net = spectral_norm(nn.Conv2d(3, 4, 3))
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        self.seen += len(x)
        return self.net(x) / self.seen


class WritesIntoNew(nn.Module):
    """What samples give is written into tensors that are made for the batch, which stay plain."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.drop, self.scale = nn.Conv2d(3, 4, 3), nn.Dropout(0.3), nn.Parameter(torch.ones(8, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        x = self.drop(self.first(x))
        both = self.scale * torch.ones(len(x), 8, *x.shape[2:], dtype=x.dtype)
        both[:, :4] = x
        both[:, 4:].mul_(x.sin())
        means = torch.zeros(len(x), 1, 1, 1, dtype=x.dtype).add_(x.mean((1, 2, 3), keepdim=True))
        return both.tanh() * self.scale.sin() + means


class ReadsRows(nn.Module):
    """An image's rows one after another, as text is read (Shi et al. 2017); torch adds into what begins as zeros."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.rows, self.last = nn.Conv2d(3, 4, 3, 2), nn.LSTM(12, 5, 2, batch_first=True, dropout=0.3), nn.RNN(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        read, (_, cell) = self.rows(x.permute(0, 2, 1, 3).flatten(2))
        return torch.cat([self.last(read.transpose(0, 1))[0].sum(0), cell[-1]], 1)


class Checkpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Dropout(0.4))
        self.last = nn.Conv2d(4, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(checkpoint(self.block, x, use_reentrant=False))


def _layers(*layers: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 4, 3), *layers, nn.Conv2d(4, 2, 3))


NETS = {
    "dropout": partial(_layers, nn.Dropout(0.3)),
    "dropout of channels, channels last": lambda: _layers(nn.Dropout2d(0.5)).to(memory_format=torch.channels_last),
    "BatchNorm and dropout": lambda: _layers(nn.BatchNorm2d(4), nn.ReLU(), nn.AlphaDropout(0.2)),
    "running statistics of InstanceNorm": lambda: _layers(nn.InstanceNorm2d(4, affine=True, track_running_stats=True)),
    "functions": Functional,
    "minibatch deviation": MinibatchDeviation,
    "queue and counter": Remembers,
    "summaries": Summaries,
    "a checkpoint": Checkpointed,
    "writes into new tensors": WritesIntoNew,
    "rows that are read": ReadsRows,
    "spectral norms": lambda: _layers(
        spectral_norm(nn.Conv2d(4, 4, 1)), nn.BatchNorm2d(4), spectral_norm(nn.Conv2d(4, 1, 1)), nn.Conv2d(1, 4, 1)
    ),
    "spectral norms and dropout": lambda: _layers(spectral_norm(nn.Conv2d(4, 4, 3)), nn.Dropout(0.3)),
    "a count of samples": CountsSamples,
    "nothing of that": partial(_layers, nn.SiLU()),
}


def built(name: str) -> nn.Module:
    torch.manual_seed(1)
    return deepcopy(NETS[name]()).double().train()  # with layers of its own


def images(step: int) -> Tensor:
    return torch.randn(SHAPE, generator=torch.Generator().manual_seed(step), dtype=torch.float64)


def loss_of(output, whole: int) -> Tensor:
    """A sum over samples of what samples give, and means of what the batch gives, weighed so that copies' means are one's."""
    if not isinstance(output, dict):
        return output.square().sum() / whole
    each = (output["each"].square().sum() + output["rows"].square().sum()) / whole
    return each + output["loss"] + output["centre"].square().sum() + output["weight"]


def two_steps(mesh, name: str) -> list[str]:
    alone, model = built(name), built(name)
    part = parts_of(even_cut(SHAPE[0], mesh.copies))[mesh.copy]
    wf.parallelize(model, mesh)
    one = torch.optim.SGD(alone.parameters(), lr=0.05, momentum=0.9)
    many = share_states(torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9), mesh)
    wrong = []
    for step in range(2):
        whole = images(step).requires_grad_()
        mine = whole.detach()[part.start : part.stop].clone().requires_grad_()
        one.zero_grad(), many.zero_grad()
        torch.manual_seed(step)
        loss_of(alone(whole), SHAPE[0]).backward()
        torch.manual_seed(step)
        output = model(wf.tile(mine, mesh))
        loss_of(wf.whole(output), SHAPE[0] / mesh.copies).backward()
        found = gather_full_on_main(model, mesh, {n: p.grad for n, p in model.named_parameters() if p.grad is not None})
        expected = {n: p.grad for n, p in alone.named_parameters() if p.grad is not None}
        wrong += differences(mesh, found, expected, f"{name}, step {step}, gradients")
        expected_image = whole.grad[part.start : part.stop] * mesh.copies
        wrong += differences(mesh, {"image": mine.grad}, {"image": expected_image}, f"{name}, step {step}")
        one.step(), many.step()
    found = gather_full_on_main(model, mesh, dict(model.state_dict()))
    return wrong + differences(mesh, found, dict(alone.state_dict()), f"{name}, weights and buffers")


def differences(mesh, found, expected, what: str) -> list[str]:
    try:
        close(found if mesh.is_main or "image" in found else expected, expected)
    except AssertionError as error:
        return [f"{what}: {error}"]
    return []


def every_net(mesh, names) -> list[str]:
    return [problem for name in names for problem in two_steps(mesh, name)[:1]]


PLANS = [
    Plan(replicate=2), Plan(replicate=3), Plan(replicate=2, space=[2, 1]), Plan(shard=2, sharding={"zero": 1}),
    Plan(shard=2, sharding={"zero": 2}), Plan(shard=2, sharding={"zero": 3}), Plan(replicate=4),
]  # fmt: skip


@pytest.mark.parametrize("plan", few(PLANS, PLANS[0], PLANS[3]), ids=str)
def test_copies_give_one_devices_numbers(plan):
    wrong = on_ranks(plan.ranks, every_net, sorted(NETS), plan=plan)[0]
    assert not wrong, "\n\n".join(wrong)


WRITTEN = {
    "spectral norms": 4, "spectral norms and dropout": None, "a count of samples": None, "queue and counter": None,
    "running statistics of InstanceNorm": None, "nothing of that": 0,
}  # fmt: skip
"""How many buffers a forward writes whatever its samples are; None where it draws, or writes what depends on them."""


@pytest.mark.parametrize("name", WRITTEN)
def test_what_is_written_whatever_the_samples_are_is_told_from_what_depends_on_them(name):
    model, x = built(name), images(0)
    before = ForwardState(model)
    found = writes_without_samples(model, model, (x,), {}, [x], before)
    assert (None if found is None else len(found)) == WRITTEN[name]
    close(dict(model.named_buffers()), dict(built(name).named_buffers()))


# ---------------------------------------------------------------------------------------------- compiled


COMPILED = ["dropout", "BatchNorm and dropout", "minibatch deviation", "spectral norms", "nothing of that"]
RUNS_COMPILED = ["spectral norms", "nothing of that"]


def compiled(mesh, way: str) -> list[str]:
    """What differs from one device, not compiled; in two steps."""
    wrong = []
    for name in COMPILED:
        torch._dynamo.reset()
        alone, model = built(name), built(name)
        if way == "before":
            model.compile(backend="aot_eager")
        call = wf.parallelize(model, mesh)
        if way == "after":
            model.compile(backend="aot_eager")
        if way == "a wrapper":
            call = torch.compile(model, backend="aot_eager")
        part = parts_of(even_cut(SHAPE[0], mesh.copies))[mesh.copy]
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            for step in range(2):
                alone.zero_grad(), model.zero_grad()
                torch.manual_seed(step)
                loss_of(alone(images(step)), SHAPE[0]).backward()
                torch.manual_seed(step)
                loss_of(call(images(step)[part.start : part.stop]), SHAPE[0] / mesh.copies).backward()
                found, expected = ({n: p.grad for n, p in net.named_parameters()} for net in (model, alone))
                wrong += differences(mesh, found, expected, f"{name}, step {step}")
        slower = sum("uncompiled" in str(warning.message) for warning in said)
        if bool(slower) != (way == "a wrapper" or name not in RUNS_COMPILED):
            wrong.append(f"{name} was said {slower} times to run uncompiled")
    return wrong


@pytest.mark.long
@pytest.mark.parametrize("way", few(["before", "after", "a wrapper"], "before", "after"))
def test_compiled_copies_draw_and_mix_as_one_device_does(way):
    wrong = on_ranks(2, compiled, way, plan=Plan(replicate=2))[0]
    assert not wrong, "\n\n".join(wrong)


# ---------------------------------------------------------------------------------------------- the rank without samples


def one_sample(mesh) -> list[str]:
    """The second copy has a stand-in, whose pass changes statistics as the first one's does and adds nothing to gradients."""
    wrong = []
    for name in ("BatchNorm and dropout", "running statistics of InstanceNorm", "queue and counter"):
        alone, model = built(name), built(name)
        wf.parallelize(model, mesh)
        for step in range(2):
            whole = images(step)[: 3 if step == 0 else 1]
            alone.zero_grad(), model.zero_grad()
            torch.manual_seed(step)
            loss_of(alone(whole), len(whole)).backward()
            torch.manual_seed(step)
            part = parts_of(even_cut(len(whole), 2))[mesh.rank]
            mine = whole[part.start : part.stop]
            if len(mine):
                loss_of(model(mine), len(whole) / 2).backward()
            else:
                with inactive(model):
                    (loss_of(model(whole), 1) * 0.0).backward()
            found, expected = ({n: p.grad for n, p in net.named_parameters()} for net in (model, alone))
            wrong += differences(mesh, found, expected, f"{name}, step {step}")
        everywhere = [mesh.sum_(b.detach().clone().double()) / 2 for b in model.buffers()]
        close([b.double() for b in model.buffers()], everywhere)
        wrong += differences(mesh, dict(model.named_buffers()), dict(alone.named_buffers()), f"{name}, buffers")
    return wrong


class Levels(nn.Module):
    """In units of ZeRO-3 one sample comes to lie whole on each rank, the one that has none included."""

    def __init__(self) -> None:
        super().__init__()
        self.net = unet.build(3, 2, widths=[4, 6, 8])

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x + 0.1 * torch.rand_like(x))


def statistics_of_levels(mesh) -> list[str]:
    torch.manual_seed(1)
    alone = Levels().double()
    model = deepcopy(alone)
    wf.parallelize(model, mesh)
    image = torch.randn(1, 3, 48, 40, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    torch.manual_seed(2)
    alone(image)
    torch.manual_seed(2)
    with inactive(model) if mesh.rank else nullcontext():
        model(image).sum().backward()
    return differences(mesh, dict(model.named_buffers()), dict(alone.named_buffers()), "buffers")


def test_a_copy_without_samples_counts_what_it_holds_of_others():
    wrong = on_ranks(2, statistics_of_levels, plan=Plan(shard=2, sharding={"zero": 3, "units": ["net.down.*"]}))[0]
    assert not wrong, "\n\n".join(wrong)


def test_a_copy_without_samples_counts_nothing():
    wrong = on_ranks(2, one_sample, plan=Plan(replicate=2))[0]
    assert not wrong, "\n\n".join(wrong)


# ---------------------------------------------------------------------------------------------- what is said


def said_by(mesh, body) -> str | None:
    try:
        body(mesh)
    except (ValueError, NotImplementedError, RuntimeError) as error:
        return str(error)
    return None


def seeded_apart(mesh):
    model = wf.parallelize(built("dropout"), mesh)
    torch.manual_seed(mesh.rank)
    for _ in range(2):  # it is found at the next draw at the latest
        model(images(0))


def sizes_apart(mesh):
    model = wf.parallelize(built("dropout"), mesh)
    model(images(0)[..., mesh.rank :])


class Scaled(nn.Module):
    def forward(self, x: Tensor, weights: Tensor, by: float) -> Tensor:
        return F.dropout(x, 0.5, True) * weights.view(-1, 1, 1) * by


def weighed_apart(mesh):
    wf.parallelize(Scaled(), mesh)(images(0), torch.tensor([[1.0, 2.0, 3.0 + mesh.rank]]), 2.0)


def scaled_apart(mesh):
    wf.parallelize(Scaled(), mesh)(images(0), torch.tensor([[1.0, 2.0, 3.0]]), by=2.0 + mesh.rank)


def weighed_alike(mesh):
    wf.parallelize(Scaled(), mesh)(images(0), torch.tensor([[1.0, 2.0, 3.0]]), by=2.0)


class Odd(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.linalg.svdvals(F.dropout(x, 0.5, True).transpose(0, 1))


def without_a_rule(mesh):
    wf.parallelize(nn.Sequential(nn.Conv2d(3, 4, 3), Odd()).double(), mesh)(images(0))


class Mean(nn.Module):
    """One number of all samples, which cannot be found by a rule."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Bilinear(4, 4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x.mean((2, 3)), x.amax((2, 3))).mean()


def a_mean_without_a_rule(mesh):
    wf.parallelize(nn.Sequential(nn.Conv2d(3, 4, 3), Mean()).double(), mesh)(images(0))


class Picks(nn.Module):
    """Bounds the first sample's features, which are within them at first."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Bilinear(4, 4, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.layer(x.mean((2, 3)), x.amax((2, 3))) * 1
        x[:1].clamp_(-99, 99)
        return x


def a_pick_without_a_rule(mesh):
    wf.parallelize(nn.Sequential(nn.Conv2d(3, 4, 3), Picks()).double(), mesh)(images(0))


class Puts(nn.Module):
    """Writes into a batch's first sample, and hides it."""

    def forward(self, x: Tensor) -> Tensor:
        x = x * 1
        x.put_(torch.tensor([0]), torch.tensor([-1.0], dtype=x.dtype))
        return x.relu()


def a_hidden_write(mesh):
    wf.parallelize(nn.Sequential(nn.Conv2d(3, 4, 3), Puts()).double(), mesh)(images(0))


class PutsFirst(nn.Module):
    """Writes what the first sample gives, and tells its sign alone."""

    def forward(self, x: Tensor) -> Tensor:
        return x + (x.detach().put(torch.tensor([1]), x.flatten()[:1].detach()) > 0)


def a_sample_that_is_put_into_others(mesh):
    wf.parallelize(nn.Sequential(nn.Conv2d(3, 4, 3), PutsFirst()).double(), mesh)(images(0))


class AddsFirst(nn.Module):
    """Adds what the first sample gives to it, which is nothing yet, beside an operation that copies cannot share."""

    def __init__(self, *, is_behind: bool) -> None:
        super().__init__()
        self.is_behind = is_behind

    def forward(self, x: Tensor) -> Tensor:
        x = (x - 1e3).relu()
        if self.is_behind:
            x = torch.linalg.svdvals(x)
        x = torch.index_put(x, (torch.tensor([0]),), x[:1], accumulate=True)
        return x if self.is_behind else torch.linalg.svdvals(x)


def zeros_before_it(mesh):
    wf.parallelize(nn.Sequential(nn.Conv2d(3, 4, 3), AddsFirst(is_behind=False)).double(), mesh)(images(0))


def zeros_behind_it(mesh):
    wf.parallelize(nn.Sequential(nn.Conv2d(3, 4, 3), AddsFirst(is_behind=True)).double(), mesh)(images(0))


def one_by_one(mesh):
    class InOrder(nn.Module):
        """No rule says what it does, and samples do not meet."""

        def forward(self, x: Tensor) -> Tensor:
            pairs = torch.cat([torch.linalg.svdvals(x), x.amax((2, 3)).unsqueeze(-1)], 2)
            return torch.stack([F.normalize(each, dim=0) for each in pairs]).sum(-1)

    wf.parallelize(nn.Sequential(nn.Conv2d(3, 4, 3), InOrder()).double(), mesh)(images(0)).sum().backward()


def outputs_in_an_object(mesh):
    class Gives(nn.Sequential):
        def forward(self, x: Tensor) -> Any:
            return SimpleNamespace(found=super().forward(x))

    wf.parallelize(Gives(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)).double(), mesh)(images(0))


def images_in_an_object(mesh):
    class Takes(nn.Sequential):
        def forward(self, given: Any) -> Tensor:
            return super().forward(given.image)

    wf.parallelize(Takes(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)).double(), mesh)(SimpleNamespace(image=images(0)))


class Lists(nn.Module):
    """Takes images in a list, as detectors do.  draws: a mask, too."""

    def __init__(self, draws: bool = False) -> None:
        super().__init__()
        self.layer, self.draws = nn.Conv2d(3, 4, 3), draws

    def forward(self, images: list[Tensor]) -> list[Tensor]:
        return [F.dropout(self.layer(image[None]), 0.5, self.draws) for image in images]


def listed(mesh, *, extra: int = 0, uneven: int = 0, **options: Any) -> None:
    model = wf.parallelize(Lists(**options).double(), mesh)
    made = [torch.ones(3, 5 + extra * mesh.rank, 6, dtype=torch.float64) for _ in range(2 + uneven * mesh.rank)]
    sum(each.sum() for each in model(made)).backward()


def images_in_a_list(mesh):
    listed(mesh)


def images_in_a_list_that_are_masked(mesh):
    listed(mesh, draws=True)


def images_of_any_size_in_a_list(mesh):
    listed(mesh, extra=1)


def images_in_lists_of_unequal_lengths(mesh):
    listed(mesh, uneven=1)


class Coder(nn.Module):
    """Two parts, which a loop may call by themselves."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Dropout(0.5))
        self.decoder = nn.Conv2d(4, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.decoder(self.encoder(x))


def a_part_that_draws_by_itself(mesh):
    model = wf.parallelize(Coder().double(), mesh)
    recurrent = wf.parallelize(nn.Sequential(nn.LSTM(3, 4, 2, dropout=0.5)).double(), mesh)
    assert "LSTM draws random numbers" in (
        said_by(mesh, lambda _: recurrent[0](torch.ones(2, 3, 3, dtype=torch.float64))) or ""
    )
    assert [type(each.encoder[1]) for each in (deepcopy(model), pickle.loads(pickle.dumps(model)))] == [nn.Dropout] * 2
    model(images(0)).sum().backward()
    deepcopy(model).encoder(images(0))
    model.decoder(model.eval().encoder(images(0))).sum().backward()
    model.train().encoder(images(0))


def parts_laid_out_by_themselves(mesh):
    model = wf.parallelize(Coder().double(), mesh)
    wf.parallelize(model.encoder, mesh)(images(0))


def counts_how_often(mesh):
    class Codes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.codes = nn.Embedding(5, 4, scale_grad_by_freq=True)

        def forward(self, x: Tensor) -> Tensor:
            return self.codes((x[:, 0] > 0).long()).movedim(-1, 1) * x.mean(1, keepdim=True)

    wf.parallelize(nn.Sequential(nn.Conv2d(3, 4, 3), Codes()).double(), mesh)(images(0))


class Scatters(nn.Module):
    """Puts numbers where a mask says, which is nowhere as yet."""

    def forward(self, x):
        return x.masked_scatter(x > 1e9, x.flatten())


def numbers_put_by_a_mask(mesh):
    wf.parallelize(nn.Sequential(nn.Conv2d(3, 4, 3), Scatters()).double(), mesh)(images(0))


REFUSALS = {
    numbers_put_by_a_mask: "how many pixels it gives depends on the values in all tiles",
    counts_how_often: "an embedding of tiles counts no frequencies",
    a_part_that_draws_by_itself: "Dropout draws random numbers or writes to buffers and is called by itself, where copies",
    images_in_a_list: "Lists runs on one copy's samples and not on a batch that its 2 copies share",
    images_in_a_list_that_are_masked: "Lists runs on one copy's samples and not on a batch that its 2 copies share",
    images_of_any_size_in_a_list: "Lists runs on one copy's samples and not on a batch that its 2 copies share",
    images_in_lists_of_unequal_lengths: "Lists runs on one copy's samples and not on a batch that its 2 copies share",
    outputs_in_an_object: "Gives returns a SimpleNamespace, whose .found is a tensor that is not found there",
    images_in_an_object: "Takes is given a SimpleNamespace, whose .image is a tensor that is not found there",
    seeded_apart: "call torch.manual_seed with the same number on all of them",
    weighed_apart: "copies gave the model other numbers besides their samples",
    scaled_apart: "copies gave the model other numbers besides their samples",
    sizes_apart: "copies got samples of different sizes, this one",
    a_pick_without_a_rule: "aten._trilinear.default cannot run on an image cut into tiles",
    a_mean_without_a_rule: "aten._trilinear.default cannot run on an image cut into tiles",
    without_a_rule: "set mesh.independent=true to let each copy draw",
    a_sample_that_is_put_into_others: "aten.put.default cannot run on an image cut into tiles",
    zeros_before_it: "aten._linalg_svd.default cannot run on an image cut into tiles",
    zeros_behind_it: "aten._linalg_svd.default cannot run on an image cut into tiles",
    a_hidden_write: "aten.put.default cannot run on an image cut into tiles",
}


ALLOWED = one_by_one, weighed_alike, parts_laid_out_by_themselves


def refused(mesh):
    return {body.__name__: said_by(mesh, body) for body in (*REFUSALS, *ALLOWED)}


def test_what_copies_cannot_share_is_refused_on_every_rank():
    for said in on_ranks(2, refused):
        assert {body.__name__: said.pop(body.__name__) for body in ALLOWED} == {body.__name__: None for body in ALLOWED}
        for body, words in REFUSALS.items():
            assert words in (said[body.__name__] or ""), (body, said[body.__name__])


def in_a_container(mesh) -> float:
    """How far gradients are off, of parts in a container that nobody calls itself."""
    torch.manual_seed(0)
    alone = nn.ModuleDict({"coder": Coder(), "heads": nn.ModuleList([nn.Conv2d(2, 2, 1), nn.Dropout(0.3)])}).double()
    model = wf.parallelize(deepcopy(alone), mesh)
    given = torch.cat([images(0), images(1)])
    mine = given[mesh.copy * 5 : mesh.copy * 5 + 5]
    for one, x in ((alone, given), (model, mine)):
        torch.manual_seed(3)
        (one["heads"][1](one["heads"][0](one["coder"](x))).square().sum() / len(x)).backward()
    pairs = zip(alone.parameters(), model.parameters(), strict=True)
    return max(float((a.grad - b.grad).abs().max()) for a, b in pairs)


def test_parts_in_a_container_draw_as_one_device_does():
    assert max(on_ranks(2, in_a_container, plan=Plan(replicate=2))) < 1e-12


class OneByOne(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        if len(x) > 1:
            raise NotImplementedError("takes one sample")
        return x.square()


def with_a_sample_more(mesh):
    wf.parallelize(nn.Sequential(nn.Conv2d(3, 4, 3), OneByOne()).double(), mesh)(images(0)[: 2 - mesh.rank])


def test_what_one_copy_cannot_do_is_refused_on_all():
    first, second = on_ranks(2, said_by, with_a_sample_more)
    assert first == "takes one sample"
    assert second is not None and "another copy of the model cannot run on its samples" in second


def drawing_apart(mesh):
    model = wf.parallelize(built("nothing of that"), mesh)
    model(images(0) * (mesh.rank + 1))
    if mesh.rank == 0:
        model[1].forward = F.dropout
        _shared_forward.PATIENCE_SECONDS = 2.0
    try:
        model(images(0))
    finally:
        _shared_forward.PATIENCE_SECONDS = 120.0


def test_a_copy_that_draws_alone_is_told():
    said, _ = on_ranks(2, said_by, drawing_apart)
    assert said is not None and "not all 2 copies of the model came to the same place" in said
    close_all()  # the other rank's next message would meet the one that was given up


def later(mesh) -> list[str]:
    """Dropout that is switched on in the second pass."""
    alone, model = built("BatchNorm and dropout"), built("BatchNorm and dropout")
    wf.parallelize(model, mesh)
    wrong, part = [], parts_of(even_cut(SHAPE[0], 2))[mesh.rank]
    for step in range(3):
        for net in (alone, model):
            net[3].p = 0.3 * (step > 0)
            net.zero_grad()
        torch.manual_seed(step)
        loss_of(alone(images(step)), SHAPE[0]).backward()
        torch.manual_seed(step)
        loss_of(model(images(step)[part.start : part.stop]), SHAPE[0] / 2).backward()
        found, expected = ({n: p.grad for n, p in net.named_parameters()} for net in (model, alone))
        wrong += differences(mesh, found, expected, f"step {step}")
    return wrong + differences(mesh, dict(model.named_buffers()), dict(alone.named_buffers()), "buffers")


def test_chance_that_comes_later_is_one_devices_too():
    wrong = on_ranks(2, later)[0]
    assert not wrong, "\n\n".join(wrong)


LAYERS = {
    "GroupNorm": lambda: nn.GroupNorm(2, 4),
    "LayerNorm": lambda: nn.LayerNorm([4, 11, 8]),
    "pooling": lambda: nn.AdaptiveAvgPool2d(3),
    "resizing": lambda: nn.Upsample(scale_factor=2, mode="bilinear"),
    "softmax": lambda: nn.Softmax2d(),
}


def messages(mesh) -> dict[str, list]:
    """By layer, what copies that share a batch send each other in a step: the group of each message, and to whom."""
    found: dict[str, list] = {}
    for name, layer in LAYERS.items():
        torch.manual_seed(0)
        model = wf.parallelize(nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.Dropout(0.1), layer()), mesh)
        x = images(0).float()[:3] * (1 + mesh.rank)
        model(x)
        hear = lambda *message, name=name: found.setdefault(name, []).append(message)  # noqa: E731
        halo.LISTENERS.append(hear)
        try:
            model(x).square().mean().backward()
        finally:
            halo.LISTENERS.remove(hear)
    return found


def test_layers_that_take_samples_one_by_one_send_nothing_between_copies():
    assert on_ranks(2, messages) == [{}, {}]


class SumsOtherwise(nn.Module):
    """Rounds otherwise where it has rows of a batch, as sums in another order do, and makes much of it."""

    def __init__(self, gain: float, apart: float) -> None:
        super().__init__()
        self.gain, self.apart, self.had_rows, self.first = gain, apart, False, nn.Conv2d(3, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        self.had_rows = isinstance(x, TiledTensor)
        assert self.had_rows or x.max() <= 1  # as a model of probabilities wants
        x = self.first(x)
        return ((x * (1 + self.apart) if self.had_rows else x) * self.gain).sin()


ROUNDING = [  # (precision, gain, last bits apart): are samples taken as mixed?
    (torch.float32, 1, 1, False),
    (torch.float32, 1, 1e4, True),  # a good net that is off by 0.1 %
    (torch.float32, 3e2, 1, False),  # more than 1e-5, as of ResNet-50 in training
    (torch.float32, 3e2, 1e3, True),
    (torch.float32, 1e6, 1, True),  # chaos, which hides everything
    (torch.bfloat16, 5, 1, False),  # more than 1 %
    (torch.bfloat16, 1, 40, True),
]


def taken_as_mixed(mesh) -> list[tuple]:
    found = []
    for dtype, gain, bits, _ in ROUNDING:
        torch.manual_seed(0)
        model = wf.parallelize(SumsOtherwise(gain, bits * torch.finfo(dtype).eps), mesh)
        x = torch.rand(3, 3, 5, 4, generator=torch.Generator().manual_seed(mesh.rank))
        x[x > 0.9] = 1
        with torch.autocast("cpu", dtype, enabled=dtype is not torch.float32):
            model(x)
        found.append((dtype, gain, bits, model.had_rows))
    return found


def test_a_nets_own_rounding_is_no_mixing_of_samples():
    assert on_ranks(2, taken_as_mixed) == [ROUNDING, ROUNDING]


class Saved:
    """What a pass keeps for its backward."""


class Keeps(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, kept: Saved) -> Tensor:
        ctx.kept = kept
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


class Counts(SumsOtherwise):
    """Notes, as a pass begins, how many passes still have what they keep."""

    def __init__(self, *rounding: float) -> None:
        super().__init__(*rounding)
        self.kept, self.most = weakref.WeakSet[Saved](), []

    def forward(self, x: Tensor) -> Tensor:
        self.most.append(len(self.kept))
        kept = Saved()
        self.kept.add(kept)
        return super().forward(Keeps.apply(x, kept) if type(x) is Tensor else x)


def passes_at_a_time(mesh) -> list[int]:
    model = wf.parallelize(Counts(3e2, torch.finfo(torch.float32).eps), mesh)
    x = torch.rand(3, 3, 5, 4, requires_grad=True)
    model(x)
    return model.most


def test_of_the_passes_that_look_for_mixed_samples_one_at_a_time_holds_its_activations():
    alone, among_all, changed, real = on_ranks(2, passes_at_a_time)[0]
    assert alone == among_all == changed == real == 0


FIRST = (torch.arange(4) < 1)[:, None, None, None]
TOLD_APART = {
    "a slice": lambda x: x[:1] * 1,
    "every other": lambda x: x[::2] * 1,
    "one": lambda x: x[0] * 1,
    "halves": lambda x: x.chunk(2),
    "each": lambda x: x.unbind(0),
    "a triangle": lambda x: x.flatten(1).tril(),
    "a triangle up": lambda x: x.transpose(0, 2).triu(),
    "a diagonal": lambda x: x.flatten(1).diagonal() * 1,
    "written": lambda x: x.slice_scatter(torch.ones(1, 3, 4, 6), 0, 0, 1),
    "one written": lambda x: x.select_scatter(torch.ones(3, 4, 6), 0, 0),
    "filled": lambda x: x.index_fill(0, torch.tensor([0]), 1),
    "weighed": lambda x: x * torch.arange(4.0)[:, None, None, None],
    "masked": lambda x: x.masked_fill(FIRST, 0),
    "chosen": lambda x: torch.where(FIRST, x, 0),
    "in turn": lambda x: x.flip(0),
    "twice": lambda x: x.repeat(2, 1, 1, 1),
}
LEFT_ALIKE = {
    "merged": lambda x: x.flatten(0, 1).sin().unflatten(0, (4, 3)),
    "channels": lambda x: x.transpose(0, 1)[:2] * 1,
    "parts": lambda x: x.reshape(4, 3, 24).permute(1, 0, 2).unbind(0),
    "pooled": lambda x: x.mean((2, 3)),
    "copies": lambda x: x[None].expand(3, -1, -1, -1, -1)[0] * 1,
    "triangles": lambda x: x.triu(),
    "equal weights": lambda x: x * torch.ones(4, 1, 1, 1),
    "weights of pixels": lambda x: x * torch.arange(6.0),
    "joined": lambda x: torch.cat([x, x], 1),
    "repeated": lambda x: x.repeat_interleave(2, 0),
}


def told_apart(mesh):
    found = {}
    for name, body in {**TOLD_APART, **LEFT_ALIKE}.items():
        layout = layout_of((4, 3, 4, 6), (Cut((0,), (0, 1, 4)), None, None, None), mesh.grid)
        with SampleMixingWatch(mesh.grid) as watch:
            body(wrap(torch.randn(layout.tile_shape), layout))
        found[name] = list(watch.found)
    return found


def test_operations_that_tell_samples_apart_by_their_number_are_seen():
    """In a copy's part of the batch that number is another's, and neither a message nor a value need tell."""
    for found in on_ranks(2, told_apart, plan=Plan(space=[2, 1])):
        assert [name for name in TOLD_APART if not found[name]] == []
        assert {name: found[name] for name in LEFT_ALIKE if found[name]} == {}


class SkipsByChance(nn.Module):
    """Python's and numpy's random numbers choose the layers that run, and it counts its forwards."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Conv2d(3, 3, 3, padding=1) for _ in range(4))
        self.chosen: list[list[bool]] = []
        self.forwards = 0

    def forward(self, x: Tensor) -> Tensor:
        self.forwards += 1
        x = F.dropout(x, 0.2, self.training and self.forwards > 2)
        runs = [random.random() < 0.5, bool(np.random.rand() < 0.5)] * 2
        self.chosen.append(runs)
        for layer, does_run in zip(self.layers, runs, strict=True):
            x = layer(x) if does_run else x
        return self.layers[0](x)


def choices(mesh) -> tuple:
    """What one device's model and a copy's chose in each forward, and how many forwards they count."""
    alone, model = SkipsByChance(), SkipsByChance()
    wf.parallelize(model, mesh, trial_step=lambda: model(images(0).float()[:2]).sum())
    found = []
    for net in (alone, model):
        random.seed(3), np.random.seed(4), torch.manual_seed(5)
        chosen = []
        for step in range(6):
            net(images(step).float()[:2]).sum().backward()
            chosen.append(net.chosen[-1])
        found.append((chosen, net.forwards, random.random(), np.random.rand()))
    return tuple(found)


def test_trial_passes_leave_the_random_numbers_of_python_and_numpy_where_they_were():
    for alone, copy in on_ranks(2, choices):
        assert copy == alone


def by_themselves(mesh):
    model = wf.parallelize(built("dropout"), mesh)
    torch.manual_seed(mesh.rank)
    listed(mesh, draws=True, extra=1)  # which copies cannot share
    return model(images(0)).detach()


def test_copies_draw_for_themselves_where_that_is_asked_for():
    first, second = on_ranks(2, by_themselves, plan=Plan(replicate=2, independent=True))
    assert not torch.equal(first, second)
