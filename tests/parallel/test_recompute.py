"""Does a model that runs blocks again remember less, and learn the same?"""

from __future__ import annotations

import copy
import io
from dataclasses import replace
from functools import partial

import devices
import pytest
import torch
from devices import on_gpu_alone, on_gpu_too
from marks import few
from ranks import on_ranks
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.utils.parametrizations import spectral_norm
from torch.utils._python_dispatch import TorchDispatchMode

import widefield as wf
from widefield import models
from widefield.comm.mesh import World, join
from widefield.config import ModelConfig, RecomputeConfig
from widefield.geometry.layout import Grid
from widefield.module_wrapping import wrap_class
from widefield.parallel.inactive import inactive
from widefield.parallel.parallelize import parallelize, parallelize_average, reasons
from widefield.parallel.strategies import TrialStep
from widefield.parallel.strategies._saved_tensors import costs_of
from widefield.parallel.strategies.recompute import _Offloaded, from_host, to_host
from widefield.plans import Plan
from widefield.sharded_state import gather_full_on_main

close = devices.close  # 1e-12 on the CPU: float64, nets with 1e2 weights


def unet(norm="batch"):
    torch.manual_seed(0)
    options = {"widths": [4, 6, 8], "norm": norm}
    return models.build(ModelConfig(name="unet", options=options), in_channels=2, num_classes=3).double()


def alone(model, **options):
    """The model laid out on one rank, where nothing but recompute is left to do."""
    return parallelize(model, join(World(), Plan(recompute=options)))


