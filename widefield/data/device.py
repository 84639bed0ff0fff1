"""From a batch to the network's input: moved to the device, augmented, normalized, mixed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor
from torch.nn import functional as F

from widefield.data import Labels
from widefield.data.intensity import Intensity
from widefield.data.loader import Batch
from widefield.data.transforms import Transforms, seed_of
from widefield.geometry.box import slices


@dataclass(frozen=True)
class Preparation:
    """A function from a Batch to images and targets on the device.

    Images are moved with the dtype that they have, as uint8, a quarter of float32's bytes.  dims: of their pixels.
    """

    device: torch.device
    dtype: torch.dtype
    mean: Sequence[float]
    std: Sequence[float]
    num_classes: int
    channels_last: bool
    augment: Transforms
    """Transforms run on the device, image by image with each sample's seed; empty where the loader runs them."""
    labels: Labels = "class"
    pixel_dtype: torch.dtype | None = None
    """Of the dataset's images, whose limits `intensity` may refer to; None: that of the batch's images."""
    intensity: Intensity = Intensity()
    dims: int = 2
    views: int = 1
    """How many views of each image are joined by their channels."""
    noise: tuple[int, ...] = ()
    """(Z, *extents) of the noise that images are made of; (): they are made of no noise."""

    def __call__(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Images (B, C, *pixels) of `dtype`, or noise (B, Z, *extents), which ranks of tiles have whole, and targets.

        Targets by kind: class: (B,) int64, or (B, num_classes) shares of mixed images.  classes, values: (B, K) of `dtype`.
        pixels: (B, *pixels) int64.  layers: (B, K, *pixels) uint8, an eighth of the bytes.  image: (B, K, *pixels) of `dtype`,
        scaled as images are, without mean and std: integers to 0..1.
        noise: the images themselves, (B, C, *pixels) of `dtype`, scaled as targets that are images.
        boxes: (B, 1 + most, 7) float64, in pixels of the whole images, see widefield/detection/targets.py.
        """
        image = batch.image.to(self.device, non_blocking=True)
        if self.augment.steps:
            image = torch.stack([self.augment(one, seed) for one, seed in zip(image, batch.seeds, strict=True)])
        if self.noise:
            return self._noise_of(batch), self._between_0_and_1(image)
        views = [self.scaled(view, batch.moments) for view in image.chunk(self.views, 1)]
        image = views[0] if self.views == 1 else torch.cat(views, 1)
        target = self._target(batch.target.to(self.device, non_blocking=True))  # after what scaling the image takes
        if batch.partner is not None:
            image, target = self._mixed(image, target, batch)
        return image.contiguous(memory_format=self.format_of(image)), target

    def format_of(self, image: Tensor) -> torch.memory_format:
        """The memory format in which the model gets images."""
        formats = {4: torch.channels_last, 5: torch.channels_last_3d}
        return formats.get(image.ndim, torch.contiguous_format) if self.channels_last else torch.contiguous_format

    def _target(self, target: Tensor) -> Tensor:
        """After the move, since labels of pixels may be uint8."""
        if self.labels in ("layers", "boxes"):
            return target
        if self.labels == "image":
            return self._between_0_and_1(target)
        return target.to(self.dtype) if self.labels in ("classes", "values") else target.long()

    def _between_0_and_1(self, image: Tensor) -> Tensor:
        low, high = self.range_of(image.dtype)
        image = image.to(self.dtype, copy=True)
        image = image if self.intensity.clip is None else image.clamp_(low, high)
        return image.sub_(low).div_(high - low)

    def _noise_of(self, batch: Batch) -> Tensor:
        """Normal, drawn for each sample by its seed alone; in an evaluation, whose seeds do not change, always the same."""
        seeds = batch.seeds or [0] * len(batch.image)  # stand-ins of the planner have none
        drawn = torch.stack([noise_of_seed(seed, self.noise) for seed in seeds])
        return drawn.to(self.device, self.dtype)

    def range_of(self, dtype: torch.dtype) -> tuple[float, float]:
        """The pixel values that are 0 and 1 in targets that are images; data_checks.py refuses others for each channel."""
        known = self.intensity.of(self.pixel_dtype or dtype)
        assert known.low is not None and known.high is not None
        return known.low[0], known.high[0]

    def scaled(self, image: Tensor, moments: Tensor | None = None) -> Tensor:
        """((pixel - low) / (high - low) - mean) / std of images on the device, as one multiply-add after the pixel's own shift.

        moments: (B, C, 2), see Batch.
        """
        known = self.intensity.of(self.pixel_dtype or image.dtype)
        assert known.low is not None and known.high is not None
        image = image.to(self.dtype)
        if known.each_image is not None:
            assert moments is not None, "the reader gives the moments that the intensity needs"
            mean, spread = (one.view(*one.shape, *[1] * self.dims) for one in moments.to(self.device, self.dtype).unbind(2))
            return torch.addcmul(self._offset, (image - mean) / spread, self._factor((0.0,), (1.0,)))
        if known.clip is not None:
            image = image.clamp(*map(self._channels, known.clip))
        if any(known.low):
            image = image - self._channels(known.low)
        return torch.addcmul(self._offset, image, self._factor(known.low, known.high))

    @cached_property
    def _offset(self) -> Tensor:
        return -self._channels(self.mean) / self._channels(self.std)

    def _factor(self, low: tuple[float, ...], high: tuple[float, ...]) -> Tensor:
        return 1 / ((self._channels(high) - self._channels(low)) * self._channels(self.std))

    def _channels(self, values: Sequence[float]) -> Tensor:
        return torch.tensor(values, dtype=self.dtype, device=self.device).view(1, -1, *[1] * self.dims)

    def _mixed(self, image: Tensor, target_B: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
        assert batch.partner is not None and batch.share is not None and batch.box is not None
        partner, ones = batch.partner.to(self.device), [1] * self.dims
        inside = _inside(batch.box, (batch.whole_shape or image.shape)[-self.dims :])
        cut_B = (batch.box[:, self.dims] > batch.box[:, 0]).to(torch.float64)
        share_B = torch.where(cut_B > 0, 1 - inside.flatten(1).mean(1), batch.share)
        # one formula for both: the partner's weight is 1 inside the pasted box for cutmix, 1 - share everywhere for mixup
        weight = torch.where(cut_B.view(-1, *ones) > 0, inside, (1 - share_B).view(-1, *ones))
        if batch.window is not None:  # the box refers to the whole image
            weight = weight.expand_as(inside)[..., *slices(batch.window)]
        weight = weight.to(self.device, self.dtype).unsqueeze(1)
        own = target_B if self.labels == "classes" else F.one_hot(target_B, self.num_classes).to(self.dtype)
        share = share_B.to(self.device, self.dtype).unsqueeze(1)
        return torch.lerp(image, image[partner], weight), torch.lerp(own[partner], own, share)


def noise_of_seed(seed: int, shape: Sequence[int]) -> Tensor:
    """float32 on the CPU, whatever the device and the arithmetic are."""
    generator = torch.Generator().manual_seed(seed_of(seed, "noise"))
    return torch.randn(tuple(shape), generator=generator, dtype=torch.float32)


def _inside(box: Tensor, size: Sequence[int]) -> Tensor:
    """(B, *size), 1 where a pixel's center is in the sample's box, else 0.  box: (B, starts and stops), see mixing.draw."""
    dims = len(size)
    inside = torch.ones(len(box), *size, dtype=torch.bool)
    for dim, extent in enumerate(size):
        at = (torch.arange(extent, dtype=torch.float64) + 0.5) / extent
        line = (at >= box[:, dim, None]) & (at < box[:, dims + dim, None])
        inside &= line.view(len(box), *[1] * dim, extent, *[1] * (dims - dim - 1))
    return inside.to(torch.float64)
