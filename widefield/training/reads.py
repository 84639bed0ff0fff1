"""What a rank reads from files of images while it trains, from the batches that its workers hand it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

from widefield.data.batch import Batch
from widefield.image_files.bytes_read import BytesRead


@dataclass
class Reads:
    """Since this process began to train.  epochs: with the fraction.  samples: those that this rank had, whole or in part."""

    read: BytesRead = field(default_factory=BytesRead)
    samples: int = 0
    epochs: Fraction = Fraction()

    def add(self, passes: Sequence[Batch], *, epochs: Fraction) -> None:
        """Count the batches of a step, which is so much of an epoch."""
        self.epochs += epochs
        for batch in passes:
            self.read += batch.read
            self.samples += batch.samples

    def to_tree(self) -> dict[str, Any]:
        """For the record."""
        return {"asked": self.read.asked, "decoded": self.read.decoded, "samples": self.samples, "epochs": float(self.epochs)}
