"""Refuses calls of dropout and other layers with random numbers or buffers outside of the forward of the parallelized model.

Copies share the random numbers and buffers of a batch only inside of the model's forward.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from widefield.module_wrapping import Wrapping, wrap_class
from widefield.parallel.strategies._forward_route import is_inside
from widefield.private_torch.autograd import current_graph_task_id
from widefield.private_torch.fake_tensors import is_captured
from widefield.private_torch.modules import DropoutNd, InstanceNorm
from widefield.private_torch.pytree import tree_leaves

_ROOTS = "_widefield_roots"
_THAT_DRAW = {"DropPath", "DropBlock", "DropBlock2d", "DropBlock3d", "StochasticDepth"}
"""Classes of timm and torchvision, by name."""


class SharedLayer(Wrapping):
    """Put before a layer's own class; a copy or a pickle is the plain layer."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if self.training and not torch.compiler.is_compiling():
            roots = [root for held in vars(self).get(_ROOTS, ()) if (root := held()) is not None]
            if roots and not any(map(is_inside, roots)) and not _is_captured_or_recomputed(args):
                raise NotImplementedError(
                    f"{type(self).__qualname__} draws random numbers or writes to buffers and is called by itself, where "
                    f"copies of {type(roots[0]).__qualname__} share these inside of its forward alone, so they would not be "
                    f"one device's; call the {type(roots[0]).__qualname__}, call parallelize on each module that you call, "
                    "or set mesh.independent=true to let each copy draw by itself"
                )
        return super().forward(*args, **kwargs)  # type: ignore[misc]


def _is_captured_or_recomputed(args: tuple) -> bool:
    """Whether the model is being captured on fake tensors, or recomputed in a backward."""
    followed = any(is_captured(leaf) for leaf in tree_leaves(args))
    return followed or current_graph_task_id() != -1


def roots_of(model: nn.Module) -> Iterator[nn.Module]:
    """The modules that are called: the model, or, where it is a container without a forward, those in it."""
    if type(model).forward is not nn.Module.forward or "forward" in vars(model):
        yield model
    else:
        for part in model.children():
            yield from roots_of(part)


def refuse_separate_calls(root: nn.Module) -> None:
    """From now on, refuse training calls of layers in `root` that draw or write, outside of `root`'s forward."""
    for part in root.modules():
        if part is not root and _draws_or_writes(part):
            wrap_class(part, SharedLayer)
            others = [held for held in vars(part).get(_ROOTS, []) if held() not in (None, root)]
            vars(part)[_ROOTS] = [*others, weakref.ref(root)]


def _draws_or_writes(part: nn.Module) -> bool:
    if isinstance(part, InstanceNorm):
        return part.track_running_stats
    if isinstance(part, nn.RNNBase):
        return part.dropout > 0
    drawing = (DropoutNd, nn.RReLU, nn.FractionalMaxPool2d, nn.FractionalMaxPool3d)
    return isinstance(part, drawing) or any(kind.__name__ in _THAT_DRAW for kind in type(part).__mro__)
