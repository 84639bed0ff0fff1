"""The places of a run where faults come in: functions of the run, replaced by ones that ask the injector first.

    phase       replaced
    data        the iterator of a run's batches, and the images as they are prepared
    forward     a pass of a step, and its loss
    halo        messages between two ranks, of tiles and of stages
    backward    a node of the graph, some operations before the loss; a stage's backward
    collective  the functions of torch.distributed, but not for messages of the thread that saves
    optimizer   the update of the weights
    save, load  the file that this rank writes into a checkpoint, and the reading of one

A phase is replaced only where a fault of this rank waits for it.
"""

from __future__ import annotations

import contextlib
import os
import re
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from widefield import sharded_state
from widefield.comm import collectives, point_to_point
from widefield.comm.mesh import Mesh
from widefield.data.batch import Batch
from widefield.data.device import Preparation
from widefield.data.loader import close
from widefield.faults.fault import PlantedFault, faults_of
from widefield.faults.injector import Injector, left_of, note_in
from widefield.faults.tensors import WRONG_NUMBERS, first_floating, one_less, spoil_
from widefield.tiled.redistribute import local_of
from widefield.training import checkpoint, loop, manifest, passes, tensors
from widefield.training.trainer import Trainer

__all__ = ["faults_of", "injecting", "planted"]
Make = Callable[[Callable[..., Any]], Callable[..., Any]]
_COLLECTIVES = (
    "all_reduce", "broadcast", "all_gather_single", "all_gather_into_tensor", "reduce_scatter_single", "reduce_scatter_tensor",
    "all_gather_object", "broadcast_object_list", "gather", "barrier",
)  # fmt: skip
_BOUND = {"_ALL_GATHER": "all_gather_single", "_REDUCE_SCATTER": "reduce_scatter_single"}
"""Names under which collectives.py keeps two of them."""
_LOSSES = ("loss_of", "_loss_of_all")
"""Methods of a Learner: of a loss that is a sum, and of one that is finished from sums."""
_OPERATIONS_BEFORE_THE_LOSS = 20


@contextlib.contextmanager
def planted(faults: Sequence[PlantedFault], mesh: Mesh, folder: Path) -> Iterator[Injector]:
    """Inside, faults befall the run in `folder` on this rank.  Those that its record has already do not come again."""
    record = folder / "record.jsonl"
    injector = Injector(left_of(faults, record), rank=mesh.rank, device=mesh.device, note=note_in(record))
    with injecting(injector):
        yield injector
    if injector.left:
        print(f"widefield: fault: never came: {'; '.join(map(str, injector.left))}", file=sys.stderr, flush=True)


@contextlib.contextmanager
def injecting(injector: Injector) -> Iterator[None]:
    """Inside, the functions of a run ask the injector, which has to be told the step where no Trainer runs."""
    with ExitStack() as stack:
        _replace(stack, Trainer, "step", lambda step: partial(_counted, injector, step))
        for phase, plant in _POINTS.items():
            if injector.expects(phase):
                plant(stack, injector)
        yield


def _replace(stack: ExitStack, owner: Any, name: str, make: Make) -> None:
    """Put `make(original)` in the place of a function or method until the stack closes."""
    original = getattr(owner, name)
    made = make(original)

    def replacement(*args: Any, **kwargs: Any) -> Any:
        return made(*args, **kwargs)

    stack.callback(setattr, owner, name, original)
    setattr(owner, name, replacement)


def _counted(injector: Injector, step: Callable[..., bool], trainer: Trainer, *args: Any, **kwargs: Any) -> bool:
    injector.step = trainer.learner.step + 1
    return step(trainer, *args, **kwargs)


# ---------------------------------------------------------------------------------------------- data


class FaultyBatches:
    """A run's batches, before each of which a fault may come."""

    def __init__(self, batches: Iterator[Batch], injector: Injector) -> None:
        self._batches, self._injector = batches, injector

    def __iter__(self) -> FaultyBatches:
        return self

    def __next__(self) -> Batch:
        self._injector.before("data")
        return next(self._batches)

    def _shutdown_workers(self) -> None:  # as torch's own iterator has it, see loader.close
        close(self._batches)


def _in_data(stack: ExitStack, injector: Injector) -> None:
    def begun(init: Callable[..., None]) -> Callable[..., None]:
        return lambda passes, batches, *args, **kwargs: init(passes, FaultyBatches(batches, injector), *args, **kwargs)

    def prepared(prepare: Callable[..., tuple[Tensor, Tensor]]) -> Callable[..., tuple[Tensor, Tensor]]:
        def changed(*args: Any) -> tuple[Tensor, Tensor]:
            image, target = prepare(*args)
            fault = injector.due("data", (*WRONG_NUMBERS, "wrong_shape"))
            if fault is None:
                return image, target
            if fault.kind == "wrong_shape":
                return image[..., :-1], target  # a column less
            spoil_(image, fault)
            return image, target

        return changed

    _replace(stack, passes.Passes, "__init__", begun)
    _replace(stack, Preparation, "__call__", prepared)