def images(rows=4):
    return torch.randn(rows, 2, 22, 18, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


class Mixed(nn.Module):
    """Everything that a second run could do twice or otherwise: dropout, running statistics, power iteration, counting."""

    def __init__(self):
        super().__init__()
        layers = (nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.ReLU(inplace=True), nn.Dropout(0.5))
        self.first = nn.Sequential(*layers)
        self.second = nn.Sequential(spectral_norm(nn.Conv2d(4, 4, 3)), nn.BatchNorm2d(4, momentum=None), nn.Dropout2d(0.5))
        self.third = Counting()

    def forward(self, x):
        return self.third(self.second(self.first(x)), factor=2.0)


class Counting(nn.Sequential):
    """Every second pass takes another way."""

    def __init__(self):
        super().__init__(nn.Conv2d(4, 4, 1), nn.Tanh())
        self.register_buffer("passes", torch.zeros((), dtype=torch.int64))

    def forward(self, x, factor=1.0):
        self.passes += 1
        return super().forward(x) * factor if self.passes % 2 else super().forward(x).square()


@on_gpu_too
@pytest.mark.parametrize("keep", ["nothing", "convolutions"])
def test_what_changes_in_a_pass_changes_once_and_masks_are_the_same(keep):
    torch.manual_seed(1)
    plain = Mixed().double()
    model = alone(copy.deepcopy(plain), keep=keep)
    for seed in range(3):
        for net in (plain, model):
            torch.manual_seed(seed)
            net(images()).square().sum().backward()
    close(dict(model.named_parameters()), dict(plain.named_parameters()))
    close([p.grad for p in model.parameters()], [p.grad for p in plain.parameters()])
    close(dict(model.state_dict()), dict(plain.state_dict()))
    assert model.third.passes == 3


class Count(TorchDispatchMode):
    """How many convolutions run."""

    def __init__(self):
        super().__init__()
        self.convolutions = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.convolutions += func is torch.ops.aten.convolution.default
        return func(*args, **(kwargs or {}))


@on_gpu_too
@pytest.mark.parametrize(("options", "times"), [
    ({}, [10, 10]), ({"keep": "convolutions"}, [10, 0]), ({"blocks": ["down.0"]}, [10, 2]),
])  # fmt: skip
def test_blocks_run_again_and_kept_convolutions_do_not(options, times):
    """The net has 13 convolutions, 10 of them in blocks."""
    model, outside = alone(unet(), **options), 3
    with Count() as forward:
        loss = model(images()).sum()
    with Count() as backward:
        loss.backward()
    assert [forward.convolutions - outside, backward.convolutions] == times


class InPlace(nn.Sequential):
    """What a convolution gave is changed by what comes next."""

    def __init__(self):
        layers = (nn.Conv2d(2, 3, 3), nn.ReLU(inplace=True), nn.Conv2d(3, 3, 3), nn.BatchNorm2d(3))
        super().__init__(nn.Sequential(*layers), nn.Conv2d(3, 1, 1))


@on_gpu_too
def test_a_kept_convolution_that_is_changed_in_place_runs_again_and_others_do_not():
    torch.manual_seed(0)
    plain = InPlace().double()
    model = alone(copy.deepcopy(plain), keep="convolutions")
    plain(images()).square().sum().backward()
    loss = model(images()).square().sum()
    with Count() as backward:
        loss.backward(retain_graph=True)
    assert backward.convolutions == 1
    close([p.grad for p in model.parameters()], [p.grad for p in plain.parameters()])
    loss.backward()
    close([p.grad for p in model.parameters()], [2 * p.grad for p in plain.parameters()])


def saved_bytes(model):
    sizes = []
    with saved_tensors_hooks(lambda t: sizes.append(t.nbytes), lambda _: None):
        model(images())
    return sum(sizes)


@on_gpu_too
def test_blocks_keep_their_inputs_alone():
    assert saved_bytes(alone(unet())) < 0.35 * saved_bytes(unet())


@on_gpu_too
def test_evaluation_and_names_and_copies_are_the_plain_models():
    plain, model = unet(), alone(unet())
    assert list(model.state_dict()) == list(plain.state_dict())
    assert [type(m).__name__ for m in model.modules()] == [type(m).__name__ for m in plain.modules()]
    for net in (plain, model):
        net.eval()
    with torch.no_grad():
        close(model(images()), plain(images()))
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    for other in (copy.deepcopy(model), torch.load(file, weights_only=False)):
        assert [type(m) for m in other.modules()] == [type(m) for m in plain.modules()]
        close(other(images()), plain(images()))


class Named(nn.Sequential):
    """A block whose keywords torch's checkpoint has, too; it notes torch's switch of the whole process."""

    def forward(self, x, *, debug, early_stop, determinism_check):
        self.switches = [*getattr(self, "switches", []), torch.utils.checkpoint._enable_checkpoint_early_stop]
        return super().forward(x) * debug + early_stop - determinism_check


class Naming(nn.Module):
    def __init__(self):
        super().__init__()
        self.block = Named(nn.Conv2d(2, 4, 3), nn.Sigmoid())

    def forward(self, x):
        return self.block(x, debug=2.0, early_stop=0.5, determinism_check=0.25)


def test_a_blocks_keywords_are_its_own_and_no_switch_of_the_process_is_set():
    torch.manual_seed(0)
    plain = Naming().double()
    model = alone(copy.deepcopy(plain), blocks=["block"])
    for net in (plain, model):
        net(images()).square().sum().backward()
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        close(ours.grad, theirs.grad)
    assert model.block.switches == [None, None], "forward and again in the backward"


# ---------------------------------------------------------------------------------------------- over ranks


def over_ranks(mesh, offload=False):
    """Two steps' gradients and buffers, on copies, tiles and parts, with a ghost where there are copies."""
    one, model = unet(), unet()
    if offload:
        wrap_class(model, _Offloaded)
    model = parallelize(model, mesh)
    x = images(mesh.copies)
    one(x).square().mean().backward()
    model(wf.tile(x[mesh.copy : mesh.copy + 1], mesh)).square().mean().backward()
    is_inactive = mesh.copies > 1 and mesh.copy == 1
    real = x[: mesh.copies - 1] if mesh.copies > 1 else x
    one(real).square().mean().backward()
    mine = wf.tile(x[mesh.copy : mesh.copy + 1] if not is_inactive else x[:1], mesh)
    if is_inactive:
        with inactive(model):
            (model(mine).square().mean() * 0.0).backward()
    else:
        rows = mesh.copies / len(real) if mesh.copy < len(real) else 0.0
        (model(mine).square().mean() * rows).backward()
    found = {"gradients": {n: p.grad for n, p in model.named_parameters()}, "state": dict(model.state_dict())}
    found = gather_full_on_main(model, mesh, found)
    if mesh.is_main:
        close(found, {"gradients": {n: p.grad for n, p in one.named_parameters()}, "state": dict(one.state_dict())})


UNITS = {"sharding": {"units": ["down.*", "up.0"]}}
LAYOUTS = {
    "copies": Plan(replicate=2, recompute={}),
    "tiles": Plan(space=[2, 1], recompute={}),
    "tiles, convolutions kept": Plan(space=[2, 1], recompute={"keep": "convolutions"}),
    "ZeRO-3": Plan(shard=2, recompute={}, **UNITS),
    "ZeRO-3, convolutions kept": Plan(shard=2, recompute={"keep": "convolutions"}, **UNITS),
    "ZeRO-2, blocks inside of units": Plan(shard=2, recompute={"blocks": ["up.*"]}, sharding={"zero": 2, "units": ["up.*"]}),
    "ZeRO-3 and tiles": Plan(shard=2, space=[1, 2], recompute={}, **UNITS),
}


@on_gpu_too
@pytest.mark.parametrize("name", few(LAYOUTS, *list(LAYOUTS)[:-1], then=["ZeRO-3 and tiles"]))
def test_blocks_run_again_over_ranks_as_on_one_device(name):
    on_ranks(LAYOUTS[name].ranks, over_ranks, plan=LAYOUTS[name])


@on_gpu_too
@pytest.mark.parametrize("name", ["tiles", "ZeRO-3"])
def test_activations_that_go_away_come_back_as_they_were(name):
    on_ranks(2, over_ranks, True, plan=LAYOUTS[name])


@on_gpu_alone
@pytest.mark.parametrize("name", ["copies", "tiles", "ZeRO-3"])
def test_activations_in_the_hosts_memory_change_no_number(name):
    plan = LAYOUTS[name].model_copy(update={"recompute": RecomputeConfig(offload=True)})
    on_ranks(plan.ranks, over_ranks, plan=plan)


def units_of_blocks(mesh):
    """A block that holds a unit, and a unit that holds a block."""
    torch.manual_seed(0)
    build = partial(
        models.build, ModelConfig(name="resnet", options={"widths": [4, 6], "blocks": 2}), in_channels=2, num_classes=3
    )
    one = build().double()
    model = build().double()
    model.load_state_dict(one.state_dict())
    model = parallelize(model, mesh)
    x = images(2)
    one(x).square().mean().backward(), model(x[mesh.rank : mesh.rank + 1]).square().mean().backward()
    found = gather_full_on_main(model, mesh, {n: p.grad for n, p in model.named_parameters()})
    if mesh.is_main:
        close(found, {n: p.grad for n, p in one.named_parameters()})


@on_gpu_too
@pytest.mark.parametrize(("blocks", "units"), [(["stages"], ["stages.1", "stages.2.conv1"]), (["stages.*"], ["stages"])])
def test_blocks_and_units_may_hold_each_other(blocks, units):
    on_ranks(2, units_of_blocks, plan=Plan(shard=2, recompute={"blocks": blocks}, sharding={"units": units}))


# ---------------------------------------------------------------------------------------------- to the CPU and back


@on_gpu_too
def test_activations_go_away_and_weights_and_small_ones_stay():
    weight, image = nn.Parameter(torch.randn(64, 64)), torch.randn(2, 8, 9, 9).to(memory_format=torch.channels_last)
    for tensor in (weight, weight.t(), torch.randn(3)):
        assert from_host(to_host(tensor)).data_ptr() == tensor.data_ptr()
    away = to_host(image)
    back = from_host(away)
    assert away is not image and torch.equal(back, image) and back.stride() == image.stride()
    assert away.values.data_ptr() != image.data_ptr()


def test_a_tile_comes_back_as_a_tile():
    tiled = wf.tile(torch.randn(1, 4, 16, 16), replace(join(World(), Plan()), grid=Grid((1, 1))))
    back = from_host(to_host(tiled))
    assert type(back) is type(tiled) and back.tile_layout is tiled.tile_layout and torch.equal(back.local, tiled.local)


# ---------------------------------------------------------------------------------------------- as few as fit


def chosen(model, memory, share=1.0):
    trial_step = TrialStep(lambda: model(images(2)).sum(), share)
    parallelize(model, join(World(), Plan(recompute={"memory": memory})), trial_step=trial_step)
    return reasons(model)[-1]


@on_gpu_too
def test_as_few_blocks_run_again_as_fit():
    blocks = [f"{way}.{n}" for way, count in (("down", 3), ("up", 2)) for n in range(count)]
    model = unet()
    costs = costs_of(model, blocks, lambda: model(images(2)).sum())
    assert costs.peak_bytes(blocks) < costs.peak_bytes([]) == sum(costs.inside.values()) + costs.outside
    assert chosen(unet(), "1GiB").startswith("recompute: no block: as few of 5 blocks as fit 1GiB")
    most, least = costs.peak_bytes([]) / 2**10, costs.peak_bytes(blocks) / 2**10
    counts = [
        int(chosen(unet(), f"{memory:.3f}KiB").split()[1].replace("no", "0")) for memory in (most + 1, most - 1, least + 1)
    ]
    assert counts[0] == 0 and 1 <= counts[1] <= counts[2]
    assert chosen(unet(), f"{2 * least + 1:.3f}KiB", share=0.5).split()[1] == str(counts[2]), "a pass is twice the trial"


def test_the_estimate_is_what_autograd_saves():
    """Each saved piece of memory counts once: a pass that really keeps all holds as much."""
    model = unet("group")
    costs, kept = costs_of(model, [], lambda: model(images(2)).sum()), {}
    weights = {p.data_ptr() for p in model.parameters()}
    with saved_tensors_hooks(lambda t: kept.setdefault(t.untyped_storage().data_ptr(), t), lambda t: t):
        model(images(2)).sum()
    held = sum(t.untyped_storage().nbytes() for pointer, t in kept.items() if pointer not in weights)
    assert costs.outside == held


# ---------------------------------------------------------------------------------------------- refusals


def streamed():
    return wf.stream(unet("group"), tiles=(2, 2))


def compiled():
    model = unet()
    model.compile(backend="eager")
    return model


def with_its_own_forward():
    model = unet()
    model.down[0].forward = lambda x: x
    return model


@pytest.mark.parametrize(("build", "plan", "words"), [
    (unet, {"blocks": ["dwon.*"]}, "recompute.blocks names 'dwon.*', which no module of UNet fits"),
    (partial(nn.Linear, 2, 2), {}, "recompute found no blocks in Linear"),
    (streamed, {}, "a streamed model keeps none of them; set recompute=null"),
    (compiled, {}, "set model.compile=false, or recompute=null"),
    (with_its_own_forward, {}, "'down.0' (Sequential) has a forward set on the object"),
    (unet, {"offload": True}, "the device is the CPU already; set recompute.offload=false"),
    (unet, {"memory": "1GiB"}, "recompute.memory is kept by looking at a trial pass and none was given"),
])  # fmt: skip
def test_what_cannot_be_is_refused(build, plan, words):
    with pytest.raises((ValueError, NotImplementedError)) as said:
        alone(build(), **plan)
    assert words in str(said.value)


def test_a_memory_into_which_nothing_fits_is_refused_with_numbers():
    with pytest.raises(
        ValueError, match=r"keeps 0.* MiB and, with 5 of its blocks run again, 0.* MiB, which recompute.memory=1KiB"
    ):
        chosen(unet(), "1KiB")


def test_a_copy_that_averages_runs_nothing_again():
    mesh = join(World(), Plan(recompute={}))
    assert [type(m) for m in parallelize_average(unet(), mesh).modules()] == [type(m) for m in unet().modules()]
