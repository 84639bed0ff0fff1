"""Is memory handed on when nobody has it any more, and is there never more of it than was wanted at one time?"""

from __future__ import annotations

import contextlib
import errno
import os
from pathlib import Path
from unittest import mock

import pytest
import torch

from widefield.streaming.storage import memory_pool as pools
from widefield.streaming.storage.memory_pool import Block, FreeList, Pool

MIB = 1 << 20


@pytest.fixture(params=["host", "file"])
def shelf(request, tmp_path) -> FreeList:
    return getattr(Pool(tmp_path), request.param)


def place_of(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def all_bytes(shelf: FreeList) -> int:
    shelf._sort_back()
    return shelf.used + sum(block.bytes for block in shelf.idle)


def test_memory_is_zeros_at_first_and_is_handed_on_with_what_is_in_it(shelf):
    _, memory = shelf.take(3 * MIB)
    assert memory.dtype == torch.uint8 and memory.numel() == 3 * MIB and not memory.any()
    memory.fill_(7)
    where = place_of(memory)
    del memory
    _, again = shelf.take(3 * MIB - 9)
    assert place_of(again) == where and again.numel() == 3 * MIB


def test_memory_that_somebody_has_a_view_of_is_nobody_elses(shelf):
    _, memory = shelf.take(MIB)
    view, where = memory.view(torch.float32)[7:9], place_of(memory)
    del memory
    _, other = shelf.take(MIB)
    assert place_of(other) != where
    del view
    _, third = shelf.take(MIB)
    assert place_of(third) == where


def test_the_smallest_that_is_large_enough_is_taken(shelf):
    taken = {size: shelf.take(size * MIB)[1] for size in (5, 3, 4, 2)}
    places = {size: place_of(memory) for size, memory in taken.items()}
    taken.clear()
    assert place_of(shelf.take(3 * MIB - 5)[1]) == places[3]


def test_memory_is_not_wasted_on_small_tensors_and_disk_may_be(tmp_path):
    for shelf, is_waste in ((Pool(tmp_path).host, True), (Pool(tmp_path).file, False)):
        shelf.take(4 * MIB)
        assert shelf.take(7 * MIB // 2)[1].numel() == 4 * MIB
        assert shelf.take(3 * MIB)[1].numel() == (3 if is_waste else 4) * MIB


def test_there_is_never_more_than_tensors_had_at_one_time(shelf):
    first = [shelf.take(size * MIB)[1] for size in (1, 2, 3)]
    first.clear()
    second = shelf.take(4 * MIB)[1]  # larger than any: one and two, which waited longest, and three go for it
    assert all_bytes(shelf) <= 6 * MIB
    third = shelf.take(5 * MIB)[1]
    assert all_bytes(shelf) == 9 * MIB and second.numel() + third.numel() == 9 * MIB and not shelf.idle


def test_files_that_wait_are_no_more_than_they_may_be(tmp_path):
    shelf = FreeList(str(tmp_path), most_idle=3 * MIB)
    taken = [shelf.take(2 * MIB)[1] for _ in range(3)]
    taken.clear()
    assert all_bytes(shelf) == 2 * MIB and len(shelf.idle) == 1
    assert 0 < Pool(tmp_path).file.most_idle < 1 << 50 and Pool(tmp_path).host.most_idle == float("inf")


def test_where_a_file_does_not_fit_those_that_wait_go_first(tmp_path):
    shelf = FreeList(str(tmp_path))
    keep = [shelf.take(3 * MIB)[1], shelf.take(MIB)[1]]
    del keep[1]
    shelf.most_used = 9 * MIB  # as once there were
    full, found = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)), []

    def reserve(file: int, size_bytes: int) -> None:
        found.append(len(shelf.idle))
        if shelf.idle:
            raise full
        os.ftruncate(file, size_bytes)

    with mock.patch.object(pools, "_reserve", reserve):
        _, memory = shelf.take(MIB + 1)
    assert found == [1, 0] and memory.numel() == MIB + 1
    with mock.patch.object(pools, "_reserve", side_effect=full), pytest.raises(OSError, match="No space left"):
        shelf.take(9 * MIB)


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="asks Linux what a process has open")
def test_a_block_has_its_file_open_once_and_closes_it_when_it_goes(tmp_path):
    block = Block(MIB, str(tmp_path))
    assert os.listdir(tmp_path) == [] and opened(tmp_path) == 1  # by the memory
    del block
    assert opened(tmp_path) == 0


def opened(folder: Path) -> int:
    """Files of a folder, named or not, that this process has open.  Other threads of it may close theirs meanwhile."""
    count = 0
    for link in list(Path("/proc/self/fd").iterdir()):
        with contextlib.suppress(FileNotFoundError):
            count += str(folder) in os.readlink(link)
    return count
