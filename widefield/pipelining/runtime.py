"""Runs a model in stages, of which each rank has one or several.

A training pass runs micro-batches by torch's schedules.  A forward without gradient runs the whole batch, stage after stage.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import pipelining

from widefield.capture.fake_parameters import Like, name_of, named_tensors, tensors_of
from widefield.capture.interpreter import ForwardOverride, OverriddenModule, override_of
from widefield.capture.ir import Graph, Value, put_in
from widefield.capture.program_cache import ProgramCache, constants_of
from widefield.capture.python_watch import Guards
from widefield.capture.trace import trace, without_autocast
from widefield.comm import point_to_point
from widefield.comm.devices import message_device
from widefield.comm.mesh import Mesh
from widefield.geometry.layout import Layout, layout_of
from widefield.pipelining.losses import BatchLoss, LossOf, dims_of_samples
from widefield.pipelining.partition import Partition, cuts_of
from widefield.pipelining.sample_mixing import where_samples_meet
from widefield.pipelining.schedule_view import STAGES_PER_RANK
from widefield.pipelining.split_backward import OwningStage, SplitStage
from widefield.pipelining.stage import StageModule
from widefield.pipelining.stage_parts import StageGraph, parts_of
from widefield.pipelining.stage_state import average_gradients
from widefield.pipelining.wire import off_wire, on_wire, wire_meta
from widefield.private_torch.fake_tensors import is_eager
from widefield.private_torch.modules import BatchNorm
from widefield.tensor_parallel.runtime import TensorParallelForward
from widefield.tiled.partial_gradient import partial_of
from widefield.tiled.redistribute import local_of
from widefield.tiled.rng import compare_generators
from widefield.tiled.tensor import TiledTensor


class PipelineForward(ForwardOverride):
    """The forward and backward of a model in stages.  micro_batches: their number in a training pass.

    partition: the stage of each weight; set once it is chosen.
    bucket_mib: the size of gradient buckets; set where several ranks have the same stage.
    """

    def __init__(self, module: nn.Module, mesh: Mesh, micro_batches: int) -> None:
        assert mesh.stage_group is not None, "a pipeline needs an axis of stages"
        self.mesh, self.micro_batches, self.group = mesh, micro_batches, mesh.stage_group
        inner = override_of(module)
        self.inner = inner if isinstance(inner, TensorParallelForward) else None
        """Runs a stage whose channels are sharded; None where they are not."""
        self.likes: dict[str, Like] = {}
        self.partition: Partition | None = None
        self.averages, self.bucket_mib = True, 0.0
        self.known: ProgramCache[_Pass] = ProgramCache()

    @property
    def stages(self) -> int:
        return self.mesh.plan.stage * STAGES_PER_RANK[self.mesh.plan.pipeline.schedule]

    @property
    def is_last(self) -> bool:
        """Whether this rank has the last stage."""
        return self.mesh.stage == self.mesh.plan.stage - 1

    def rank_of(self, stage: int) -> int:
        """The coordinate on the axis `stage` of the rank that has a stage."""
        return stage % self.mesh.plan.stage

    # ------------------------------------------------------------------------------------------ capture

    def graph_of(self, module: nn.Module, args: tuple, kwargs: dict, guards: Guards | None = None) -> Graph:
        """The graph of the whole model, including stages of other ranks.  guards: see `trace`.

        NotImplementedError: the model cannot be captured (see `trace`), or draws from a torch.Generator of its own.
        """
        metas = {name: tensor for name, tensor in named_tensors(module).items() if tensor.is_meta}
        # A weight may have been frozen or unfrozen since its `Like` was recorded.
        likes = {name: replace(self.likes[name], requires_grad=tensor.requires_grad) for name, tensor in metas.items()}
        if self.inner is not None:
            return _without_generators(module, self.inner.graph_of(module, args, kwargs, likes, guards))
        forward = super(OverriddenModule, module).forward if isinstance(module, OverriddenModule) else module.forward  # type: ignore[misc]
        with _layer_by_layer():
            graph = trace(module, forward, args, kwargs, likes=likes, aim="cut into stages", guards=guards)
        return _without_generators(module, graph)

    def _pass_of(self, module: nn.Module, args: tuple, kwargs: dict, *, trains: bool) -> _Pass:
        """The pass for inputs of this shape, built when they first come; every rank of the copy calls it."""
        trained = tuple(parameter.requires_grad for parameter in module.parameters())
        return self.known.get(module, args, kwargs, partial(self._made, module, args, kwargs, trains=trains), trains, trained)

    def _made(self, module: nn.Module, args: tuple, kwargs: dict, guards: Guards, *, trains: bool) -> _Pass:
        graph = self.graph_of(module, args, kwargs, guards)
        assert self.partition is not None, "stages are cut before the first pass"
        if trains and self.micro_batches > 1 and self.mesh.plan.batch_norm != "per_micro_batch":
            refuse_batchwise(module, graph, self.micro_batches)
        cuts = cuts_of(graph, self.partition)
        if self.mesh.plan.channel > 1:  # ranks with unequal shards of channels count unequal bytes
            cuts = self.mesh.least_of_copy(cuts)
        made = _Pass(graph, parts_of(graph, self.partition, cuts, constants_of(module, graph)))
        if trains:
            inputs = tensors_of((args, kwargs))
            if self.is_tiled:
                self._trial_step(module, made, inputs)
            made.build_schedule(self, module, tuple(local_of(tensor) for tensor in inputs))
        return made

    @property
    def is_tiled(self) -> bool:
        """Whether images are cut into tiles in space."""
        return self.mesh.grid.size > 1

    def _trial_step(self, module: nn.Module, made: _Pass, inputs: list[Tensor]) -> None:
        """Run a forward to find the layouts of the values between stages, which only operations on tiles determine."""
        devices = [self.mesh.device.index] if self.mesh.device.type == "cuda" else []
        with torch.no_grad(), torch.random.fork_rng(devices=devices), without_autocast():
            self._forward(module, made, inputs, is_trial=True)

    # ------------------------------------------------------------------------------------------ forward without gradient

    def call(self, module: nn.Module, args: tuple, kwargs: dict) -> Any:
        """What the model returns, without gradient, on every rank of the copy; all of them call it.

        NotImplementedError: in training with gradients enabled; see `backward`.
        """
        if module.training and torch.is_grad_enabled():
            raise NotImplementedError(
                f"{type(module).__qualname__} is cut into {self.stages} stages, and in training a pass runs forward and "
                "backward at once; call widefield.parallel.passes.backward_of(model, image, target, loss_of=...), or call the "
                "model under torch.no_grad() for its output alone"
            )
        with torch.no_grad(), without_autocast_of(self, module, args, kwargs) as made:
            return self._forward(module, made, tensors_of((args, kwargs)))

    def _forward(self, module: nn.Module, made: _Pass, inputs: list[Tensor], *, is_trial: bool = False) -> Any:
        """What the model returns.  is_trial: do not update buffers."""
        weights, given, here = named_tensors(module), inputs, self.mesh.stage
        if self.is_tiled:
            made.layouts |= {v: t.tile_layout for v, t in zip(made.graph.inputs, inputs, strict=True) if type(t) is TiledTensor}
        for stage, part in enumerate(made.parts):
            rank, following = self.rank_of(stage), self.rank_of(stage + 1)
            problem = None
            if rank == here:
                try:
                    given = part.run({name: weights[name] for name in part.weights}, given, updates=not is_trial)
                except (ValueError, NotImplementedError) as error:
                    if not self.is_tiled or made.has_layouts:
                        raise
                    problem = error
            if self.is_tiled and not made.has_layouts:
                self._share_layouts(made, part, given, rank, problem)
            if stage == self.stages - 1:
                break
            if rank == here and following != here:
                for tensor, value in zip(given, part.gives, strict=True):
                    point_to_point.send(on_wire(tensor, value, made.layouts.get(value)), following, self.group)
            elif following == here and rank != here:
                given = [self._receive(value, made.layouts.get(value), rank) for value in part.gives]
        made.has_layouts = True
        return self._broadcast_outputs(made, given)

    def _share_layouts(
        self,
        made: _Pass,
        part: StageGraph,
        given: Sequence[Tensor],
        source: int,
        problem: ValueError | NotImplementedError | None,
    ) -> None:
        """Broadcast the layouts of a stage's outputs to all ranks of the copy, or the problem that its rank met; raise that."""
        message: list[Any] = [None]
        if problem is not None:
            message = [(isinstance(problem, ValueError), str(problem))]
        elif source == self.mesh.stage:
            message = [[tensor.tile_layout.cuts if type(tensor) is TiledTensor else None for tensor in given]]
        dist.broadcast_object_list(message, group_src=source, group=self.group, device=self.mesh.device)
        if isinstance(message[0], tuple):
            is_value, text = message[0]
            raise problem or (ValueError(text) if is_value else NotImplementedError(text))
        for value, cuts in zip(part.gives, message[0], strict=True):
            if cuts is not None:
                made.layouts[value] = layout_of(value.shape, cuts, self.mesh.grid)

    def _receive(self, value: Value, layout: Layout | None, source: int) -> Tensor:
        buffer = torch.empty_like(wire_meta(value, layout), device=self.mesh.device, requires_grad=False)
        return off_wire(point_to_point.receive(buffer, source, self.group), value, layout)

    def _broadcast_outputs(self, made: _Pass, given: Sequence[Tensor]) -> Any:
        """The last stage's results on every rank of the copy."""
        found = {}
        for number, value in enumerate(made.parts[-1].gives):
            layout = made.layouts.get(value)
            buffer = torch.empty_like(wire_meta(value, layout), device=self.mesh.device, requires_grad=False)
            packed = on_wire(given[number], value, layout).detach() if self.is_last else buffer
            dist.broadcast(packed, group_src=self.rank_of(self.stages - 1), group=self.group)
            found[value] = given[number] if self.is_last else off_wire(packed, value, layout)
        return put_in(made.graph.outputs, found)

    # ------------------------------------------------------------------------------------------ forward and backward

    def backward(
        self, module: nn.Module, image: Tensor, target: Any, *, loss_of: LossOf, scaled: Callable, autocast: Callable
    ) -> Tensor:
        """One training pass; adds gradients to this rank's parameters.  Returns the detached loss, a float64 scalar.

        All ranks of the copy call it and get the same loss.  loss_of, scaled: see BatchLoss.  autocast: a context manager.
        A batch that the number of micro-batches does not divide is padded with its last sample, whose loss is not counted.
        """
        self._to_partial_gradients(module)
        rows, count = len(image), self.micro_batches
        each = -(-rows // count)
        with autocast():
            made = self._pass_of(module, (image[:each],), {}, trains=True)
            filled = _filled(image, each * count)
            dims = None if filled is image else made.dims_of_samples(partial(self.graph_of, module, (filled[: each + 1],), {}))
        with self._own_draws(made):
            loss = made.step(filled, BatchLoss(target, rows, loss_of, scaled, dims))
        loss = loss.to(self.mesh.device, torch.float64)
        dist.broadcast(loss, group_src=self.rank_of(self.stages - 1), group=self.group)
        if self.averages:
            average_gradients([p for p in module.parameters() if not p.is_meta], self.mesh, self.bucket_mib)
        return loss

    def _to_partial_gradients(self, module: nn.Module) -> None:
        """Make existing gradients PartialGradients too: the order in which torch adds two kinds differs between ranks."""
        for parameter in module.parameters() if self.is_tiled else ():
            if is_eager(parameter.grad) and not parameter.grad.is_meta:
                parameter.grad = partial_of(parameter.grad, self.mesh.grid)

    @contextmanager
    def without_sync(self) -> Iterator[None]:
        """Inside, gradients are accumulated on this rank and not averaged."""
        self.averages = False
        try:
            yield
        finally:
            self.averages = True

    @contextmanager
    def _own_draws(self, made: _Pass) -> Iterator[None]:
        """Inside, each stage has its own random seed; afterwards the generators of all ranks of a copy are equal again."""
        if not any(part.draws for part in made.parts):
            yield
            return
        if self.mesh.channel_group is not None:
            compare_generators(self.mesh.channel_group, torch.device("cpu"))
        seed = int(torch.randint(2**62, ()))
        devices = [self.mesh.device.index] if self.mesh.device.type == "cuda" else []
        with torch.random.fork_rng(devices=devices):
            torch.manual_seed(seed + self.mesh.stage)
            yield


@contextmanager
def without_autocast_of(override: PipelineForward, module: nn.Module, args: tuple, kwargs: dict) -> Iterator[_Pass]:
    """The pass, captured under the caller's autocast; inside, autocast is off, since its casts are operations of the graph."""
    made = override._pass_of(module, args, kwargs, trains=False)
    with without_autocast(), override._own_draws(made):
        yield made


@contextmanager
def _layer_by_layer() -> Iterator[None]:
    """Inside, torch's fast path is off: it runs a transformer layer in evaluation as one operation, which cannot be cut."""
    fast = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fast)


