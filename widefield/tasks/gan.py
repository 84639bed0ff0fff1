"""Images from images, or from noise, by a generator and a discriminator that learn by turns.

From images, as pix2pix and pix2pixHD do:

The discriminator is called with an input and its target, or with what the generator makes of the input.  Each turn's loss is a
mean over samples:

    discriminator   real(D(x, y)) + fake(D(x, G(x)))  [+ r1/2 |dD/dy|^2 + r2/2 |dD/dG(x)|^2 + gradient_penalty (|dD/dz| - 1)^2]
    generator       adversarial_weight made(D(x, G(x))) + reconstruction loss(G(x), y) [+ feature_matching |F(G(x)) - F(y)|]

z is a point between y and G(x), drawn for each sample.  Penalties are on gradients at the images alone, not at the inputs.
Evaluation, answers and the result are those of `restoration`.

From noise, as DCGAN does, y is an image of the data, x is noise drawn for each sample, and the discriminator judges D(y) and
D(G(x)) without seeing x.  There is no image that G(x) should be, so nothing is compared pixel by pixel.  The generator's loss
may have `path_length` (|d(G(x) . n)/dx| - a)^2 added, with n normal at each pixel and divided by the root of their number, and
a the running mean of these lengths (Karras et al. 2020, arXiv:1912.04958).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torchmetrics import MetricCollection

from widefield.config.field_types import Labels
from widefield.losses import widened
from widefield.tasks import SampleDraws, SampleMeans, output_of
from widefield.tasks._adversarial import (
    answers_of,
    apart,
    distance_from_slope_one,
    judged,
    lengths_of_paths,
    loss_named,
    scores_of,
    square_of_gradient,
)
from widefield.tasks._pixel_moments import PixelMoments, distance_of, moments_of
from widefield.tasks.restoration import Restoration

GENERATOR, DISCRIMINATOR = "generator", "discriminator"
PATH_LENGTH = "path_length"


@dataclass(frozen=True)
class Adversarial:
    """The options of `build`: numbers are weights, see the module's docstring.

    penalty_every: penalties count in each so many-th step of the discriminator, and that many times there (lazy
        regularization).  path_length_every: the same of `path_length` and the generator.
    path_length_decay: how far a step moves the mean of lengths towards its own.
    """

    loss: str = "hinge"
    steps: tuple[tuple[str, ...], ...] = ((DISCRIMINATOR, GENERATOR),)
    adversarial_weight: float = 1.0
    reconstruction: float = 100.0
    feature_matching: float = 0.0
    r1: float = 0.0
    r2: float = 0.0
    gradient_penalty: float = 0.0
    penalty_every: int = 1
    path_length: float = 0.0
    path_length_every: int = 1
    path_length_decay: float = 0.01

    def __post_init__(self) -> None:
        """ValueError: an option out of range."""
        loss_named(self.loss)
        for name in ("adversarial_weight", "reconstruction", "feature_matching", "r1", "r2", "gradient_penalty", "path_length"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < math.inf:
                raise ValueError(f"task.options.{name} is {value!r}; a number of 0 or more is wanted")
        for name in ("penalty_every", "path_length_every"):
            value = getattr(self, name)
            if type(value) is not int or value < 1:
                raise ValueError(f"task.options.{name} is {value!r}; a whole number of 1 or more is wanted")
        decay = self.path_length_decay
        if isinstance(decay, bool) or not isinstance(decay, int | float) or not 0 < decay <= 1:
            raise ValueError(f"task.options.path_length_decay is {decay!r}; a number above 0 and up to 1 is wanted")

    def is_due(self, member: str, step: int, *, every: int) -> bool:
        """Whether this step is one of each so many-th in which the member learns.  step: counted from 0."""
        learns = [member in turns for turns in self.steps]
        rounds, rest = divmod(step, len(learns))
        return learns[rest] and (rounds * sum(learns) + sum(learns[:rest])) % every == 0

    @property
    def penalizes(self) -> bool:
        """Whether the discriminator's loss has gradients of its scores in it."""
        return bool(self.r1 or self.r2 or self.gradient_penalty)


