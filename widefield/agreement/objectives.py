"""What a simulation learns: a quadratic whose minimum is known, softmax regression, or any small module of torch's.

Weights are one flat tensor (P,) in float64.  Samples are places in the data set.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.func import functional_call


@dataclass(frozen=True, eq=False)
class Objective:
    """start: (P,) the weights of all workers at first.  gradient: of the mean loss of some samples.  loss: the mean of all."""

    start: Tensor
    num_samples: int
    gradient: Callable[[Tensor, Sequence[int]], Tensor]
    loss: Callable[[Tensor], float]
    accuracy: Callable[[Tensor], float] | None = None

    def gradient_of(self, weights: Tensor, numbers: Sequence[int]) -> Tensor:
        """The gradient of samples by their numbers in a log, which count over epochs."""
        return self.gradient(weights, [number % self.num_samples for number in numbers])


def quadratic(num_samples: int = 64, dims: int = 8, *, seed: int = 0) -> Objective:
    """The mean of |A_s w - b_s|^2 / 2 over samples s, with A_s (dims, dims) near the identity and b_s normal."""
    generator = torch.Generator().manual_seed(seed)
    near = 0.2 * torch.randn(num_samples, dims, dims, generator=generator, dtype=torch.float64)
    matrices = near + torch.eye(dims, dtype=torch.float64)
    targets = torch.randn(num_samples, dims, generator=generator, dtype=torch.float64)

    def gradient(weights: Tensor, samples: Sequence[int]) -> Tensor:
        chosen = matrices[list(samples)]
        missed = chosen @ weights - targets[list(samples)]
        return torch.einsum("sij,si->j", chosen, missed) / len(samples)

    def loss(weights: Tensor) -> float:
        return float((matrices @ weights - targets).square().sum(1).mean() / 2)

    return Objective(torch.zeros(dims, dtype=torch.float64), num_samples, gradient, loss)


def softmax_regression(inputs: Tensor, labels: Tensor, classes: int) -> Objective:
    """Cross entropy of a linear classifier, with its gradient in closed form.  inputs: (N, F); labels: (N,) from 0.

    The weights are (classes, F + 1), flat, at first zero; the last column is the bias.
    """
    features = torch.cat([inputs.double(), torch.ones(len(inputs), 1, dtype=torch.float64)], 1)
    targets = nn.functional.one_hot(labels, classes).double()

    def logits(weights: Tensor, rows: Tensor) -> Tensor:
        return rows @ weights.view(classes, -1).T

    def gradient(weights: Tensor, samples: Sequence[int]) -> Tensor:
        rows = features[list(samples)]
        missed = logits(weights, rows).softmax(1) - targets[list(samples)]
        return (missed.T @ rows / len(samples)).flatten()

    def loss(weights: Tensor) -> float:
        return float(nn.functional.cross_entropy(logits(weights, features), labels))

    def accuracy(weights: Tensor) -> float:
        return float((logits(weights, features).argmax(1) == labels).double().mean())

    start = torch.zeros(classes * features.shape[1], dtype=torch.float64)
    return Objective(start, len(inputs), gradient, loss, accuracy)


def of_module(module: nn.Module, inputs: Tensor, targets: Tensor, loss_of: Callable[[Tensor, Tensor], Tensor]) -> Objective:
    """The mean loss of a module, by autograd, in float64.  loss_of: of (outputs, targets) of some samples, their mean.

    ValueError: the module has buffers, as running statistics, which are no weights and on which workers would not agree.
    """
    if buffers := [name for name, _ in module.named_buffers()]:
        raise ValueError(
            f"the module has the buffers {', '.join(buffers)}, which a simulation keeps nowhere; use layers without"
        )
    named = {name: value.detach().double() for name, value in module.named_parameters()}
    inputs = inputs.double()

    def value(weights: Tensor, rows: Sequence[int] | slice) -> Tensor:
        parts = weights.split([one.numel() for one in named.values()])
        parameters = {name: part.view(one.shape) for (name, one), part in zip(named.items(), parts, strict=True)}
        return loss_of(functional_call(module, parameters, (inputs[rows],)), targets[rows])

    def gradient(weights: Tensor, samples: Sequence[int]) -> Tensor:
        leaf = weights.detach().requires_grad_()
        return torch.autograd.grad(value(leaf, list(samples)), leaf)[0]

    def loss(weights: Tensor) -> float:
        with torch.no_grad():
            return float(value(weights, slice(None)))

    return Objective(torch.cat([one.flatten() for one in named.values()]), len(inputs), gradient, loss)


def digits(num_samples: int = 1797) -> Objective:
    """Softmax regression on the first of scikit-learn's 1,797 handwritten digits of 8 x 8 pixels.

    ValueError: there are not so many.
    """
    from sklearn.datasets import load_digits

    pixels, labels = load_digits(return_X_y=True)
    if not 1 <= num_samples <= len(pixels):
        raise ValueError(f"{num_samples} of scikit-learn's digits, of which there are {len(pixels)}; take 1 to that many")
    inputs = torch.from_numpy(pixels[:num_samples]).double() / 16
    return softmax_regression(inputs, torch.from_numpy(labels[:num_samples]).long(), 10)


def check_is_finite(weights: Tensor, time: float) -> None:
    """RuntimeError: training diverged."""
    if not math.isfinite(float(weights.sum())):
        raise RuntimeError(f"the weights are not finite at {time:.6g} s of virtual time; take a lower learning rate")
