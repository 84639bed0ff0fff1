"""torchmetrics, imported in a fifth of the time: before everything else that imports it, see widefield/tasks/__init__.py.

It imports scipy.signal, for one metric of sound that a newer scipy would break.  That takes 1.5 s, and no image needs it, so it
finds an empty module there while it is imported.  A program that has loaded either before keeps what it has.
"""

from __future__ import annotations

import sys
from types import ModuleType

_UNUSED = "scipy.signal"


def _import() -> None:
    quick = "torchmetrics" not in sys.modules and _UNUSED not in sys.modules
    if quick:
        empty = ModuleType(_UNUSED)
        empty.hamming = None  # type: ignore[attr-defined]  # torchmetrics would add it from scipy.signal.windows
        sys.modules[_UNUSED] = empty
    try:
        import torchmetrics  # noqa: F401
    finally:
        if quick:
            del sys.modules[_UNUSED]


_import()

from torchmetrics import Metric, MetricCollection  # noqa: E402
from torchmetrics.utilities import dim_zero_cat, dim_zero_sum  # noqa: E402

__all__ = ["Metric", "MetricCollection", "dim_zero_cat", "dim_zero_sum"]
