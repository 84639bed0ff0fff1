"""Do models cut by their channels give one device's numbers, and is what is told of the cut true?"""

from __future__ import annotations

import copy
import io
from unittest import mock

import devices
import pytest
import timm
import torch
import torchvision
from devices import on_gpu_too
from marks import LONG_ON_CPU, few
from ranks import on_ranks
from torch import nn

from widefield.capture.interpreter import override_of
from widefield.comm import collectives
from widefield.config import RecomputeConfig, StreamConfig
from widefield.fallback import Fallback
from widefield.parallel.parallelize import fallbacks, parallelize, reasons
from widefield.parallel.strategies.channel import CASES
from widefield.plans import Plan, check
from widefield.tensor_parallel import search
from widefield.verification.training import compare_training


def layers() -> nn.Module:
    """Draws, activations with a weight, halves, groups, a head that few channels have."""
    return nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.Dropout(0.3), nn.PReLU(8), nn.ConvTranspose2d(8, 12, 2, 2), nn.GroupNorm(4, 12), nn.GLU(1),
        nn.Dropout2d(0.2), nn.Conv2d(6, 6, 1, groups=2), nn.PReLU(), nn.InstanceNorm2d(6, affine=True), nn.Conv2d(6, 2, 1),
    )  # fmt: skip


def dense() -> nn.Module:
    return torchvision.models.DenseNet(8, (2, 2), 16, num_classes=10)


NETS = {
    "layers": (layers, (2, 3, 20, 20)),
    "densenet": (dense, (2, 3, 40, 33)),
    "mobilenet": (lambda: timm.create_model("mobilenetv3_small_050", num_classes=10), (2, 3, 64, 64)),
    "regnet": (lambda: timm.create_model("regnety_002", num_classes=10), (2, 3, 64, 64)),
    "shufflenet": (lambda: torchvision.models.shufflenet_v2_x0_5(num_classes=10), (2, 3, 64, 64)),
    "resnext": (lambda: torchvision.models.resnext50_32x4d(num_classes=10), (2, 3, 64, 64)),
    "torchvision vit": (
        lambda: torchvision.models.VisionTransformer(32, 8, 2, 4, 32, 48, num_classes=10, dropout=0.1), (2, 3, 32, 32)
    ),
    "swin": (
        lambda: timm.create_model("swin_tiny_patch4_window7_224", img_size=56, depths=(2, 2), num_heads=(4, 8), embed_dim=32,
                                  num_classes=10, drop_path_rate=0.1),
        (2, 3, 56, 56),
    ),
    "three heads": (
        lambda: timm.create_model("vit_tiny_patch16_224", img_size=32, patch_size=8, depth=1, num_classes=10), (2, 3, 32, 32)
    ),
}  # fmt: skip


def made(name: str) -> tuple[nn.Module, tuple[int, ...]]:
    torch.manual_seed(0)
    make, shape = NETS[name]
    model = make()
    for parameter in model.parameters():
        if parameter.ndim and not parameter.any():
            nn.init.normal_(parameter, std=0.1)
    return model, shape


def every_layer():
    """Small nets are cut as large ones are: every layer that can be."""
    return mock.patch.multiple(search, WEIGHT_COST=1e5, WEIGHT_LEAST=0)


def one_step(mesh, name):
    model, shape = made(name)
    with every_layer():  # a deep net's BatchNorms of few values make rounding large from step to step
        return compare_training(model, shape, mesh, steps=1)


@LONG_ON_CPU
@on_gpu_too
@pytest.mark.parametrize(
    ("size", "name"),
    few(
        [*((2, name) for name in NETS), (3, "layers"), (3, "shufflenet"), (3, "swin")],
        (2, "layers"), (2, "densenet"), (2, "torchvision vit"), then=[(3, "swin")], is_sweep=True,
    ),
)  # fmt: skip
def test_a_step_of_whole_models_equals_one_devices(size, name):
    verdict = on_ranks(size, one_step, name, plan=Plan(channel=size), timeout_seconds=300)[0]
    assert verdict.ok, str(verdict)
    assert "left whole" not in verdict.reasons[0] or (name == "layers" and size == 3), verdict.reasons


FLOAT32 = {"cpu": 3e-6, "cuda": 1e-5}
"""Of the largest value.  A GPU adds up products in the order of its blocks: as for the mixes of strategies."""


def in_low_precision(mesh, low):
    model, shape = made("three heads")
    with every_layer():  # of one step: each further one makes rounding several times as large, on one device too
        tolerance = FLOAT32[devices.here().type] if low is None else 0.05
        return compare_training(model, shape, mesh, dtype=torch.float32, low=low, tolerance=tolerance, steps=1)


