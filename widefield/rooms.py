"""The rooms that run a model's operations.  What their modules define is no part of a model, so capturing leaves it alone."""

from __future__ import annotations

from pathlib import Path

ENGINE = (
    "capture", "comm", "geometry", "kernels", "module_wrapping", "ops", "parallel", "pipelining", "private_torch", "rules",
    "sharded_state", "streaming", "tensor_parallel", "tiled", "verification",
)  # fmt: skip
_HERE = Path(__file__).parent

ENGINE_MODULES = tuple(f"{__package__}.{room}" for room in ENGINE)
_PREFIXES = tuple(f"{room}." for room in ENGINE_MODULES)
ENGINE_PATHS = tuple(str(path) for room in ENGINE for path in (_HERE / room, _HERE / f"{room}.py") if path.exists())


def is_of_engine(module: object) -> bool:
    """Whether the module of this name is one of these rooms, or inside of one."""
    return isinstance(module, str) and f"{module}.".startswith(_PREFIXES)
