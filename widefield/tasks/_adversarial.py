"""Losses of a discriminator and of what it judges, each as (B,) numbers of samples, so that they are exact on any plan.

A discriminator answers with scores (B, ...), of which each sample's mean is taken, as of a map of patches (Isola et al. 2017,
arXiv:1611.07004); or with several, as of several resolutions, whose losses are added (Wang et al. 2018, arXiv:1711.11585).
An answer may have the features of all layers in a list, the scores last.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from widefield.losses import of_samples, widened
from widefield.naming import did_you_mean

Part = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class AdversarialLoss:
    """real, fake: what the discriminator minimizes, of its scores of real and of made images; made: what the generator does."""

    real: Part
    fake: Part
    made: Part


LOSSES = {
    # Goodfellow et al. 2014 (arXiv:1406.2661): of logits, the generator's in the form that does not saturate
    "non_saturating": AdversarialLoss(lambda x: F.softplus(-x), F.softplus, lambda x: F.softplus(-x)),
    # Lim and Ye 2017 (arXiv:1705.02894)
    "hinge": AdversarialLoss(lambda x: F.relu(1 - x), lambda x: F.relu(1 + x), lambda x: -x),
    # Mao et al. 2017 (arXiv:1611.04076), equation 9
    "lsgan": AdversarialLoss(
        lambda x: 0.5 * (x - 1).square(), lambda x: 0.5 * x.square(), lambda x: 0.5 * (x - 1).square()
    ),
    # Arjovsky et al. 2017 (arXiv:1701.07875), with a penalty on gradients
    "wasserstein": AdversarialLoss(lambda x: -x, lambda x: x, lambda x: -x),
}  # fmt: skip


def loss_named(name: str) -> AdversarialLoss:
    """ValueError: there is none."""
    if name not in LOSSES:
        hint = did_you_mean(str(name), LOSSES)
        raise ValueError(f"task.options.adversarial is {name!r}{hint} It can be: {', '.join(LOSSES)}")
    return LOSSES[name]


def answers_of(output: Any) -> list[list[Tensor]]:
    """The features of each answer, its scores last.  output: scores, a list of features, or a list of such lists.

    ValueError: it is none of these.
    """
    answers = [output] if isinstance(output, Tensor) else output
    if isinstance(answers, list | tuple) and answers and all(isinstance(one, Tensor) for one in answers):
        return [widened(list(answers))]
    if (
        not isinstance(answers, list | tuple)
        or not answers
        or not all(isinstance(one, list | tuple) and one for one in answers)
    ):
        raise ValueError(
            f"the discriminator gives a {type(output).__name__}; scores (B, ...), a list of features with the scores last, or "
            "a list of such lists are wanted"
        )
    return [widened(list(features)) for features in answers]


def mean_of_samples(tensor: Tensor) -> Tensor:
    """(B,) the mean over everything but the samples."""
    return of_samples(tensor) / (tensor.numel() / len(tensor))


def scores_of(output: Any) -> list[Tensor]:
    """The scores of each answer, without its features, which may be as large as the image."""
    return [features[-1] for features in answers_of(output)]


def judged(scores: list[Tensor], part: Part) -> Tensor:
    """(B,) the loss of scores, the mean over an answer's scores, added up over answers."""
    return torch.stack([mean_of_samples(part(one)) for one in scores]).sum(0)


def apart(made: list[list[Tensor]], real: list[list[Tensor]]) -> Tensor:
    """(B,) the mean distance |made - real| of each layer's features, added up over layers and answers, without the scores.

    Feature matching as in pix2pixHD.  ValueError: the discriminator gives scores alone.
    """
    if not all(len(features) > 1 for features in made):
        raise ValueError(
            "task.options.feature_matching compares the discriminator's features and it gives scores alone; take one that "
            "gives lists of features with the scores last (patch, multiscale, with features: true), or leave "
            "feature_matching out"
        )
    pairs = [pair for one, other in zip(made, real, strict=True) for pair in zip(one[:-1], other[:-1], strict=True)]
    # l1_loss saves what it is given and no difference
    return torch.stack([mean_of_samples(F.l1_loss(one, other.detach(), reduction="none")) for one, other in pairs]).sum(0)


def gradient_at(image: Tensor, discriminate: Callable[[Tensor], Any]) -> Tensor:
    """The gradient of all scores' means at an image, which may be differentiated once more."""
    image = image.detach().requires_grad_(True)
    score = torch.stack([mean_of_samples(one) for one in scores_of(discriminate(image))]).sum()
    (gradient,) = torch.autograd.grad(score, image, create_graph=True)
    return gradient


def lengths_of_paths(noise: Tensor, make: Callable[[Tensor], Tensor], normal_like: Callable[[Tensor], Tensor]) -> Tensor:
    """(B,) the norm of the gradient, at each sample's noise, of its image times normal numbers over the root of its pixels.

    Its mean is how far an image moves with its noise (Karras et al. 2020, arXiv:1912.04958, equation 4).  make: of the images.
    """
    noise = noise.detach().requires_grad_(True)
    made = widened(make(noise))
    towards = normal_like(made) / math.prod(made.shape[2:]) ** 0.5
    (gradient,) = torch.autograd.grad((made * towards).sum(), noise, create_graph=True)
    return of_samples(widened(gradient).square()).add(1e-12).sqrt()


def square_of_gradient(image: Tensor, discriminate: Callable[[Tensor], Any]) -> Tensor:
    """(B,) the squared norm of each image's gradient, as R1 penalizes it (Mescheder et al. 2018, arXiv:1801.04406)."""
    return of_samples(gradient_at(image, discriminate).square())


def distance_from_slope_one(image: Tensor, discriminate: Callable[[Tensor], Any]) -> Tensor:
    """(B,) (norm - 1)^2 of each image's gradient over all pixels and channels (Gulrajani et al. 2017, arXiv:1704.00028)."""
    return (of_samples(gradient_at(image, discriminate).square()).add(1e-12).sqrt() - 1).square()
