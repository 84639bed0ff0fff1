"""The section `stream` of a recipe: tiles in time."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from widefield.config.field_types import Positive
from widefield.quantity import Memory
from widefield.section import Section


class StreamConfig(Section):
    tiles: Annotated[list[Positive], Field(min_length=1)] | None = None
    """Tiles of every image, one number per dim: `[4, 4]` runs 16 of them; chosen by `memory` where null."""
    memory: Memory | None = None
    """The memory of a step on the device, as `6GiB`: tiles, unless given, and saved activations are chosen to fit."""
    keep: Literal["device", "host", "file"] | None = None
    """Where activations are saved between the passes over an image; chosen by what fits where null."""
    compile: bool = False
    """Compile sequences of pointwise operations on a tile with torch.compile."""
    strict: bool = False
    """Refuse a model with an operation that no rule can run on tiles, instead of running it on the whole image with a note."""

    @model_validator(mode="after")
    def _tiles_or_memory(self) -> StreamConfig:
        if self.tiles is None and self.memory is None:
            raise ValueError("a stream needs to know its tiles or its memory; write stream.tiles=[4, 4] or stream.memory=6GiB")
        return self

    def __str__(self) -> str:
        """`4 x 4 tiles`, `tiles within 6GiB`, or `4 x 4 tiles within 6GiB`."""
        tiles = "tiles" if self.tiles is None else f"{' x '.join(map(str, self.tiles))} tiles"
        return tiles if self.memory is None else f"{tiles} within {self.memory}"
