"""Writes down operations, messages and the lives of allocations, as a StepRecord.

An allocation is a storage.  It is born where an operation returns a tensor with a new one, and dies when torch frees it, which
autograd's saved tensors decide as in a real run.
"""

from __future__ import annotations

import weakref
from collections.abc import Hashable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.flop_counter import flop_registry

from widefield.module_paths import ModulePaths
from widefield.planner.emulation.kernel_memory import transient_bytes
from widefield.planner.step_record import (
    AllocatedBlock,
    Event,
    MemoryPoint,
    MessageEvent,
    OpEvent,
    Part,
    Phase,
    StepRecord,
    WaitEvent,
)
from widefield.private_torch.autograd import current_autograd_node, current_graph_task_id, next_node_number, node_number_of
from widefield.private_torch.pytree import tree_leaves
from widefield.private_torch.tensors import cdata


@dataclass
class _Life:
    """An allocation.  born, died: the number of events written when it came and went.  phase: in which it was made."""

    bytes: int
    born: int
    phase: Phase
    key: int
    died: int | None = None
    is_message: bool = False
    is_stored: bool = False
    before: bool = False
    """Whether it was there when the step began."""


class Recording:
    """One rank's record of the step since `begin`."""

    def __init__(self, rank: int, ranks: int, *, kernels: bool = True) -> None:
        self.rank, self.ranks, self.kernels = rank, ranks, kernels
        self.assumed: dict[str, None] = {}
        self.paths: ModulePaths | None = None
        self._lives: dict[int, _Life] = {}
        """Of the storages that there are, by `cdata`."""
        self._refs: dict[int, weakref.ref] = {}
        self._in_optimizer = False
        self._is_on = False
        self._on_host: dict[int, int] = {}
        """The bytes of storages in the host's memory, of a GPU's step, by `cdata`; of files none."""
        self._host_peak = 0
        self._now = self._stored = self._allocator_peak = 0
        self._clear()

    def _clear(self) -> None:
        self._events: list[Event] = []
        self._points: list[MemoryPoint] = []
        self._ended: list[_Life] = []
        self._module_of: dict[int, str] = {}
        """The module of a forward operation, by the sequence number of its autograd node."""
        self._unknown: dict[str, None] = {}
        self._peak, self._peak_event, self._peak_place = 0, 0, ("", "")
        self._numbers = 0

    def begin(self, model: nn.Module) -> None:
        """Forget what was recorded, but for the allocations that there are, and record from now on."""
        self._clear()
        self.paths = ModulePaths(model)
        for life in self._lives.values():
            life.before, life.born = True, 0
        self._is_on, self._peak, self._allocator_peak = True, self._now, self._now - self._stored
        self._points.append(MemoryPoint(0, self._now))

    # ------------------------------------------------------------------------------------------ what happens

    @property
    def phase(self) -> Phase:
        """What runs now."""
        return self._phase_in(self._module)

    def _phase_in(self, module: str | None) -> Phase:
        if self._in_optimizer:
            return "optimizer"
        if current_graph_task_id() != -1:
            return "backward"
        return "loss" if module is None else "forward"

    @property
    def _module(self) -> str | None:
        return None if self.paths is None else self.paths.running_or_none()

    def operation(self, func: Any, args: tuple, kwargs: dict, out: Any, reads: list[Tensor], signature: Hashable) -> None:
        """An operation has run.  args, kwargs, out: with fake tensors.  reads: its tensors.  signature: see signature.py."""
        self.hold_all(out)
        if not self._is_on or func.is_view:
            return
        phase, module = self._place()
        outs = [tensor for tensor in tree_leaves(out) if isinstance(tensor, Tensor)]
        count = flop_registry.get(func.overloadpacket)
        self._events.append(
            OpEvent(
                name=str(func),
                phase=phase,
                module=module,
                signature=signature,
                flops=0.0 if count is None else float(count(*args, **kwargs, out_val=out)),
                bytes_read=sum(tensor.nbytes for tensor in reads),
                bytes_written=sum(tensor.nbytes for tensor in outs) or (reads[0].nbytes if reads else 0),
                dtype=str((outs or reads)[0].dtype).removeprefix("torch.") if outs or reads else "",
                is_transfer=bool(self._on_host) and len({cdata(t.untyped_storage()) in self._on_host for t in reads}) > 1,
            )
        )
        extra = transient_bytes(str(func), args, kwargs, out) if self.kernels else 0
        if extra is None:
            self._unknown[str(func)] = None
        elif extra:
            self._grows(extra, (module, str(func)))
        self._reaches((module, str(func)))

    def _place(self) -> tuple[Phase, str]:
        """The phase, and the module: in the backward that of the forward operation whose gradient is computed."""
        if current_graph_task_id() != -1 and not self._in_optimizer:
            node = current_autograd_node()
            return "backward", "" if node is None else self._module_of.get(node_number_of(node), "")
        module = self._module
        phase = self._phase_in(module)
        if phase != "optimizer":
            self._module_of.setdefault(next_node_number() - 1, module or "")  # later ones may make no node
        return phase, module or ""

    def message(self, kind: Any, tensors: Iterable[Tensor], ranks: tuple[int, ...], peer: int | None, *, control: bool) -> int:
        """A message begins; returns its number."""
        self._numbers += 1
        if self._is_on:
            tensors = list(tensors)
            phase, module = self._place()
            size = sum(tensor.nbytes for tensor in tensors)
            self._events.append(MessageEvent(kind, size, ranks, phase, module, self._numbers, peer, control))
            for tensor in tensors:
                life = self._lives.get(cdata(tensor.untyped_storage()))
                if life is not None:
                    life.is_message = True
        return self._numbers

    def waited(self, number: int) -> None:
        if self._is_on:
            self._events.append(WaitEvent(number))

    # ------------------------------------------------------------------------------------------ memory

    def hold_all(self, made: Any) -> None:
        """`holds` of each tensor in what an operation has returned."""
        for tensor in tree_leaves(made):
            if isinstance(tensor, Tensor):
                self.holds(tensor)

    def holds(self, tensor: Tensor, *, stored: bool | None = False) -> None:
        """A tensor exists: its storage is an allocation, if it is a new one.

        stored: between tiles of a stream, in memory that is the process's and not the allocator's; None: in a file.
        """
        storage = tensor.untyped_storage()
        key = cdata(storage)
        if key in self._lives:
            return
        size = 0 if stored is None else storage.nbytes()
        life = _Life(size, len(self._events), self.phase, key, is_stored=bool(stored))
        self._lives[key] = life
        self._refs[key] = weakref.ref(storage, lambda _: self._frees(key))
        self._changes(life.bytes, stored=life.is_stored)

    def holds_on_host(self, tensor: Tensor, *, is_file: bool) -> None:
        """A tensor exists in the host's memory, or in a file, where the step is a GPU's."""
        self.holds(tensor, stored=None)
        self._on_host[cdata(tensor.untyped_storage())] = 0 if is_file else tensor.nbytes
        self._host_peak = max(self._host_peak, sum(self._on_host.values()))

    def resized(self, storage: torch.UntypedStorage, size: int) -> None:
        """A storage gets another size, as FSDP's gathered weights do: it ends, and another one begins in its place."""
        life = self._lives.get(cdata(storage))
        if life is None or life.bytes == size:
            return
        self._ends(life)
        self._lives[life.key] = _Life(size, len(self._events), self.phase, life.key, is_message=True)
        self._changes(size)

    def _frees(self, key: int) -> None:
        self._refs.pop(key, None)
        self._on_host.pop(key, None)
        life = self._lives.pop(key, None)
        if life is not None:
            self._ends(life)

    def _ends(self, life: _Life) -> None:
        life.died = len(self._events)
        if self._is_on:
            self._ended.append(life)
        self._changes(-life.bytes, stored=life.is_stored)

    def _changes(self, by: int, *, stored: bool = False) -> None:
        self._now += by
        self._stored += by if stored else 0
        self._allocator_peak = max(self._allocator_peak, self._now - self._stored)
        if self._is_on:
            self._points.append(MemoryPoint(len(self._events), self._now))
            if by > 0 and self._now > self._peak:
                self._peak, self._peak_event = self._now, len(self._events)

    def _reaches(self, place: tuple[str, str]) -> None:
        """The operation just recorded has allocated what was the peak: that is its place."""
        if self._peak_event == len(self._events) - 1:
            self._peak_place = place

    def _grows(self, extra: int, place: tuple[str, str]) -> None:
        """While the operation just recorded ran, it held `extra` bytes more."""
        event = len(self._events) - 1
        self._points += [MemoryPoint(event, self._now + extra), MemoryPoint(event + 1, self._now)]
        self._allocator_peak = max(self._allocator_peak, self._now - self._stored + extra)
        if self._now + extra > self._peak:
            self._peak, self._peak_event, self._peak_place = self._now + extra, event, place

    # ------------------------------------------------------------------------------------------ the record

    def finish(self, tensors: dict[Part, Iterable[Tensor]], *, samples: int) -> StepRecord:
        """The record.  tensors: those of weights, buffers, optimizer states, gradients and inputs at the end of the step."""
        self._is_on = False
        known = {cdata(t.untyped_storage()): part for part, found in tensors.items() for t in found}
        at = self._peak_event
        alive = [
            life for life in (*self._ended, *self._lives.values()) if life.born <= at and (life.died is None or life.died > at)
        ]
        parts: dict[Part, int] = {}
        for life in alive:
            part = _part_of(life, known)
            parts[part] = parts.get(part, 0) + life.bytes
        rest = self._peak - sum(parts.values())
        if rest:
            parts["transient"] = parts.get("transient", 0) + rest
        if self._host_peak:
            held = f"{self._host_peak / 2**30:.2f} GiB of the host's memory"
            self.assumed[f"beside the device's, a rank takes up to {held} for what it moves there"] = None
        module, op = self._peak_place
        lives = sorted((*self._ended, *self._lives.values()), key=lambda life: life.born)
        blocks = [AllocatedBlock(life.born, life.died, life.bytes) for life in lives]
        return StepRecord(
            self.rank, self.ranks, self._events, self._points, self._peak, at, module, op, parts,
            list(self.assumed), list(self._unknown), samples, blocks, self._allocator_peak,
        )  # fmt: skip

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Inside, steps of optimizers are noticed, and storages that are resized."""

        def begins(*_: Any) -> None:
            self._in_optimizer = True

        def ends(*_: Any) -> None:
            self._in_optimizer = False

        hooks = [register_optimizer_step_pre_hook(begins), register_optimizer_step_post_hook(ends)]
        resize = torch.UntypedStorage.resize_

        def resized(storage: torch.UntypedStorage, size: int) -> Any:
            found = resize(storage, size)
            self.resized(storage, size)
            return found

        torch.UntypedStorage.resize_ = resized  # type: ignore[method-assign]
        try:
            yield
        finally:
            torch.UntypedStorage.resize_ = resize  # type: ignore[method-assign]
            for hook in hooks:
                hook.remove()


def _part_of(life: _Life, known: dict[int, Part]) -> Part:
    """What an allocation that is held at the peak is for."""
    if life.key in known and (life.died is None or life.before):
        return known[life.key]
    if life.is_stored:
        return "stored"
    if life.is_message:
        return "messages"
    if life.before:
        return "inputs"
    return "activations" if life.phase in ("forward", "loss") else "transient"
