"""`verify`: does a model give one device's numbers under a plan?

Tiles in space, and plans, get ranks of their own on this machine; tiles in time alone need none.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from functools import partial

import torch
import torch.distributed as dist
from torch import nn

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
    """Compare `model` on tiles with `model` on one device: outputs, every gradient, buffers; in float64, on the CPU.

    shape: of a batch of images, e.g. (2, 3, 250, 190); space: tiles in space per image dim, (2,) where `stream` is not given
    either; stream: tiles in time per image dim; cuts as for `tile`.
    train: in training mode, forward and backward; else evaluation mode and forward alone.
    plan: instead, any plan of any strategies, as `Plan(shard=2, channel=2)`: three optimizer steps under it, the batch shared
        out, against three on one device; losses, gradients, weights, buffers and outputs are compared.
    Starts one gloo rank per tile in space on this machine and ends them; the model itself stays as it is.
    Returns a Verdict: true if all agree; print it for the table, and for what ran whole or was brought whole, with its bytes.
    ValueError: more sizes than image dims, cuts that do not fit, or ranks to be started by a process that is a rank.
    """
    model = _on_the_cpu(model)
    if plan is not None:
        return _verify_plan(model, shape, plan, tolerance, timeout_seconds, others=bool(space or stream or cuts or not train))
    space = space if space is not None else () if stream else (2,)
    sizes, turns = (_sizes(name, given, shape) for name, given in (("space", space), ("stream", stream)))
    body = partial(compare, model, tuple(shape), cuts=cuts, train=train, tolerance=tolerance, stream=turns if stream else ())
    if not space:
        with torch.random.fork_rng(devices=[]):
            return body(mesh=Mesh(Plan(), World(), torch.device("cpu"), grid=Grid(())))
    if dist.is_initialized():
        raise ValueError(OWN_RANKS)
    window(shape, Mesh(Plan(space=sizes), World(), torch.device("cpu"), grid=Grid(tuple(sizes))), cuts)  # refuses a wrong cut
    return on_own_ranks(Plan(space=sizes), body, timeout_seconds)


def _on_the_cpu(model: nn.Module) -> nn.Module:
    """The model, or a copy where some of it is on a GPU, which no forked process can use."""
    is_there = all(t.device.type in ("cpu", "meta") for t in (*model.parameters(), *model.buffers()))
    return model if is_there else copy.deepcopy(model).cpu()


def _verify_plan(
    model: nn.Module, shape: Sequence[int], plan: Plan, tolerance: float, timeout_seconds: float, *, others: bool
) -> Verdict:
    if others:
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
    """A number of tiles for every dim of an image, 1 for the last ones where none is given."""
    dims = len(shape) - 2
    if len(given) > dims:
        raise ValueError(
            f"{name}={tuple(given)} has {len(given)} sizes and an image of {tuple(shape)[1:]} has {dims} dims to cut"
        )
    return [*given] + [1] * (dims - len(given))
