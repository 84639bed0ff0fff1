"""Which of a run's ranks is this process?  A World says it; a launcher's environment gives one.  Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass

FILE = "file://"
MAY_COME_BACK = "WIDEFIELD_MAY_COME_BACK"
"""The environment variable by which a launcher tells ranks that it may start some of them again, by themselves."""
CAME_BACK = "WIDEFIELD_CAME_BACK"
"""The one by which it tells a rank that it is such a one."""


class AgreedError(ValueError):
    """A problem that every rank raises with the same text, so one rank has to print it."""


@dataclass(frozen=True)
class World:
    """What the launcher says of this process: its rank among `size`, its rank on its machine, the rendezvous address.

    local_size: 0 where it is not known; joining the others finds out, see comm/meeting.py.
    address: also file:///PATH, a file that all machines share and in which the first rank writes where it is.
    job: the launcher's name for the run, the same on all ranks and different for another run or another start of it; "" where
    there is none.  Ranks of different jobs do not meet.
    """

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1
    address: str = "127.0.0.1"
    port: int = 0
    launcher: str = "none"
    job: str = ""

    @property
    def has_one_host(self) -> bool:
        """Whether all ranks are on this machine."""
        loopback = self.address in ("localhost", "::1") or self.address.startswith("127.")
        return self.local_size == self.size or (self.local_size == 0 and loopback)

    @property
    def place(self) -> str:
        """The rendezvous address, as host:port, or the file."""
        return self.address if self.address.startswith(FILE) else f"{self.address}:{self.port}"
