"""torch.distributed's own registry of process groups."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

c10d_world = distributed_c10d._world
"""All process groups there are (`pg_map`): those that a mesh has made are closed with it."""

get_default_store: Callable[[], dist.Store] = distributed_c10d._get_default_store
"""The key-value store by which the ranks met: failures and stalls are told there, beside the messages."""

resolve_process_group: Callable[[str], dist.ProcessGroup] = distributed_c10d._resolve_process_group  # type: ignore[assignment]
"""The group of a name: layouts and compiled graphs hold names, which are data."""


def abort(group: dist.ProcessGroup, device: torch.device) -> None:
    """End what waits for a group's messages on a device; RuntimeError of a group that has none there, or is gone."""
    backend: Any = group._get_backend(device)
    backend.abort()


def sequence_number(group: dist.ProcessGroup) -> int:
    """How many collectives a group has begun on this rank: of a rank that hangs, it says which message others wait for.

    A group that has one backend for the CPU and one for GPUs counts in each; the group itself gives 0 or an error then.
    """
    counted: Any = group
    backends = {counted._get_backend(device) for device in counted._device_types}
    return sum(backend._get_sequence_number_for_group() for backend in backends)


def flight_records() -> list[str]:
    """The dumps of torch's flight recorders, of gloo and of NCCL, as JSON: what the last collectives of this rank were."""
    names = ("_dump_fr_trace_json", "_dump_nccl_trace_json")  # torch 2.11 has no recorder of gloo's collectives
    dumps = [dump for name in names if (dump := getattr(torch._C._distributed_c10d, name, None)) is not None]
    found = [dump(includeCollectives=True, onlyActive=False) for dump in dumps]
    return [text.decode() if isinstance(text, bytes) else text for text in found]


def group_hooks(group: dist.ProcessGroup, before: Callable[[str, Sequence[torch.Tensor]], None]) -> Callable[[], None]:
    """Have `before(operation, tensors)` called before each collective of a group, also those that C++ calls.

    What is returned ends that.  `before` may raise: then the collective is not called.  Needs torch 2.14 (`register_pre_hook`).
    """
    hooked: Any = group
    number = id(before)  # any number that no other hook of the group has

    def called(arguments: Any) -> None:
        before(arguments.name.name, arguments.input_tensors or arguments.output_tensors)

    hooked.register_pre_hook(number, called)
    return lambda: hooked.unregister_pre_hook(number)
