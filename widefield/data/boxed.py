"""Images with boxes: a rank reads the window that it needs of the image, and all the boxes of the whole one, which are small.

Boxes move with the image, by the same map: a box becomes the hull of what its sides become, cut to the image.  One of which too
little is left to see is left out.  Its area changes as the box's does.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from widefield.data import Images, WindowedImages
from widefield.data.sources import OfImages
from widefield.data.spatial.axis_warp import AxisMap
from widefield.data.spatial.boxes import moved_boxes
from widefield.data.spatial.coordinate_map import CoordinateMap
from widefield.detection.targets import areas, checked_rows
from widefield.geometry.box import Box, full_box, slices


class BoxedSource:
    """Image `index` of a split with boxes, as a `Source` whose pixels have labels of no meaning.

    classes: how many there are.  seed: of a dataset that uses random numbers.  ValueError, when it is read: see checked_rows.
    """

    def __init__(self, images: Images, index: int, *, seed: int, classes: int) -> None:
        self._images, self._index, self._classes = images, index, classes
        self._source = OfImages(images, index, seed=seed, check=self._check)
        self._rows: Tensor | None = None

    @property
    def size(self) -> tuple[int, ...]:
        return self._source.size

    @property
    def rows(self) -> Tensor:
        """(N, 7) the boxes of the whole image; a window of it was read before."""
        assert self._rows is not None, "the boxes come with the image"
        return self._rows

    def read(self, box: Box) -> tuple[Tensor, Tensor]:
        """The image of a box of pixels."""
        if isinstance(self._images, WindowedImages):
            image, _ = self._source.read(box)
        else:
            image = self._source.sample()[0][..., *slices(box)]
        return image, self.labels(box)

    def labels(self, box: Box) -> Tensor:
        return torch.zeros(tuple(map(len, box)), dtype=torch.uint8)

    def whole(self) -> Tensor:
        """The whole image."""
        return self.read(full_box(self.size))[0]

    def _check(self, image: Tensor, target: object) -> None:
        windowed = isinstance(self._images, WindowedImages)
        size = self._images.shape(self._index)[1:] if windowed else image.shape[1:]  # type: ignore[attr-defined]
        self._rows = checked_rows(self._images.name_of(self._index), target, size, self._classes)


def moved_rows(rows: Tensor, maps: Sequence[CoordinateMap | AxisMap], *, visible: float) -> Tensor:
    """(M, 7) the boxes (N, 7) of the output of one map after the other.

    visible: the least share of a moved box that is in the image; others are left out.
    """
    for map in maps:
        assert isinstance(map, CoordinateMap), "volumes have no boxes"
        if map.is_identity:
            continue
        boxes, numbers = (torch.from_numpy(found) for found in moved_boxes(map, rows[:, :4].numpy(), keep=visible))
        left = rows[numbers]
        area = left[:, 6:] * (areas(boxes) / areas(left))[:, None]
        rows = torch.cat([boxes, left[:, 4:6], area], dim=1)
    return rows
