"""A network cable with delay, loss and little bandwidth.

The kernel's own is `tc ... netem`.  Where it has none, as in small virtual machines, frames go through a thread here,
between two TAP devices: each waits for its turn and its delay, or is lost.
"""

from __future__ import annotations

import fcntl
import functools
import heapq
import os
import random
import select
import struct
import subprocess
import threading
import time
from dataclasses import dataclass, field

TUNSETIFF = 0x400454CA
TAP, PLAIN = 0x0002, 0x1000
"""IFF_TAP and IFF_NO_PI of linux/if_tun.h: Ethernet frames, without a header of the driver's."""
LONGEST_QUEUE_SECONDS = 0.5
"""A frame that would wait longer for its turn is lost, as at a router whose memory is full."""


@dataclass(frozen=True)
class Cable:
    """delay_ms: one way.  loss: the share of frames that are lost.  mbit: bandwidth in each direction, Mbit/s."""

    delay_ms: float
    loss: float
    mbit: float

    def netem(self) -> list[str]:
        """The words that tell `tc ... netem` the same."""
        return ["delay", f"{self.delay_ms}ms", "loss", f"{100 * self.loss}%", "rate", f"{self.mbit}mbit"]


@functools.cache
def netem_refusal() -> str | None:
    """What `tc` says where the kernel has no netem; None where it has."""
    here = f"wfq{os.getpid()}"
    subprocess.run(["ip", "link", "add", here, "type", "veth", "peer", "name", f"{here}p"], check=True)
    try:
        tried = subprocess.run(
            ["tc", "qdisc", "add", "dev", here, "root", "netem", "delay", "1ms"], capture_output=True, text=True
        )
    finally:
        subprocess.run(["ip", "link", "delete", here], check=True)
    return None if tried.returncode == 0 else f"tc qdisc add ... netem: {tried.stderr.strip()}"


@dataclass
class Way:
    """One direction of a cable."""

    into: int
    free_at: float = 0.0
    """When the last frame will have left the sender."""


@dataclass
class Link:
    """A running cable between two TAP devices.  ends: their files."""

    cable: Cable
    ends: tuple[int, int]
    seed: int = 0
    frames: int = 0
    lost: int = 0
    _over: threading.Event = field(default_factory=threading.Event)

    def __post_init__(self) -> None:
        self._draw = random.Random(self.seed)
        self._thread = threading.Thread(target=self._carry, name="cable", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._over.set()
        self._thread.join()
        for end in self.ends:
            os.close(end)

    def _carry(self) -> None:
        near, far = self.ends
        ways = {near: Way(far), far: Way(near)}
        under_way: list[tuple[float, int, int, bytes]] = []
        while not self._over.is_set():
            wait = min(0.2, max(0.0, under_way[0][0] - time.monotonic())) if under_way else 0.2
            for end in select.select(self.ends, [], [], wait)[0]:
                try:
                    self._take(os.read(end, 65536), ways[end], under_way)
                except OSError:  # the host is off, and the device with it
                    return
            while under_way and under_way[0][0] <= time.monotonic():
                _, _, into, frame = heapq.heappop(under_way)
                self._put(into, frame)

    def _take(self, frame: bytes, way: Way, under_way: list[tuple[float, int, int, bytes]]) -> None:
        now = time.monotonic()
        self.frames += 1
        if self._draw.random() < self.cable.loss or way.free_at - now > LONGEST_QUEUE_SECONDS:
            self.lost += 1
            return
        way.free_at = max(now, way.free_at) + 8 * len(frame) / (1e6 * self.cable.mbit)
        heapq.heappush(under_way, (way.free_at + self.cable.delay_ms / 1000, self.frames, way.into, frame))

    @staticmethod
    def _put(into: int, frame: bytes) -> None:
        try:
            os.write(into, frame)
        except OSError:  # the device is down: a cut cable, or a host that is off
            pass


def join_by_tap(near: str, far: str, *, init: int, cable: Cable) -> Link:
    """A cable between the new devices `near`, here, and `far`, in the network of the process `init`."""
    ours, theirs = _tap(near), _tap(f"{near}f")
    subprocess.run(["ip", "link", "set", f"{near}f", "netns", str(init), "name", far], check=True)
    return Link(cable, (ours, theirs))


def _tap(name: str) -> int:
    """The file of a new TAP device."""
    file = os.open("/dev/net/tun", os.O_RDWR)
    fcntl.ioctl(file, TUNSETIFF, struct.pack("16sH22x", name.encode(), TAP | PLAIN))
    return file
