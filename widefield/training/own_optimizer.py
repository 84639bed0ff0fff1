"""`optimizer.name=package.module:callable`: how a user's own optimizer is made, and what is asked of it.

It is called as torch's are, `callable(groups, lr=..., **optimizer.options)`, so a class of torch.optim serves as it is.  One
that has a parameter `config` is called as a row of the table in optimizer.py is: `callable(groups, config, lr, fused)`.
groups: parameter groups with their weight decay.  The learning rate of every step is written into its groups.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from widefield.config import OptimizerConfig
from widefield.own_code import code_named, takes
from widefield.parallel.optimizer_steps import STEPS_PARTS
from widefield.plans import Plan

Groups = list[dict[str, Any]]
TRIED_STEPS = 3
"""Steps after which a whole weight and its parts are compared; momenta have begun by then."""


def own_optimizer(name: str) -> Callable[[Groups, OptimizerConfig, float, bool], Any]:
    """The callable that `name` says, with the arguments of a row of the table; ValueError where there is none."""
    make = code_named(name, key="optimizer.name")

    def build(groups: Groups, config: OptimizerConfig, lr: float, fused: bool) -> Any:
        if takes(make, "config"):
            return make(groups, config, lr, fused)
        return make(groups, lr=lr, **config.options)

    return build


def check_own(optimizer: Any, parameters: Sequence[nn.Parameter], name: str) -> None:
    """ValueError where a user's callable gave no optimizer, or one of other parameters than it was given."""
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise ValueError(f"optimizer.name={name} gives a {type(optimizer).__name__}; a torch.optim.Optimizer is wanted")
    stepped = [id(parameter) for group in optimizer.param_groups for parameter in group["params"]]
    wanted = {id(parameter) for parameter in parameters}
    if set(stepped) != wanted or len(stepped) != len(wanted):
        raise ValueError(
            f"optimizer.name={name} steps {len(set(stepped) & wanted)} of the {len(wanted)} parameters that it was given, and "
            f"{len(stepped)} in all; let it step each of them once"
        )
    if not all("lr" in group for group in optimizer.param_groups):
        raise ValueError(
            f"optimizer.name={name} has groups without 'lr', which is where the schedule writes the learning rate of each "
            "step; let it read group['lr']"
        )


def check_steps_parts(build: Callable[[list[nn.Parameter]], Any], *, name: str, plan: Plan) -> None:
    """NotImplementedError where the optimizer steps a part of the weights in another way than it steps them all together.

    Tried in float64 on a matrix of 4 rows and a vector: once together, once as 2 rows, and 2 rows with the vector.
    """
    draws = torch.Generator().manual_seed(0)
    first = [torch.randn(shape, generator=draws, dtype=torch.float64) for shape in ((4, 3), (5,))]
    gradients = [[torch.randn(w.shape, generator=draws, dtype=torch.float64) for w in first] for _ in range(TRIED_STEPS)]
    rows = slice(0, 2), slice(2, 4)
    whole, vector = _stepped(build, first, gradients)
    (upper,) = _stepped(build, [first[0][rows[0]]], [[matrix[rows[0]]] for matrix, _ in gradients])
    lower, beside = _stepped(build, [first[0][rows[1]], first[1]], [[matrix[rows[1]], other] for matrix, other in gradients])
    for together, apart in ((whole, torch.cat([upper, lower])), (vector, beside)):
        if not torch.allclose(together, apart, rtol=1e-9, atol=1e-12):  # float64, three steps
            raise NotImplementedError(
                f"optimizer.name={name} steps a part of a weight in another way than the whole (by up to "
                f"{(together - apart).abs().max():.2g} on a trial weight), and under {plan} ranks hold parts; take one that "
                "steps each number by itself, or a plan whose ranks hold whole models, as mesh.replicate or mesh.space"
            )


def _stepped(
    build: Callable[[list[nn.Parameter]], Any], weights: Sequence[Tensor], gradients: Sequence[Sequence[Tensor]]
) -> list[Tensor]:
    """Copies of `weights` after a step with each of `gradients`."""
    parameters = [nn.Parameter(weight.clone()) for weight in weights]
    optimizer = build(parameters)
    if getattr(type(optimizer), STEPS_PARTS, False):  # it says that it looks after parts itself
        return list(weights)
    for step in gradients:
        for parameter, gradient in zip(parameters, step, strict=True):
            parameter.grad = gradient.clone()
        optimizer.step()
    return [parameter.detach() for parameter in parameters]
