"""On which device does a test run?  `@on_gpu_too` runs it once more on CUDA: the same body, on its ranks and in its process.

Tensors that tests make without naming a device lie on the test's device then.  Those that widefield makes lie where it says, so
that a tensor left on the CPU meets those of the GPU and is found.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._device import _device_constructors
from torch.utils._pytree import tree_map_only

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
on_gpu_too = pytest.mark.parametrize("device", DEVICES, indirect=True)
"""A mark for a test; its cases that are marked `cpu`, or `long` without `on_gpu`, stay on the CPU."""

on_gpu_alone = pytest.mark.parametrize("device", DEVICES[1:], indirect=True)
"""A mark for a test of what there is on a GPU alone."""

CURRENT = ["cpu"]
"""The kind of device of the test that runs now, last."""
_HERE = [torch.device("cpu")]
"""The device of the body that this process runs now, last."""

NOT_ON_GPUS = {
    ("losses", "mse of integers"): "Found dtype Long but expected Double",
    ("normalization", "batch, bias alone"): "tensor does not have a device",
    ("normalization", "evaluation, bias alone"): "tensor does not have a device",
    ("ordering", "aminmax"): "derivative for aten::aminmax is not implemented",  # torch 2.11
    ("sampling", "channel_shuffle, channels cut"): "view size is not compatible with input tensor's size and stride",
    ("products", "addmv of integers"): '"addmv_impl_cuda" not implemented for',
    ("normalization", "no update"): "batch_norm_cpu",  # torch 2.14 runs the CPU's kernel for it
    ("resize", "lanczos"): "aten::_upsample_lanczos2d_aa",
}
"""By family and beginning of the name, what torch itself cannot run on a GPU, and what it says then."""

TESTS, PACKAGE = (str(Path(__file__).parent) + os.sep, str(Path(__file__).parents[1] / "widefield") + os.sep)
MODELS = str(Path(PACKAGE) / "models") + os.sep


class OnDevice(TorchFunctionMode):
    """Inside, a tensor that a test makes lies on `device`, a model's that a test builds as well.

    What a generator on the CPU draws is drawn there and moved, so that the numbers are the same on every device.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.device = device

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        options = kwargs or {}
        if func not in _device_constructors() or options.get("device") is not None or not _is_of_a_test():
            return func(*args, **options)
        generator = options.get("generator")
        if generator is None or generator.device.type == self.device.type:
            return func(*args, **(options | {"device": self.device}))
        wants = options.pop("requires_grad", False)
        return func(*args, **options).to(self.device).requires_grad_(wants)


def _is_of_a_test() -> bool:
    """Whether the innermost frame that is neither torch's nor another library's is a test's."""
    frame = sys._getframe(2)
    while frame is not None:
        name = frame.f_code.co_filename
        if name.startswith(TESTS) and name != __file__:
            return True
        if name.startswith(PACKAGE) and not name.startswith(MODELS):
            return False
        frame = frame.f_back  # type: ignore[assignment]
    return False


@contextlib.contextmanager
def running_on(device: torch.device) -> Iterator[None]:
    """Run a test's body on a device.  A GPU then computes the same numbers every time, and float32 in float32."""
    if device.type == "cpu":
        yield
        return
    cudnn = torch.backends.cudnn
    before = cudnn.deterministic, cudnn.benchmark, cudnn.allow_tf32
    cudnn.deterministic, cudnn.benchmark, cudnn.allow_tf32 = True, False, False
    _HERE.append(device)
    try:
        with OnDevice(device):
            yield
    finally:
        _HERE.pop()
        cudnn.deterministic, cudnn.benchmark, cudnn.allow_tf32 = before


@contextlib.contextmanager
def without_gpus() -> Iterator[None]:
    """Inside, there is no GPU, in this process and in those that it starts."""
    if not torch.cuda.is_available():
        yield
        return
    none = mock.patch.multiple(torch.cuda, is_available=lambda: False, device_count=lambda: 0)
    with none, mock.patch.dict(os.environ, {"CUDA_VISIBLE_DEVICES": ""}):
        yield


def here() -> torch.device:
    """Where the body that runs now has its tensors."""
    return _HERE[-1]


def tensors_lie_here() -> contextlib.AbstractContextManager:
    """Inside, tensors lie where the body has its own, whoever makes them.

    On the CPU that needs no mode: under one, torch leaves the fast path of its attention layers.
    """
    return contextlib.nullcontext() if here().type == "cpu" else here()


def moved(nest: Any, device: torch.device | str) -> Any:
    """A nest with its tensors on a device; on the CPU, one without GPUs' tensors is as it was."""

    def there(tensor: Tensor) -> Tensor:
        if tensor.device.type in ("meta", torch.device(device).type):
            return tensor
        return tensor.detach().to(device).requires_grad_(tensor.requires_grad)

    return tree_map_only(Tensor, there, nest)


def close(found: Any, expected: Any, *, on_cpu: float = 1e-12) -> None:
    """Whether tensors in nests agree, wherever they lie: to `on_cpu`, and to 1e-10 on a GPU, which adds up in another order."""
    most = on_cpu if here().type == "cpu" else max(on_cpu, 1e-10)
    torch.testing.assert_close(found, expected, rtol=most, atol=most, check_device=False)
