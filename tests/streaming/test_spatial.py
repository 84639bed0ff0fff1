"""A stream on several ranks: inside of tiles in space, under DDP and FSDP2, with statistics over copies of the model."""

from __future__ import annotations

import copy

import pytest
import torch
from devices import on_gpu_too
from marks import LONG_ON_CPU, few
from ranks import on_ranks
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_leaves
from zoo.models import MODELS

import widefield as wf
from widefield.plans import Plan
from widefield.verification.verdict import NOISE, TOLERANCE


def tensors_of(value) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)]


def worst(found, expected, scale: float = 0.0) -> float:
    """Largest difference relative to the largest expected value, or to `scale` if that is more."""
    return ((found - expected).abs().max() / max(expected.abs().max().item(), scale, 1e-300)).item()


def made(name: str) -> tuple[torch.nn.Module, torch.nn.Module, torch.Tensor]:
    """A model, a copy of it, and an image of a batch that all ranks have alike."""
    torch.manual_seed(0)
    model = MODELS[name].make().double().train()
    return model, copy.deepcopy(model), torch.randn(MODELS[name].shape, dtype=torch.float64)


def errors_of(mesh, alone, streamed) -> dict[str, float]:
    """Of every parameter's gradient, as the mean over ranks, and of every buffer."""
    largest = max(p.grad.abs().max().item() for p in alone.parameters() if p.grad is not None)
    found = {}
    for (name, expected), got in zip(alone.named_parameters(), streamed.parameters(), strict=True):
        if expected.grad is not None:
            whole = got.grad.full_tensor() if hasattr(got.grad, "full_tensor") else got.grad
            mean = mesh.sum_(whole.clone()) / mesh.size
            found[f"gradient {name}"] = worst(mean, expected.grad, NOISE * largest)
    for (name, expected), got in zip(alone.named_buffers(), streamed.buffers(), strict=True):
        found[f"buffer {name}"] = worst(got.double(), expected.double(), 1.0)
    return found


def in_space(mesh, name: str, tiles: tuple[int, ...]) -> dict[str, float]:
    alone, cut, image = made(name)
    wf.stream(cut, tiles=tiles)
    whole, part = image.clone().requires_grad_(), image.clone().requires_grad_()
    torch.manual_seed(1)
    expected = tensors_of(alone(whole))
    torch.manual_seed(1)
    got = [wf.whole(out) for out in tensors_of(cut(wf.tile(part, mesh)))]
    found = {f"output {n}": worst(a.detach(), b.detach()) for n, (a, b) in enumerate(zip(got, expected, strict=True))}
    torch.manual_seed(2)
    weights = [torch.randn_like(out) for out in expected]
    torch.autograd.backward(expected, weights)
    sum((out * weight).sum() for out, weight in zip(got, weights, strict=True)).backward()
    return found | {"gradient of the image": worst(part.grad, whole.grad)} | errors_of(mesh, alone, cut)


def check(found: dict[str, float]) -> None:
    assert found and {name: error for name, error in found.items() if not error <= TOLERANCE} == {}


@on_gpu_too
@pytest.mark.parametrize(
    "name",
    few(["widefield/unet batch", "widefield/unet group", "timm/resnet18", "timm/seresnet33ts", "timm/convnext_atto",
         "timm/swin_tiny", "smp/DeepLabV3Plus", "smp/PSPNet", "DCGAN generator", "DCGAN discriminator"],
        "widefield/unet batch", "DCGAN generator", then=["timm/convnext_atto", "timm/seresnet33ts", "smp/DeepLabV3Plus"],
        is_sweep=True),
)  # fmt: skip
def test_a_stream_inside_of_tiles_in_space_is_exact(name):
    check(on_ranks(2, in_space, name, (2, 2), plan=Plan(space=[2, 1]), timeout_seconds=300)[0])


@pytest.mark.long
def test_a_stream_inside_of_a_volume_s_tiles_is_exact():
    check(on_ranks(2, in_space, "monai/SegResNet 3-D", (2, 2, 1), plan=Plan(space=[2, 1, 1]), timeout_seconds=300)[0])


@pytest.mark.long
@pytest.mark.parametrize("name", few(["widefield/unet batch", "timm/resnet18"], "widefield/unet batch"))
def test_a_stream_inside_of_two_by_two_tiles_is_exact(name):
    check(on_ranks(4, in_space, name, (2, 2), plan=Plan(space=[2, 2]), timeout_seconds=300)[0])


OF_FSDP2 = ("FSDP2", "FSDP2, streams inside")


def over_data(mesh, name: str, wrap: str) -> dict[str, float]:
    """Each rank has one image of a batch."""
    alone, streamed, _ = made(name)
    torch.manual_seed(3)
    batch = torch.randn(mesh.size, *MODELS[name].shape[1:], dtype=torch.float64)
    alone(batch).square().mean().backward()
    if wrap == "FSDP2, streams inside":
        for part in streamed.down:
            fully_shard(wf.stream(part, tiles=(2, 2)))
        fully_shard(streamed)
    else:
        wf.stream(streamed, tiles=(2, 2))
    if wrap == "DDP":
        call = DistributedDataParallel(streamed)
    elif wrap == "FSDP2":
        call = fully_shard(streamed)
    else:
        call = wf.parallelize(streamed, mesh) if wrap == "parallelize" else streamed
    call(batch[mesh.rank : mesh.rank + 1]).square().mean().backward()
    return errors_of(mesh, alone, streamed)


@on_gpu_too
@pytest.mark.parametrize("wrap", ["DDP", *(pytest.param(name, marks=pytest.mark.cpu) for name in OF_FSDP2)])
def test_under_ddp_and_fsdp2_gradients_are_the_whole_batch_s(wrap):
    check(on_ranks(2, over_data, "widefield/unet group", wrap, plan=Plan(replicate=2), timeout_seconds=300)[0])


@LONG_ON_CPU
@on_gpu_too
def test_batch_statistics_are_those_of_all_copies():
    check(on_ranks(2, over_data, "widefield/unet batch", "parallelize", plan=Plan(replicate=2), timeout_seconds=300)[0])


def over_both(mesh, name: str) -> dict[str, float]:
    """Copies of the model, each over two tiles in space, each of these streamed."""
    alone, streamed, _ = made(name)
    torch.manual_seed(3)
    batch = torch.randn(mesh.copies, *MODELS[name].shape[1:], dtype=torch.float64)
    alone(batch).square().mean().backward()
    call = wf.parallelize(wf.stream(streamed, tiles=(2, 2)), mesh)
    image = batch[mesh.copy : mesh.copy + 1]
    call(wf.tile(image, mesh)).square().mean().backward()
    return errors_of(mesh, alone, streamed)


@pytest.mark.long
def test_batch_statistics_over_copies_and_tiles_in_space_are_the_whole_batch_s():
    check(on_ranks(4, over_both, "widefield/unet batch", plan=Plan(replicate=2, space=[2, 1]), timeout_seconds=300)[0])
