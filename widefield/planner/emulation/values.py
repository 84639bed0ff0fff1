"""Tensors without data for all that is large, real ones for what is small and known.

A step asks for numbers here and there: how many ranks have a gradient, at which layer the others are, the optimizer's count of
steps.  These come from small tensors made without pixels or weights, so small tensors that no large one has touched are real.
Where the rooms that run models ask a fake tensor for a truth value, it is true: do ranks, or runs of one operation, agree?
"""

from __future__ import annotations

import math
import sys
import types
from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from widefield.capture.decompositions import draws_numbers
from widefield.data.batch import Batch
from widefield.planner.emulation.recording import Recording
from widefield.planner.emulation.signature import signature_of
from widefield.private_torch.dispatcher import TorchDispatchMode, disable_current_modes, no_dispatch, schema_of
from widefield.private_torch.fake_tensors import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    EmulatedFakeMode,
    FakeTensor,
)
from widefield.private_torch.modules import buffers_of, parameters_of
from widefield.private_torch.pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten
from widefield.private_torch.tensors import cdata
from widefield.rooms import is_of_engine
from widefield.streaming.storage import memory_pool
from widefield.tiled.redistribute import is_dense
from widefield.tiled.replicated_ops import is_in_place, tensors_in

aten = torch.ops.aten
_CPU = torch.device("cpu")
SMALL, SMALL_BYTES = 4096, 8192
"""Numbers up to which a tensor that is made without fake ones is real, and bytes: the state of torch's generator has 5,056."""
_PLAIN = (Tensor, nn.Parameter, nn.Buffer, FakeTensor)
_DEVICE_OF = torch.ops.prim.device.default
_WITHOUT_FAKES = (aten.batch_norm_update_stats.default, aten.batch_norm_backward_elemt.default)
"""Operations of batch norm that torch's fake tensors do not know, and would compute."""


class CannotEmulate(NotImplementedError):
    """The step depends on numbers that only data or weights have."""


def _asks_of_ranks() -> bool:
    """Whether a truth value is asked for by the rooms that run models, and not by a model, a loss or a library."""
    frame: types.FrameType | None = sys._getframe(1)
    while frame is not None:
        name = str(frame.f_globals.get("__name__", ""))
        if not name.startswith(("torch.", f"{__name__.rpartition('.')[0]}.")):
            return is_of_engine(name)
        frame = frame.f_back
    return False


def _is_small(args: tuple, kwargs: dict, tensors: list[Tensor]) -> bool:
    """Whether an operation without fake tensors is on small ones, or makes one."""
    if tensors:
        return all(tensor.numel() <= SMALL or tensor.nbytes <= SMALL_BYTES for tensor in tensors)
    sizes = next((arg for arg in args if isinstance(arg, list | tuple)), None)
    if sizes is None:  # arange(end), scalar_tensor(value)
        return max([abs(arg) for arg in args if isinstance(arg, int | float) and math.isfinite(arg)], default=0) <= SMALL
    numbers = math.prod(size for size in sizes if isinstance(size, int))
    return numbers <= SMALL or numbers * (kwargs.get("dtype") or torch.get_default_dtype()).itemsize <= SMALL_BYTES


def _is_meta(tensors: list[Tensor], kwargs: dict) -> bool:
    """Whether an operation is on meta tensors alone, or makes one."""
    asked = kwargs.get("device")
    if asked is not None:
        return torch.device(asked).type == "meta"
    return bool(tensors) and all(type(tensor) is not FakeTensor and tensor.is_meta for tensor in tensors)


def _writes_to_real_ones_alone(func: Any, args: tuple, kwargs: dict) -> bool:
    """Whether all that an operation writes to are real tensors."""
    schema = schema_of(func)
    if not schema.is_mutable:
        return False
    given = {argument.name: value for argument, value in zip(schema.arguments, args, strict=False)} | kwargs
    written = [
        tensor
        for argument in schema.arguments
        if argument.alias_info is not None and argument.alias_info.is_write
        for tensor in tree_leaves(given.get(argument.name))
        if isinstance(tensor, Tensor)
    ]
    return bool(written) and not any(isinstance(tensor, FakeTensor) for tensor in written)


@dataclass(frozen=True)
class Made:
    """The description of a tensor that an operation returns.

    of: the place, among the operation's tensors, of the one whose memory it shows; None of a new one.
    offset: of its first number behind that tensor's first.
    """

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype
    of: int | None
    offset: int


