"""How mixup and cutmix blend the images of a batch: in pairs, drawn by the seed and the place in the epoch's order."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch

from widefield.data.batch import Batch
from widefield.data.transforms import seed_of


def mixed(batch: Batch, places: Sequence[tuple[int, int]], *, seed: int, mixup: float, cutmix: float) -> Batch:
    """Pair positions 2i and 2i + 1 (parts are cut at even positions); a sample without its partner is not mixed.

    places: the epoch of each sample and its position there.  mixup, cutmix: alpha of their beta distributions, 0 is off.
    """
    place = {position: number for number, (_, position) in enumerate(places)}
    partner = [place.get(position ^ 1, number) for number, (_, position) in enumerate(places)]
    dims = batch.image.ndim - 2
    draws = [draw(seed, epoch, position // 2, mixup=mixup, cutmix=cutmix, dims=dims) for epoch, position in places]
    return replace(
        batch,
        partner=torch.tensor(partner),
        share=torch.tensor([share for share, _ in draws], dtype=torch.float64),
        box=torch.tensor([box for _, box in draws], dtype=torch.float64),
    )


def draw(
    seed: int, epoch: int, pair: int, *, mixup: float = 0.0, cutmix: float = 0.0, dims: int = 2
) -> tuple[float, list[float]]:
    """The share of a pair's first image and, for cutmix, the pasted box: where it starts along each dim, then where it stops.

    They are shares of the image, as top, left, bottom, right; of a volume, front, top, left, back, bottom, right.
    mixup: Zhang et al. 2018, arXiv:1710.09412; cutmix: Yun et al. 2019, arXiv:1905.04899.
    """
    generator = np.random.default_rng(seed_of(seed, "mix", epoch, pair))
    cut = bool(cutmix) and (not mixup or generator.random() < 0.5)
    share = generator.beta(*(2 * [cutmix if cut else mixup]))
    if not cut:
        return share, [0.0] * (2 * dims)
    side, center = (1 - share) ** (1 / dims), generator.random(dims).tolist()
    return share, [*(max(0.0, at - side / 2) for at in center), *(min(1.0, at + side / 2) for at in center)]
