"""A user's own optimizer, `optimizer.name=package.module:callable`: how it is called, and what it must satisfy.

It is called as torch's are, `callable(groups, lr=..., **optimizer.options)`, so a class of torch.optim can be named directly.
A callable with a parameter `config` is called as those of optimizer.py are: `callable(groups, config, lr, fused)`.
groups: parameter groups with their weight decay.  The learning rate of every step is written into the optimizer's groups.
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
from widefield.training.parameter_groups import Groups

TRIED_STEPS = 3
"""Steps after which a full weight and its shards are compared; momenta are nonzero by then."""


def own_optimizer(name: str) -> Callable[[Groups, OptimizerConfig, float, bool], Any]:
    """The callable that `name` names, with the arguments (groups, config, lr, fused).  ValueError: there is none."""
    make = code_named(name, key="optimizer.name")

    def build(groups: Groups, config: OptimizerConfig, lr: float, fused: bool) -> Any:
        if takes(make, "config"):
            return make(groups, config, lr, fused)
        return make(groups, lr=lr, **config.options)

    return build


def check_own(optimizer: Any, parameters: Sequence[nn.Parameter], name: str) -> None:
    """ValueError: the callable returned no optimizer, or one that does not step each of `parameters` once by group["lr"]."""
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


def check_steps_shards(build: Callable[[list[nn.Parameter]], Any], *, name: str, plan: Plan) -> None:
    """NotImplementedError: the optimizer steps shards of the weights differently than the full weights.

    Tried in float64 on a matrix of 4 rows and a vector: once together, once as 2 rows, and 2 rows with the vector.
    """
    generator = torch.Generator().manual_seed(0)
    first = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in ((4, 3), (5,))]
    gradients = [[torch.randn(w.shape, generator=generator, dtype=torch.float64) for w in first] for _ in range(TRIED_STEPS)]
    rows = slice(0, 2), slice(2, 4)
    whole, vector = _stepped(build, first, gradients)
    (upper,) = _stepped(build, [first[0][rows[0]]], [[matrix[rows[0]]] for matrix, _ in gradients])
    lower, beside = _stepped(build, [first[0][rows[1]], first[1]], [[matrix[rows[1]], other] for matrix, other in gradients])
    for full, sharded in ((whole, torch.cat([upper, lower])), (vector, beside)):
        if not torch.allclose(full, sharded, rtol=1e-9, atol=1e-12):  # float64, three steps
            raise NotImplementedError(
                f"optimizer.name={name} steps a part of a weight in another way than the whole (by up to "
                f"{(full - sharded).abs().max():.2g} on a trial weight), and under {plan} ranks hold parts; take one that "
                "steps each number by itself, or a plan whose ranks hold whole models, as mesh.replicate or mesh.space"
            )


def _stepped(
    build: Callable[[list[nn.Parameter]], Any], weights: Sequence[Tensor], gradients: Sequence[Sequence[Tensor]]
) -> list[Tensor]:
    """Copies of `weights` after a step with each of `gradients`."""
    parameters = [nn.Parameter(weight.clone()) for weight in weights]
    optimizer = build(parameters)
    if getattr(type(optimizer), STEPS_PARTS, False):  # its class declares that it is exact on shards
        return list(weights)
    for step in gradients:
        for parameter, gradient in zip(parameters, step, strict=True):
            parameter.grad = gradient.clone()
        optimizer.step()
    return [parameter.detach() for parameter in parameters]