@on_gpu_too
@pytest.mark.parametrize("low", [None, torch.bfloat16], ids=["float32", "bfloat16"])
def test_low_precision_differs_by_its_rounding(low):
    """float32: FLOAT32 of the largest value; autocast to bfloat16 (2**-8): sums of parts are rounded once more, 0.05."""
    verdict = on_ranks(2, in_low_precision, low, plan=Plan(channel=2), timeout_seconds=300)[0]
    assert verdict.ok, str(verdict)


# ---------------------------------------------------------------------------------------------- what ranks hold and send


def resnet() -> nn.Module:
    return timm.create_model("resnet18", num_classes=10)


def held_bytes(mesh):
    """Of weights, gradients and Adam's state on this rank, as a share of one device's."""
    model, whole = resnet(), resnet()
    parallelize(model, mesh, sample=torch.empty(2, 3, 64, 64, device="meta"))
    model(torch.randn(2, 3, 64, 64)).square().sum().backward()
    optimizer = torch.optim.AdamW(model.parameters())
    optimizer.step()
    mine = sum(p.nbytes + p.grad.nbytes + sum(t.nbytes for t in optimizer.state[p].values()) for p in model.parameters())
    return mine / sum(4 * p.nbytes for p in whole.parameters()), reasons(model)[0]


def test_two_ranks_hold_at_most_0_55_of_weights_gradients_and_optimizer_state():
    for share, told in on_ranks(2, held_bytes, plan=Plan(channel=2)):
        assert 0.5 < share <= 0.505
        assert "2 ranks share 21 layers" in told and "each holds 50% of the weights, replicates 0% of the work" in told


def sent_bytes(mesh):
    """What the plan says is sent in a pass, and what is."""
    model, shape = made("torchvision vit")
    with every_layer():
        parallelize(model, mesh, sample=torch.empty(shape, device="meta"))
        sent = 0
        reduce, gather = torch.distributed.all_reduce, collectives.all_gather_single

        def all_reduce(tensor, **kwargs):
            nonlocal sent
            sent += 2 * tensor.nbytes
            return reduce(tensor, **kwargs)

        def all_gather(out, tensor, *args, **kwargs):
            nonlocal sent
            sent += out.nbytes * tensor.is_floating_point()  # but for where generators stand
            return gather(out, tensor, *args, **kwargs)

        with (
            mock.patch.object(torch.distributed, "all_reduce", all_reduce),
            mock.patch.object(collectives, "all_gather_single", all_gather),
        ):
            model(torch.randn(shape)).square().sum().backward()
    return sent, override_of(model).initial.sent_bytes


def test_as_many_bytes_are_sent_as_the_plan_says():
    for sent, told in on_ranks(2, sent_bytes, plan=Plan(channel=2)):
        assert sent == told > 0


def copied(mesh):
    model, shape = made("layers")
    with every_layer():
        parallelize(model, mesh, sample=torch.empty(shape, device="meta"))
        model.eval()
        out = model(torch.zeros(shape))
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    twice = copy.deepcopy(copy.deepcopy(model))
    found = [(override_of(one) is None, type(one).__name__, _said_by(one, torch.zeros(shape))) for one in (loaded, twice)]
    try:
        parallelize(twice, mesh, sample=torch.empty(shape, device="meta"))
    except ValueError as error:
        found.append(str(error))
    return found, type(model).__name__, list(out.shape)


def _said_by(model, x):
    try:
        return model(x)
    except RuntimeError as error:
        return str(error)


@pytest.mark.parametrize("axis", ["channel", "stage"])
def test_a_copy_and_a_pickle_have_one_ranks_part_and_compute_nothing(axis):
    for (loaded, copied_, again), name, shape in on_ranks(2, copied, plan=Plan(**{axis: 2}, independent=True)):
        for is_laid_out, kind, said in (loaded, copied_):
            assert is_laid_out and kind == "Sequential"
            assert said.startswith("this Sequential is a copy of what one rank has of a model in mesh.channel or mesh.stage")
        assert "Sequential is parallelized already and each rank holds a part of its weights" in again
        assert name == "Sequential" and shape == [2, 2, 36, 36]


# ---------------------------------------------------------------------------------------------- what is not cut


class Sorted(nn.Module):
    """Channels are sorted whole."""

    def forward(self, x):
        return x.sort(1).values


