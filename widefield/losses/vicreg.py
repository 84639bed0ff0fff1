"""Variance, invariance and covariance of the embeddings of two views (VICReg, Bardes et al. 2022, arXiv:2105.04906).

Without labels, so that embeddings of two views of an image come close, and cannot do so by being the same for all images:

    loss = invariance |z - z'|^2 / D  +  variance [v(Z) + v(Z')] / 2  +  covariance [c(Z) + c(Z')]
    v: the mean over the D dims of max(0, 1 - sqrt(variance + 1e-4))
    c: the sum of the squares of what is off the diagonal of the covariance matrix, over D

as in the authors' code, which takes the mean over dims of the invariance and half the sum of both variance terms.  All of it
follows from sums over samples of z, z z^T and |z - z'|^2, so it is the loss of the batch of all ranks.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from widefield.losses import FinishedLoss, Loss, Targets

EPSILON = 1e-4
"""Added to a variance before its root, whose gradient would be infinite at 0; the authors' number."""


@dataclass(frozen=True)
class VarianceInvarianceCovariance(FinishedLoss):
    """Outputs are (B, 2, D), the embeddings of two views; targets are not looked at.  The fields are weights."""

    invariance: float = 25.0
    variance: float = 25.0
    covariance: float = 1.0

    def sums(self, output: Tensor, target: Tensor) -> Tensor:
        """(2 (D + 1)^2 + 1,) float64: of each view the sum of [z, 1] [z, 1]^T, in which are z z^T, z and the number of samples;
        then that of the mean square of z - z'.

        In float64, since a variance is the difference of two of these sums.
        """
        views_BVD = output.double()
        ones = views_BVD.new_ones(*views_BVD.shape[:2], 1)
        extended = torch.cat([views_BVD, ones], 2).transpose(0, 1)
        products = extended.transpose(1, 2) @ extended
        return torch.cat([products.flatten(), self.loss_of_pairs(views_BVD).sum().view(1)])

    def loss_of_pairs(self, views_BVD: Tensor) -> Tensor:
        """(B,) the mean square over dims of the difference of the views."""
        return (views_BVD[:, 0] - views_BVD[:, 1]).square().mean(1)

    def finish(self, sums: Tensor) -> Tensor:
        side = math.isqrt((sums.numel() - 1) // 2)
        products = sums[:-1].view(2, side, side)
        number = products[0, -1, -1].detach().clamp(min=1)
        mean = products[:, -1, :-1] / number
        scatter = products[:, :-1, :-1] - number * mean[:, :, None] * mean[:, None, :]
        covariances = scatter / (number - 1).clamp(min=1)
        variances = covariances.diagonal(dim1=1, dim2=2)
        spread = (1 - (variances + EPSILON).sqrt()).relu().mean(1).sum() / 2
        redundant = (covariances.square().sum() - variances.square().sum()) / (side - 1)
        return self.invariance * sums[-1] / number + self.variance * spread + self.covariance * redundant

    def loss_each(self, output: Tensor, target: Tensor) -> Tensor:
        """Of one sample there is the invariance alone."""
        return self.invariance * self.loss_of_pairs(output)


def build(targets: Targets, *, invariance: float = 25.0, variance: float = 25.0, covariance: float = 1.0) -> Loss:
    """The weights of the three terms."""
    targets.refuse_unless("vicreg", "views")
    targets.refuse_weights("vicreg", "it looks at no labels")
    weights = {"invariance": invariance, "variance": variance, "covariance": covariance}
    for name, weight in weights.items():
        if isinstance(weight, bool) or not isinstance(weight, int | float) or not 0 <= weight < math.inf:
            raise ValueError(f"{name} is {weight!r}; a number of 0 or more is wanted, as the {_DEFAULTS[name]} of the paper")
    return VarianceInvarianceCovariance(**weights)


_DEFAULTS = {"invariance": 25, "variance": 25, "covariance": 1}

_CORNERS = torch.tensor([[[1.0, 1.0]] * 2, [[1.0, -1.0]] * 2, [[-1.0, 1.0]] * 2, [[-1.0, -1.0]] * 2])  # variances of 4 / 3
_LINE = torch.tensor([[[0.5, 0.5], [0.5, 1.5]], [[-0.5, -0.5], [-0.5, 0.5]]])  # variances and covariances of 1 / 2
_SPREAD = 1 - math.sqrt(0.5 + EPSILON)

CASES = [
    (build(Targets("views", 1)), _CORNERS, torch.zeros(4), 0.0),
    (build(Targets("views", 1), invariance=2, variance=10, covariance=3), _LINE, torch.zeros(2),
     2 * 0.5 + 10 * _SPREAD + 3 * 2 * (2 * 0.25) / 2),
]  # fmt: skip
"""As in cross_entropy."""
