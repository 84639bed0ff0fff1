"""Parallelize a model over a mesh: apply the strategies that its plan calls for, in the order of their Phase."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from types import ModuleType
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from widefield import sharded_state
from widefield.capture.interpreter import RankShardModule
from widefield.comm.mesh import Mesh
from widefield.config.strategies import STRATEGIES
from widefield.fallback import Fallback, in_words
from widefield.naming import load_all
from widefield.parallel import optimizer_steps
from widefield.parallel.members import is_undivided, members_of
from widefield.parallel.strategies import Phase, data, fully_shard
from widefield.parallel.strategies._forward_state import without_trace
from widefield.parallel.strategies._optimizer_shards import share_states as share_optimizer_states
from widefield.parallel.strategies.data import broadcast_weights
from widefield.plans import Plan
from widefield.plans.replicas import check_steps_together
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
    sample: Tensor | tuple[Tensor, ...] | None = None,
    rehearse: Callable[[], Tensor] | None = None,
) -> nn.Module:
    """Make `model` train over the ranks of `mesh` as the mesh's plan says; returns the same module, changed in place.

    The model is on the mesh's device.  Its parameter names, hooks and `state_dict()` stay.  Where gradients are
    disabled, copies of the model do not communicate, unless weights are sharded (see `evaluates_together`).
    Make the optimizer afterwards: where weights are sharded, parameters become new objects.
    trial_step: runs the model on a small batch of this rank and returns a scalar loss; every rank passes one, or none does.
        `rehearse` is its earlier name.
    sample: a batch as one pass of this rank has it, or a meta tensor of that shape; several where the forward takes several,
        which mesh.stage does not.  mesh.channel and mesh.stage need it: the
        model is captured on its shape, without pixels.
    Gradients are averaged over the data ranks.  So multiply a loss that is summed over samples by `mesh.copies` / samples of
    all copies.  A copy is one rank, or all the ranks that share the tiles, channels or stages of one model.
    ValueError, on every rank: ranks have different models, or this model is sharded already.  NotImplementedError: lazy
    parameters, layers with sparse gradients; and what a strategy refuses.
    """
    trial_step = trial_step or rehearse
    check_steps_together(mesh.plan, "`parallelize` makes all copies step together (`wf.train` and the command can do both)")
    if mesh.size > 1:
        _refuse_sharded(model)
        check_same_model(model, mesh)
    if dist.is_initialized():
        SyncBatchNorm.adopt(model)
    found = _begun_whole(model, mesh)
    watched = None if trial_step is None else _WatchedStep(trial_step, model)
    for strategy in _strategies_for(model, mesh.plan):
        more = {"sample": sample} if strategy.PHASE == Phase.SPLIT else {}
        found += strategy.apply(model, mesh, trial_step=watched, **more)
    if mesh.plan.channel * mesh.plan.stage > 1:
        optimizer_steps.watch(model)
    _CHOICES[model] = [*_of_one_rank(mesh), *mesh.reasons, *found, *([] if watched is None else watched.gathered)]
    return model


def _begun_whole(model: nn.Module, mesh: Mesh) -> list[str | Fallback]:
    """Give the ranks of a channel axis the same weights of a module that no rank divides; the reason, [] of any other."""
    if mesh.plan.channel == 1 or not is_undivided(model):
        return []
    broadcast_weights(model, mesh)
    return ["mesh.channel: every rank of the axis has this module whole, and runs it on the same values"]


def _of_one_rank(mesh: Mesh) -> list[str]:
    is_alone = mesh.size == 1 and mesh.of_all is None and mesh.plan.data_strategy == "data"
    return ["one rank: nothing is exchanged"] if is_alone else []


class _WatchedStep:
    """A trial step that records which tiled tensors it gathers in full, with their bytes in a training pass.

    `share`: see TrialStep.
    """

    def __init__(self, step: Callable[[], Tensor], model: nn.Module) -> None:
        self.step, self.model, self.share = step, model, getattr(step, "share", 1.0)
        self.gathered: list[Fallback] = []

    def __call__(self) -> Tensor:
        with GatherWatch(self.model) as watch:
            loss = self.step()
        self.gathered = [replace(one, bytes=round(one.bytes / self.share)) for one in watch.found]
        return loss


def parallelize_members(
    model: nn.Module,
    mesh: Mesh,
    *,
    trial_steps: Mapping[str, Callable[[], Tensor]],
    samples: Mapping[str, tuple[Tensor, ...]],
    is_average: bool = False,
) -> nn.Module:
    """`parallelize` of each member of a model, see members.py; returns the same model, changed in place.

    trial_steps, samples: as for `parallelize`, by the member's name.  is_average: `parallelize_average` in its place.
    NotImplementedError: stages, of which a pipeline runs forward and backward of one module in one call.
    """
    if mesh.plan.stage > 1:
        raise NotImplementedError(
            f"mesh.stage={mesh.plan.stage} divides one module into stages, whose forward and backward are one call, and this "
            f"model's {' and '.join(members_of(model))} learn by turns through each other; set mesh.stage=1, and cut images by "
            "mesh.space or channels by mesh.channel"
        )
    apply = parallelize_average if is_average else parallelize
    members = members_of(model)
    for name, member in members.items():
        with ExitStack() as stack:
            for other in members.values():  # a trial step runs them too, and may write to their buffers
                stack.enter_context(without_trace(other) if other is not member else nullcontext())
            apply(member, mesh, trial_step=trial_steps[name], sample=samples[name])
        specs = {f"{name}.{path}": spec for path, spec in sharded_state.registered(member).items()}
        if specs:
            sharded_state.register(model, specs)
    return model


def parallelize_average(
    copy: nn.Module,
    mesh: Mesh,
    *,
    trial_step: Callable[[], Tensor] | None = None,
    sample: Tensor | tuple[Tensor, ...] | None = None,
) -> nn.Module:
    """Parallelize `copy`, which is only evaluated, as the moving average of a model's weights; returns it, changed in place.

    Its weights are sharded as those of a model that is trained, so that each shard averages the same shard.  It gets no
    gradient averaging.  trial_step, sample: as for `parallelize`.
    """
    for strategy in _strategies_for(copy, mesh.plan):
        if strategy.PHASE == Phase.SPLIT or (strategy is fully_shard and mesh.plan.sharding.zero > 1):
            more = {"trial_step": trial_step, "sample": sample} if strategy.PHASE == Phase.SPLIT else {}
            strategy.apply(copy, mesh, **more)
    return copy


def share_states(optimizer: torch.optim.Optimizer, mesh: Mesh) -> torch.optim.Optimizer:
    """Shard the state of a parallelized model's optimizer where the plan says so (ZeRO-1); returns the same optimizer.

    NotImplementedError: an optimizer whose step on one weight depends on other weights.
    """
    if mesh.plan.shard > 1 and mesh.plan.sharding.zero == 1:
        optimizer_steps.refuse_unfit(
            optimizer, has_whole_weights=True, where="with sharding.zero=1 each rank steps some of them"
        )
        return share_optimizer_states(optimizer, mesh)
    return optimizer


@contextmanager
def without_sync(model: nn.Module) -> Iterator[None]:
    """Inside, backward adds to this rank's gradients and sends none: every pass of a step but the last runs here.

    Forward and backward both belong inside.  Does nothing for a model that averages no gradients.
    """
    with ExitStack() as stack:
        for member in members_of(model).values():
            of_strategy = fully_shard if fully_shard.is_sharded(member) else data
            stack.enter_context(of_strategy.without_sync(member))
        yield


def _refuse_sharded(model: nn.Module) -> None:
    """ValueError where ranks hold shards of the model.  A model of which each rank has all may be parallelized again."""
    if fully_shard.is_sharded(model) or isinstance(model, RankShardModule):
        raise ValueError(
            f"{type(model).__qualname__} is parallelized already and each rank holds a part of its weights; build a new "
            "model, load its weights from a checkpoint, and parallelize that"
        )


def check_same_model(model: nn.Module, mesh: Mesh) -> None:
    """Check that all ranks have the same model, not yet cut, and give its tensors the strides of rank 0; one message."""
    tensors = [(name, t) for name, t in (*model.named_parameters(), *model.named_buffers()) if not t.is_meta]
    mine = [_signature(name, t) for name, t in tensors], [_strides(t) for _, t in tensors]
    sparse = [name for name, layer in model.named_modules() if getattr(layer, "sparse", False) is True]
    of_ranks = mesh.gather_objects((*mine, sparse))
    expected, expected_strides, _ = of_ranks[0]
    for rank, (theirs, _, sparse) in enumerate(of_ranks):
        lazy = next((name for name, shape, _ in theirs if shape is None), None)
        if lazy is not None:
            raise NotImplementedError(
                f"'{lazy}' is lazy: it has no shape yet, so ranks cannot begin with the same; run the model once before it is "
                "parallelized"
            )
        if sparse:
            raise NotImplementedError(
                f"the layer '{sparse[0]}' has sparse gradients, which are not averaged over ranks; make it with sparse=False"
            )
        if theirs != expected:
            pairs = [(a, b) for a, b in zip(expected, theirs, strict=False) if a != b]
            difference = f"{pairs[0][1]} on rank {rank} where rank 0 has {pairs[0][0]}" if pairs else (
                f"{len(theirs)} parameters and buffers on rank {rank} where rank 0 has {len(expected)}"
            )  # fmt: skip
            raise ValueError(f"ranks have different models: {difference}; build the same model on every rank")
    for (_, tensor), strides in zip(tensors, expected_strides, strict=True):
        if _strides(tensor) != strides:  # a gradient is sent in the memory order of its weight
            values = tensor.detach()
            tensor.data = torch.empty_strided(values.shape, strides, dtype=values.dtype, device=values.device).copy_(values)


def _signature(name: str, tensor: Tensor) -> tuple[str, tuple[int, ...] | None, str]:
    return name, None if is_lazy(tensor) else tuple(tensor.shape), str(tensor.dtype)


def _strides(tensor: Tensor) -> tuple[int, ...] | None:
    """Strides of a dense copy, 1 in dims of length 1, where strides mean nothing; None for a lazy or a sparse tensor."""
    if is_lazy(tensor) or tensor.layout != torch.strided:
        return None
    return tuple(stride if size > 1 else 1 for stride, size in zip(dense_strides(tensor), tensor.shape, strict=True))


def evaluates_together(model: nn.Module) -> bool:
    """Whether a pass in evaluation communicates between copies of the model, so that ranks must run equally many passes."""
    return any(map(fully_shard.is_sharded, (model, *members_of(model).values())))  # in prediction a pair is one model


def reasons(model: nn.Module) -> list[str]:
    """What `parallelize` chose for this model and why, and its fallbacks with their bytes, a sentence each.

    Empty for a model that was not parallelized.
    """
    return [*choices(model), *in_words(_of_plan(model))]


def choices(model: nn.Module) -> list[str]:
    """`reasons` without those of `fallbacks`."""
    return [f"{name}: {choice}" if name else choice for name, choice in _choices(model) if isinstance(choice, str)]


def fallbacks(model: nn.Module) -> list[Fallback]:
    """The operations of a model that run on gathered tensors though the plan cuts them, or whole though the model is streamed.

    A stream has none before its first call; afterwards it has those of the last new input shape.
    """
    streams = [(name, part._stream) for name, part in model.named_modules() if isinstance(part, Streamed)]
    inside = [(name, one) for name, stream in streams for one in stream.fallbacks]
    return [*_of_plan(model), *(replace(one, module=".".join(filter(None, (name, one.module)))) for name, one in inside)]


def _of_plan(model: nn.Module) -> list[Fallback]:
    return [
        replace(choice, module=".".join(filter(None, (name, choice.module))))
        for name, choice in _choices(model)
        if isinstance(choice, Fallback)
    ]


def _choices(model: nn.Module) -> list[tuple[str, str | Fallback]]:
    """Each with the name of the member of the model that it is about; "" where the model is one."""
    return [(name, choice) for name, member in members_of(model).items() for choice in _CHOICES.get(member, [])]


def _strategies_for(model: nn.Module, plan: Plan) -> list[ModuleType]:
    """`_strategies`, of a member that stays whole without those that divide a module."""
    return [strategy for strategy in _strategies(plan) if strategy.PHASE != Phase.SPLIT or not is_undivided(model)]


def _strategies(plan: Plan) -> list[ModuleType]:
    """The strategy files that the plan calls for, in the order of their Phase; channels are cut before stages are."""
    used = [strategy for strategy in load_all(STRATEGIES) if strategy.is_used(plan)]
    return sorted(used, key=lambda strategy: (strategy.PHASE, strategy.__name__))