class Reused(nn.Module):
    """A weight that is cut is read once more, by an operation that wants all of it."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Conv2d(3, 8, 3)

    def forward(self, x):
        return self.layer(x) + self.layer.weight.sort(0).values.sum()


def told_of(mesh, model):
    with every_layer():
        parallelize(model, mesh, sample=torch.empty(2, 3, 12, 12, device="meta"))
    return fallbacks(model), reasons(model)


def test_values_that_are_gathered_are_named_with_their_reader_and_their_bytes():
    model = nn.Sequential(nn.Conv2d(3, 8, 3), Sorted(), nn.Conv2d(8, 6, 3))
    for found, told in on_ranks(2, told_of, model, plan=Plan(channel=2)):
        first, *others = found
        why = "its rule wants dim 1 whole"
        assert first == Fallback("gathered", "1", "sort", 2 * 8 * 10 * 10 * 4, why)
        assert all((one.kind, one.module, one.operation) == ("gathered", "", "output") for one in others)
        assert f"gathered: 1's sort (6 KiB): {why}" in told
        assert any(reason.startswith("gathered: ") and " in all, in full on every rank" in reason for reason in told)


def test_a_weight_that_is_gathered_is_named():
    for found, _ in on_ranks(2, told_of, Reused(), plan=Plan(channel=2)):
        (one,) = [one for one in found if one.operation == "sort"]
        assert (one.kind, one.bytes) == ("gathered", 8 * 3 * 9 * 4)
        assert one.why == "the weight layer.weight is sharded, and it takes another shard, or the whole"


def test_masks_that_every_rank_draws_whole_are_named():
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Dropout(0.3), nn.Conv2d(8, 6, 3))
    for found, _ in on_ranks(2, told_of, model, plan=Plan(channel=2)):
        assert found == [Fallback("drawn whole", "1", "bernoulli_", 2 * 8 * 10 * 10 * 4)]


def left_whole(mesh):
    model = CASES[0].build()
    parallelize(model, mesh, sample=torch.empty(CASES[0].shape, device="meta"))
    return fallbacks(model), reasons(model)


def test_layers_that_are_left_whole_are_named_with_the_bytes_of_their_weights():
    for found, told in on_ranks(2, left_whole, plan=Plan(channel=2)):
        assert [(one.module, one.bytes) for one in found if one.kind == "left whole"] == [("6", 24 * 9 * 4), ("11", 24 * 3 * 4)]
        assert told[-1] == (
            "left whole: 2 operations, 1 KiB in all, on every rank, for cutting them would send more than it saves: "
            "6's convolution (864 bytes), 11's addmm (288 bytes)"
        )


def test_a_net_whose_channels_all_layers_share_has_nothing_to_tell():
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 6, 3))
    for found, _ in on_ranks(2, told_of, model, plan=Plan(channel=2)):
        assert found == []


# ---------------------------------------------------------------------------------------------- refusals


class Looks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Conv2d(3, 4, 1)

    def forward(self, image):
        return self.layer(image) if image.mean() > 0 else self.layer(-image)


def refused(mesh, sample):
    try:
        parallelize(Looks(), mesh, sample=sample)
    except (ValueError, NotImplementedError) as error:
        return str(error)


def test_a_model_that_depends_on_pixels_and_one_without_a_sample_are_refused():
    for said in on_ranks(2, refused, torch.empty(2, 3, 4, 4, device="meta"), plan=Plan(channel=2)):
        assert "Looks cannot be cut by channels: " in said
    for said in on_ranks(2, refused, None, plan=Plan(channel=2)):
        assert "give parallelize a sample, as torch.empty(2, 3, 64, 64)" in said


@pytest.mark.parametrize(("plan", "told"), [
    (Plan(channel=2, stream=StreamConfig(tiles=[2, 2])), "set stream=null and mesh.space=[2, 1] beside mesh.channel, or"),
    (Plan(channel=2, recompute=RecomputeConfig()), "its modules never called; set recompute=null, or mesh.channel=1"),
])  # fmt: skip
def test_what_cannot_be_mixed_is_refused_with_the_nearest_that_can(plan, told):
    with pytest.raises(NotImplementedError) as said:
        check(plan, ranks=2)
    assert told in str(said.value)


class Scaled(nn.Module):
    """What its forward gives depends on a number and a tensor that are neither parameters nor buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.factor, self.shift = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 3, 1), 2.0, torch.ones(3, 1, 1)

    def forward(self, x):
        return self.second(self.first(x).relu() * self.factor) + self.shift


def with_new_attributes(mesh):
    torch.manual_seed(0)
    model, x = Scaled(), torch.randn(2, 3, 9, 8)
    alone = copy.deepcopy(model)
    with every_layer():
        parallelize(model, mesh, sample=x)
    model.eval(), alone.eval()
    found = []
    for factor, shift in ((2.0, 1.0), (3.0, 1.0), (3.0, 5.0)):
        for net in (model, alone):
            net.factor, net.shift = factor, torch.full((3, 1, 1), shift)
        with torch.no_grad():
            found.append((model(x), alone(x)))
    return found


@pytest.mark.parametrize("axis", ["channel", "stage"])
def test_a_changed_attribute_counts_from_the_next_call_on(axis):
    for found in on_ranks(2, with_new_attributes, plan=Plan(**{axis: 2})):
        for ours, expected in found:
            torch.testing.assert_close(ours, expected)
        assert not torch.equal(found[0][1], found[1][1]) and not torch.equal(found[1][1], found[2][1])
