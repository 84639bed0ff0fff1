"""The result of comparing two runs of a model tensor by tensor."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from widefield.fallback import Fallback, by_kind, head_of

TOLERANCE = 1e-10
"""The largest difference, relative to the largest value, that float64 sums in another order explain."""

NOISE = 1e-3
"""Relative to the largest gradient: smaller gradients may be rounding of sums that cancel, as of a bias before a BatchNorm."""

KINDS = ("loss", "output", "gradient", "weight", "buffer")
"""The kinds of compared tensors, besides outputs of layers."""


@dataclass(frozen=True)
class Row:
    """One compared tensor.  kind: one of KINDS, or layer.  error: the largest difference / the largest value."""

    kind: str
    name: str
    error: float


@dataclass(frozen=True)
class Verdict:
    """The result of `verify`.  ok: every tensor agrees.  refusal: why the model cannot run so; None where it did."""

    rows: list[Row] = field(default_factory=list)
    refusal: str | None = None
    tolerance: float = TOLERANCE
    zero_gradients: int = 0
    """How many gradients are zero on one device, as behind a ReLU that is off everywhere: comparing these shows nothing."""
    reasons: list[str] = field(default_factory=list)
    """The choices of the plan's strategies, a sentence each."""
    fallbacks: list[Fallback] = field(default_factory=list)
    """The operations that ran whole though tiles or channels were asked for, with their bytes."""
    randomized: int = 0
    """How many weights were all zero and got random values for the comparison."""

    @property
    def ok(self) -> bool:
        return self.refusal is None and all(row.error <= self.tolerance for row in self.rows)

    def __bool__(self) -> bool:
        return self.ok

    def __str__(self) -> str:
        """A table: the largest error of each kind, the tensors that differ, with layers in running order, and fallbacks."""
        if self.refusal is not None:
            return f"refused: {self.refusal}"
        lines = [_summary(kind, [row for row in self.rows if row.kind == kind]) for kind in KINDS]
        wrong = [row for row in self.rows if row.error > self.tolerance]
        lines += [f"  differs: {row.kind} {row.name}: {row.error:.1e}" for row in wrong[:20]]
        lines += [f"  and {len(wrong) - 20} more"] * (len(wrong) > 20)
        if self.randomized:
            which, them = ("weights", "them") if self.randomized > 1 else ("weight", "it")
            lines.append(
                f"{self.randomized:5d} {which} of zeros had random values here, for no gradient to be zero behind {them}"
            )
        lines += _blocks(self.fallbacks)
        return "\n".join([*(line for line in lines if line), self._end])

    @property
    def _end(self) -> str:
        if not self.ok:
            return "NOT EXACT"
        if not self.zero_gradients:
            return "exact"
        count = f"{self.zero_gradients} gradient{'s' if self.zero_gradients > 1 else ''}"
        return f"exact, but for {count} of zero on one device too, of which this shows nothing"


def _blocks(fallbacks: list[Fallback]) -> list[str]:
    """For each kind of fallback a head with the total, and a line for each place."""
    return [line for kind, rows in by_kind(fallbacks).items() for line in (head_of(kind, rows), *(f"  {row}" for row in rows))]


def _summary(kind: str, rows: list[Row]) -> str:
    if not rows:
        return ""
    worst = max(rows, key=lambda row: row.error)
    plural = {"loss": "losses"}.get(kind, kind + "s")
    return f"{len(rows):5d} {plural if len(rows) > 1 else kind:10s} largest error {worst.error:.1e} ({worst.name})"


def rows_of(kind: str, got: dict, expected: dict) -> list[Row]:
    """A row for each tensor that one of the two has; None, as for the gradient of an unused weight, counts as missing."""
    pairs = {name: (got.get(name), expected.get(name)) for name in expected | got}
    largest = max((_size(tensor) for tensor in expected.values() if tensor is not None), default=0.0)
    floor = min(1.0, NOISE * largest)
    return [Row(kind, name, _error(*pair, floor)) for name, pair in pairs.items() if any(one is not None for one in pair)]


def _size(tensor: Tensor) -> float:
    return float(tensor.abs().max()) if tensor.is_floating_point() and tensor.numel() else 0.0


def _error(got: Tensor | None, expected: Tensor | None, floor: float) -> float:
    """The largest difference relative to the largest value, or to `floor` where that is more.

    Infinite where shapes differ or one is missing (unless the other is all zero).
    """
    if got is None or expected is None:
        other = expected if got is None else got
        return 0.0 if other is None or not other.any() else float("inf")
    if got.shape != expected.shape:
        return float("inf")
    got = got.to(expected.device)  # gathered full tensors are on the CPU
    if not got.is_floating_point():
        return 0.0 if torch.equal(got, expected) else float("inf")
    size, difference = max(floor, _size(expected)), _size(got - expected)
    if difference == 0.0:
        return 0.0
    return difference / size if difference == difference and 0.0 < size < float("inf") else float("inf")
