"""`verify`: does a model give one device's numbers under a plan?

For tiles in space, and for plans, it starts ranks on this machine; tiles in time need none.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parameter import is_lazy

from widefield.comm.mesh import Mesh, World
from widefield.geometry.layout import Grid
from widefield.plans import Plan, check
from widefield.tiled.api import window
from widefield.verification.forward import compare
from widefield.verification.own_ranks import on_own_ranks
from widefield.verification.training import compare_training
from widefield.verification.verdict import TOLERANCE, Verdict

OWN_RANKS = "verify starts ranks of its own; call it outside of a process group, in a process by itself"


def verify(
    model: nn.Module,
    shape: Sequence[int],
    *,
    space: Sequence[int] | None = None,
    stream: Sequence[int] = (),
    cuts: Sequence[Sequence[int] | None] | None = None,
    train: bool = True,
    tolerance: float = TOLERANCE,
    plan: Plan | None = None,
    timeout_seconds: float = 600.0,
) -> Verdict:
    """Compare `model` on tiles with `model` on one device: outputs, gradients and buffers, in float64 on the CPU.

    Weights that begin at zero, as those at the end of a residual branch often do, get random values first: behind them all
    gradients would be zero, under a wrong plan too.

    shape: of a batch of images, as (2, 3, 250, 190).  space: tiles in space per image dim, (2,) if `stream` is empty too.
    stream: tiles in time per image dim.  cuts: as for `tile`.
    train: forward and backward in training mode; else only forward, in evaluation mode.
    plan: instead of tiles, a plan of any strategies, as `Plan(shard=2, channel=2)`: compares losses, gradients, weights,
        buffers and outputs of three optimizer steps, of which each copy of the model runs its part of the batch.
    Starts a gloo rank per tile in space, or per rank of the plan, and ends them; `model` is not changed.
    Returns a Verdict, true where everything agrees; print it for the table and the fallbacks with their bytes.
    ValueError: more sizes than image dims, cuts that do not fit, or the process is itself a rank and ranks are needed.
    """
    model, count = _with_values(_on_the_cpu(model))
    return replace(_verify(model, shape, space, stream, cuts, train, tolerance, plan, timeout_seconds), randomized=count)


def _verify(
    model: nn.Module,
    shape: Sequence[int],
    space: Sequence[int] | None,
    stream: Sequence[int],
    cuts: Sequence[Sequence[int] | None] | None,
    train: bool,
    tolerance: float,
    plan: Plan | None,
    timeout_seconds: float,
) -> Verdict:
    if plan is not None:
        others = bool(space or stream or cuts or not train)
        return _verify_plan(model, shape, plan, tolerance, timeout_seconds, has_other_choices=others)
    space = space if space is not None else () if stream else (2,)
    sizes, tiles = (_sizes(name, given, shape) for name, given in (("space", space), ("stream", stream)))
    body = partial(compare, model, tuple(shape), cuts=cuts, train=train, tolerance=tolerance, stream=tiles if stream else ())
    if not space:
        with torch.random.fork_rng(devices=[]):
            return body(mesh=Mesh(Plan(), World(), torch.device("cpu"), grid=Grid(())))
    if dist.is_initialized():
        raise ValueError(OWN_RANKS)
    window(shape, Mesh(Plan(space=sizes), World(), torch.device("cpu"), grid=Grid(tuple(sizes))), cuts)  # refuses a wrong cut
    return on_own_ranks(Plan(space=sizes), body, timeout_seconds)


def _on_the_cpu(model: nn.Module) -> nn.Module:
    """The model, or a copy on the CPU, since forked processes cannot use CUDA."""
    is_there = all(t.device.type in ("cpu", "meta") for t in (*model.parameters(), *model.buffers()))
    return model if is_there else copy.deepcopy(model).cpu()


def _with_values(model: nn.Module) -> tuple[nn.Module, int]:
    """The model, or a copy whose weights of zeros have random values, and how many of them there are.

    Biases stay, for no gradient is zero behind one.
    """
    zero = [name for name, weight in model.named_parameters() if not name.endswith("bias") and _is_zero(weight)]
    if not zero:
        return model, 0
    model, generator = copy.deepcopy(model), torch.Generator().manual_seed(11)
    weights = dict(model.named_parameters())
    with torch.no_grad():
        for name in zero:
            weights[name].copy_(0.1 * torch.randn(weights[name].shape, generator=generator))
    return model, len(zero)


def _is_zero(weight: nn.Parameter) -> bool:
    return weight.is_floating_point() and not (weight.is_meta or is_lazy(weight) or bool(weight.any()))


def _verify_plan(
    model: nn.Module, shape: Sequence[int], plan: Plan, tolerance: float, timeout_seconds: float, *, has_other_choices: bool
) -> Verdict:
    if has_other_choices:
        raise ValueError(
            "a plan itself says how images are cut, and is verified in training; leave space, stream, cuts and train out"
        )
    if dist.is_initialized():
        raise ValueError(OWN_RANKS)
    try:
        check(plan, ranks=plan.ranks, samples_per_step=shape[0])
    except (ValueError, NotImplementedError) as error:
        return Verdict(refusal=str(error))
    return on_own_ranks(plan, partial(compare_training, model, tuple(shape), tolerance=tolerance), timeout_seconds)


def _sizes(name: str, given: Sequence[int], shape: Sequence[int]) -> list[int]:
    """The number of tiles for every dim of an image, 1 for dims behind those given."""
    dims = len(shape) - 2
    if len(given) > dims:
        raise ValueError(
            f"{name}={tuple(given)} has {len(given)} sizes and an image of {tuple(shape)[1:]} has {dims} dims to cut"
        )
    return [*given] + [1] * (dims - len(given))
