"""Do nets on tiles train as on one device, together with everything else that people use?"""

from __future__ import annotations

import copy
import re
import warnings
from functools import partial

import devices
import pytest
import torch
from devices import on_gpu_too
from marks import few
from ranks import on_ranks
from torch import nn
from torch.nn import functional as F

import widefield as wf
from widefield.comm.halo import TRAFFIC
from widefield.config import ModelConfig
from widefield.geometry.layout import Grid
from widefield.models import build
from widefield.plans import Plan
from widefield.tiled.tensor import TiledTensor

close = partial(torch.testing.assert_close, rtol=1e-10, atol=1e-10)  # float64; sums of 1e4 products in another order
SIZE = (2, 3, 43, 38)


def unet(norm: str = "batch", dtype: torch.dtype = torch.float64) -> nn.Module:
    torch.manual_seed(0)
    options = {"widths": [4, 8, 16], "norm": norm}
    return build(ModelConfig(name="unet", options=options), in_channels=3, num_classes=4).to(dtype)


def convs() -> nn.Module:
    torch.manual_seed(0)
    body = [nn.Conv2d(3, 8, 3, 2, 1), nn.SiLU(), nn.Dropout(0.3), nn.Conv2d(8, 8, 5, 1, 4, 2), nn.SiLU()]
    return nn.Sequential(*body, nn.ConvTranspose2d(8, 4, 3, 2, 1, (0, 1))).double()


def batch(step: int = 0, dtype: torch.dtype = torch.float64, size=SIZE):
    draw = torch.Generator().manual_seed(step)
    image = torch.randn(size, generator=draw, dtype=torch.float64).to(dtype)
    return image, torch.randint(0, 4, (size[0], *size[2:]), generator=draw)


def averaged(mesh, model) -> dict:
    """Gradients as DDP would leave them."""
    return {name: mesh.sum_(wf.whole(p.grad).clone()) / mesh.size for name, p in model.named_parameters() if p.grad is not None}


def gradients(model) -> dict:
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


# ---------------------------------------------------------------------------------------------- training


def three_steps(mesh, norm, cuts):
    alone, model = unet(norm), wf.parallelize(unet(norm), mesh)
    one, many = (torch.optim.SGD(m.parameters(), 0.1, momentum=0.9) for m in (alone, model))
    share = SIZE[0] // mesh.copies
    mine = slice(mesh.copy * share, (mesh.copy + 1) * share)
    for number in range(3):
        image, target = batch(number)
        one.zero_grad()
        many.zero_grad()
        expected = F.cross_entropy(alone(image), target)
        expected.backward()
        tiled = partial(wf.tile, mesh=mesh, cuts=cuts)
        output = model(tiled(image[mine]))
        loss = F.cross_entropy(output, tiled(target[mine]))
        assert output.shape == (share, 4, *SIZE[2:]) and type(loss) is torch.Tensor and loss.ndim == 0
        loss.backward()
        assert all(type(p.grad) is torch.Tensor for p in model.parameters())
        close(mesh.sum_(loss.detach().clone()) / mesh.size, expected.detach())
        close(gradients(model), gradients(alone))
        one.step()
        many.step()
    close(dict(model.state_dict()), dict(alone.state_dict()))


PLANS = [
    (Plan(space=[2, 1]), None),
    (Plan(space=[1, 2]), [None, [0, 5, 38]]),
    (Plan(space=[3, 1]), [[0, 10, 31, 43], None]),
    (Plan(space=[2, 2]), None),
    (Plan(space=[4, 1]), None),
    (Plan(replicate=2, space=[2, 1]), None),
]


@on_gpu_too
@pytest.mark.parametrize(("plan", "cuts"), PLANS, ids=[f"{p.replicate} x {p.space} {c}" for p, c in PLANS])
@pytest.mark.parametrize("norm", ["batch", pytest.param("group", marks=pytest.mark.cpu)])
def test_three_steps_on_tiles_equal_one_device(plan, cuts, norm):
    on_ranks(plan.ranks, three_steps, norm, cuts, plan=plan)


