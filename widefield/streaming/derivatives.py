"""Tangents of what a tile makes, and the backward of its backward: two uses of autograd's own second derivatives."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from widefield.capture.ir import Value


def pushed(outs: Sequence[Tensor | None], moves: Sequence[tuple[Tensor, Tensor]]) -> list[Tensor | None]:
    """The tangents of `outs`, None for None.  moves: the leaves that they were computed from, with their tangents.

    A backward J'u is linear in u, so that its own backward along the tangents v is J v, whatever u is.  Here it is 1, for the
    backward of logcumsumexp takes the logarithm of u.
    """
    wanted = [out for out in outs if out is not None and out.requires_grad]
    ends = [torch.ones_like(out).requires_grad_() for out in wanted]
    found: dict[int, Tensor] = {}
    if wanted and moves:
        with torch.enable_grad():
            grads = torch.autograd.grad(wanted, [leaf for leaf, _ in moves], ends, create_graph=True, allow_unused=True)
        pairs = [(grad, along) for grad, (_, along) in zip(grads, moves, strict=True) if grad is not None]
        pairs = [(grad, along) for grad, along in pairs if grad.requires_grad]
        if pairs:
            tangents = torch.autograd.grad([grad for grad, _ in pairs], ends, [along for _, along in pairs], allow_unused=True)
            found = {id(out): tangent for out, tangent in zip(wanted, tangents, strict=True) if tangent is not None}
    return [None if out is None else found.get(id(out), torch.zeros_like(out.detach())) for out in outs]


class TwoBackwards:
    """The backward of <u, J v> through what a tile makes: u are gradients of tangents, v are tangents of what it reads."""

    def __init__(self) -> None:
        self.of_values: list[tuple[Tensor, Tensor]] = []
        self.of_tangents: list[tuple[Tensor, Tensor]] = []

    def add(self, made: Tensor, grads: Sequence[Tensor | None]) -> None:
        """made: a value, with its history.  grads: the gradients of it and of its tangent."""
        for goals, grad in zip((self.of_values, self.of_tangents), grads, strict=True):
            if grad is not None and made.requires_grad:
                goals.append((made, grad))

    def run(self, leaves: Mapping[Value, Tensor], tangents: Mapping[Value, Tensor]) -> dict[Value, Tensor]:
        """Add the gradients of what was read to their `grad`; returns those of the tangents."""
        found: dict[Value, Tensor] = {}
        goals, moved = list(self.of_values), {value: leaf for value, leaf in leaves.items() if value in tangents}
        if self.of_tangents and moved:
            outs, grads = zip(*self.of_tangents, strict=True)
            with torch.enable_grad():
                first = torch.autograd.grad(outs, list(moved.values()), grads, create_graph=True, allow_unused=True)
            for value, grad in zip(moved, first, strict=True):
                if grad is None:
                    continue
                found[value] = grad.detach()
                if grad.requires_grad:
                    goals.append((grad, tangents[value]))
        if goals:
            torch.autograd.backward(*zip(*goals, strict=True))
        return found