def _without_generators(module: nn.Module, graph: Graph) -> Graph:
    """The graph.  NotImplementedError: it draws from a generator that would not advance on the ranks of other stages."""
    if any(generator is not None for generator in graph.generators):
        raise NotImplementedError(
            f"{name_of(module)} cannot be cut into stages: it draws from a torch.Generator of its own, which stands at one "
            "place on the rank of that stage and at another on all others; draw from torch's own, or set mesh.stage=1"
        )
    return graph


def refuse_batchwise(module: nn.Module, graph: Graph, micro_batches: int, counted: Sequence[str] = ()) -> None:
    """NotImplementedError if a layer in training depends on the whole batch, of which a micro-batch is a part.

    counted: operations that depend on the number of samples.
    """
    layers = batchwise(module, graph) or counted
    if layers:
        raise NotImplementedError(
            f"pipeline.micro_batches={micro_batches} cannot give what {len(layers)} layers or operations make of the whole "
            f"batch in training ({', '.join(layers[:3])}); set pipeline.micro_batches=1, or batch_norm=per_micro_batch for the "
            "statistics of each micro-batch, which are not one device's"
        )


def batchwise(module: nn.Module, graph: Graph) -> list[str]:
    """The layers that in training mix samples or update a buffer; without any, the operations that mix samples."""
    found = {name: None for name, layer in module.named_modules() if isinstance(layer, BatchNorm) and layer.training}
    found |= {name.rpartition(".")[0]: None for name in graph.updates}
    return list(found) or where_samples_meet(graph)