@dataclass(frozen=True)
class Result:
    """The description of what an operation returns; None for no tensor.  spec: of the tree that they are leaves of."""

    tensors: tuple[Made | None, ...]
    spec: Any

    @classmethod
    def of(cls, out: Any, given: list[Tensor]) -> Result | None:
        """None where a new tensor has another memory than its strides tell.  given: the operation's tensors."""
        leaves, spec = tree_flatten(out)
        places = {cdata(tensor.untyped_storage()): place for place, tensor in reversed([*enumerate(given)])}
        made: list[Made | None] = []
        for leaf in leaves:
            if leaf is None:
                made.append(None)
                continue
            if type(leaf) is not FakeTensor:
                return None
            key = cdata(leaf.untyped_storage())
            source = places.get(key)
            if source == -1:
                return None  # two results in one memory
            if source is None and (not is_dense(leaf) or leaf.storage_offset()):
                return None
            if source is not None and type(given[source]) is not FakeTensor:
                return None
            offset = 0 if source is None else leaf.storage_offset() - given[source].storage_offset()
            made.append(Made(tuple(leaf.shape), leaf.stride(), leaf.dtype, source, offset))
            places.setdefault(key, -1)
        return cls(tuple(made), spec)

    def again(self, fakes: EmulatedFakeMode, given: list[Tensor]) -> Any:
        """New tensors like those."""
        with no_dispatch():
            return tree_unflatten([one and _made_again(one, fakes, given) for one in self.tensors], self.spec)


def _made_again(one: Made, fakes: EmulatedFakeMode, given: list[Tensor]) -> Tensor:
    if one.of is None:
        return FakeTensor(fakes, torch.empty_strided(one.shape, one.strides, dtype=one.dtype, device="meta"), _CPU)
    source = given[one.of]
    shown = torch.empty(0, dtype=one.dtype, device="meta")
    shown.set_(source.untyped_storage(), source.storage_offset() + one.offset, one.shape, one.strides)
    return FakeTensor(fakes, shown, _CPU)


_RESULTS: dict[Hashable, Result] = {}
"""By the signature of an operation and the default dtype."""
MOST_RESULTS = 65536


