"""A model's weights, gradients and running statistics as flat tensors on the CPU, in the order of their names in the model."""

from __future__ import annotations

import copy
from collections.abc import Sequence

import torch
from torch import Tensor, nn


class FlatModel:
    """trained: the parameters that learn.  A flat state has these first, then the other parameters, then floating buffers."""

    def __init__(self, model: nn.Module) -> None:
        named = [one for _, one in model.named_parameters()]
        self.trained = [one for one in named if one.requires_grad]
        self.others = [one for one in named if not one.requires_grad]
        self.buffers = [one for one in model.buffers() if one.is_floating_point()]
        self.counters = [one for name, one in model.named_buffers() if name.endswith("num_batches_tracked")]
        self._count()

    def with_pieces(self, pieces: Sequence[nn.Parameter], *, only: bool = False) -> FlatModel:
        """The same with `pieces` as what is trained; only: and nothing else."""
        found = copy.copy(self)
        found.trained = list(pieces)
        if only:
            found.others, found.buffers, found.counters = [], [], []
        found._count()
        return found

    def _count(self) -> None:
        self.numel = sum(one.numel() for one in self.trained)
        """Of what is trained."""

    @property
    def dtype(self) -> torch.dtype:
        """Of flat gradients."""
        return self.trained[0].dtype if self.trained else torch.get_default_dtype()

    def lasting(self, absent: Sequence[int], sent: Tensor) -> tuple[int, ...]:
        """Those of `absent` for which nothing is sent but zeros.  sent: (numel,)."""
        parts = sent.split([one.numel() for one in self.trained])
        return tuple(place for place in absent if not parts[place].any())

    @property
    def of_push(self) -> int:
        """The values that a worker pushes."""
        return self.numel + sum(one.numel() for one in self.buffers)

    @property
    def of_state(self) -> int:
        """The values that a server sends."""
        return self.of_push + sum(one.numel() for one in self.others)

    @torch.no_grad()
    def state(self) -> Tensor:
        return _flat([*self.trained, *self.others, *self.buffers])

    @torch.no_grad()
    def load(self, state: Tensor) -> None:
        _fill([*self.trained, *self.others, *self.buffers], state)

    @torch.no_grad()
    def load_trained(self, weights: Tensor) -> None:
        _fill(self.trained, weights)

    @torch.no_grad()
    def weights(self) -> Tensor:
        """Of what is trained."""
        return _flat(self.trained)

    @torch.no_grad()
    def statistics(self) -> Tensor:
        return _flat(self.buffers)

    @torch.no_grad()
    def gradient(self) -> tuple[Tensor, tuple[int, ...]]:
        """(of all that is trained, the places of parameters that have none, which have zeros)."""
        absent = tuple(place for place, one in enumerate(self.trained) if one.grad is None)
        return _flat([torch.zeros_like(one) if one.grad is None else one.grad for one in self.trained]), absent

    @torch.no_grad()
    def set_gradient(self, gradient: Tensor, absent: Sequence[int]) -> None:
        parts = gradient.split([one.numel() for one in self.trained])
        for place, (one, part) in enumerate(zip(self.trained, parts, strict=True)):
            one.grad = None if place in absent else torch.empty_like(one).copy_(part.view(one.shape))

    @torch.no_grad()
    def move_statistics(self, change: Tensor) -> None:
        """Add what passes have changed, and count one more update."""
        _fill(self.buffers, self.statistics() + change)
        for one in self.counters:
            one += 1


def _flat(tensors: Sequence[Tensor]) -> Tensor:
    return torch.cat([one.detach().reshape(-1).cpu() for one in tensors]) if tensors else torch.zeros(0)


def _fill(tensors: Sequence[Tensor], flat: Tensor) -> None:
    for one, part in zip(tensors, flat.split([one.numel() for one in tensors]), strict=True):
        one.copy_(part.view(one.shape))
