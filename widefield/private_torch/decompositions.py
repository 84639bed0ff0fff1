"""Torch's own definitions of operators by others."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch._decomp as decomp

decomposition_table: dict[Any, Callable] = decomp.decomposition_table
"""Such definitions by operator, for those that have no rule."""

get_decompositions: Callable[..., dict[Any, Callable]] = decomp.get_decompositions
"""Those of some operators alone."""