def image_gradient(mesh):
    image, target = batch()
    whole, cut = image.clone().requires_grad_(), image.clone().requires_grad_()
    F.cross_entropy(unet()(whole), target).backward()
    F.cross_entropy(unet()(wf.tile(cut, mesh)), wf.tile(target, mesh)).backward()
    close(cut.grad, whole.grad)
    own = wf.window(SIZE, mesh)
    mine = image[own].clone().requires_grad_()
    F.cross_entropy(unet()(wf.from_tile(mine, mesh, SIZE)), wf.tile(target, mesh)).backward()
    close(mine.grad, whole.grad[own])


@on_gpu_too
def test_the_images_gradient_is_whole_on_every_rank_and_a_tiles_is_its_part():
    on_ranks(2, image_gradient, plan=Plan(space=[2, 1]))


# ---------------------------------------------------------------------------------------------- beside other things


def one_pass(mesh, change, tolerance=1e-10, dtype=torch.float64, make=unet):
    """`change(model)` gives what is called; gradients and outputs against one device with the same change."""
    image, target = batch(dtype=dtype)
    ran = []
    for place in (lambda x: x, partial(wf.tile, mesh=mesh)):
        model = make().to(dtype)
        torch.manual_seed(5)
        output = change(model)(place(image))
        loss = F.cross_entropy(output.float() if output.dtype.itemsize < 4 else output, place(target))
        loss.backward()
        ran.append((wf.whole(output).detach(), gradients(model) if place(image) is image else averaged(mesh, model)))
    torch.testing.assert_close(ran[1], ran[0], rtol=tolerance, atol=tolerance)


def checkpointed(model, use_reentrant):
    from torch.utils.checkpoint import checkpoint

    return lambda x: checkpoint(model, x.detach().requires_grad_(), use_reentrant=use_reentrant)


@on_gpu_too
@pytest.mark.parametrize("use_reentrant", [False, pytest.param(True, marks=pytest.mark.cpu)])
@pytest.mark.parametrize("make", [unet, convs])
def test_activation_checkpointing_with_the_same_draws(make, use_reentrant):
    on_ranks(2, checkpointed_pass, make, use_reentrant, plan=Plan(space=[2, 1]))


def checkpointed_pass(mesh, make, use_reentrant):
    one_pass(mesh, partial(checkpointed, use_reentrant=use_reentrant), make=make)


def under_autocast(mesh, dtype, tolerance):
    def change(model):
        def call(x):
            with torch.autocast(devices.here().type, dtype):
                return model(x)

        return call

    one_pass(mesh, change, tolerance=tolerance, dtype=torch.float32)


@on_gpu_too
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.bfloat16, 3e-2), (torch.float16, 4e-3)], ids=str)
def test_autocast(dtype, tolerance):  # a rounding step of each format, a few layers deep
    on_ranks(2, under_autocast, dtype, tolerance, plan=Plan(space=[2, 1]))


def channels_last(mesh):
    image, _ = batch()
    net = unet().to(memory_format=torch.channels_last)
    image = image.to(memory_format=torch.channels_last)
    output = net(wf.tile(image, mesh))
    last = net(image).is_contiguous(memory_format=torch.channels_last)  # not on a GPU, whose convolutions of float64 keep none
    assert output.local.is_contiguous(memory_format=torch.channels_last) == last == (devices.here().type == "cpu")
    one_pass(mesh, lambda model: lambda x: model.to(memory_format=torch.channels_last)(x.to(memory_format=torch.channels_last)))


@on_gpu_too
def test_channels_last_is_kept():
    on_ranks(2, channels_last, plan=Plan(space=[2, 1]))


def accumulated(mesh):
    model = wf.parallelize(unet("group"), mesh)
    alone = unet("group")
    from widefield.parallel.strategies.data import without_sync

    image, target = batch()
    for sample in (slice(0, 1), slice(1, 2)):
        F.cross_entropy(alone(image[sample]), target[sample]).backward()
    with without_sync(model):
        F.cross_entropy(model(wf.tile(image[:1], mesh)), wf.tile(target[:1], mesh)).backward()
    F.cross_entropy(model(wf.tile(image[1:], mesh)), wf.tile(target[1:], mesh)).backward()
    close(gradients(model), gradients(alone))


def test_gradient_accumulation():
    on_ranks(2, accumulated, plan=Plan(space=[2, 1]))


