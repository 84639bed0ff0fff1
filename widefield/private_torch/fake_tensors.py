"""Tensors without data, and functionalization: how a module is captured, and how torch is asked for strides."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch._prims_common as prims_common
import torch._subclasses.fake_tensor as fake
import torch._subclasses.functional_tensor as functional
from torch import Tensor

FakeTensor = fake.FakeTensor
"""A tensor of a device, shape and strides without data: a module that is given one is being captured."""

FakeTensorMode = fake.FakeTensorMode
"""Inside, operations make fake tensors as the device's kernels would lay them out."""


class EmulatedFakeMode(fake.FakeTensorMode):
    """torch's fake tensors where a program runs on them as if they were real, and is not being captured.

    of_gpu: the program is that of a GPU, though the tensors say that they are a CPU's.
    torch's cache of what operations return is off: the emulation has its own, and keys to fill both take longer.
    """

    def __init__(self, *, of_gpu: bool = False, **options: Any) -> None:
        super().__init__(**options)
        self.of_gpu, self.cache_enabled = of_gpu, False

    @property
    def learns_shapes(self) -> bool:
        """Whether torch has entered this mode once more to learn shapes, as DTensor does for operations that are new to it."""
        return len(self.enter_stack) > 1


def is_captured(tensor: Any) -> bool:
    """Whether a tensor is one of those that a module is captured with."""
    if isinstance(tensor, fake.FakeTensor):
        return not isinstance(tensor.fake_mode, EmulatedFakeMode)
    return isinstance(tensor, functional.FunctionalTensor)


def is_emulated(tensor: Any) -> bool:
    """Whether a tensor has no numbers because a program is run on such tensors."""
    return isinstance(tensor, fake.FakeTensor) and isinstance(tensor.fake_mode, EmulatedFakeMode)


def runs_on_gpu(tensor: Tensor) -> bool:
    """Whether kernels of a GPU run on a tensor, or would where the program of a GPU is emulated."""
    return tensor.is_cuda or is_emulated(tensor) and tensor.fake_mode.of_gpu  # type: ignore[attr-defined]


def is_eager(tensor: Any) -> bool:
    """Whether kernels run on a tensor as it is: it is no subclass of this package's or a user's, and no compiler traces it."""
    return type(tensor) in (Tensor, torch.nn.Parameter) or is_emulated(tensor)


DataDependentOutputException = fake.DataDependentOutputException
"""Raised where a forward asks a fake tensor for its numbers."""

DynamicOutputShapeException = fake.DynamicOutputShapeException
"""Raised where the shape of what an operation gives depends on numbers."""

FunctionalTensor = functional.FunctionalTensor
"""A fake tensor whose writes in place become new tensors, so that a graph has none."""

FunctionalTensorMode = functional.FunctionalTensorMode
"""Inside, operations on functional tensors are turned into ones that write nothing."""

from_functional_tensor: Callable[[Any], Tensor] = torch._from_functional_tensor
"""The tensor inside of a functional one."""

sync: Callable[[Any], None] = torch._sync
"""Brings writes through views to the functional tensor that they show, before what is inside is looked at."""

suggest_memory_format: Callable[[Tensor], torch.memory_format] = prims_common.suggest_memory_format
"""Channels last or row-major, as kernels read it from a tensor's strides."""

FAKE_TENSOR_LOGGER = fake.__name__
"""The logger on which fake tensors print the errors that they raise, too."""
