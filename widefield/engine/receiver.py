"""Whose gradient is being computed?  Looked up in autograd's graph, by the operation that computes a part of it.

The gradient of a plain weight may stay a rank's own part, for DDP or FSDP to take the mean of; any other sum is added up at
once.  A convolution's backward knows its weight; a product's is made of plain products, which have to ask.
"""

from __future__ import annotations

from typing import Any

import torch

from widefield.engine.tiled import TiledTensor

VIEWS = {
    "TBackward0", "TransposeBackward0", "PermuteBackward0", "ViewBackward0", "UnsafeViewBackward0", "ReshapeAliasBackward0",
    "UnsqueezeBackward0", "SqueezeBackward1", "SqueezeBackward0", "ExpandBackward0", "AliasBackward0", "ToCopyBackward0",
}  # fmt: skip
"""Operations between a weight and its use that pass its gradient on as it is, linearly."""


def is_plain_weights_gradient(shape: tuple[int, ...], nodes: tuple[str, ...]) -> bool:
    """Whether a value of `shape`, or of it with the last two dims swapped, can only be the gradient of a plain weight here.

    nodes: the names of autograd's backward operations in which that may be asked.
    Cost: a few microseconds.  False in a forward pass, in a recomputed one, and where gradients are to be differentiated again.
    """
    if torch.is_grad_enabled():
        return False
    node = torch._C._current_autograd_node()  # type: ignore[attr-defined]
    if node is None or node.name() not in nodes:
        return False
    swapped = (*shape[:-2], shape[-1], shape[-2]) if len(shape) > 1 else shape
    fitting = [edge for edge in node.next_functions if edge[0] is not None and _shape_of(edge) in (shape, swapped)]
    return bool(fitting) and all(_ends_in_plain_weight(function) for function, _ in fitting)


def _shape_of(edge: tuple[Any, int]) -> tuple[int, ...]:
    function, number = edge
    return tuple(function._input_metadata[number].shape)


def _ends_in_plain_weight(function: Any) -> bool:
    while function is not None and function.name() in VIEWS:
        function = function.next_functions[0][0]
    leaf = getattr(function, "variable", None)
    return leaf is not None and type(leaf) is not TiledTensor
