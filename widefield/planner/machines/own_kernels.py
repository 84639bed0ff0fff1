"""The kernels of the plans that are asked about, timed on this machine while they are compared."""

from __future__ import annotations

import platform
import time
from collections.abc import Iterable

import torch

from widefield.planner.machines.calibration import calibration_path, write_calibration
from widefield.planner.machines.cluster import Cluster
from widefield.planner.machines.timing import measure_signatures
from widefield.planner.step_record import OpEvent, StepRecord
from widefield.streaming.storage.heap import keep_freed_memory

MOST_OF_MEMORY = 1 / 8
"""Of a device's memory, that the numbers of a kernel may take: its result and its workspace come on top."""


class OwnKernels:
    """Times those kernels of steps that no calibration has, for `seconds` in all; what is left is priced by its neighbours.

    cluster: of this machine as it was measured; `is_here` says whether it is.  Its calibration gets the kernels.
    """

    def __init__(self, cluster: Cluster, *, seconds: float) -> None:
        assert cluster.calibration is not None, "see is_here"
        self.calibration = cluster.calibration
        self.most_bytes = MOST_OF_MEMORY * cluster.device.memory_bytes
        self.left, self.added = seconds, 0
        kind = self.calibration.conditions["kind"]
        self.device = torch.device("cuda", torch.cuda.current_device()) if kind == "cuda" else torch.device(kind)

    def measure(self, records: Iterable[StepRecord]) -> None:
        """Time the kernels of steps, those first that take longest."""
        began, threads = time.monotonic(), torch.get_num_threads()
        try:
            if self.device.type == "cpu":
                torch.set_num_threads(int(self.calibration.conditions["threads"]))
                keep_freed_memory()  # as in a step
            for record in records:
                left = self.left - (time.monotonic() - began)
                if left > 0:
                    found = measure_signatures(self._small(record), self.calibration, budget_seconds=left, device=self.device)
                    self.added += len(found)
        finally:
            torch.set_num_threads(threads)
            self.left -= time.monotonic() - began

    def keep(self) -> None:
        """Write the calibration to the user's cache, if it has got anything.  OSError: it cannot be written."""
        if self.added:
            threads = int(self.calibration.conditions["threads"])
            write_calibration(self.calibration, calibration_path(self.device.type, threads))

    def _small(self, record: StepRecord) -> list[OpEvent]:
        return [event for event in record.operations if event.bytes_read + event.bytes_written <= self.most_bytes]


def is_here(cluster: Cluster) -> bool:
    """Whether the devices are this machine's, and measured."""
    if cluster.calibration is None or cluster.calibration.conditions.get("host") != platform.node():
        return False
    return cluster.device.is_cpu or torch.cuda.is_available()
