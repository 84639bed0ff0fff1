"""Records of steps made by hand, and of a plain torch model, without the emulation."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from widefield.planner.step_record import Event, MessageEvent, OpEvent, StepRecord, WaitEvent

Z = 2**20


def op(
    name: str = "aten.relu.default",
    phase: str = "forward",
    *,
    flops: float = 0.0,
    size: int = Z,
    dtype: str = "float32",
    **more: Any,
) -> OpEvent:
    """An operation that reads and writes `size` bytes in all."""
    signature = more.get("signature", (name, flops, size))
    return OpEvent(name, phase, more.get("module", ""), signature, flops, size // 2, size - size // 2, dtype)  # type: ignore[arg-type]


def message(
    kind: str, size: int, ranks: Iterable[int], number: int, *, peer: int | None = None, control: bool = False
) -> MessageEvent:
    return MessageEvent(kind, size, tuple(ranks), "backward", "", number, peer, control)  # type: ignore[arg-type]


def record(events: list[Event], *, rank: int = 0, ranks: int = 1, samples: int = 8, peak: int = 0) -> StepRecord:
    return StepRecord(rank, ranks, events, samples=samples, peak_bytes=peak)


def waited(sent: MessageEvent) -> list[Event]:
    """A message, and at once the wait for it."""
    return [sent, WaitEvent(sent.number)]


def described(value: Any) -> Hashable:
    """An argument of an operation, as signatures have it."""
    if isinstance(value, Tensor):
        return ("tensor", tuple(value.shape), tuple(value.stride()), str(value.dtype).removeprefix("torch."))
    if isinstance(value, list | tuple):
        return tuple(described(one) for one in value)
    return value if isinstance(value, int | float | bool | str | None) else str(value)


class Recorder(TorchDispatchMode):
    """Writes down the kernels that run, on real tensors or fake ones."""

    def __init__(self) -> None:
        super().__init__()
        self.events: list[Event] = []
        self.phase = "forward"

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        read, written = _tensors((args, kwargs)), _tensors(out)
        if func.namespace != "aten" or func.is_view or not (read or written) or "_unsafe_view" in str(func):
            return out
        count = flop_registry.get(func._overloadpacket)
        flops = float(count(*args, **kwargs, out_val=out)) if count else 0.0
        signature = (str(func), described(args), tuple((key, described(one)) for key, one in sorted(kwargs.items())))
        dtype = str((written or read)[0].dtype).removeprefix("torch.")
        phase: Any = self.phase
        self.events.append(OpEvent(str(func), phase, "", signature, flops, _bytes(read), _bytes(written), dtype))
        return out


def _tensors(tree: Any) -> list[Tensor]:
    return [one for one in tree_leaves(tree) if isinstance(one, Tensor)]


def _bytes(tensors: list[Tensor]) -> int:
    return sum(one.numel() * one.element_size() for one in tensors)


def recorded(
    model: nn.Module, image: Tensor, *, low: torch.dtype | None = None, momentum: float = 0.9
) -> tuple[StepRecord, Callable[[], None]]:
    """The record of a step of SGD on class numbers, and a function that takes such a step.  low: of autocast."""
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=momentum)
    target = torch.zeros(len(image), dtype=torch.long)

    def step(recorder: Recorder | None = None) -> None:
        def enter(phase: str) -> None:
            if recorder is not None:
                recorder.phase = phase

        enter("forward")
        with torch.autocast("cpu", low) if low else nullcontext():
            output = model(image)
        enter("loss")
        output = output.float() if output.dim() == 2 else output.float().mean((2, 3))
        loss = F.cross_entropy(output, target)
        enter("backward")
        loss.backward()
        enter("optimizer")
        optimizer.step()
        optimizer.zero_grad()

    step()
    with Recorder() as recorder:
        step(recorder)
    return record(recorder.events, samples=len(image)), step
