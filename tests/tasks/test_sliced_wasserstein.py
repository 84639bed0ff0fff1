"""Is the sliced Wasserstein distance 0 of what is equal, that of its definition, and the same in any order and on any ranks?"""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from widefield.tasks._cases import CaseSizes
from widefield.tasks._sliced_wasserstein import SlicedWasserstein, laplacian_pyramid

IMAGES = torch.rand(4, 3, 40, 36, generator=torch.Generator().manual_seed(1))


def metric(**options: int) -> SlicedWasserstein:
    return SlicedWasserstein(CaseSizes(3, len(IMAGES), None, False), **options)


def value_of(made: torch.Tensor, real: torch.Tensor, **options: int) -> dict[str, float]:
    one = metric(**options)
    one.update(torch.arange(len(real)), made, real)
    return {name: float(value) for name, value in one.columns().items()}


def test_what_is_equal_has_a_distance_of_0_and_levels_add_up_to_the_image():
    assert set(value_of(IMAGES, IMAGES).values()) == {0.0}
    fine, middle, image = laplacian_pyramid(IMAGES[0], 3)
    for detail in (middle, fine):
        image = detail + F.interpolate(image[None], size=detail.shape[1:], mode="bilinear")[0]
    assert torch.allclose(image, IMAGES[0])


def test_a_shift_of_all_pixels_is_its_projection():
    """Pixels that are s standard deviations lighter are, in direction d, s |sum of d| apart."""
    found = value_of(IMAGES + 0.25, IMAGES, levels=1, side=1, directions=64, patches=200)["swd"]
    one = metric(levels=1, side=1, directions=64, patches=200)
    one.update(torch.arange(4), IMAGES, IMAGES)
    spread = one.table[:, 0, 1].double().flatten(0, 1).std(0, correction=0)[:, 0]
    directions = torch.randn(3, 64, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    wanted = 1000 * (0.25 / spread @ (directions / directions.norm(dim=0))).abs().mean()
    assert found == pytest.approx(float(wanted), rel=1e-5)


def test_images_may_come_in_any_order_and_on_any_rank():
    made = IMAGES.flip(0) * 0.7
    whole, first, second = value_of(made, IMAGES), metric(), metric()
    first.update(torch.tensor([3, 0]), made[[3, 0]], IMAGES[[3, 0]])
    second.update(torch.tensor([1, 2]), made[1:3], IMAGES[1:3])
    first.table += second.table
    assert {name: float(value) for name, value in first.columns().items()} == whole and whole["swd"] > 0


def test_small_images_and_wrong_numbers_are_refused():
    with pytest.raises(ValueError, match=r"patches of 7 x 7 px on 4 levels and images are 40 x 36 px, at the coarsest 4; give"):
        value_of(IMAGES, IMAGES, levels=4)
    with pytest.raises(ValueError, match=r"swd compares patches of two dims and images have 3; leave swd out"):
        value_of(IMAGES[:, :, None], IMAGES[:, :, None])
    with pytest.raises(ValueError, match=r"swd has patches=0; a whole number of 1 or more is wanted"):
        metric(patches=0)
