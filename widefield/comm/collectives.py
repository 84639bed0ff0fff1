"""Collectives under one name, whatever torch calls them.

torch 2.14 renames `all_gather_into_tensor` and warns of the old name at every call; earlier releases know only that one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch.distributed as dist

if TYPE_CHECKING:
    from torch import Tensor

_ALL_GATHER = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


def all_gather_single(gathered: Tensor, part: Tensor, group: dist.ProcessGroup, *, async_op: bool = False) -> dist.Work | None:
    """Write every rank's `part` into `gathered`, one after another in the group's order."""
    return _ALL_GATHER(gathered, part, group=group, async_op=async_op)
