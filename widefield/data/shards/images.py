"""Samples of shards as a split of a dataset."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from widefield.data import BadImageError
from widefield.data.masks import Coding
from widefield.data.order import ShuffleBlocks
from widefield.data.records import PixelKind
from widefield.data.shards.columns import MemberColumn
from widefield.data.shards.decoding import image_in, labels_in, spacing_in

Array = np.ndarray[Any, Any]


class StoredTargets(Protocol):
    """The targets of samples."""

    def of(self, sample: int) -> int | Tensor: ...

    def taken(self, samples: Array) -> StoredTargets:
        """Those of some samples, in their order."""


@dataclass(frozen=True)
class OneClass:
    """numbers: (samples,), the class of each."""

    numbers: Array

    def of(self, sample: int) -> int:
        return int(self.numbers[sample])

    def taken(self, samples: Array) -> OneClass:
        return OneClass(self.numbers[samples])


@dataclass(frozen=True)
class SomeClasses:
    """numbers: the classes of all samples, one after the other.  starts, ends: (samples,), where those of each stand."""

    numbers: Array
    starts: Array
    ends: Array
    classes: int

    def of(self, sample: int) -> Tensor:
        """(classes,) uint8 of 0 and 1."""
        found = torch.zeros(self.classes, dtype=torch.uint8)
        found[self.numbers[self.starts[sample] : self.ends[sample]].tolist()] = 1
        return found

    def taken(self, samples: Array) -> SomeClasses:
        return SomeClasses(self.numbers, self.starts[samples], self.ends[samples], self.classes)


@dataclass(frozen=True)
class StoredValues:
    """values: (samples, columns) float64."""

    values: Array

    def of(self, sample: int) -> Tensor:
        return torch.tensor(self.values[sample].tolist(), dtype=torch.float32)

    def taken(self, samples: Array) -> StoredValues:
        return StoredValues(self.values[samples])


@dataclass(frozen=True)
class StoredMasks:
    """The masks of samples, and which number in them is which class."""

    masks: MemberColumn
    coding: Coding

    def of(self, sample: int) -> Tensor:
        return labels_in(self.masks.member(sample), self.coding)

    def taken(self, samples: Array) -> StoredMasks:
        return StoredMasks(self.masks.taken(samples), self.coding)


@dataclass(frozen=True)
class ShardImages:
    """One split; see data.Images.  It holds places of bytes, and no handle: a worker opens shards for itself."""

    images: MemberColumn
    targets: StoredTargets
    kind: PixelKind

    def __len__(self) -> int:
        return len(self.images)

    def read(self, index: int) -> tuple[Tensor, int | Tensor]:
        member, kind = self.images.member(index), self.kind
        image = image_in(member, kind.channels, kind.dtype, narrow=kind.narrow)
        if image.ndim - 1 != kind.dims:
            raise BadImageError(
                f"{member} has {image.ndim - 1} dims, {' x '.join(map(str, image.shape[1:]))}, and the first image to train on "
                f"has {kind.dims}; keep images and volumes in datasets of their own"
            )
        return image, self.target_of(index)

    def target_of(self, index: int) -> int | Tensor:
        return self.targets.of(index)

    def name_of(self, index: int) -> str:
        return str(self.images.member(index))

    def spacing_of(self, index: int) -> tuple[float, ...] | None:
        """The lengths of a pixel along each dim, where a TIFF tells them."""
        spacing = spacing_in(self.images.member(index))
        return spacing if spacing is not None and len(spacing) == self.kind.dims else None


@dataclass(frozen=True)
class BlockedShardImages(ShardImages):
    """Samples to train on that are shuffled by blocks; see order.ShuffleBlocks."""

    blocks: ShuffleBlocks