class Emulation(TorchDispatchMode):
    """Inside, operations run on fake tensors and are recorded."""

    def __init__(self, recording: Recording, fakes: EmulatedFakeMode) -> None:
        super().__init__()
        self.recording, self.fakes = recording, fakes

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        if self.fakes.learns_shapes:
            return func(*args, **kwargs)  # no part of the step
        tensors = tensors_in(args, kwargs)
        if any(type(tensor) not in _PLAIN for tensor in tensors):
            return NotImplemented  # a tiled tensor or a part of a gradient: its own operations come here
        if func is _DEVICE_OF and type(args[0]) is FakeTensor:
            return args[0].fake_device
        if func.namespace == "prim":
            return func(*args, **kwargs)  # a question, as for a tensor's device: no kernel runs
        if _is_meta(tensors, kwargs):
            with no_dispatch():
                return func(*args, **kwargs)  # of another rank's weights only shapes are kept, as in a run
        fakes = [tensor for tensor in tensors if isinstance(tensor, FakeTensor)]
        if not fakes and _is_small(args, kwargs, tensors):
            with no_dispatch():
                out = func(*args, **kwargs)
            self.recording.hold_all(out)
            return out
        if fakes and _writes_to_real_ones_alone(func, args, kwargs):
            return args[0] if schema_of(func).returns else None  # a count stays what it was
        if draws_numbers(func, args, kwargs):
            with no_dispatch():
                torch.rand(1)  # the generator moves on, which tells that the forward draws
        if func is aten.equal.default and _asks_of_ranks():
            return True
        if func is aten._local_scalar_dense.default:
            return self._number_of(tensors[0])
        signature = signature_of(str(func), args, kwargs)
        out = self._out_of(func, args, kwargs, tensors, signature)
        self.recording.operation(func, args, kwargs, out, tensors, signature)
        return out

    def _out_of(self, func: Any, args: tuple, kwargs: dict, given: list[Tensor], signature: Hashable) -> Any:
        """What an operation returns; of one that ran before with equal arguments, without asking torch's fake tensors again.

        (They take half a millisecond each.)  What it returns is no emulation's own.
        """
        if is_in_place(func) and torch.Tag.inplace_view not in func.tags:
            return args[0] if schema_of(func).returns else None
        key = repr(signature), torch.get_default_dtype()
        if key in _RESULTS:
            return _RESULTS[key].again(self.fakes, given)
        if any(type(tensor) is not FakeTensor for tensor in given):
            args, kwargs = tree_map(self._without_numbers, (args, kwargs))
        try:
            out = self._of_batch_norm(func, args) if func in _WITHOUT_FAKES else func(*args, **kwargs)
        except (DataDependentOutputException, DynamicOutputShapeException) as error:
            raise self._refusal(str(func)) from error
        found = Result.of(out, given)
        if found is not None:
            if len(_RESULTS) >= MOST_RESULTS:
                _RESULTS.clear()
            _RESULTS[key] = found
        return out

    def _without_numbers(self, leaf: Any) -> Any:
        """A real tensor among fake ones as a fake one: torch's own conversion asks for its history, too."""
        if not isinstance(leaf, Tensor) or isinstance(leaf, FakeTensor):
            return leaf
        with no_dispatch():
            return FakeTensor(self.fakes, torch.empty_strided(leaf.shape, leaf.stride(), dtype=leaf.dtype, device="meta"), _CPU)

    def _of_batch_norm(self, func: Any, args: tuple) -> Any:
        """What operations of _WITHOUT_FAKES return: mean and variance per channel, or the gradient of an image."""
        if func is aten.batch_norm_backward_elemt.default:
            return self.like(args[1])
        image, channels = args[0], args[0].shape[1]
        dtype = torch.promote_types(image.dtype, torch.float32)
        mean, var = (self.like(torch.empty(channels, dtype=dtype, device="meta")) for _ in range(2))
        return mean, var

    def _number_of(self, tensor: Tensor) -> bool:
        if tensor.dtype is torch.bool and _asks_of_ranks():
            return True
        raise self._refusal(f"the value of a tensor of {list(tensor.shape)}")

    def _refusal(self, what: str) -> CannotEmulate:
        module = "" if self.recording.paths is None else self.recording.paths.running()
        where = f"'{module}'" if module else "the step"
        return CannotEmulate(
            f"{where} asks for numbers ({what}), on which its next operations depend, and a plan is made without data; measure "
            "this model with `widefield bench`"
        )

    # ------------------------------------------------------------------------------------------ making fake tensors

    def model_of(self, model: nn.Module) -> nn.Module:
        """The model with tensors without data in place of its parameters and buffers."""
        made: dict[Tensor, Tensor] = {}
        for part in model.modules():
            for registry in (parameters_of(part), buffers_of(part)):
                for name, tensor in registry.items():
                    if tensor is not None and tensor not in made:
                        fake = self.like(tensor)
                        is_parameter = isinstance(tensor, nn.Parameter)
                        made[tensor] = nn.Parameter(fake, requires_grad=tensor.requires_grad) if is_parameter else fake
                    registry[name] = None if tensor is None else made[tensor]  # type: ignore[assignment]
        return model

    def like(self, tensor: Tensor, rows: int | None = None) -> Tensor:
        """A new tensor without data like `tensor`, with `rows` rows where that is given."""
        with disable_current_modes(), self.fakes:
            if rows is None and is_dense(tensor):
                fake = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype)
            else:
                fake = torch.empty(tensor.shape if rows is None else (rows, *tensor.shape[1:]), dtype=tensor.dtype)
        self.recording.holds(fake)
        return fake

    def stored(self, size_bytes: int, is_file: bool) -> Tensor:
        """The memory of what a stream stores between its tiles, as bytes.

        A file is not the process's, so it counts none; nor does a GPU's step in the host's memory.
        """
        with disable_current_modes(), self.fakes:
            memory = torch.empty(size_bytes, dtype=torch.uint8)
        if self.fakes.of_gpu:
            self.recording.holds_on_host(memory, is_file=is_file)
        else:
            self.recording.holds(memory, stored=None if is_file else True)
        return memory

    def batch_of(self, batch: Batch, rows: int, *, samples: int) -> Batch:
        """A batch of `rows` images like the first of `batch`, without pixels.  samples: as in Batch; 0 of a dummy batch."""
        rows = max(1, rows)
        return replace(
            batch,
            image=self.like(batch.image, rows),
            target=self.like(batch.target, rows),
            index=torch.zeros(rows, dtype=torch.int64),
            moments=None if batch.moments is None else self.like(batch.moments, rows),
            samples=samples,
            seeds=[0] * rows,
        )


@contextmanager
def emulated(recording: Recording, *, of_gpu: bool = False) -> Iterator[Emulation]:
    """Inside, operations are recorded and have no data.  of_gpu: they are those that run on a GPU."""
    fakes = EmulatedFakeMode(of_gpu=of_gpu, allow_non_fake_inputs=True)
    emulation = Emulation(recording, fakes)
    memory_pool.PLANNED_MEMORY.append(memory_pool.PlannedMemory(emulation.stored, of_gpu))
    try:
        with fakes, recording.watched(), emulation:
            yield emulation
    finally:
        memory_pool.PLANNED_MEMORY.pop()
