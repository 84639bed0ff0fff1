"""FSDP2 makes weights contiguous.  Where they were channels-last before, may the model draw random numbers?

A convolution's output takes the memory format of its image or its weight, and torch fills random numbers in memory order.  So
with contiguous weights a dropout may give the same random numbers to other pixels than on one device.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from widefield.capture.decompositions import draws_numbers
from widefield.parallel.strategies._forward_route import Compiled
from widefield.parallel.strategies._forward_state import random_states
from widefield.private_torch.dispatcher import TorchDispatchMode
from widefield.private_torch.fake_tensors import suggest_memory_format
from widefield.private_torch.pytree import tree_leaves


def not_row_major(model: nn.Module) -> list[str]:
    """The names of the parameters that are not row-major."""
    return [name for name, p in model.named_parameters() if not p.is_contiguous() or _is_channels_last(p)]


def _is_channels_last(weight: Tensor) -> bool:
    return weight.ndim in (4, 5) and suggest_memory_format(weight) != torch.contiguous_format


class RefuseRandom:
    """Runs forwards, and refuses those that draw random numbers for images.  names: weights that were not row-major.

    The first training forward is checked operation by operation.  NotImplementedError: it draws for a tensor with pixels, or a
    later forward draws where the checked one drew nothing.
    """

    def __init__(self, names: list[str], around: Callable | None) -> None:
        self.names, self.around = names, around
        self.has_trained = self.has_drawn = False

    def __call__(self, model: nn.Module, run: Callable, args: tuple, kwargs: dict) -> Any:
        if self.has_drawn:
            return self._run(model, run, args, kwargs)
        before, looks = random_states(model), not self.has_trained and not isinstance(run, Compiled)
        self.has_trained |= model.training
        if looks:
            with _Look(self._words(model)):
                output = self._run(model, run, args, kwargs)
        else:
            output = self._run(model, run, args, kwargs)
        draws = not all(map(torch.equal, before, random_states(model)))
        if draws and not looks:
            raise NotImplementedError(self._words(model))
        self.has_drawn = draws
        return output

    def _run(self, model: nn.Module, run: Callable, args: tuple, kwargs: dict) -> Any:
        return run(*args, **kwargs) if self.around is None else self.around(model, run, args, kwargs)

    def _words(self, model: nn.Module) -> str:
        return (
            f"{type(model).__qualname__} draws random numbers for images, and {len(self.names)} of its weights ({self.names[0]}"
            ", ...) are channels-last or in another order, which FSDP2 does not keep: activations would have another memory "
            "format than on one device, and random numbers go to other pixels; leave the model's weights row-major and give it "
            "images with channels last, or set sharding.zero=1"
        )


class _Look(TorchDispatchMode):
    """Inside, NotImplementedError(words) where random numbers are drawn for a tensor with more dims than batch and channel."""

    def __init__(self, words: str) -> None:
        super().__init__()
        self.words = words

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        made = func(*args, **(kwargs or {}))
        if draws_numbers(func, args, kwargs or {}):
            for leaf in tree_leaves((args, made)):
                if isinstance(leaf, Tensor) and leaf.ndim > 2 and sum(extent > 1 for extent in leaf.shape[1:]) > 1:
                    raise NotImplementedError(self.words)
        return made
