"""Lay a model out over a mesh: the strategies that its plan calls for, in the order of their Phase."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from types import ModuleType
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from widefield.capture.interpreter import RankShardModule
from widefield.comm.mesh import Mesh
from widefield.config.strategies import STRATEGIES
from widefield.fallback import Fallback, in_words
from widefield.naming import load_all
from widefield.parallel import optimizer_steps
from widefield.parallel.strategies import Phase, data, fully_shard
from widefield.parallel.strategies._optimizer_shards import share_states as share_optimizer_states
from widefield.plans import Plan
from widefield.streaming.api import Streamed
from widefield.tiled.gather_watch import GatherWatch
from widefield.tiled.redistribute import dense_strides
from widefield.tiled.sync_batch_norm import SyncBatchNorm

_CHOICES: WeakKeyDictionary[nn.Module, list[str | Fallback]] = WeakKeyDictionary()


def parallelize(
    model: nn.Module,
    mesh: Mesh,
    *,
    trial_step: Callable[[], Tensor] | None = None,
    sample: Tensor | None = None,
    rehearse: Callable[[], Tensor] | None = None,
) -> nn.Module:
    """Make `model`, which is on the mesh's device, train over the ranks of `mesh` as its plan says; the same module back.

    Names, hooks and `state_dict()` stay the model's, and `model(...)` runs in parallel where gradients are wanted and alone
    elsewhere (but together where its weights lie in parts, see `evaluates_together`).  On one rank the model stays untouched,
    unless the plan recomputes.  Make the optimizer afterwards: where ranks share weights, parameters become new objects.
    trial_step: runs the model on a small batch of this rank and returns a scalar loss; every rank gives one or none.
        `rehearse` is its earlier name.
    sample: a batch such as a pass of this rank has, or a tensor on meta of its shape; asked for where layers are cut or dealt
    out (mesh.channel, mesh.stage), for which the model is followed on it without pixels.
    Gradients are averaged over the data ranks: a loss summed over samples wants the factor copies / samples of all
    copies of the model (on tiles in space, several ranks are one copy).
    ValueError, on every rank: ranks have different models, or hold parts of this one already.  NotImplementedError: parameters
    without a shape yet, layers with sparse gradients; and whatever a strategy refuses.
    """
    trial_step = trial_step or rehearse
    if mesh.size > 1:
        _refuse_parts(model)
        _check_alike(model, mesh)
    if dist.is_initialized():
        SyncBatchNorm.adopt(model)
    found: list[str | Fallback] = []
    watched = None if trial_step is None else _WatchedStep(trial_step, model)
    for strategy in _strategies(mesh.plan):
        more = {"sample": sample} if strategy.PHASE == Phase.SPLIT else {}
        found += strategy.apply(model, mesh, trial_step=watched, **more)
    if mesh.plan.channel * mesh.plan.stage > 1:
        optimizer_steps.watch(model)
    alone = ["one rank: nothing is exchanged"] if mesh.size == 1 and mesh.plan.data_strategy == "data" else []
    _CHOICES[model] = [*alone, *mesh.reasons, *found, *([] if watched is None else watched.gathered)]
    return model


class _WatchedStep:
    """A trial step that notes what it brings whole to every rank of an image, as bytes of a pass; share: as of a TrialStep."""

    def __init__(self, step: Callable[[], Tensor], model: nn.Module) -> None:
        self.step, self.model, self.share = step, model, getattr(step, "share", 1.0)
        self.gathered: list[Fallback] = []

    def __call__(self) -> Tensor:
        with GatherWatch(self.model) as watch:
            loss = self.step()
        self.gathered = [replace(one, bytes=round(one.bytes / self.share)) for one in watch.found]
        return loss


def parallelize_average(
    copy: nn.Module, mesh: Mesh, *, trial_step: Callable[[], Tensor] | None = None, sample: Tensor | None = None
) -> nn.Module:
    """Lay out a copy that learns nothing but averages the weights of a laid out model; the same module back.

    It holds the same parts, so that they can be averaged one by one; its passes average no gradient.
    """
    for strategy in _strategies(mesh.plan):
        if strategy.PHASE == Phase.SPLIT or (strategy is fully_shard and mesh.plan.sharding.zero > 1):
            more = {"trial_step": trial_step, "sample": sample} if strategy.PHASE == Phase.SPLIT else {}
            strategy.apply(copy, mesh, **more)
    return copy


def share_states(optimizer: torch.optim.Optimizer, mesh: Mesh) -> torch.optim.Optimizer:
    """Share the state of an optimizer of a laid out model over ranks where the plan asks for that; the same optimizer back.

    NotImplementedError: an optimizer that looks at all weights together.
    """
    if mesh.plan.shard > 1 and mesh.plan.sharding.zero == 1:
        optimizer_steps.refuse_unfit(
            optimizer, has_whole_weights=True, where="with sharding.zero=1 each rank steps some of them"
        )
        return share_optimizer_states(optimizer, mesh)
    return optimizer


def without_sync(model: nn.Module) -> AbstractContextManager[None]:
    """Inside, backward adds to this rank's gradients and sends none: every pass of a step but the last runs here.

    Forward and backward both belong inside.  Does nothing for a model that averages no gradients.
    """
    return fully_shard.without_sync(model) if fully_shard.is_sharded(model) else data.without_sync(model)


def _refuse_parts(model: nn.Module) -> None:
    """A model whose copies are whole may be laid out anew."""
    if fully_shard.is_sharded(model) or isinstance(model, RankShardModule):
        raise ValueError(
            f"{type(model).__qualname__} is laid out already and each rank holds a part of its weights; build a new "
            "model, load its weights from a checkpoint, and lay that out"
        )


def _check_alike(model: nn.Module, mesh: Mesh) -> None:
    """See that all ranks have the same model, which no strategy has cut yet, laid out in memory as on rank 0; one message."""
    tensors = [(name, t) for name, t in (*model.named_parameters(), *model.named_buffers()) if not t.is_meta]
    mine = [_told(name, t) for name, t in tensors], [_strides(t) for _, t in tensors]
    sparse = [name for name, layer in model.named_modules() if getattr(layer, "sparse", False) is True]
    of_ranks = mesh.gather_objects((*mine, sparse))
    expected, lie, _ = of_ranks[0]
    for rank, (theirs, _, sparse) in enumerate(of_ranks):
        lazy = next((name for name, shape, _ in theirs if shape is None), None)
        if lazy is not None:
            raise NotImplementedError(
                f"'{lazy}' is lazy: it has no shape yet, so ranks cannot begin with the same; run the model once before it is "
                "laid out"
            )
        if sparse:
            raise NotImplementedError(
                f"the layer '{sparse[0]}' has sparse gradients, which are not averaged over ranks; make it with sparse=False"
            )
        if theirs != expected:
            pairs = [(a, b) for a, b in zip(expected, theirs, strict=False) if a != b]
            told = f"{pairs[0][1]} on rank {rank} where rank 0 has {pairs[0][0]}" if pairs else (
                f"{len(theirs)} parameters and buffers on rank {rank} where rank 0 has {len(expected)}"
            )  # fmt: skip
            raise ValueError(f"ranks have different models: {told}; build the same model on every rank")
    for (_, tensor), strides in zip(tensors, lie, strict=True):
        if _strides(tensor) != strides:  # gradients travel as weights lie
            values = tensor.detach()
            tensor.data = torch.empty_strided(values.shape, strides, dtype=values.dtype, device=values.device).copy_(values)


def _told(name: str, tensor: Tensor) -> tuple[str, tuple[int, ...] | None, str]:
    return name, None if is_lazy(tensor) else tuple(tensor.shape), str(tensor.dtype)


def _strides(tensor: Tensor) -> tuple[int, ...] | None:
    """Those of memory without gaps, 1 in dims of one, which tell nothing; None for one without a shape, or a sparse one."""
    if is_lazy(tensor) or tensor.layout != torch.strided:
        return None
    return tuple(by if many > 1 else 1 for by, many in zip(dense_strides(tensor), tensor.shape, strict=True))


def evaluates_together(model: nn.Module) -> bool:
    """Whether a pass in evaluation sends messages over copies of the model, so that ranks need equally many of them."""
    return fully_shard.is_sharded(model)


def reasons(model: nn.Module) -> list[str]:
    """What `parallelize` chose for this model and why, a sentence each, and what runs whole all the same, with its bytes; none
    for a model it has not seen."""
    return [*choices(model), *in_words(_of_plan(model))]


def choices(model: nn.Module) -> list[str]:
    """`reasons` without those of `fallbacks`."""
    return [choice for choice in _CHOICES.get(model, []) if isinstance(choice, str)]


def fallbacks(model: nn.Module) -> list[Fallback]:
    """The operations of a model that run otherwise than was asked for: on what is gathered, though channels are cut, or on the
    whole image, though it is streamed.

    A stream's are those of the last new shape of its inputs, so there are none before its first call.
    """
    streams = [(name, part._stream) for name, part in model.named_modules() if isinstance(part, Streamed)]
    inside = [(name, one) for name, stream in streams for one in stream.fallbacks]
    return [*_of_plan(model), *(replace(one, module=".".join(filter(None, (name, one.module)))) for name, one in inside)]


def _of_plan(model: nn.Module) -> list[Fallback]:
    return [choice for choice in _CHOICES.get(model, []) if isinstance(choice, Fallback)]


def _strategies(plan: Plan) -> list[ModuleType]:
    """The strategy files that the plan calls for, in the order of their Phase; channels are cut before stages are."""
    used = [strategy for strategy in load_all(STRATEGIES) if strategy.is_used(plan)]
    return sorted(used, key=lambda strategy: (strategy.PHASE, strategy.__name__))
