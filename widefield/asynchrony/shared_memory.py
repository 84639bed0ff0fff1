"""Memory that ranks of one machine share: a model's weights and statistics, and of each worker what it does to them.

The memory has no name in any folder.  One rank makes it (Linux's memfd), and others open it as that rank's /proc/PID/fd/FD.  So
it is gone with the last process that has it, however that ends, and the size of /dev/shm is no limit of it.

A worker writes into its *cell* what it learned from and that it begins, changes the weights, and writes that it has ended.  A
process that is killed leaves what it wrote, so whoever has the memory can see how far it came.
"""

from __future__ import annotations

import mmap
import os
import secrets
from dataclasses import dataclass

import torch
from torch import Tensor

from widefield.agreement.serving import Share
from widefield.asynchrony.flat_model import FlatModel
from widefield.asynchrony.messages import WorkersGradient

LINE = 64
"""Bytes that processors pass around as one, so that what one worker writes often lies in lines of its own."""
_STAGE, _STEP, _PLACE, _IS_STRUCK = range(4)
"""Of a cell's integers."""
IDLE, BEGUN, ENDED = range(3)
"""How far a worker came with its update of the weights."""


@dataclass(frozen=True)
class SharedLayout:
    """What lies where: a mark, the flat state, and the workers' cells.  values: of a state.  statistics: its last ones."""

    values: int
    statistics: int
    dtype: torch.dtype
    workers: int

    @classmethod
    def of(cls, flat: FlatModel, workers: int) -> SharedLayout:
        return cls(flat.of_state, flat.of_push - flat.numel, flat.dtype, workers)

    @property
    def cell_nbytes(self) -> int:
        return 2 * LINE + _whole_lines(self.statistics * self.dtype.itemsize)

    @property
    def first_cell(self) -> int:
        return LINE + _whole_lines(self.values * self.dtype.itemsize)

    @property
    def nbytes(self) -> int:
        return self.first_cell + self.workers * self.cell_nbytes


def _whole_lines(nbytes: int) -> int:
    return -(-nbytes // LINE) * LINE


class Cell:
    """Of one worker, which writes all of it but `strike`."""

    def __init__(self, memory: mmap.mmap, start: int, layout: SharedLayout) -> None:
        self._ints = torch.frombuffer(memory, dtype=torch.int64, count=LINE // 8, offset=start)
        self._floats = torch.frombuffer(memory, dtype=torch.float64, count=3, offset=start + LINE)
        self._change = torch.zeros(0, dtype=layout.dtype)
        if layout.statistics:
            offset = start + 2 * LINE
            self._change = torch.frombuffer(memory, dtype=layout.dtype, count=layout.statistics, offset=offset)

    def begin(self, gradient: WorkersGradient) -> None:
        """From now on the weights may have something of the update with a gradient."""
        self._ints[_STAGE] = IDLE
        self._ints[_STEP], self._ints[_PLACE] = gradient.share
        self._floats.copy_(torch.tensor([gradient.loss_sum, gradient.count, gradient.seconds], dtype=torch.float64))
        self._change.copy_(gradient.statistics)
        self._ints[_STAGE] = BEGUN

    def end(self) -> None:
        """The weights have all of the update."""
        self._ints[_STAGE] = ENDED

    def strike(self) -> None:
        """The worker is taken for dead: an update that it has not begun is for another one to make."""
        self._ints[_IS_STRUCK] = 1

    @property
    def is_struck(self) -> bool:
        return bool(self._ints[_IS_STRUCK])

    @property
    def stage(self) -> int:
        return int(self._ints[_STAGE])

    def written(self, nbytes: int) -> WorkersGradient:
        """What the last update was made with, without the gradient.  nbytes: of the message that told of it."""
        share: Share = int(self._ints[_STEP]), int(self._ints[_PLACE])
        loss_sum, count, seconds = self._floats.tolist()
        return WorkersGradient(share, self._change[:0], self._change.clone(), frozenset(), loss_sum, count, seconds, nbytes)


class SharedMemory:
    """state: (values,) trained weights, others and statistics, as of a FlatModel.  cells: by worker.

    address: (process, file, bytes, mark), by which another rank finds it.
    """

    def __init__(self, file: int, layout: SharedLayout, address: tuple[int, int, int, int]) -> None:
        """OSError: it cannot be mapped."""
        # its pages are here before anybody writes: a fault between reading and writing a number is time for others to write it
        memory = mmap.mmap(file, layout.nbytes, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)
        self.address, self.layout = address, layout
        self.mark = torch.frombuffer(memory, dtype=torch.int64, count=1)
        self.state = torch.frombuffer(memory, dtype=layout.dtype, count=layout.values, offset=LINE)
        starts = range(layout.first_cell, layout.nbytes, layout.cell_nbytes)
        self.cells = [Cell(memory, start, layout) for start in starts]

    @property
    def statistics(self) -> Tensor:
        return self.state[self.layout.values - self.layout.statistics :]

    def close(self) -> None:
        """Let nobody else find it; of the rank that made it.  Those who have it keep it."""
        if self.address[1] >= 0:
            os.close(self.address[1])
        self.address = (self.address[0], -1, *self.address[2:])


def made_memory(layout: SharedLayout) -> SharedMemory:
    """New memory, of zeros.  ValueError: the machine has none, or does not let this process have it."""
    file = -1
    try:
        file = os.memfd_create("widefield weights")
        os.posix_fallocate(file, 0, layout.nbytes)  # all of it now: later the kernel would kill who writes
        memory = SharedMemory(file, layout, (os.getpid(), file, layout.nbytes, secrets.randbits(62)))
    except OSError as error:
        if file >= 0:
            os.close(file)
        raise ValueError(
            f"the weights and {layout.workers} workers' cells take {layout.nbytes:,} bytes of memory that ranks share, which "
            f"cannot be had ({error.strerror}); free some on this machine or raise its limit, take a smaller model, or set "
            "agreement.kind=asynchronous, whose weights go by messages"
        ) from None
    memory.mark[0] = memory.address[3]
    return memory


def opened_memory(address: tuple[int, ...], layout: SharedLayout) -> SharedMemory:
    """The memory that another rank made.  ValueError: this process cannot have it, or it is of another model."""
    process, file, nbytes, mark = address
    if nbytes != layout.nbytes:
        raise ValueError(
            f"the server shares {nbytes:,} bytes and this worker's model and {layout.workers} workers take {layout.nbytes:,}; "
            "start all ranks with the same recipe and code"
        )
    try:
        opened = os.open(f"/proc/{process}/fd/{file}", os.O_RDWR | os.O_CLOEXEC)
        try:
            memory = SharedMemory(opened, layout, (process, -1, nbytes, mark))
        finally:
            os.close(opened)
    except (OSError, ValueError) as error:  # ValueError: another process's file, which is shorter
        raise ValueError(_not_found(process, nbytes, getattr(error, "strerror", None) or str(error))) from None
    if int(memory.mark[0]) != mark:
        raise ValueError(_not_found(process, nbytes, "there is another file of that number"))
    return memory


def _not_found(process: int, nbytes: int, why: str) -> str:
    return (
        f"the {nbytes:,} bytes of weights that process {process} shares cannot be mapped here ({why}); all ranks have to be "
        "one user's, in one container, and find each other in /proc. Start them so, or set agreement.kind=asynchronous"
    )
