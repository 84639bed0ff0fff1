"""Parts of DTensor, which takes long to import: import this file where weights are sharded."""

from __future__ import annotations

from collections.abc import Callable

from torch.distributed.tensor import debug

clear_sharding_prop_cache: Callable[[], None] = debug._clear_sharding_prop_cache
"""Forgets what DTensor has found for operations: on the next mesh of equal sizes it would name groups that are closed."""