@dataclass(frozen=True)
class ImageTranslation(Restoration):
    """A task of two modules; see tasks/__init__.py.  Targets are (B, K, *pixels) images of the input's size."""

    adversarial: Adversarial = field(default_factory=Adversarial)
    members: tuple[str, ...] = (GENERATOR, DISCRIMINATOR)

    def in_turn(self, step: int) -> Sequence[str]:
        return self.adversarial.steps[step % len(self.adversarial.steps)]

    @property
    def differentiates_twice(self) -> bool:
        """Whether a loss has gradients in it."""
        return self.adversarial.penalizes or self.adversarial.path_length > 0

    def example(self, member: str, image: Tensor, target: Tensor) -> tuple[Tensor, ...]:
        """What the member is called with, of images and targets."""
        return (image,) if member == GENERATOR else self.judged(image, target.to(image.dtype))

    def judged(self, image: Tensor, picture: Tensor) -> tuple[Tensor, ...]:
        """What the discriminator is called with, of an input and a picture that is its target or made of it."""
        return (image, picture)

    def turn_loss(self, member: str, model: Any, image: Tensor, target: Tensor, *, draw: SampleDraws, step: int) -> Tensor:
        """The sum over samples of the loss of the member whose turn it is.  step: counted from 0."""
        target = target.to(image.dtype)
        if member == GENERATOR:
            return self._of_generator(model, image, target)
        with torch.no_grad():
            made = self.fitting(model.generator(image), target).to(image.dtype)
        loss = loss_named(self.adversarial.loss)

        def discriminate(one: Tensor) -> Any:
            return model.discriminator(*self.judged(image, one))

        real, fake = (scores_of(discriminate(one)) for one in (target, made))
        total = (judged(real, loss.real) + judged(fake, loss.fake)).sum()
        every = self.adversarial.penalty_every
        if self.adversarial.penalizes and self.adversarial.is_due(DISCRIMINATOR, step, every=every):
            total = total + every * self._penalty(discriminate, target, made, draw)
        return total

    def _of_generator(self, model: Any, image: Tensor, target: Tensor) -> Tensor:
        asked = self.adversarial
        output = self.fitting(model.generator(image), target)
        made = answers_of(model.discriminator(*self.judged(image, output.to(image.dtype))))
        scores = [features[-1] for features in made]
        total = asked.adversarial_weight * judged(scores, loss_named(asked.loss).made).sum()
        if asked.feature_matching:
            with torch.no_grad():
                real = answers_of(model.discriminator(*self.judged(image, target)))
            total = total + asked.feature_matching * apart(made, real).sum()
        if asked.reconstruction:
            mean = self.loss_sum(widened(output), target) * (len(target) / self._loss.count(target))
            total = total + asked.reconstruction * mean
        return total

    def _penalty(self, discriminate: Callable[[Tensor], Any], real: Tensor, made: Tensor, draw: SampleDraws) -> Tensor:
        """The sum over samples of the penalties on the discriminator's gradients."""
        asked, each = self.adversarial, list[Tensor]()
        if asked.r1:
            each.append(0.5 * asked.r1 * square_of_gradient(real, discriminate))
        if asked.r2:
            each.append(0.5 * asked.r2 * square_of_gradient(made, discriminate))
        if asked.gradient_penalty:
            share = draw.uniform().view(-1, *[1] * (real.ndim - 1))
            between = share * real + (1 - share) * made
            each.append(asked.gradient_penalty * distance_from_slope_one(between, discriminate))
        return torch.stack(each).sum()


@dataclass(frozen=True)
class ImageGeneration(ImageTranslation):
    """Images are made of noise; targets are the data's images, (B, K, *pixels) from 0 to 1.

    noise: (Z,) numbers, or a map of (Z, *extents).  The loss of an evaluation is `distance`, see _pixel_moments.py.
    """

    headline: str = "distance"
    higher_is_better: bool = False
    labels: Labels = "noise"
    noise: tuple[int, ...] = (64,)

    def __post_init__(self) -> None:
        """There is no loss of pixels."""

    def judged(self, image: Tensor, picture: Tensor) -> tuple[Tensor, ...]:
        return (picture,)

    @property
    def running_means(self) -> Mapping[str, float]:
        asked = self.adversarial
        return {PATH_LENGTH: asked.path_length_decay} if asked.path_length else {}

    def turn_loss(
        self,
        member: str,
        model: Any,
        image: Tensor,
        target: Tensor,
        *,
        draw: SampleDraws,
        step: int,
        means: SampleMeans | None = None,
    ) -> Tensor:
        total = super().turn_loss(member, model, image, target, draw=draw, step=step)
        every = self.adversarial.path_length_every
        if means is None or member != GENERATOR or not self.adversarial.is_due(GENERATOR, step, every=every):
            return total
        lengths = lengths_of_paths(image, lambda noise: self.fitting(model.generator(noise), target), draw.normal_like)
        means.add(PATH_LENGTH, lengths)
        apart = lengths - means.value(PATH_LENGTH).to(lengths.dtype)
        return total + every * self.adversarial.path_length * apart.square().sum()

    def fitting(self, output: Tensor, target: Tensor) -> Tensor:
        output = output_of("gan", output, batch=len(target), classes=self.num_classes, pixels=True)
        if output.shape[2:] != target.shape[2:]:
            wanted, got = (" x ".join(map(str, image.shape[2:])) for image in (target, output))
            raise ValueError(
                f"the images are {wanted} pixels and the generator makes {got} of noise {list(self.noise)}; set its sizes (of "
                "dcgan, images are start * 2^strides a side, or 2^strides times the noise), or bring images to that size by "
                "Resize, or CenterCrop, in data.read and data.read_evaluate"
            )
        return output

    def measures(self, output: Tensor, target: Tensor) -> Tensor:
        return moments_of(self.fitting(output, target), target)

    @property
    def counts_images(self) -> bool:
        return True

    def sums(self, output: Tensor, target: Tensor) -> Tensor:  # type: ignore[override]
        return self.measures(output, target).sum(0)

    def finish(self, sums: Tensor) -> Tensor:  # type: ignore[override]
        return distance_of(sums)[0]

    def loss_sum(self, output: Tensor, target: Tensor) -> Tensor:
        return self.finish(self.sums(output, target)) * len(target)

    def count(self, target: Tensor) -> int:
        return len(target)

    def metrics(self) -> MetricCollection:
        return MetricCollection({"moments": PixelMoments(self.num_classes)}, compute_groups=False)

    def sentence(self, values: dict[str, float]) -> str:
        return f"distance {values['distance']:.4f}, spread {values['spread']:.3f}"


