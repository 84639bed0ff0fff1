"""Are the bytes that kernels hold for themselves those that the allocator sees?  Every formula and guess beside the kernel."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from planner.allocations import allocations, mark
from torch import Tensor
from torch.nn import functional as F

from widefield.planner.emulation import kernel_memory
from widefield.planner.emulation.kernel_formulas import formula_bytes
from widefield.planner.emulation.kernel_memory import transient_bytes
from widefield.private_torch.dispatcher import TorchDispatchMode
from widefield.private_torch.pytree import tree_leaves


class Kernels(TorchDispatchMode):
    """Runs every operation once more under the profiler, and keeps what it held for itself.

    found: name, arguments, keyword arguments and bytes of each.
    """

    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[Any, tuple, dict, int]] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func.namespace == "profiler":  # a span that begins in one profiler and ends in another breaks both
            return func(*args, **kwargs)
        copies = [leaf.clone(memory_format=torch.preserve_format) for leaf in tree_leaves(args) if isinstance(leaf, Tensor)]
        with allocations() as seen, mark("kernel"):
            out = func(*args, **kwargs)
        del copies
        self.found.append((func, args, kwargs, seen.peak("kernel") - seen.after("kernel")))
        return out


def convolutions() -> Iterator[Any]:
    """Forward and backward of shapes that oneDNN, ATen's own kernels and both formats take."""
    for channels, out, size, kernel, stride, dilation, groups in [
        (3, 16, 17, 3, 1, 1, 1), (16, 24, 20, 3, 2, 1, 1), (24, 5, 16, 1, 1, 1, 1), (24, 24, 12, 7, 1, 1, 24),
        (32, 32, 9, 3, 1, 4, 1), (32, 48, 12, 3, 1, 1, 4), (16, 40, 14, 1, 2, 1, 1),
    ]:  # fmt: skip
        for last in (False, True):
            layer = torch.nn.Conv2d(channels, out, kernel, stride, kernel // 2 * dilation, dilation, groups)
            image = torch.randn(2, channels, size, size + 3, requires_grad=True)
            yield layer, image.to(memory_format=torch.channels_last) if last else image
    volume = torch.randn(2, 8, 9, 10, 11, requires_grad=True)
    yield torch.nn.Conv3d(8, 12, 3, padding=1), volume
    yield torch.nn.ConvTranspose3d(8, 6, 2, 2), volume
    yield torch.nn.Conv2d(8, 8, 3), torch.randn(1, 8, 6, 6, requires_grad=True)


def others() -> Iterator[Any]:
    image = torch.randn(2, 12, 10, 14, requires_grad=True)
    last = image.to(memory_format=torch.channels_last)
    volume = torch.randn(2, 4, 6, 6, 7, requires_grad=True)
    for module in (torch.nn.BatchNorm2d(12), torch.nn.GroupNorm(3, 12), torch.nn.InstanceNorm2d(12, affine=True)):
        yield from ((module, image), (module, last))
    yield torch.nn.BatchNorm2d(12), torch.randn(2, 12, 1, 1, requires_grad=True)
    yield torch.nn.BatchNorm3d(4), volume
    yield torch.nn.LayerNorm(12), image.permute(0, 2, 3, 1)
    yield torch.nn.LayerNorm([12, 10, 14]), image
    for module in (
        torch.nn.GELU(), torch.nn.PReLU(), torch.nn.SiLU(), torch.nn.Softmax(1), torch.nn.MaxPool2d(2),
        torch.nn.AvgPool2d(3, 2, 1), torch.nn.AdaptiveAvgPool2d(1), torch.nn.AdaptiveAvgPool2d(3),
        torch.nn.Upsample(scale_factor=2), torch.nn.Upsample(scale_factor=2, mode="bilinear"), torch.nn.LeakyReLU(),
        torch.nn.Linear(14, 5),
    ):  # fmt: skip
        yield from ((module, image), (module, last))
    yield torch.nn.Upsample(scale_factor=2, mode="trilinear"), volume
    yield torch.nn.MaxPool3d(2), volume
    yield lambda x: F.cross_entropy(x, torch.zeros(2, 10, 14, dtype=torch.long)), image
    yield lambda x: F.scaled_dot_product_attention(x, x, x), image
    yield lambda x: torch.cat([x, x * 2.5, x.mean((2, 3), keepdim=True).expand_as(x)], 1), image
    yield lambda x: F.embedding(torch.zeros(5, dtype=torch.long), x[0, 0]), image
    yield lambda x: F.pad(x[:, 2:9], (1, 2, 3, 4)).sum() / 3, image
    yield lambda x: x.double().mul(x).to(torch.bfloat16), image


def kernels_of(cases: Iterator[Any]) -> list[tuple[Any, tuple, dict, int]]:
    with Kernels() as kernels:
        for module, image in cases:
            out = module(image)
            out.backward(torch.ones_like(out))
    return kernels.found


def kernels_of_optimizers() -> list[tuple[Any, tuple, dict, int]]:
    with Kernels() as kernels:
        for make in (torch.optim.SGD, torch.optim.AdamW):
            for how in ({"fused": True}, {"foreach": True}, {"foreach": False}):
                weights = [torch.randn(4, 3, requires_grad=True), torch.randn(7, requires_grad=True)]
                momentum = {"momentum": 0.9} if make is torch.optim.SGD else {}
                optimizer = make(weights, lr=0.1, weight_decay=0.1, **how, **momentum)
                for weight in weights:
                    weight.grad = torch.ones_like(weight)
                torch.nn.utils.clip_grad_norm_(weights, 1.0, foreach=how.get("foreach"))
                optimizer.step()
    return kernels.found


@pytest.fixture(scope="module", params=[1, 2], ids=["1 thread", "2 threads"])
def threads(request):
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


@pytest.mark.long
def test_transient_bytes_are_what_the_allocator_saw(threads):
    found = kernels_of(convolutions()) + kernels_of(others()) + kernels_of_optimizers()
    assert len(found) > 500
    wrong = []
    for func, args, kwargs, seen in found:
        told = transient_bytes(str(func), args, kwargs, None, threads=threads)
        if told != seen:
            wrong.append(f"{func}: {told}, seen {seen}, of {[tuple(a.shape) for a in args if isinstance(a, Tensor)]}")
    assert not wrong, "\n".join(wrong[:20])
    by_formula = {
        str(func) for func, args, kwargs, _ in found if formula_bytes(str(func), func, args, kwargs, threads) is not None
    }
    assert {"aten.native_batch_norm_backward.default", "aten.native_layer_norm.default", "aten.silu.default"} <= by_formula


@pytest.mark.parametrize(
    ("channels", "out", "size", "kernel", "stride"),
    [(16, 16, (160, 160), 3, 1), (3, 32, (224, 224), 7, 2), (24, 48, (128, 128), 1, 2), (8, 16, (40, 40, 48), 3, 1)],
)
def test_a_convolution_too_large_to_run_is_drawn_through_two_smaller_ones(channels, out, size, kernel, stride, monkeypatch):
    layer = {2: torch.nn.Conv2d, 3: torch.nn.Conv3d}[len(size)](channels, out, kernel, stride, kernel // 2)
    image = torch.randn(2, channels, *size, requires_grad=True)
    ran = [(func, args, kwargs, seen) for func, args, kwargs, seen in kernels_of(iter([(layer, image)])) if "conv" in str(func)]
    assert len(ran) == 2
    monkeypatch.setattr(kernel_memory, "RUN_BYTES", 2**21)
    monkeypatch.setattr(kernel_memory, "_MEASURED", {})
    for func, args, kwargs, seen in ran:
        told = transient_bytes(str(func), args, kwargs, None)
        assert told == pytest.approx(seen, rel=0.05), f"{func} of {tuple(image.shape)}"


def test_what_is_not_known_is_told_as_such():
    zeros = torch.zeros(3, device="meta")
    assert transient_bytes("aten.add.Tensor", (zeros, zeros), {}, zeros) is None, "a device other than the CPU"
    assert transient_bytes("nobody.knows.default", (torch.zeros(3),), {}, None) is None
    assert transient_bytes("aten.linalg_inv_ex.default", (torch.zeros(5000, 5000),), {}, None) is None, "too large to run"
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):
        assert transient_bytes("aten.linalg_inv_ex.default", (torch.eye(3),), {}, None) is None, "in a profiler"


def test_running_a_kernel_leaves_the_generator_alone():
    torch.manual_seed(0)
    before = torch.get_rng_state()
    assert transient_bytes("aten.bernoulli.default", (torch.full((5,), 0.5),), {}, None) is not None
    assert torch.equal(torch.get_rng_state(), before)