def hooks_and_modes(mesh):
    net, (image, _) = unet(), batch()
    seen = []
    net.down[1].register_forward_hook(lambda module, inputs, output: seen.append(output.shape))
    net.down[1].register_full_backward_hook(lambda module, given, got: seen.append(got[0].shape))
    net(wf.tile(image, mesh)).square().sum().backward()
    assert seen == [(2, 8, 21, 19), (2, 8, 21, 19)], seen
    net.eval()
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            close(wf.whole(net(wf.tile(image, mesh))), net(image))
    copied = copy.deepcopy(wf.tile(image, mesh))
    assert type(copied) is TiledTensor and torch.equal(wf.whole(copied), image)
    wrapped = wf.parallelize(unet(), mesh)
    assert list(wrapped.state_dict()) == list(unet().state_dict())
    assert type(copy.deepcopy(wrapped)) is type(unet())


def test_hooks_modes_copies_and_names():
    on_ranks(2, hooks_and_modes, plan=Plan(space=[2, 1]))


def fully_sharded(mesh, low):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    dtype = torch.float32 if low else torch.float64
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32) if low else MixedPrecisionPolicy()
    devices = init_device_mesh("cpu", (mesh.size,))
    alone, model = unet("group", dtype), unet("group", dtype)
    for block in [*model.down, *model.up]:
        fully_shard(block, mesh=devices, mp_policy=policy)
    fully_shard(model, mesh=devices, mp_policy=policy)
    image, target = batch(dtype=dtype)
    expected = F.cross_entropy(alone(image), target)
    expected.backward()
    loss = F.cross_entropy(model(wf.tile(image, mesh)).to(dtype), wf.tile(target, mesh))
    loss.backward()
    tolerance = 3e-2 if low else 1e-10
    got = {name: p.grad.full_tensor() for name, p in model.named_parameters()}
    torch.testing.assert_close((loss, got), (expected, gradients(alone)), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("low", [False, True], ids=["float64", "mixed precision"])
def test_fsdp2_per_block_over_the_same_ranks(low):
    on_ranks(2, fully_sharded, low, plan=Plan(space=[2, 1]))


def compiled(mesh, backend):
    torch._dynamo.reset()
    torch._dynamo.config.force_parameter_static_shapes = True
    image, target = batch()
    alone, model = unet(), unet()
    call = torch.compile(model, fullgraph=True, backend=backend, dynamic=False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's compiler warns of its own doings
        loss = F.cross_entropy(call(wf.tile(image, mesh)), wf.tile(target, mesh))
        loss.backward()
    F.cross_entropy(alone(image), target).backward()
    close(averaged(mesh, model), gradients(alone))


@pytest.mark.long
@pytest.mark.parametrize("backend", few(["aot_eager", "inductor"], "aot_eager", is_sweep=True))
def test_a_compiled_model_is_one_graph_and_exact(backend):
    on_ranks(2, compiled, backend, plan=Plan(space=[2, 1]), timeout_seconds=400)


def penalized(mesh):
    """WGAN-GP's gradient penalty (arXiv:1704.00028): the norm of the gradient at the image, itself differentiated."""
    torch.manual_seed(0)
    critic = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.SiLU(), nn.Conv2d(8, 8, 4, 2, 1), nn.InstanceNorm2d(8), nn.SiLU(), nn.AvgPool2d(2),
        nn.Conv2d(8, 1, 3),
    ).double()  # fmt: skip

    def penalty(net, leaf, taken=lambda tensor: tensor):
        leaf = leaf.detach().requires_grad_()
        (slope,) = torch.autograd.grad(net(taken(leaf)).sum(), leaf, create_graph=True)
        loss = (taken(slope).flatten(1).norm(2, dim=1) - 1).square().mean()
        loss.backward()
        return loss.detach()

    image, _ = batch()
    own = image[wf.window(image.shape, mesh)]
    gathers = nn.Sequential(*critic[:-1], Gathered(), nn.Conv2d(8, 1, 3), nn.Tanh()).double()
    taking = [
        (critic, wf.tile(image, mesh), lambda tensor: tensor),
        (gathers, image, lambda tensor: wf.tile(tensor, mesh)),
        (gathers, own, lambda tensor: wf.from_tile(tensor, mesh, image.shape)),
    ]
    for net, leaf, taken in taking:
        alone, cut = copy.deepcopy(net), copy.deepcopy(net)
        close(penalty(cut, leaf, taken), penalty(alone, image))
        close(averaged(mesh, cut), gradients(alone))


class Gathered(nn.Module):
    def forward(self, x):
        return wf.whole(x.sin())


@pytest.mark.parametrize("space", [[2, 1], [2, 2]], ids=str)
def test_a_gradient_penalty_differentiates_twice(space):
    plan = Plan(space=space)
    on_ranks(plan.ranks, penalized, plan=plan)


# ---------------------------------------------------------------------------------------------- messages


def chain_bytes(mesh):
    """A chain of 3x3 convolutions: each sends one row up or down, forward its input's and backward its output's."""
    channels, (_, _, _, width) = 8, SIZE
    net = nn.Sequential(*[nn.Conv2d(3 if n == 0 else channels, channels, 3, padding=1) for n in range(4)]).double()
    image, _ = batch()
    TRAFFIC.clear()
    output = net(wf.tile(image, mesh))
    forward = TRAFFIC.pixel_bytes
    output.backward(torch.ones_like(output))
    row = SIZE[0] * width * 8
    return forward - row * (3 + 3 * channels), TRAFFIC.pixel_bytes - forward - row * 3 * channels, TRAFFIC.pixel_messages


def test_a_chain_of_convolutions_sends_a_row_each_way_and_nothing_for_the_images_gradient():
    assert on_ranks(2, chain_bytes, plan=Plan(space=[2, 1])) == [(0, 0, 7)] * 2


def largest_share(mesh, norm):
    """Of any exchange in a step, how much of what a rank then has came from others; an all-gather on 2 ranks gives 1/2."""
    model, (image, target) = unet(norm), batch(size=(1, 3, 128, 96))
    TRAFFIC.clear()
    F.cross_entropy(model(wf.tile(image, mesh)), wf.tile(target, mesh)).backward()
    return TRAFFIC.largest_share


@pytest.mark.parametrize("norm", ["batch", "group"])
def test_a_unets_step_gathers_no_activation(norm):
    assert max(on_ranks(2, largest_share, norm, plan=Plan(space=[2, 1]))) < 0.1


def test_without_space_axes_images_stay_as_they_are():
    image, mesh = batch()[0], wf.build_mesh()
    assert wf.tile(image, mesh) is image and wf.from_tile(image, mesh, SIZE) is image and wf.whole(image) is image


# ---------------------------------------------------------------------------------------------- refusals


def refused(mesh, what):
    image, _ = batch()
    try:
        {
            "an operation without a rule": lambda: torch.linalg.svd(wf.tile(image, mesh)),
            "a data-dependent shape": lambda: wf.tile(image, mesh)[wf.tile(image, mesh) > 0],
            "a wrong cut": lambda: wf.tile(image, mesh, cuts=[[0, 50, 43], None]),
            "a wrong tile": lambda: wf.from_tile(image, mesh, SIZE),
            "one size for two dims": lambda: wf.tile(image, type(mesh)(**vars(mesh) | {"grid": Grid((2,), mesh.grid.index)})),
            "a pickle": lambda: __import__("pickle").dumps(wf.tile(image, mesh)),
        }[what]()
    except (NotImplementedError, ValueError) as error:
        return str(error)


REFUSALS = {
    "an operation without a rule": "svd.*cannot run on an image cut into tiles.*test_space.py",
    "a data-dependent shape": r"a mask of shape \[2, 3, 43, 38\] that is cut into tiles cannot pick pixels",
    "a wrong cut": r"\[0, 50, 43\] of dim 2 does not fit: 43 px",
    "a wrong tile": "holds a tile of .* read the window",
    "one size for two dims": r"mesh.space=\[2\] has one size .* as \[2, 1\]",
    "a pickle": "cannot be pickled",
}


@pytest.mark.parametrize("what", REFUSALS)
def test_what_is_not_covered_refuses_in_words_on_every_rank(what):
    words = on_ranks(2, refused, what, plan=Plan(space=[2, 1]))
    assert all(text is not None and re.search(REFUSALS[what], text) for text in words), words
