"""What one rank does in a training step, as data: operations, messages and allocations in the order in which they happen.

Written by emulation/ and read by cost/, search/ and the pages.  Imports no torch.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from dataclasses import dataclass, field
from typing import Literal

Phase = Literal["forward", "loss", "backward", "optimizer", "other"]
MessageKind = Literal["all_reduce", "all_gather", "reduce_scatter", "broadcast", "send", "receive", "all_to_all", "barrier"]
Part = Literal["weights", "gradients", "optimizer", "activations", "transient", "messages", "inputs", "buffers", "stored"]
"""What an allocation is for.  activations: it outlives the forward.  transient: made and freed within a phase.  buffers: of the
model, as running statistics.  stored: by a stream between its tiles, in the process's memory beside the allocator's."""


@dataclass(frozen=True)
class OpEvent:
    """One kernel on this rank's part of the tensors.

    name: of the operation with its overload, as `aten.convolution.default` or `fsdp.chunk_cat.default`.
    signature: all that decides its time on a device: name, shapes, dtypes, memory formats and further arguments.
    flops: as torch's FlopCounterMode counts them; 0 for what it does not count.  bytes_read, bytes_written: of whole tensors.
    module: the path of the innermost module that ran it, in the backward the one whose forward operation it belongs to.
    """

    name: str
    phase: Phase
    module: str
    signature: Hashable
    flops: float
    bytes_read: int
    bytes_written: int
    dtype: str
    """Of the result, as `float32`."""
    is_transfer: bool = False
    """Whether it copies from the host's memory to a GPU's, or back."""

    @property
    def runs_kernel(self) -> bool:
        """False: a question to a tensor, as prim.device, or a mark for the profiler."""
        return not self.name.startswith(("prim.", "profiler."))


@dataclass(frozen=True)
class MessageEvent:
    """One message of this rank.

    bytes: of this rank's input: of an all_gather its own part, of a reduce_scatter the whole.
    ranks: the global ranks of the group, in order.  peer: the global rank at the other end of a send or receive.
    number: names the message for its WaitEvent.  control: a few numbers by which ranks compare themselves, on the host.
    """

    kind: MessageKind
    bytes: int
    ranks: tuple[int, ...]
    phase: Phase
    module: str
    number: int
    peer: int | None = None
    control: bool = False


@dataclass(frozen=True)
class WaitEvent:
    """This rank goes on only when the message of that number has arrived."""

    number: int


Event = OpEvent | MessageEvent | WaitEvent


@dataclass(frozen=True)
class MemoryPoint:
    """The bytes that this rank holds after an event.  event: its index in `events`."""

    event: int
    bytes: int


@dataclass(frozen=True)
class AllocatedBlock:
    """An allocation of `bytes`.  made, freed: indices of the events before which it comes and goes; freed None: it stays."""

    made: int
    freed: int | None
    bytes: int


@dataclass
class StepRecord:
    """One training step of one rank.

    memory: where the bytes change, in order.  peak_bytes: the largest of them, with the model's weights and all the rest.
    peak_event: the index of the event at which the peak is reached.  peak_module, peak_op: where that is, in words.
    parts: the bytes held at the peak, by what they are for; they add up to peak_bytes.
    assumed: what could not be known without numbers and was taken for granted, a sentence each.
    unknown: operations whose kernels' own temporary memory is not known, by name.
    samples: of the whole step, on all ranks.
    blocks: every allocation that there is at the beginning or that the step makes, without what kernels hold while they run.
    allocator_peak_bytes: the largest number of bytes of torch's allocator, which has all but the part `stored`.
    """

    rank: int
    ranks: int
    events: list[Event] = field(default_factory=list)
    memory: list[MemoryPoint] = field(default_factory=list)
    peak_bytes: int = 0
    peak_event: int = 0
    peak_module: str = ""
    peak_op: str = ""
    parts: dict[Part, int] = field(default_factory=dict)
    assumed: list[str] = field(default_factory=list)
    unknown: list[str] = field(default_factory=list)
    samples: int = 0
    blocks: list[AllocatedBlock] = field(default_factory=list)
    allocator_peak_bytes: int = 0

    @property
    def operations(self) -> Iterator[OpEvent]:
        return (event for event in self.events if isinstance(event, OpEvent))

    @property
    def messages(self) -> Iterator[MessageEvent]:
        return (event for event in self.events if isinstance(event, MessageEvent))

    @property
    def flops(self) -> float:
        return sum(event.flops for event in self.operations)
