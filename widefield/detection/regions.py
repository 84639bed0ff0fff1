"""What the second stage of a detector is asked about, and what it answers: boxes of each image, drawn ones and proposals."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from torch import Tensor


@dataclass(frozen=True)
class Asked:
    """Boxes (n, 4) of one image.  wanted: their class numbers (n,), 0 for the background; learned: the boxes (n, 4) of these.

    Both are None of proposals, of which nobody knows.
    """

    boxes: Tensor
    wanted: Tensor | None = None
    learned: Tensor | None = None


@dataclass(frozen=True)
class Answered:
    """logits: (n, 1 + classes), the background first.  codes: (n, (1 + classes) * 4)."""

    asked: Asked
    logits: Tensor
    codes: Tensor


@dataclass(frozen=True)
class AnchorsDrawn:
    """Of the anchors of one image: the numbers of those that are drawn and learn a box, its codes (n, 4), and the others."""

    learns: Tensor
    codes: Tensor
    others: Tensor


@dataclass(frozen=True)
class StagedOutput:
    """An output with both stages.  levels: the maps of each.

    drawn, anchors: of each image, what losses are of, or None.  proposed: of each image, what is found among, or None.
    """

    levels: Sequence[Sequence[Tensor]]
    drawn: Sequence[Answered] | None = None
    anchors: Sequence[AnchorsDrawn] | None = None
    proposed: Sequence[Answered] | None = None

    def of_image(self, row: int) -> StagedOutput:
        """Those of one image, still with its dim."""
        some = {
            name: None if rows is None else rows[row : row + 1]
            for name, rows in (("drawn", self.drawn), ("anchors", self.anchors), ("proposed", self.proposed))
        }
        return replace(self, levels=[[one[row : row + 1] for one in level] for level in self.levels], **some)  # type: ignore[arg-type]
