"""Which part of the weights, and of the optimizer's state, each of several servers holds: even cuts of the flat weights.

A server's optimizer is the recipe's, over *pieces*: what of each parameter lies in the server's part, as a parameter of one
dim.  So a cut may go through a parameter, and only optimizers that step each number by itself are taken.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import safetensors.torch
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from widefield.asynchrony.flat_model import FlatModel
from widefield.parallel.optimizer_steps import OF_ALL_WEIGHTS, OF_WHOLE_WEIGHTS, STEPS_PARTS
from widefield.training.tree_json import from_json, to_json

_TEXT = "text"
"""The name of the JSON among the tensors of a message; other names begin with `tree`."""


@dataclass(frozen=True)
class Piece:
    """Numbers `start` to before `stop` of the parameter at `place` among those that learn."""

    place: int
    start: int
    stop: int

    def of(self, parameter: Tensor, value: Any) -> Any:
        """The piece's part of what an optimizer keeps of a parameter: of a tensor of its shape, the numbers; else a copy."""
        if not isinstance(value, Tensor):
            return value
        if value.shape != parameter.shape or not parameter.dim():
            return value.clone()
        return value.reshape(-1)[self.start : self.stop].clone()


def pieces_of(sizes: Sequence[int], part: slice) -> list[Piece]:
    """The pieces that a part of the flat weights consists of.  sizes: of the parameters that learn.

    >>> pieces_of([4, 3, 5], slice(2, 8))
    [Piece(place=0, start=2, stop=4), Piece(place=1, start=0, stop=3), Piece(place=2, start=0, stop=1)]
    """
    found, first = [], 0
    for place, size in enumerate(sizes):
        start, stop = max(part.start - first, 0), min(part.stop - first, size)
        if start < stop:
            found.append(Piece(place, start, stop))
        first += size
    return found


def check_optimizer(optimizer: Optimizer, servers: int) -> None:
    """NotImplementedError: a step on one number looks at others, which another server may hold."""
    kinds = {kind.__name__ for kind in type(optimizer).__mro__}
    if kinds & (OF_ALL_WEIGHTS | OF_WHOLE_WEIGHTS) or getattr(type(optimizer), STEPS_PARTS, False):
        raise NotImplementedError(
            f"{type(optimizer).__name__} looks at whole weights in each step, and {servers} servers hold a part each, cut "
            "anywhere; take an optimizer that steps each number by itself (SGD, AdamW), or agreement.servers=1"
        )