def _filled(image: Tensor, rows: int) -> Tensor:
    """The batch, padded to `rows` samples with its last one."""
    missing = rows - len(image)
    return torch.cat([image, *[image[-1:]] * missing]) if missing else image


# ---------------------------------------------------------------------------------------------- the pass for one shape


class _Pass:
    """For inputs of one shape: every stage's part of the graph and, in training, torch's schedule over this rank's stages."""

    def __init__(self, graph: Graph, parts: list[StageGraph]) -> None:
        self.graph, self.parts = graph, parts
        self.layouts: dict[Value, Layout] = {}
        """The layouts of tiled inputs and of tiled values between stages; complete once `has_layouts`."""
        self.has_layouts = False
        self._batch_loss: BatchLoss | None = None
        self._losses: list[Tensor] = []
        self._dims: list[int | None] | None = None

    def dims_of_samples(self, larger: Callable[[], Graph]) -> list[int | None]:
        """The dim along which each output has samples, or None.  larger: captures the model for a larger batch."""
        if self._dims is None:
            self._dims = dims_of_samples(self.graph, larger())
        return self._dims

    def build_schedule(self, override: PipelineForward, module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        """Build torch's schedule.  inputs: this rank's tiles of one micro-batch's inputs, for their shapes."""
        weights, count, kind = named_tensors(module), len(self.parts), override.mesh.plan.pipeline.schedule
        device, wire = override.mesh.device, message_device(override.group, override.mesh.device)
        mine = [stage for stage in range(count) if override.rank_of(stage) == override.mesh.stage]
        like = tuple(torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device="meta") for t in inputs)
        self.stages: list[OwningStage] = []
        for stage in mine:
            stage_class = SplitStage if kind == "zero_bubble" else OwningStage
            place = {"stage": stage, "stages": count, "device": device, "wire": wire, "layouts": self.layouts}
            made = StageModule(self.parts[stage], weights, splits=stage_class is SplitStage, **place)
            takes, gives = made.metas(like)
            self.stages.append(stage_class(made, stage, count, wire, input_args=takes, output_args=gives, group=override.group))
        self.has_first, self.positions = 0 in mine, torch.arange(override.micro_batches * len(inputs[0]))
        self.schedule = _schedule(kind, self.stages, override.micro_batches, self._loss)
        names = inspect.signature(self.schedule.step).parameters
        self._options = {"return_outputs": False} if "return_outputs" in names else {}

    def step(self, image: Tensor, batch_loss: BatchLoss) -> Tensor:
        """Forward and backward of all micro-batches; the sum of their losses on the last stage's rank, 0 elsewhere."""
        self._batch_loss, self._losses = batch_loss, []
        try:
            self.schedule.step(*([local_of(image)] if self.has_first else []), target=self.positions, **self._options)
        except RuntimeError as error:
            cause = _cause(error)
            if cause is error:
                raise
            raise cause from cause.__cause__
        finally:
            self._batch_loss = None
            for stage in self.stages:
                stage.end_pass()
        return torch.stack(self._losses).double().sum() if self._losses else torch.zeros((), dtype=torch.float64)

    def _loss(self, outputs: tuple[Tensor, ...], positions: Tensor) -> Tensor:
        assert self._batch_loss is not None, "a loss is computed in a step only"
        returned = put_in(self.graph.outputs, dict(zip(self.parts[-1].gives, outputs, strict=True)))
        scaled, loss = self._batch_loss.loss(returned, positions)
        self._losses.append(loss)
        return scaled


def _cause(error: RuntimeError) -> BaseException:
    """The error in a stage's own operations; torch wraps it into one that says only the shapes of tensors."""
    cause = error.__cause__
    return cause if isinstance(cause, (ValueError, NotImplementedError)) else error


def _schedule(kind: str, stages: list[Any], micro_batches: int, loss: Callable) -> Any:
    """torch's schedule.  torch refuses 1F1B with fewer micro-batches than stages, where its order would be that of GPipe."""
    if kind == "1f1b" and micro_batches < len(stages) * stages[0].group_size:
        kind = "gpipe"
    schedules = {
        "gpipe": pipelining.ScheduleGPipe,
        "1f1b": pipelining.Schedule1F1B,
        "interleaved": pipelining.ScheduleInterleaved1F1B,
        "zero_bubble": pipelining.ScheduleInterleavedZeroBubble,
    }
    given = stages[0] if kind in ("gpipe", "1f1b") else stages
    return schedules[kind](given, micro_batches, loss_fn=loss, scale_grads=False)
