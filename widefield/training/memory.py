"""How much memory does this rank use, at its peak and now, and how much may it use?

On a GPU it is what torch has allocated there, on the CPU what is resident of the process.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

import torch

from widefield.comm.mesh import World


def peak_memory_bytes(device: torch.device) -> int:
    """The peak memory of this rank since it began, or since `reset_peak`."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    peak = _kibibytes("/proc/self/status", "VmHWM")
    return _largest_resident() if peak is None else peak


def memory_bytes(device: torch.device) -> int:
    """The memory of this rank now; where the system does not tell, the peak of its process."""
    if device.type == "cuda":
        return torch.cuda.memory_allocated(device)
    resident = _kibibytes("/proc/self/status", "VmRSS")
    return _largest_resident() if resident is None else resident


def reset_peak(device: torch.device) -> bool:
    """Count the peak from now on; False where the system has no such thing, and it goes on from what it was."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        return True
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # man 5 proc: resets VmHWM
    return peak_memory_bytes(device) <= memory_bytes(device) + _NOISE


_NOISE = 2**24
"""Bytes by which a process may shrink between two readings; a peak this little above it is as good as reset."""


def usable_bytes(device: torch.device, world: World) -> int:
    """The memory that this rank may use in all, with what it uses now; ranks on one device or machine share it evenly."""
    if device.type != "cuda":
        return memory_bytes(device) + free_host_bytes() // world.local_size
    free, total = torch.cuda.mem_get_info(device)
    ours = range(world.local_rank % torch.cuda.device_count(), world.local_size, torch.cuda.device_count())
    return min(total, free + torch.cuda.memory_reserved(device)) // max(1, len(ours))


def free_host_bytes() -> int:
    """Free memory of this machine, or of this process's control group, whichever is less."""
    free = _kibibytes("/proc/meminfo", "MemAvailable")
    if free is None:
        free = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2
    return max(0, min(free, *_free_in_groups()))


def _free_in_groups(root: Path = Path("/sys/fs/cgroup")) -> list[int]:
    """What is free in each control group that this process is in; a container sees its own as `root`.  [inf] without limits."""
    try:
        lines = Path("/proc/self/cgroup").read_text(encoding="ascii").splitlines()
    except OSError:
        lines = []
    paths = {name for number, kinds, name in (line.split(":", 2) for line in lines) if number == "0" or "memory" in kinds}
    files = ("memory.max", "memory.current"), ("memory.limit_in_bytes", "memory.usage_in_bytes")
    folders = [root, root / "memory"]
    for path in paths:
        for base in (root, root / "memory"):
            own = base / path.strip("/")
            folders += [own, *(parent for parent in own.parents if base in parent.parents)]
    found = [_free_in(folder, *names) for folder in folders for names in files]
    return [free for free in found if free is not None] or [2**63]


def _free_in(folder: Path, most: str, used: str) -> int | None:
    """What is free in a control group, where files that were read count as free; None where it has no limit."""
    try:
        limit, now = ((folder / name).read_text(encoding="ascii").strip() for name in (most, used))
        rows = dict(line.split() for line in (folder / "memory.stat").read_text(encoding="ascii").splitlines())
        return int(limit) - int(now) + int(rows.get("inactive_file", 0))
    except (OSError, ValueError):  # no such group, or `max`
        return None


def _kibibytes(path: str, key: str) -> int | None:
    """The bytes of a line `key:  12 kB`; None where there is none."""
    try:
        lines = Path(path).read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{key}:")), None)


def _largest_resident() -> int:
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024  # Linux counts KiB