class WeightPart:
    """What one server holds.  whole: of the model.  part: of its flat weights.

    pieces: parameters of the values that `whole` has now.  optimizer: over them, as `optimizer` is now over the model's.
    """

    def __init__(self, whole: FlatModel, optimizer: Optimizer, part: slice) -> None:
        self.part, self.places = part, pieces_of([one.numel() for one in whole.trained], part)
        self.pieces = [_piece_of(whole.trained[one.place], one) for one in self.places]
        self.optimizer = self._over_pieces(whole, optimizer)

    def _over_pieces(self, whole: FlatModel, optimizer: Optimizer) -> Optimizer:
        of = {id(whole.trained[one.place]): piece for one, piece in zip(self.places, self.pieces, strict=True)}
        found = object.__new__(type(optimizer))
        found.__dict__.update(optimizer.__dict__)
        groups = [
            {**group, "params": [of[id(one)] for one in group["params"] if id(one) in of]} for group in optimizer.param_groups
        ]
        found.param_groups = [group for group in groups if group["params"]]
        found.state = type(optimizer.state)(optimizer.state.default_factory)  # type: ignore[attr-defined]
        for one, piece in zip(self.places, self.pieces, strict=True):
            parameter = whole.trained[one.place]
            if parameter in optimizer.state:
                found.state[piece] = {key: one.of(parameter, value) for key, value in optimizer.state[parameter].items()}
        return found

    def pieces_at(self, places: Sequence[int] | frozenset[int]) -> list[int]:
        """Of the pieces, those whose parameters are at `places`."""
        return [number for number, one in enumerate(self.places) if one.place in places]

    def weights(self) -> Tensor:
        with torch.no_grad():
            return torch.cat([one.reshape(-1).cpu() for one in self.pieces])

    def states(self) -> list[dict[str, Any]]:
        """What the optimizer keeps of each piece."""
        return [dict(self.optimizer.state.get(piece, {})) for piece in self.pieces]

    def load(self, weights: Tensor, states: Sequence[dict[str, Any]], options: Sequence[dict[str, Any]]) -> None:
        """Take what the first server has.  options: of the optimizer's groups that have pieces here."""
        sizes = [one.numel() for one in self.pieces]
        with torch.no_grad():
            for piece, values in zip(self.pieces, weights.split(sizes), strict=True):
                piece.copy_(values.view(piece.shape))
        for group, of in zip(self.optimizer.param_groups, options, strict=True):
            group.update(of)
        self.optimizer.state.clear()
        on_device = {
            piece for group in self.optimizer.param_groups for piece in group["params"]
            if group.get("fused") or group.get("capturable")
        }  # fmt: skip
        for piece, state in zip(self.pieces, states, strict=True):
            if state:
                where = {key: piece.device if piece in on_device or _is_like(value, piece) else "cpu"
                         for key, value in state.items()}  # fmt: skip
                self.optimizer.state[piece] = {
                    key: value.to(where[key]) if isinstance(value, Tensor) else value for key, value in state.items()
                }

    def options(self) -> list[dict[str, Any]]:
        """Of the optimizer's groups."""
        return [{key: value for key, value in group.items() if key != "params"} for group in self.optimizer.param_groups]


def join_states(
    whole: FlatModel, optimizer: Optimizer, parts: Sequence[tuple[Sequence[Piece], Sequence[dict[str, Any]]]]
) -> None:
    """Give the model's optimizer what the optimizers of all parts keep.  parts: of each server in order, pieces and states."""
    by_place: dict[int, list[tuple[Piece, dict[str, Any]]]] = {}
    for pieces, states in parts:
        for piece, state in zip(pieces, states, strict=True):
            by_place.setdefault(piece.place, []).append((piece, state))
    optimizer.state.clear()
    for place, found in by_place.items():
        if found[0][1]:
            parameter = whole.trained[place]
            optimizer.state[parameter] = {key: _joined(parameter, key, found) for key in found[0][1]}


def _joined(parameter: Tensor, key: str, found: Sequence[tuple[Piece, dict[str, Any]]]) -> Any:
    values = [state[key] for _, state in found]
    lengths = [(piece.stop - piece.start,) for piece, _ in found]
    if not parameter.dim() or any(not isinstance(one, Tensor) for one in values):
        return values[0]
    if [tuple(one.shape) for one in values] != lengths:
        return values[0].clone()
    flat = torch.cat([one.to(parameter.device) for one in values])
    return torch.empty_like(parameter, dtype=flat.dtype, requires_grad=False).copy_(flat.view(parameter.shape))


def _piece_of(parameter: Tensor, piece: Piece) -> nn.Parameter:
    return nn.Parameter(piece.of(parameter, parameter.detach()))


def _is_like(value: Any, piece: Tensor) -> bool:
    return isinstance(value, Tensor) and value.shape == piece.shape


def to_bytes(tree: Any) -> Tensor:
    """(bytes,) of uint8: tensors and plain values in dicts and lists."""
    text, tensors = to_json(tree, name="tree")
    told = torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)
    plain = {name: one.detach().cpu().contiguous().clone() for name, one in tensors.items()}
    return torch.frombuffer(bytearray(safetensors.torch.save({**plain, _TEXT: told})), dtype=torch.uint8)


def from_bytes(values: Tensor) -> Any:
    """What `to_bytes` made bytes of."""
    tensors = safetensors.torch.load(values.numpy().tobytes())
    text = tensors.pop(_TEXT).numpy().tobytes().decode()
    return from_json(text, tensors)
