"""torch.distributed's own registry of process groups."""

from __future__ import annotations

from collections.abc import Callable
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
    """How many collectives a group has begun on this rank: of a rank that hangs, it says which message others wait for."""
    counted: Any = group
    return counted._get_sequence_number_for_group()
