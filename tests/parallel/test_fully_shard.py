"""Do copies of a model that share weights, gradients and optimizer state hold their share alone, and compute the same?"""

from __future__ import annotations

import warnings
from functools import partial

import devices
import pytest
import torch
from devices import on_gpu_alone
from ranks import on_ranks
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import widefield as wf
from widefield import models
from widefield.config import ModelConfig
from widefield.parallel.inactive import inactive
from widefield.parallel.parallelize import evaluates_together, parallelize, share_states
from widefield.parallel.strategies._optimizer_shards import steps
from widefield.parallel.strategies.fully_shard import CASES, SMALLEST_BYTES, units_of
from widefield.plans import Plan
from widefield.sharded_state import gather_full_on_main, local
from widefield.tiled.sync_batch_norm import SyncBatchNorm

close = partial(torch.testing.assert_close, rtol=1e-12, atol=1e-12)  # float64, nets with 1e2 weights
NET = CASES[0]


def net(dtype=torch.float64):
    torch.manual_seed(1)
    return NET.build().to(dtype)


def batch(rows=6, seed=0):
    return torch.randn(rows, *NET.shape[1:], dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def my_half(mesh):
    return batch()[3 * mesh.rank : 3 * mesh.rank + 3]


def sharding(zero, **options):
    return Plan(shard=2, sharding={"zero": zero, **options})


# ---------------------------------------------------------------------------------------------- memory


def held(mesh):
    """Bytes of parameters, gradients and Adam's state on this rank after a step, and on one device."""

    def build():
        torch.manual_seed(0)
        return nn.Sequential(*(nn.Sequential(nn.Conv2d(16, 16, 3), nn.BatchNorm2d(16), nn.ReLU()) for _ in range(4)))

    def bytes_after_a_step(model, *, shared=False):
        optimizer = torch.optim.Adam(model.parameters(), foreach=True)
        if shared:
            share_states(optimizer, mesh)
        model(torch.randn(2, 16, 12, 12)).sum().backward()
        gradients = [p.grad for p in model.parameters()]
        optimizer.step()
        state = [value for values in optimizer.state.values() for value in values.values() if value.ndim]
        kinds = (list(model.parameters()), gradients, state)
        return [sum(local(t).numel() * t.element_size() for t in kind) for kind in kinds]

    return bytes_after_a_step(parallelize(build(), mesh), shared=mesh.plan.sharding.zero == 1), bytes_after_a_step(build())


@pytest.mark.parametrize(("zero", "shares"), [(1, (1, 1, 0.27)), (2, (0.25, 0.25, 0.25)), (3, (0.25, 0.25, 0.25))])
def test_four_ranks_hold_a_fourth_each_of_what_they_share(zero, shares):
    """ZeRO-1 deals out whole parameters, so that its shares are even to a parameter; between steps ZeRO-2 holds parts too."""
    for here, whole in on_ranks(4, held, plan=Plan(shard=4, sharding={"zero": zero})):
        assert all(mine <= share * all_ for mine, all_, share in zip(here, whole, shares, strict=True)), (here, whole)
        assert zero == 1 or sum(here) <= 0.30 * sum(whole)


# ---------------------------------------------------------------------------------------------- passes


def in_evaluation(mesh):
    """Whether outputs are one device's in each mode, and names lead to parts afterwards."""
    alone, model = net(), parallelize(net(), mesh)
    objects, names = list(model.modules()), list(alone.state_dict())
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    model(my_half(mesh)).sum().backward(), alone(batch()).sum().backward()
    model.eval(), alone.eval()
    for mode in (torch.no_grad, torch.inference_mode, torch.enable_grad):
        with mode():
            close(model(batch(3 + mesh.rank)), alone(batch(3 + mesh.rank)))
        if mode is not torch.enable_grad:
            assert all(isinstance(p, DTensor) for p in model.parameters())
    assert list(model.state_dict()) == names
    assert all(a is b for a, b in zip(objects, model.modules(), strict=True)) and evaluates_together(model)
    assert {id(p) for p in model.parameters()} == {id(p) for group in optimizer.param_groups for p in group["params"]}


@pytest.mark.parametrize("zero", [2, 3])
def test_evaluation_gives_one_devices_numbers_and_leaves_parts_behind(zero):
    on_ranks(2, in_evaluation, plan=sharding(zero, units=["1"]))


def with_a_ghost(mesh):
    """Rank 1 has no sample of this step and runs a stand-in."""
    alone, model = net(), parallelize(net(), mesh)
    alone(batch()).square().sum().backward()
    if mesh.rank == 0:
        (model(batch()).square().sum() * mesh.copies).backward()
    else:
        with inactive(model):
            (model(batch(1, seed=9)).square().sum() * 0.0).backward()
    check_gradients(mesh, model, alone)


def offloaded(mesh):
    """Three steps; the optimizer of parts that lie in the host's memory steps there."""
    alone, model = net().to(mesh.device), parallelize(net(), mesh)
    assert {local(p).device.type for p in model.parameters()} == {"cpu"}
    one, many = (torch.optim.SGD(m.parameters(), 0.1, momentum=0.9) for m in (alone, model))
    for _ in range(3):
        one.zero_grad(), many.zero_grad()
        (alone(batch()).square().sum() / 6).backward()
        (model(my_half(mesh)).square().sum() * mesh.copies / 6).backward()
        one.step(), many.step()
    found = gather_full_on_main(model, mesh, dict(model.state_dict()))
    if mesh.is_main:
        devices.close(found, dict(alone.state_dict()))


@on_gpu_alone
@pytest.mark.parametrize("zero", [2, 3])
def test_parts_in_the_hosts_memory_train_as_on_one_device(zero):
    on_ranks(2, offloaded, plan=sharding(zero, offload=True))


def check_gradients(mesh, model, alone):
    found = gather_full_on_main(model, mesh, {name: p.grad for name, p in model.named_parameters()})
    if mesh.is_main:
        close(found, {name: p.grad for name, p in alone.named_parameters()})


@pytest.mark.parametrize("zero", [1, 2, 3])
def test_a_rank_without_samples_changes_nothing(zero):
    on_ranks(2, with_a_ghost, plan=sharding(zero))


def compiled(mesh):
    warnings.filterwarnings("ignore", message="The .grad attribute of a Tensor that is not a leaf")
    torch._dynamo.reset()
    alone, model = net(), net()
    model.compile(backend="aot_eager")
    model = parallelize(model, mesh)
    for _ in range(2):
        alone.zero_grad(), model.zero_grad()
        alone(batch()).square().mean().backward(), model(my_half(mesh)).square().mean().backward()
    check_gradients(mesh, model, alone)


@pytest.mark.long
def test_a_compiled_model_gives_the_same_gradients():
    on_ranks(2, compiled, plan=sharding(3, units=["1"]))


def in_another_memory_format(mesh):
    """FSDP2 wants rows one after another; images may lie as they like."""
    alone, model = net(), parallelize(net().to(memory_format=torch.channels_last), mesh)
    mine = my_half(mesh).to(memory_format=torch.channels_last)
    alone(batch()).square().mean().backward(), model(mine).square().mean().backward()
    check_gradients(mesh, model, alone)


def test_weights_in_channels_last_are_sharded_too():
    on_ranks(2, in_another_memory_format, plan=sharding(3))


def drawing_in_another_memory_format(mesh, *layers):
    """What a model with channels last says, whose images lie row by row, in two forwards."""
    model = parallelize(nn.Sequential(nn.Conv2d(2, 4, 3), *layers).to(memory_format=torch.channels_last), mesh)
    try:
        for _ in range(2):
            model(torch.ones(1, 2, 6, 5))
    except NotImplementedError as error:
        return str(error)
    return "drawn"


class Attends(nn.Module):
    """Attention of pixels to each other, whose kernel drops some or, though torch marks it as one that draws, none."""

    def __init__(self, dropped: float) -> None:
        super().__init__()
        self.dropped = dropped

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.scaled_dot_product_attention(x, x, x, dropout_p=self.dropped)


@pytest.mark.parametrize(
    ("layers", "is_refused"),
    [
        ([nn.Dropout(0.5)], True),
        ([Attends(0.5)], True),
        ([Attends(0.0)], False),
        ([nn.Flatten(2), nn.Dropout(0.5)], True),
        ([nn.Dropout2d(0.5)], False),
        ([nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Dropout(0.5)], False),
        ([nn.ReLU()], False),
    ],
    ids=["of an image", "of attention", "none of attention", "of rows of pixels", "of channels", "of features", "none"],
)
def test_weights_in_channels_last_and_chance_for_images_are_refused(layers, is_refused):
    """FSDP2 makes weights row-major, and a convolution's pixels lie as they do: one device's masks would be others'."""
    for words in on_ranks(2, drawing_in_another_memory_format, *layers, plan=sharding(3)):
        if is_refused:
            assert "draws random numbers for images, and 1 of its weights (0.weight, ...) are channels-last" in words
        else:
            assert words == "drawn"


def chance_that_comes_late(mesh):
    late = nn.Dropout(0.0)
    model = parallelize(nn.Sequential(nn.Conv2d(2, 4, 3), late).to(memory_format=torch.channels_last), mesh)
    model(torch.ones(1, 2, 6, 5))
    late.p = 0.5
    with pytest.raises(NotImplementedError, match="set sharding.zero=1"):
        model(torch.ones(1, 2, 6, 5))


def test_weights_in_channels_last_and_chance_that_comes_late_are_refused():
    on_ranks(2, chance_that_comes_late, plan=sharding(3))


def streamed(mesh, widths):
    """Tiles in time on each copy; the batch's statistics are taken in a pass of their own."""
    alone = models.build(ModelConfig(name="unet", options={"widths": widths}), in_channels=2, num_classes=3).double()
    model = models.build(ModelConfig(name="unet", options={"widths": widths}), in_channels=2, num_classes=3).double()
    model.load_state_dict(alone.state_dict())
    model = parallelize(wf.stream(model, tiles=(2, 2)), mesh)
    image = torch.randn(2, 2, 20, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    alone(image).square().mean().backward(), model(image[mesh.rank : mesh.rank + 1]).square().mean().backward()
    check_gradients(mesh, model, alone)


@pytest.mark.long
@pytest.mark.parametrize("widths", [[4, 6], [64, 96]], ids=["small", "whose blocks would be units"])
def test_a_streamed_model_is_sharded_as_any(widths):
    on_ranks(2, streamed, widths, plan=sharding(3))


def streamed_in_units(mesh):
    net = nn.Sequential(nn.Conv2d(2, 4, 3), nn.Conv2d(4, 3, 3)).double()
    with pytest.raises(ValueError, match=r"with a stream the model runs as operations.*; leave sharding.units out"):
        parallelize(wf.stream(net, tiles=(2, 2)), mesh)


def test_a_streamed_model_has_no_units():
    on_ranks(2, streamed_in_units, plan=Plan(shard=2, sharding={"units": ["1"]}))


def start_values(mesh):
    torch.manual_seed(mesh.rank)
    model = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
    model[1].running_mean.fill_(mesh.rank)
    parallelize(model, mesh)
    return model[0].weight.full_tensor(), model[1].running_mean, isinstance(model[1], SyncBatchNorm)


@pytest.mark.parametrize("choice", ["synchronized", "averaged", "broadcast"])
def test_all_ranks_start_from_rank_zero(choice):
    torch.manual_seed(0)
    expected = nn.Linear(3, 2).weight
    for weight, mean, is_synchronized in on_ranks(2, start_values, plan=Plan(shard=2, batch_norm=choice)):
        assert torch.equal(weight, expected) and mean.tolist() == [0.0, 0.0]
        assert is_synchronized is (choice == "synchronized")


def buffers_met(mesh):
    model = parallelize(nn.Sequential(nn.BatchNorm1d(2, momentum=0.0), nn.Linear(2, 2)), mesh)
    model[0].running_mean.fill_(mesh.rank + 5.0)
    model(torch.randn(3, 2)).sum().backward()
    return model[0].running_mean[0].item()


@pytest.mark.parametrize(("choice", "met"), [("broadcast", [5.0, 5.0]), ("averaged", [5.0, 6.0])])
def test_rank_zeros_buffers_are_sent_before_a_pass_for_broadcast_alone(choice, met):
    assert on_ranks(2, buffers_met, plan=Plan(shard=2, batch_norm=choice)) == met


# ---------------------------------------------------------------------------------------------- float16's scaler


def scaled(mesh):
    """A gradient of one rank's part is infinite: no rank may step."""
    model = parallelize(net(torch.float32), mesh)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, foreach=True)
    scaler = torch.amp.GradScaler("cpu")
    before = [local(p).detach().clone() for p in model.parameters()]
    scaler.scale(model(batch().float()).sum()).backward()
    if mesh.rank == 1:
        local(model[0].weight.grad).fill_(float("inf"))
    scaler.step(optimizer)
    scaler.update()
    return all(torch.equal(a, local(p)) for a, p in zip(before, model.parameters(), strict=True)), scaler.get_scale()


def test_a_gradient_that_overflows_on_one_rank_stops_the_step_on_all():
    assert on_ranks(2, scaled, plan=sharding(3)) == [(True, 2.0**15)] * 2


# ---------------------------------------------------------------------------------------------- units


def named_units(name, patterns=None, **options):
    with torch.device("meta"):
        model = models.build(ModelConfig(name=name, options=options), in_channels=3, num_classes=10)
    return list(units_of(model, patterns)[0]), model


def test_stages_and_blocks_are_units_and_small_ones_go_with_the_rest():
    names, model = named_units("resnet", widths=[32, 64, 128, 256, 512], blocks=2)
    assert names == ["stages.5", "stages.6", "stages.7", "stages.8", "stages.9"]
    assert all(sum(p.numel() for p in model.get_submodule(name).parameters()) * 4 >= SMALLEST_BYTES for name in names)
    assert named_units("resnet")[0] == []
    assert named_units("unet", widths=[64, 128, 256, 512])[0] == ["down.2", "down.3", "up.0", "up.1"]


def test_a_large_models_stages_become_blocks():
    pytest.importorskip("torchvision")
    with torch.device("meta"):
        model = models.build(ModelConfig(name="torchvision/resnet50"), in_channels=3, num_classes=1000)
    names, why = units_of(model, None)
    assert list(names) == [
        "layer2", *(f"layer3.{n}" for n in range(6)), *(f"layer4.{n}" for n in range(3)), "fc",
    ]  # fmt: skip
    assert why.startswith("weights are gathered in 11 units (layer2, layer3.0, layer3.1, layer3.2, ...) and the rest")


def test_patterns_name_units_and_a_list_means_its_members():
    assert named_units("unet", ["down", "up.0"], widths=[4, 8])[0] == ["down.0", "down.1", "up.0"]


def test_a_pattern_that_no_module_fits_is_refused():
    with pytest.raises(ValueError, match="sharding.units names 'dwon', which no module of UNet fits; did you mean 'down'?"):
        named_units("unet", ["dwon"])


# ---------------------------------------------------------------------------------------------- ZeRO-1, refusals


def owners(mesh):
    model = parallelize(net(), mesh)
    optimizer = share_states(torch.optim.SGD(model.parameters(), 0.1, momentum=0.9), mesh)
    model(batch()).sum().backward()
    optimizer.step()
    mine = {name for name, p in model.named_parameters() if steps(optimizer, p)}
    assert mine == {name for name, p in model.named_parameters() if p in optimizer.state}
    return mine, {name: p.detach() for name, p in model.named_parameters()}


def test_each_parameter_is_stepped_by_one_rank_and_sent_to_all():
    (first, here), (second, there) = on_ranks(2, owners, plan=sharding(1))
    assert first | second == set(here) and not first & second
    assert all(torch.equal(here[name], there[name]) for name in here)


class RankChooses(nn.ModuleDict):
    def forward(self, x):
        return self["a"](x) if self.rank == 0 else self["b"](x)


def differing(mesh):
    model = RankChooses({"a": nn.Linear(2, 2), "b": nn.Linear(2, 2)})
    model.rank = mesh.rank
    parallelize(model, mesh, trial_step=lambda: model(torch.ones(1, 2)).sum())
    model(torch.ones(1, 2)).sum().backward()
    return [parameter.grad.full_tensor().tolist() for parameter in model["b"].parameters()]


def test_gradients_that_only_some_ranks_have_are_averaged():
    for gradients in on_ranks(2, differing, plan=sharding(3)):
        assert gradients == [[[0.5, 0.5], [0.5, 0.5]], [0.5, 0.5]]


class Reads(nn.ModuleDict):
    """Takes a weight of a unit without calling the unit."""

    def forward(self, x):
        return self["a"](x) * self["b"].weight.sum()


class ReadsAlone(nn.ModuleDict):
    """Gives a number of a weight, which torch mixes with numbers of any rank."""

    def forward(self, x):
        return self["a"](x).mean(), self["b"].weight.mean() * torch.ones(1, 1)


class Differentiates(nn.ModuleDict):
    def forward(self, x):
        x = self["a"](x)
        return torch.autograd.grad(self["b"](x).sin().sum(), x, create_graph=True)[0]


def other_units(mesh):
    """Rank 1 calls another unit than rank 0, as large, so that their parts would fit together; or what no unit can do."""
    said = []
    for kind in (RankChooses, Reads, ReadsAlone, Differentiates):
        model = kind({"a": nn.Linear(2, 2), "b": nn.Linear(2, 2)})
        model.rank = mesh.rank
        parallelize(model, mesh)
        try:
            model(torch.ones(1, 2))
        except RuntimeError as error:
            said.append(f"{type(error).__name__}: {error}")
    return said


def test_ranks_that_call_other_units_or_ask_what_units_cannot_do_are_told():
    sharded = Plan(shard=2, sharding={"zero": 3, "units": ["a", "b"]})
    for rank, (calls, reads, reads_alone, differentiates) in enumerate(on_ranks(2, other_units, plan=sharded)):
        assert f"the 2 ranks that share weights do not call the same layers: here '{'ab'[rank]}' is next" in calls
        assert reads.startswith(
            "NotImplementedError: FSDPReads reads a weight of which each rank has a part: that of one of its 2"
        )
        assert reads_alone.startswith("NotImplementedError: FSDPReadsAlone reads a weight of which each rank has a part")
        assert differentiates.startswith("NotImplementedError: the forward takes a gradient through 'b', a unit whose weights")


class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.scale = nn.Linear(2, 2), nn.Parameter(torch.tensor(2.0))

    def forward(self, x):
        return self.layer(x) * self.scale


def scalar(mesh):
    try:
        parallelize(Scaled(), mesh)
    except NotImplementedError as error:
        return str(error)


def test_a_parameter_without_dims_is_refused_and_shares_its_state_alone():
    for said in on_ranks(2, scalar, plan=sharding(3)):
        assert "'scale' is a parameter without dims, which has no rows to share out" in said
    assert on_ranks(2, scalar, plan=sharding(1)) == [None, None]


def refused(mesh):
    try:
        parallelize(net(), mesh)
    except ValueError as error:
        return str(error)


@pytest.mark.parametrize(("options", "words"), [
    ({"compression": "fp16"}, "sharding.zero=3 has none; set gradient.compression=none, or sharding.zero=1"),
    ({"sharding": {"offload": True}}, "the device is the CPU already"),
    ({"sharding": {"units": ["7x"]}}, "which no module of Sequential fits"),
])  # fmt: skip
def test_what_cannot_be_is_refused_on_every_rank(options, words):
    for said in on_ranks(2, refused, plan=Plan(shard=2, **options)):
        assert words in said
