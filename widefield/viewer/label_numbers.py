"""Labels as the page has them: the number of a class plus one, and 0 where a pixel has no class.

So where pixels are made smaller, a class wins over nothing if there is as much of both.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass

import numpy as np

from widefield.image_files import ImageFile
from widefield.viewer.pyramid import Array

IGNORED = 255
"""The number that is no class where nothing else is said, as it is usual."""
MOST = 65_534
"""The greatest number that the page can have."""


@dataclass(frozen=True)
class Numbers:
    """classes: how many there are, from 0 on; None: all numbers are classes.  ignored: numbers that are none.

    dtype: of the page's numbers, uint8 where these suffice.
    """

    classes: int | None
    ignored: frozenset[int]
    dtype: str

    def stored(self, labels_HW: Array, file: ImageFile) -> Array:
        """The page's numbers of some labels of a file.  ValueError: one is greater than MOST."""
        wide = labels_HW.astype(np.int64)
        holds = wide >= 0
        for number in (*self.ignored, *(one for one in file.info.nodata if one is not None)):
            holds &= wide != number
        if self.classes is not None:
            holds &= wide < self.classes
        elif (greatest := int(wide.max(initial=0, where=holds))) > MOST:
            raise ValueError(
                f"{file.path} has the number {greatest:,} and the page has numbers up to {MOST:,}; number them anew"
            )
        return np.where(holds, wide + 1, 0).astype(self.dtype)

    @property
    def count(self) -> int:
        """How many numbers the page may have, with 0."""
        return self.classes + 1 if self.classes is not None else int(np.iinfo(self.dtype).max) + 1


def numbers_of(files: Iterable[ImageFile], classes: int, ignored: Collection[int] | None) -> Numbers:
    """How the labels of some files are stored.  classes: how many have names; 0: none has.  ignored: None: IGNORED."""
    found = frozenset([IGNORED] if ignored is None and classes <= IGNORED else ignored or [])
    if classes:
        return Numbers(classes, found, "uint8" if classes < 256 else "uint16")
    is_small = all(file.info.dtype in ("uint8", "bool") for file in files) and IGNORED in found
    return Numbers(None, found, "uint8" if is_small else "uint16")
