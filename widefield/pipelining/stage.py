"""One stage as a module: its part of the model's operations, with its parameters under their names in the model."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from widefield.capture.ir import Value
from widefield.capture.trace import without_autocast
from widefield.geometry.layout import Layout
from widefield.pipelining.stage_parts import StageGraph
from widefield.pipelining.wire import as_one_node, off_wire, on_wire, wire_meta, with_zeros_for
from widefield.private_torch.modules import buffers_of, modules_of, parameters_of
from widefield.tiled.api import as_tile


class StageModule(nn.Module):
    """Stage `stage` of `stages`.  The first takes the model's inputs, the last returns its outputs; see wire.py for the rest.

    weights: the model's parameters and buffers, by name, which the stage shares.
    device: where the stage computes.  wire: the device of tensors received from another stage or sent to one.
    splits: whether the backward runs in two halves.
    layouts: the layout of each value that is tiled; the stage receives and sends this rank's tiles.
    """

    def __init__(
        self,
        part: StageGraph,
        weights: Mapping[str, Tensor],
        *,
        stage: int,
        stages: int,
        device: torch.device,
        wire: torch.device,
        splits: bool = False,
        layouts: Mapping[Value, Layout] = MappingProxyType({}),
    ) -> None:
        super().__init__()
        self.part, self.splits, self.layouts = part, splits, layouts
        self.device, self.wire = device, wire
        self.is_first, self.is_last = stage == 0, stage == stages - 1
        self.weights = {name: weights[name] for name in part.weights.keys() | part.updates.keys()}
        for name, tensor in self.weights.items():
            _put(self, name, tensor)

    def metas(self, like: tuple[Tensor, ...]) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        """Meta tensors like the stage's inputs and outputs.  like: meta tensors of this rank's tiles of the model's inputs."""
        takes = like if self.is_first else self._wire_metas(self.part.takes)
        metas = [torch.empty_permuted(v.shape, v.order, dtype=v.dtype, device="meta") for v in self.part.gives if self.is_last]
        return takes, tuple(metas) if self.is_last else self._wire_metas(self.part.gives)

    def _wire_metas(self, values: Sequence[Value]) -> tuple[Tensor, ...]:
        return tuple(wire_meta(value, self.layouts.get(value)) for value in values)

    def forward(self, *given: Tensor) -> Any:
        values = self.part.takes
        take = _tiled if self.is_first else off_wire
        pairs = zip(given, values, strict=True)
        taken = [take(tensor.to(self.device), value, self.layouts.get(value)) for tensor, value in pairs]
        with without_autocast():
            gives = self.part.run(self.weights, taken)
        unused = [t for t, v in zip(given, values, strict=True) if not v.wants_grad or v in self.part.without_gradient]
        unused = [] if self.is_first else unused
        if self.is_last:
            return self._returned(gives, unused)
        sent = [on_wire(tensor, value, self.layouts.get(value)) for tensor, value in zip(gives, self.part.gives, strict=True)]
        sent[0] = with_zeros_for(sent[0], unused)
        sent = [tensor.to(self.wire) for tensor in as_one_node(sent)]
        # torch detaches the sent tensors in place after the first half; the second may need them, such as a ReLU's output.
        return tuple(tensor.clone() for tensor in sent) if self.splits else tuple(sent)

    def _returned(self, gives: Iterable[Tensor], unused: list[Tensor]) -> tuple[Tensor, ...]:
        """The tensors that the model returns, as a flat tuple, the only form that torch's schedules take."""
        found = list(gives)
        first = next((place for place, value in enumerate(self.part.gives) if value.wants_grad), None)
        if first is not None:
            found[first] = with_zeros_for(found[first], unused)
        # torch detaches outputs that are no views in place before the second half, which may need what the loss saved.
        return tuple(tensor.view_as(tensor) if self.splits else tensor for tensor in found)


def _tiled(tensor: Tensor, value: Value, layout: Layout | None) -> Tensor:
    """The model's input of which `tensor` is this rank's tile."""
    return tensor if layout is None else as_tile(tensor, layout)


def _put(module: nn.Module, name: str, tensor: Tensor) -> None:
    """Register a parameter or buffer under its qualified name, with a plain module for each part of it."""
    *owners, last = name.split(".")
    for owner in owners:
        if owner not in modules_of(module):
            modules_of(module)[owner] = nn.Module()
        module = modules_of(module)[owner]  # type: ignore[assignment]
    registry: dict[str, Any] = parameters_of(module) if isinstance(tensor, nn.Parameter) else buffers_of(module)
    registry[last] = tensor
