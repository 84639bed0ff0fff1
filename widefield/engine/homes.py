"""Views whose pixels had to move: writes to them go home, and they fetch again what was written there."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from widefield.engine.layout import Layout
from widefield.engine.places import on_layout, recut
from widefield.engine.tiled import TiledTensor, wrap


def give_home(made: Any, source: Any, layout: Layout, run: Callable) -> None:
    """Tell views that are copies, because pixels had to move, where their pixels belong."""
    for number, view in enumerate([made] if isinstance(made, Tensor) else made):
        if source.laid is layout and torch._C._is_alias_of(view.own, source.own):
            view.home = source.home
        else:
            view.home = Home(source, layout, run, number, view.own)


class Home:
    """Keeps a moved view and the tensor that it shows the same, whichever of them is written to in place.

    source: the tensor; layout: where its pixels were brought to before `run` showed them; tile: the view's, its `number`th.
    version: torch's count of writes, which a tensor and its views share, when they were last the same; of the inference
    mode, where torch counts none, only what is written to the view is brought home.
    """

    def __init__(self, source: TiledTensor, layout: Layout, run: Callable, number: int, tile: Tensor) -> None:
        self.source, self.layout, self.run, self.number, self.own = source, layout, run, number, tile
        self.version = version_of(source)

    def bring(self, version: int) -> None:
        """Send the view's pixels home, on every rank alike; `version`: the count once this write is counted."""
        source, self.version = self.source, version
        tile = on_layout(source, self.layout).clone(memory_format=torch.contiguous_format)
        self._shown(tile).copy_(self.own)
        source.own.copy_(recut(wrap(tile, self.layout), source.laid))
        if source.home is not None:
            source.home.bring(version)

    def keep_up(self, version: int) -> None:
        """Fetch the pixels again where the tensor was written to since, which all ranks see alike."""
        if version == self.version:
            return
        self.version = version
        if self.source.home is not None:
            self.source.home.keep_up(version)
        self.own.copy_(self._shown(on_layout(self.source, self.layout)))

    def _shown(self, tile: Tensor) -> Tensor:
        shown = self.run(self.layout, tile)
        return shown if isinstance(shown, Tensor) else shown[self.number]


def version_of(tensor: Tensor) -> int:
    """How often torch counted a write to the tensor or to a view of the same memory."""
    return 0 if tensor.is_inference() else tensor._version