# ---------------------------------------------------------------------------------------------- forward and backward


def _in_forward(stack: ExitStack, injector: Injector) -> None:
    def of_loss(loss_of: Callable[..., Any]) -> Callable[..., Any]:
        def changed(*args: Any, **kwargs: Any) -> Any:
            found = loss_of(*args, **kwargs)
            loss = found[0] if isinstance(found, tuple) else found  # that of a turn comes with its count
            if not loss.requires_grad or injector.due("forward", ("nan",)) is None:
                return found
            loss = loss * float("nan")
            return (loss, *found[1:]) if isinstance(found, tuple) else loss

        return changed

    def of_pass(run: Callable[..., None]) -> Callable[..., None]:
        def asked(*args: Any, **kwargs: Any) -> None:
            injector.before("forward")
            everyone = dist.group.WORLD
            if everyone is not None and injector.due("forward", ("deadlock",)) is not None:
                peer = (injector.rank + 1) % everyone.size()
                point_to_point.receive(torch.empty(1, device=injector.device), peer, everyone)
            run(*args, **kwargs)

        return asked

    _replace(stack, loop.Learner, "_pass", of_pass)
    for name in (*_LOSSES, "_loss_of_turn"):
        _replace(stack, loop.Learner, name, of_loss)


def _in_backward(stack: ExitStack, injector: Injector) -> None:
    def in_graph(gradients: Sequence[Tensor | None]) -> tuple[Tensor | None, ...] | None:
        injector.before("backward")
        fault = injector.due("backward", WRONG_NUMBERS)
        return None if fault is None else _spoiled(gradients, fault)

    def of_loss(loss_of: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def watched(learner: loop.Learner, output: Any, *args: Any, **kwargs: Any) -> Tensor:
            tensor = first_floating(output)
            if tensor is not None and tensor.grad_fn is not None:
                _node_before(tensor.grad_fn).register_prehook(in_graph)
            return loss_of(learner, output, *args, **kwargs)

        return watched

    def of_turn(loss_of: Callable[..., tuple[Tensor, int]]) -> Callable[..., tuple[Tensor, int]]:
        def watched(*args: Any) -> tuple[Tensor, int]:
            loss, count = loss_of(*args)
            if loss.grad_fn is not None:
                _node_before(loss.grad_fn).register_prehook(in_graph)
            return loss, count

        return watched

    for name in _LOSSES:
        _replace(stack, loop.Learner, name, of_loss)
    _replace(stack, loop.Learner, "_loss_of_turn", of_turn)
    _in_backward_of_stages(stack, injector)


def _in_backward_of_stages(stack: ExitStack, injector: Injector) -> None:
    """The backward of a stage that has no loss."""
    from widefield.pipelining.split_backward import OwningStage  # imported late: torch's schedules take long to load

    def of_stage(backward: Callable[..., Any]) -> Callable[..., Any]:
        def asked(stage: OwningStage, *args: Any, **kwargs: Any) -> Any:
            if not stage.is_last:
                injector.before("backward")
            found = backward(stage, *args, **kwargs)
            fault = None if stage.is_last else injector.due("backward", WRONG_NUMBERS)
            if fault is not None:
                gradient = next(weight.grad for weight in stage.submod.parameters() if weight.grad is not None)
                spoil_(gradient, fault)
            return found

        return asked

    _replace(stack, OwningStage, "backward_one_chunk", of_stage)


def _node_before(node: Any) -> Any:
    """The node of the graph some operations before one, or the first that there is."""
    for _ in range(_OPERATIONS_BEFORE_THE_LOSS):
        node = next((before for before, _ in node.next_functions if before is not None and before.next_functions), node)
    return node


def _spoiled(gradients: Sequence[Tensor | None], fault: PlantedFault) -> tuple[Tensor | None, ...]:
    changed = [None if gradient is None else gradient.clone() for gradient in gradients]
    spoil_(local_of(next(gradient for gradient in changed if gradient is not None)), fault)
    return tuple(changed)


# ---------------------------------------------------------------------------------------------- messages


class _NotSent(dist.Work):
    """What a collective that was left out returns."""

    def wait(self, *args: Any) -> bool:
        return True


def _in_messages(stack: ExitStack, injector: Injector) -> None:
    """Messages between two ranks: those of tiles, and those that stages send."""

    def exchanged(exchange: Callable[..., Any]) -> Callable[..., Any]:
        def changed(sends: Mapping[int, Tensor], receives: Mapping[int, Tensor], group: dist.ProcessGroup) -> Any:
            injector.before("halo")
            if injector.due("halo", ("skip",)) is not None:
                return []
            fault = injector.due("halo", (*WRONG_NUMBERS, "wrong_shape")) if sends else None
            if fault is not None:
                peer = min(sends)
                sends = {**sends, peer: _changed(sends[peer], fault)}
            return exchange(sends, receives, group)

        return changed

    def posted(post: Callable[..., Any]) -> Callable[..., Any]:
        def changed(posts: list[dist.P2POp], desc: str | None = None) -> Any:
            if posts:
                injector.before("halo")
                if injector.due("halo", ("skip",)) is not None:
                    return []
            sends = [one for one in posts if one.op is dist.isend]
            fault = injector.due("halo", (*WRONG_NUMBERS, "wrong_shape")) if sends else None
            if fault is not None:
                sends[0].tensor = _changed(sends[0].tensor, fault)
            return post(posts, desc)

        return changed

    from widefield.private_torch.pipelining import messages_of_stages  # imported late, see there

    _replace(stack, point_to_point, "exchange", exchanged)
    stack.enter_context(messages_of_stages(posted))


def _in_collectives(stack: ExitStack, injector: Injector) -> None:
    for name in _COLLECTIVES:
        if hasattr(dist, name):
            _replace(stack, dist, name, partial(_collective, injector, name))
    for name, operation in _BOUND.items():
        _replace(stack, collectives, name, partial(_collective, injector, operation))


def _collective(injector: Injector, name: str, operation: Callable[..., Any]) -> Callable[..., Any]:
    others = ("skip", *WRONG_NUMBERS, *(("wrong_shape",) if name in ("all_reduce", "broadcast") else ()))
    kinds = (*others, "wrong_operation") if name == "all_reduce" else others

    def asked(*args: Any, **kwargs: Any) -> Any:
        if threading.current_thread().name == "checkpoint":
            return operation(*args, **kwargs)
        injector.before("collective")
        fault = injector.due("collective", kinds)
        if fault is None:
            return operation(*args, **kwargs)
        asynchronous = kwargs.get("async_op", False)
        if fault.kind == "skip":
            return _NotSent() if asynchronous else None
        if fault.kind == "wrong_operation":
            return dist.broadcast(args[0], group_src=0, group=kwargs.get("group"), async_op=asynchronous)
        sent = 1 if "gather_" in name or "scatter" in name else 0  # the result comes first
        if len(args) > sent and isinstance(args[sent], Tensor):
            args = (*args[:sent], _changed(args[sent], fault), *args[sent + 1 :])
        return operation(*args, **kwargs)

    return asked


def _changed(tensor: Tensor, fault: PlantedFault) -> Tensor:
    """What is sent in the place of a tensor; for wrong numbers the tensor itself, so that results arrive where they belong."""
    if fault.kind == "wrong_shape":
        return one_less(tensor)
    spoil_(tensor, fault)
    return tensor


# ---------------------------------------------------------------------------------------------- optimizer, save, load


def _in_optimizer(stack: ExitStack, injector: Injector) -> None:
    def updated(update: Callable[..., None]) -> Callable[..., None]:
        def changed(learner: loop.Learner, *args: Any, **kwargs: Any) -> None:
            injector.before("optimizer")
            update(learner, *args, **kwargs)
            fault = injector.due("optimizer", WRONG_NUMBERS)
            if fault is not None:
                weights = [sharded_state.local(weight) for weight in learner.model.parameters() if not weight.is_meta]
                spoil_(next(weight for weight in weights if weight.numel()).data, fault)

        return changed

    _replace(stack, loop.Learner, "_update", updated)


def _in_save(stack: ExitStack, injector: Injector) -> None:
    def step_of(partial_folder: Path) -> int:
        return int(re.sub(r"\D", "", partial_folder.name) or 0)

    def written(write: Callable[..., Any]) -> Callable[..., Any]:
        def asked(folder: Path, *args: Any, **kwargs: Any) -> Any:
            injector.before("save", step=step_of(folder))
            return write(folder, *args, **kwargs)

        return asked

    def hashed(hashes_of: Callable[..., dict[str, str]]) -> Callable[..., dict[str, str]]:
        def truncated(folder: Path, names: Sequence[str]) -> dict[str, str]:
            found = hashes_of(folder, names)
            fault = injector.due("save", ("truncated_write",), step=step_of(folder))
            if fault is not None:  # the disk promised more than it kept
                largest = max((folder / name for name in names), key=lambda file: file.stat().st_size)
                os.truncate(largest, largest.stat().st_size // 2)
            return found

        return truncated

    _replace(stack, tensors, "write", written)
    _replace(stack, manifest, "hashes_of", hashed)


def _in_load(stack: ExitStack, injector: Injector) -> None:
    def read_in(read: Callable[..., Any]) -> Callable[..., Any]:
        def asked(found: checkpoint.Found, *args: Any, **kwargs: Any) -> Any:
            injector.before("load", step=found.about.step)
            return read(found, *args, **kwargs)

        return asked

    _replace(stack, checkpoint, "read", read_in)


_POINTS: dict[str, Callable[[ExitStack, Injector], None]] = {
    "data": _in_data,
    "forward": _in_forward,
    "halo": _in_messages,
    "backward": _in_backward,
    "collective": _in_collectives,
    "optimizer": _in_optimizer,
    "save": _in_save,
    "load": _in_load,
}
