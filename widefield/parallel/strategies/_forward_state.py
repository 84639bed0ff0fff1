"""What does a forward change besides its output?  Random states, buffers, and plain attributes of modules."""

from __future__ import annotations

import random
from collections.abc import Container, Iterator
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor, nn

from widefield.private_torch.modules import BatchNorm, buffers_of
from widefield.private_torch.tensors import version_counter

Place = tuple[int, str]
"""Of a buffer: the id of its module, and its name there."""
PLAIN = (bool, int, float, str, type(None))
"""Types of the plain attributes that are restored: a counter, a mode."""


def random_states(model: nn.Module) -> list[Tensor]:
    """The states of torch's generators, on the CPU and on the GPUs that the model may draw random numbers on."""
    return _random_of(_devices(model))


def _devices(model: nn.Module) -> list[torch.device]:
    """The GPUs with parameters of the model, and the current one, where a model without parameters, as Dropout, draws."""
    if not torch.cuda.is_initialized():
        return []
    own = torch.device("cuda", torch.cuda.current_device())
    return sorted({own, *(p.device for p in model.parameters() if p.is_cuda)}, key=str)


def _random_of(devices: list[torch.device]) -> list[Tensor]:
    return [torch.get_rng_state(), *(torch.cuda.get_rng_state(device) for device in devices)]


class ForwardState:
    """Random states, buffers and plain attributes of modules before a forward."""

    def __init__(self, model: nn.Module) -> None:
        self.devices = _devices(model)
        self.random, self.of_python, self.of_numpy = _random_of(self.devices), random.getstate(), np.random.get_state()
        parts = list(model.modules())
        held: list[tuple[nn.Module, str, Tensor]] = [
            (part, name, buffer) for part in parts for name, buffer in buffers_of(part).items() if buffer is not None
        ]
        self.buffers = [(part, name, buffer, version_counter(buffer)) for part, name, buffer in held]
        self.values = [buffer.detach().clone() for *_, buffer in held]
        self.attributes = [(part, part.__dict__.copy()) for part in parts]

    def has_changed(self, *, by_value: bool = False, apart_from: Container[Place] = ()) -> bool:
        """Whether torch drew random numbers, or a buffer was written other than a BatchNorm's, which are synchronized.

        Python's and numpy's generators do not count: what they decide is the same for a batch and for its parts.
        by_value: compare the values of buffers, too, since `F.batch_norm` does not increase their version.
        apart_from: buffers that may be written.
        """
        return self.has_drawn() or any(
            buffers_of(part).get(name) is not buffer
            or version_counter(buffer) != version
            or by_value
            and not torch.equal(buffer, value)
            for (part, name, buffer, version), value in zip(self.buffers, self.values, strict=True)
            if not isinstance(part, BatchNorm) and (id(part), name) not in apart_from
        )

    def has_drawn(self) -> bool:
        """Whether torch drew random numbers."""
        return not all(map(torch.equal, self.random, _random_of(self.devices)))

    def may_run_otherwise(self) -> bool:
        """Whether the forward may take other branches when it runs again: numbers were drawn, or it has counted."""
        numpy, now = self.of_numpy, np.random.get_state()
        has_drawn = random.getstate() != self.of_python or any(not np.array_equal(*two) for two in zip(numpy, now, strict=True))
        return has_drawn or self.has_changed() or any(map(_has_other_values, *zip(*self.attributes, strict=True)))

    def written(self) -> dict[Place, Tensor | None]:
        """Copies of the buffers that were written, but for a BatchNorm's; None: it is no buffer any more."""
        found = dict[Place, Tensor | None]()
        for (part, name, buffer, version), value in zip(self.buffers, self.values, strict=True):
            now = buffers_of(part).get(name)
            is_same = now is buffer and version_counter(buffer) == version and torch.equal(buffer, value)
            if not isinstance(part, BatchNorm) and not is_same:
                found[id(part), name] = None if now is None else now.detach().clone()
        return found

    @torch.no_grad()
    def restore(self) -> None:
        torch.set_rng_state(self.random[0])
        for device, state in zip(self.devices, self.random[1:], strict=True):
            torch.cuda.set_rng_state(state, device)
        random.setstate(self.of_python)
        np.random.set_state(self.of_numpy)
        for (part, name, buffer, version), value in zip(self.buffers, self.values, strict=True):
            if version_counter(buffer) != version or not torch.equal(buffer, value):
                buffer.copy_(value)
            buffers_of(part)[name] = buffer
        for part, attributes in self.attributes:
            part.__dict__.update({name: value for name, value in attributes.items() if isinstance(value, PLAIN)})


def _has_other_values(part: nn.Module, before: dict[str, object]) -> bool:
    """Whether a plain attribute of a module, other than `training`, is not what it was."""
    now = {name: value for name, value in part.__dict__.items() if isinstance(value, PLAIN) and name != "training"}
    return any(name not in before or before[name] != value for name, value in now.items())


@contextmanager
def without_trace(model: nn.Module) -> Iterator[ForwardState]:
    """Restore random states, buffers and plain attributes, `training` too, after the passes inside, and drop gradients.

    Yields what it was before.
    """
    before = ForwardState(model)
    try:
        with torch.enable_grad():
            yield before
    finally:
        model.zero_grad(set_to_none=True)
        before.restore()
