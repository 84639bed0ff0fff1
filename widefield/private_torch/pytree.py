"""Nested arguments, as torch itself goes through them: in tuples, lists, dicts and whatever was registered."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.utils._pytree as pytree

tree_map: Callable[..., Any] = pytree.tree_map
"""The same nest with a function's value in place of each leaf."""

tree_leaves: Callable[[Any], list[Any]] = pytree.tree_leaves
"""The leaves of a nest in order."""

tree_flatten: Callable[[Any], tuple[list[Any], Any]] = pytree.tree_flatten
"""The leaves of a nest, and its form."""

tree_unflatten: Callable[[list[Any], Any], Any] = pytree.tree_unflatten
"""The nest of a form with these leaves."""
