"""The images of an evaluation whose boxes were found worst, with these boxes drawn into their thumbnails.

Boxes of the truth are green, those that were found orange.  The worst are those with the largest loss.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from widefield.detection.selection import FoundBoxes
from widefield.detection.targets import boxes_in
from widefield.training.evaluation import Mistake
from widefield.training.thumbnails import Thumbnail

SHOWN_SCORE = 0.3
"""What is found with a lower score is not shown."""
MOST_DRAWN = 500
"""Of an image, of the truth and of what is found."""
TRUTH, FOUND = (60, 200, 90), (255, 140, 0)


def mistakes_of_boxes(index: Tensor, target: Tensor, found: Sequence[FoundBoxes], loss: Tensor) -> list[Mistake]:
    """Each image of a batch, with the class numbers of its boxes and of those that were found, and all of these boxes."""
    made = []
    for number, truth, answer, one in zip(index.tolist(), boxes_in(target), found, loss.tolist(), strict=True):
        shown = answer.scores > SHOWN_SCORE
        boxes = [(truth.boxes, 0), (answer.boxes[shown], 1)]
        drawn = tuple((*box, kind) for rows, kind in boxes for box in rows[:MOST_DRAWN].tolist())
        labels = [tuple(sorted(rows.tolist())) for rows in (truth.labels, answer.labels[shown])]
        made.append(Mistake(number, labels[0], labels[1], None, one, drawn))
    return made


def with_boxes(piece: Thumbnail, boxes: Iterable[Sequence[float]]) -> Tensor:
    """(3, h, w) uint8, the thumbnail with lines of one pixel.  boxes: x1, y1, x2, y2 in pixels of the image; 1: found."""
    image = piece.image.expand(3, -1, -1).clone()
    height, width = image.shape[1:]
    scale = torch.tensor([width / piece.size[1], height / piece.size[0]] * 2, dtype=torch.float64)
    last = torch.tensor([width - 1, height - 1] * 2)
    for *box, found in boxes:
        place = torch.tensor(box, dtype=torch.float64) * scale - torch.tensor([0.0, 0, 1, 1])
        x1, y1, x2, y2 = place.round().long().clamp(min=0).minimum(last).tolist()
        colour = torch.tensor(FOUND if found else TRUTH, dtype=torch.uint8)[:, None]
        for rows, columns in (
            (y1, slice(x1, x2 + 1)), (y2, slice(x1, x2 + 1)), (slice(y1, y2 + 1), x1), (slice(y1, y2 + 1), x2),
        ):  # fmt: skip
            image[:, rows, columns] = colour
    return image
