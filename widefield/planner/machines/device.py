"""What one device computes, holds and how fast it reads: figures of a data sheet, or measured.  Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

SHORT_SECONDS = 2e-5
"""A GPU's kernel that takes no longer does not fill the GPU, and tells nothing of larger ones."""
PRECISIONS = ("float64", "float32", "tf32", "bfloat16", "float16")


@dataclass(frozen=True)
class Device:
    """One GPU, or the cores of one CPU rank.

    memory_bytes: all of its memory; of a CPU rank its share of the machine's.
    memory_bytes_per_second: reads and writes together, at the peak.
    flops_per_second: at the peak, of dense matrices, by precision; 2 per multiplication and addition.  A precision that is
        missing has no arithmetic of its own: it runs at the speed of float32.
    launch_seconds: from the start of one small kernel to the start of the next, which the host's Python bounds.
    context_bytes: what the driver and its libraries hold before the first tensor.
    block_bytes: storages are rounded up to multiples of it; 1 on a CPU.
    flops_reached, bandwidth_reached: the part of the peaks that large kernels reach, where nothing was measured.
    flops_reached_plain: that part where a GPU computes without tensor cores; Winograd's convolutions save multiplications.
    dollars_per_hour: of one device, where the user gives it.
    source: where the figures are from.
    """

    name: str
    memory_bytes: int
    memory_bytes_per_second: float
    flops_per_second: Mapping[str, float] = field(hash=False)
    launch_seconds: float
    context_bytes: int = 0
    block_bytes: int = 1
    is_cpu: bool = False
    flops_reached: float = 0.62
    flops_reached_plain: float = 0.88
    bandwidth_reached: float = 0.8
    dollars_per_hour: float | None = None
    source: str = ""

    def peak_flops(self, precision: str) -> float:
        """Operations per second of dense matrices in a precision of `PRECISIONS`; other dtypes count as float32."""
        return self.flops_per_second.get(precision) or self.flops_per_second["float32"]

    def uses_tensor_cores(self, precision: str) -> bool:
        """Whether products in a precision are at least 1.5 times as fast as in float32, on a GPU."""
        return not self.is_cpu and self.peak_flops(precision) >= 1.5 * self.peak_flops("float32")