def build(
    num_classes: int,
    *,
    adversarial: str = "hinge",
    steps: Any = (DISCRIMINATOR, GENERATOR),
    noise: int | Sequence[int] | None = None,
    **weights: float,
) -> ImageTranslation:
    """adversarial: hinge, non_saturating, lsgan or wasserstein.  weights: the other fields of Adversarial.

    steps: whose turns a step has, in order, as [discriminator, generator]; or a list of such lists, of which the steps take one
        after the other, as [[discriminator], [discriminator, generator]] for two batches of the discriminator per one of the
        generator.
    noise: images are made of so many numbers, or of a map [channels, *extents]; None: of the images of pairs.
    ValueError: an option out of range, or turns of nobody.  TypeError: an unknown option.
    """
    if noise is not None:
        return _of_noise(num_classes, Adversarial(adversarial, _steps(steps), **({"reconstruction": 0.0} | weights)), noise)  # type: ignore[arg-type]
    asked = Adversarial(adversarial, _steps(steps), **weights)  # type: ignore[arg-type]
    if asked.path_length:
        raise ValueError(
            f"task.options.path_length is {asked.path_length:g}, which is of images that are made of noise; set "
            "task.options.noise too, or leave path_length out"
        )
    return ImageTranslation(num_classes, adversarial=asked)


def _of_noise(channels: int, asked: Adversarial, noise: Any) -> ImageGeneration:
    """ValueError: it is no shape of noise, or a loss compares what is made with an image that it should be."""
    extents = tuple(noise) if isinstance(noise, list | tuple) else (noise,)
    if not extents or not all(type(extent) is int and extent > 0 for extent in extents):
        raise ValueError(
            f"task.options.noise is {noise!r}; a whole number above 0 is wanted, as 64, or channels and extents of a map, as "
            "[16, 8, 8]"
        )
    for name in ("reconstruction", "feature_matching"):
        if value := getattr(asked, name):
            raise ValueError(
                f"task.options.{name} is {value:g}, which compares what is made with the image that it should be, and of noise "
                f"there is none; leave {name} out"
            )
    return ImageGeneration(channels, adversarial=asked, noise=extents)


def _steps(asked: Any) -> tuple[tuple[str, ...], ...]:
    """ValueError: these are no lists of members, or one of them never learns."""
    nested = isinstance(asked, list | tuple) and asked and all(isinstance(one, list | tuple) for one in asked)
    lists, known = asked if nested else [asked], (GENERATOR, DISCRIMINATOR)
    right = all(isinstance(turns, list | tuple) and turns and all(one in known for one in turns) for turns in lists)
    if not right or {one for turns in lists for one in turns} != set(known):
        raise ValueError(
            f"task.options.steps is {asked!r}; a list of turns is wanted, as [discriminator, generator], or a list of such "
            "lists, in which both learn"
        )
    return tuple(tuple(turns) for turns in lists)


_TARGET = torch.full((1, 1, 6, 6), 0.5, dtype=torch.float64)

CASES = [
    (build(1), _TARGET + 0.125, _TARGET, {"psnr_all": -20 * math.log10(0.125)}),
    (build(1, noise=4), torch.cat([_TARGET, _TARGET + 0.5]), torch.cat([_TARGET - 0.25, _TARGET + 0.25]),
     {"distance": 0.25, "spread": 1.0}),
]  # fmt: skip
"""As in classification."""
