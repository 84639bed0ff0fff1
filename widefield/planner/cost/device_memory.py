"""What a rank's allocations take on a device: allocated and reserved.

On a CPU, what is allocated is what is taken.  On a GPU torch's caching allocator rounds each storage up to 512 bytes, and takes
memory from the driver in segments: 2 MiB for storages up to 1 MiB, 20 MiB for those below 10 MiB, and multiples of 2 MiB above.
A free block is cut where it is more than 1 MiB (512 bytes of small ones) too large, and goes to what fits it best.  Where the
driver has no more, segments that are wholly free are given back to it first (c10/cuda/CUDACachingAllocator.cpp).  Where the
record has its blocks, they are put into segments as there; otherwise the slack is estimated.
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from dataclasses import dataclass, field

from widefield.planner.machines.cluster import Cluster
from widefield.planner.machines.device import Device
from widefield.planner.step_record import OpEvent, StepRecord

MIB = 2**20
SMALL, SMALL_SEGMENT = MIB, 2 * MIB
LARGE_FROM, LARGE_SEGMENT, ROUND = 10 * MIB, 20 * MIB, 2 * MIB
SLACK = 0.05
"""Reserved above allocated, as a share, where the order of allocations is not known."""
WORKSPACE_MOST = 256 * MIB
"""What cuDNN may take for one convolution while it runs; larger ones fall back to a method that needs less, where torch
benchmarks."""
HOPPER_AND_LATER = ("H100", "H200", "B200", "RTX5090")
COMMUNICATOR_BYTES = 128 * MIB
"""NCCL's buffers for one group of ranks: 4 MiB for each of some 16 to 32 channels."""


@dataclass(frozen=True)
class DeviceMemory:
    """Bytes of one rank at its peak.

    allocated: by tensors, each rounded up.  workspace: of kernels while they run.  reserved: what torch has taken from the
    driver, workspace and slack with it.  context: of driver, libraries and groups of ranks.  total: reserved and context.
    free: of the device, beyond the total; negative where it does not fit.  assumed: what was estimated, in sentences.
    """

    allocated: int
    workspace: int
    reserved: int
    context: int
    total: int
    free: int
    assumed: list[str] = field(default_factory=list)

    @property
    def fits(self) -> bool:
        return self.free >= 0


def device_memory(record: StepRecord, cluster: Cluster) -> DeviceMemory:
    """The memory of the rank that `record` is of, on a device of the cluster."""
    device = cluster.device
    if device.is_cpu:
        peak = record.peak_bytes
        return DeviceMemory(peak, 0, peak, device.context_bytes, peak + device.context_bytes, device.memory_bytes - peak)
    workspace = _workspace(record) + blas_workspace(device)
    groups = {event.ranks for event in record.messages if not event.control}
    context = device.context_bytes + COMMUNICATOR_BYTES * len(groups)
    assumed = [f"kernels' own memory: at most {workspace / MIB:.0f} MiB, not measured"]
    if record.blocks:
        blocks = [(one.made, one.freed, one.bytes) for one in record.blocks]
        allocated, reserved = packed(blocks, device.block_bytes, limit=device.memory_bytes - context - workspace)
    else:
        allocated = record.peak_bytes
        reserved = int(allocated * (1 + SLACK))
        assumed.append(f"the allocator's slack: {SLACK:.0%} of what is allocated, as an estimate")
    reserved += workspace
    total = reserved + context
    return DeviceMemory(allocated, workspace, reserved, context, total, device.memory_bytes - total, assumed)


def blas_workspace(device: Device) -> int:
    """What cuBLAS and cuBLASLt keep, which torch counts as allocated: 32 MiB each from Hopper on, 8 and 1 before."""
    return 0 if device.is_cpu else 64 * MIB if device.name.startswith(HOPPER_AND_LATER) else 9 * MIB


def _workspace(record: StepRecord) -> int:
    """Of the largest convolution: as much as it reads and writes, at most WORKSPACE_MOST."""
    sizes = [one.bytes_read + one.bytes_written for one in record.operations if _is_convolution(one)]
    return min(max(sizes, default=0), WORKSPACE_MOST)


def _is_convolution(event: OpEvent) -> bool:
    return "convolution" in event.name


def packed(blocks: Sequence[tuple[int, int | None, int]], block_bytes: int, *, limit: int | None = None) -> tuple[int, int]:
    """(the most that is allocated at a time, the most that is taken from the driver) of blocks in the caching allocator.

    blocks: (event at which it is made, at which it is freed or None, bytes).  What is freed at an event is free for what is
    made there.  limit: what the driver has.
    """
    sized = [(made, freed, index) for index, (made, freed, size) in enumerate(blocks) if size]
    makes = [(made, 1, index) for made, _, index in sized]
    # What comes and goes between the same two events goes after it has come.
    frees = [(freed, 2 if freed == made else 0, index) for made, freed, index in sized if freed is not None]
    pools, places, now, most = Segments(limit), {}, 0, 0
    for _, order, index in sorted(makes + frees):
        size = -(-blocks[index][2] // block_bytes) * block_bytes
        if order == 1:
            places[index] = pools.take(size)
            now += size
        else:
            pools.give_back(places.pop(index), size)
            now -= size
        most = max(most, now)
    return most, pools.most


class Segments:
    """Free blocks of the small and the large pool; addresses are numbers that grow, with a gap between segments."""

    def __init__(self, limit: int | None = None) -> None:
        self.limit = limit
        self.reserved, self.most, self.top = 0, 0, 0
        """`most`: the most that was ever reserved."""
        self.segments: dict[int, int] = {}
        """The bytes of each segment, by its first address."""
        self.free: dict[bool, list[tuple[int, int]]] = {True: [], False: []}
        """(bytes, address) in order, by whether the pool is the small one."""
        self.taken: dict[int, int] = {}
        """The bytes of the block at an address, which may be more than was asked for."""

    def take(self, size: int) -> int:
        small = size <= SMALL
        free = self.free[small]
        place = bisect.bisect_left(free, (size, 0))
        if place == len(free):
            segment = SMALL_SEGMENT if small else LARGE_SEGMENT if size < LARGE_FROM else -(-size // ROUND) * ROUND
            if self.limit is not None and self.reserved + segment > self.limit:
                self.release()
            self.reserved += segment
            self.most = max(self.most, self.reserved)
            self.segments[self.top] = segment
            found, self.top = (segment, self.top), self.top + segment + 1
        else:
            found = free.pop(place)
        block, address = found
        if block - size >= (512 if small else SMALL + 1):
            bisect.insort(free, (block - size, address + size))
            block = size
        self.taken[address] = block
        return address

    def release(self) -> None:
        """Give the segments that are wholly free back to the driver."""
        for free in self.free.values():
            for block, address in [one for one in free if self.segments.get(one[1]) == one[0]]:
                free.remove((block, address))
                self.reserved -= self.segments.pop(address)

    def give_back(self, address: int, size: int) -> None:
        """Free it, joined with the free blocks before and behind it."""
        block, free = self.taken.pop(address), self.free[size <= SMALL]
        for one in [one for one in free if one[1] + one[0] == address or address + block == one[1]]:
            free.remove(one)
            address, block = min(address, one[1]), block + one[0]
        bisect.insort(free, (block, address))
