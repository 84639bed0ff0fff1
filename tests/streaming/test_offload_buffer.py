"""Does a whole that is written and read by boxes hold what a plain tensor would, wherever it lies?"""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import subprocess
import sys
import tempfile
from pathlib import Path
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from marks import few

from widefield.geometry.box import size_of, within
from widefield.geometry.interval import Interval
from widefield.streaming.storage import offload_buffer
from widefield.streaming.storage.memory_pool import Pool
from widefield.streaming.storage.offload_buffer import PLACES, OffloadBuffer

DTYPES = [torch.bool, torch.uint8, torch.int64, torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.complex64]
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
needs_proc = pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="asks Linux what a process holds")


def box_of(*intervals: tuple[int, int]):
    return tuple(Interval(*interval) for interval in intervals)


def random_tile(size, dtype: torch.dtype, seed: int) -> torch.Tensor:
    """A tile whose memory has gaps, as the crop of a larger one has."""
    generator = torch.Generator().manual_seed(seed)
    padded = torch.rand([n + 2 for n in size], generator=generator, dtype=torch.float64) * 9 - 3
    tile = padded[tuple(slice(1, 1 + n) for n in size)]
    return tile > 0 if dtype == torch.bool else tile.abs().to(dtype) if dtype == torch.uint8 else tile.to(dtype)


@st.composite
def uses(draw):
    """A whole, the order of its dims, and what is done to it."""
    shape = tuple(draw(st.lists(st.integers(0, 6), max_size=4)))
    order = draw(st.none() | st.permutations(range(len(shape))))
    interval = [st.tuples(st.integers(0, n), st.integers(0, n)).map(sorted).map(lambda ab: Interval(*ab)) for n in shape]
    step = st.tuples(st.sampled_from(["write", "add", "read", "whole"]), st.tuples(*interval), st.integers(0, 99))
    return shape, order, draw(st.sampled_from(DTYPES)), draw(st.lists(step, max_size=8))


def compare_with_a_plain_tensor(use, place: str, device: str = "cpu", pool: Pool | None = None) -> None:
    shape, order, dtype, steps = use
    ours, plain = OffloadBuffer(shape, dtype, device, place, order, pool), torch.zeros(shape, dtype=dtype)
    everything = tuple(Interval(0, n) for n in shape)
    for name, box, seed in [*steps, ("whole", everything, 0)]:
        pixels = plain[within(everything, box)]
        if name in ("write", "add"):
            tile = random_tile(size_of(box), dtype, seed)
            getattr(ours, name)(box, tile.to(device))
            pixels.copy_(tile) if name == "write" else pixels.add_(tile)
        else:
            got = ours.whole() if name == "whole" else ours.read(box)
            assert got.device.type == device
            torch.testing.assert_close(got.cpu(), plain if name == "whole" else pixels, rtol=0, atol=0)
            if name == "whole":
                assert got.permute(ours.order).is_contiguous()
    ours.free()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("place", PLACES)
def test_a_kept_tensor_holds_what_a_plain_one_would(place, device):
    pool = Pool()  # whose blocks hold what tensors before had in them

    @given(uses(), st.sampled_from([8, 100, offload_buffer.SLAB_BYTES]), st.booleans())
    @settings(max_examples=200 if device == "cpu" else 40)
    def law(use, slab_bytes, is_pooled):
        with (
            mock.patch.object(offload_buffer, "SLAB_BYTES", slab_bytes),  # so that a few pixels are many slabs
            mock.patch.object(offload_buffer, "HOST_BYTES", 1),  # and come from the pool
        ):
            compare_with_a_plain_tensor(use, place, device, pool if is_pooled else None)

    law()


class Travelling:
    """Stands for a copy that a GPU makes aside: the tile comes where it is going when somebody waits for it."""

    def __init__(self, tile, there):
        self.tile, self.there = tile, there

    def synchronize(self):
        self.there.copy_(self.tile)


def late(tile, lane, device, order):
    there = torch.full_like(tile, True if tile.dtype == torch.bool else 77)
    return there, Travelling(tile.clone(), there)


@pytest.mark.long
@given(uses())
@settings(max_examples=150)
def test_a_tile_on_its_way_is_waited_for_before_anything_else_happens(use):
    with contextlib.ExitStack() as stack:
        for name, fake in {
            "copy_stream_to": lambda device, direction: direction,
            "on_stream": lambda copy_stream: contextlib.nullcontext(),
            "_copy_down": late,
            "to_device": lambda place, device, order: place.clone(),
            "wait_for_copy": lambda there, copy_stream: there,
        }.items():
            stack.enter_context(mock.patch.object(offload_buffer, name, fake))
        compare_with_a_plain_tensor(use, "file")


@pytest.mark.gpu
def test_a_tile_may_be_written_to_once_it_was_handed_over():
    ours, box = OffloadBuffer((64, 1 << 20), torch.float32, "cuda", "host"), box_of((0, 64), (0, 1 << 20))
    tile = torch.ones(64, 1 << 20, device="cuda")
    ours.write(box, tile)
    tile.zero_()
    assert bool((ours.whole() == 1).all())


# ---------------------------------------------------------------------------------------------- what it is


@pytest.mark.parametrize("place", PLACES)
def test_nothing_is_held_before_the_first_write_and_after_it_was_freed(place):
    ours, box = OffloadBuffer((2, 3, 4), torch.float64, "cpu", place), box_of((0, 1), (1, 3), (0, 4))
    assert ours.is_empty and ours.bytes == 192
    assert torch.equal(ours.read(box), torch.zeros(1, 2, 4, dtype=torch.float64)) and ours.is_empty
    ours.write(box_of((0, 0), (0, 3), (0, 4)), torch.ones(0, 3, 4, dtype=torch.float64))
    assert ours.is_empty
    ours.add(box, torch.ones(1, 2, 4, dtype=torch.float64))
    assert not ours.is_empty
    ours.free()
    ours.free()
    assert ours.is_empty and ours.bytes == 192
    for use in (lambda: ours.read(box), lambda: ours.write(box, torch.ones(1, 2, 4, dtype=torch.float64)), ours.whole):
        with pytest.raises(AssertionError, match=r"\(2, 3, 4\) px is used after it was freed"):
            use()


def test_a_tensor_that_exists_is_kept_without_a_copy():
    image = torch.randn(1, 2, 5, 6).to(memory_format=torch.channels_last).requires_grad_()
    ours = OffloadBuffer.of(image)
    assert (ours.shape, ours.dtype, ours.place, ours.is_empty) == (image.shape, image.dtype, "device", False)
    assert ours.whole().data_ptr() == image.data_ptr() and ours.order == (0, 2, 3, 1)
    ours.write(box_of((0, 1), (0, 2), (2, 4), (0, 6)), torch.zeros(1, 2, 2, 6))
    assert float(image.detach()[:, :, 2:4].abs().sum()) == 0 and image.is_leaf


@pytest.mark.parametrize("place", PLACES)
def test_what_is_kept_has_no_history(place):
    ours, box = OffloadBuffer((2, 3), torch.float32, "cpu", place), box_of((0, 2), (0, 3))
    weight = torch.ones(2, 3, requires_grad=True)
    ours.write(box, weight * 2)
    ours.add(box, weight * 3)
    assert not ours.read(box).requires_grad and not ours.whole().requires_grad


def test_a_read_is_a_view_on_the_device_and_a_tensor_of_its_own_from_a_file():
    box = box_of((0, 2), (0, 3))
    for place, is_view in [("device", True), ("host", True), ("file", False)]:
        ours = OffloadBuffer((2, 3), torch.float32, "cpu", place)
        ours.write(box, torch.ones(2, 3))
        before = ours.read(box)
        ours.write(box, torch.zeros(2, 3))
        assert bool((before == 0).all()) == is_view


# ---------------------------------------------------------------------------------------------- files


def mapped(folder) -> list[str]:
    """What this process has in memory of files in a folder, named or not."""
    return [line for line in Path("/proc/self/maps").read_text().splitlines() if str(folder) in line]


@needs_proc
def test_a_file_has_no_name_and_goes_when_freed(tmp_path):
    ours = OffloadBuffer((3, 4), torch.float32, "cpu", "file", pool=Pool(tmp_path))
    assert mapped(tmp_path) == []
    ours.write(box_of((0, 3), (0, 4)), torch.ones(3, 4))
    assert os.listdir(tmp_path) == [] and len(mapped(tmp_path)) == 1
    ours.free()
    assert mapped(tmp_path) == []


def test_without_a_folder_a_file_lies_where_the_system_has_such_files(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "nowhere"))
    with pytest.raises(OSError, match="nowhere"):
        OffloadBuffer((3,), torch.float32, "cpu", "file").write(box_of((0, 3)), torch.ones(3))


GROWTH = """
import sys, torch
from widefield.streaming.storage.offload_buffer import OffloadBuffer
from widefield.geometry.interval import Interval
torch.set_num_threads(1)

def peak_kb():
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmHWM"))

def use(side, part):
    kept = OffloadBuffer((1, 16, side, side), torch.float32, "cpu", sys.argv[1])
    for name in ("write", "add", "read"):
        for y in range(0, side, part):
            for x in range(0, side, part):
                box = (Interval(0, 1), Interval(0, 16), Interval(y, y + part), Interval(x, x + part))
                kept.read(box) if name == "read" else getattr(kept, name)(box, torch.ones(1, 16, part, part))
    assert float(kept.read(box).sum()) == 2 * 16 * part**2

use(256, 128)
before = peak_kb()
use(1024, 128)
print(peak_kb() - before)
"""


@pytest.mark.long
@needs_proc
@pytest.mark.parametrize(("place", "least_mb", "most_mb"), few([("host", 56, 90), ("file", 0, 32)], ("file", 0, 32)))
def test_a_file_of_64_mb_makes_the_process_hold_less_than_half_of_it(place, least_mb, most_mb):
    """The host's growth shows that the measure sees what is held."""
    done = subprocess.run([sys.executable, "-c", GROWTH, place], capture_output=True, text=True, check=True)
    assert least_mb * 1024 <= int(done.stdout) <= most_mb * 1024


def test_slabs_cover_a_box_once_and_reach_no_further_than_they_may():
    box, strides = box_of((0, 2), (1, 6), (2, 9), (0, 8)), (4000, 10, 100, 1)
    seen = torch.zeros(2, 8, 10, 8, dtype=torch.int64)
    slabs = list(offload_buffer._slabs(box, strides, 120))
    for slab in slabs:
        assert offload_buffer._reach(size_of(slab), strides) <= 120
        seen[within(box_of((0, 2), (0, 8), (0, 10), (0, 8)), slab)] += 1
    assert seen.sum() == seen[:, 1:6, 2:9].sum() == 2 * 5 * 7 * 8 and seen.max() == 1 and len(slabs) < 2 * 5 * 7


def test_an_image_lies_in_a_file_row_by_row_and_any_other_order_as_it_is():
    orders = [(0, 1, 2, 3), (0, 1, 2, 3, 4), (0, 2, 3, 1), (0, 1, 2), ()]
    assert [offload_buffer._file_order(order) for order in orders] == [
        (0, 2, 1, 3),
        (0, 2, 1, 3, 4),
        (0, 2, 3, 1),
        (0, 1, 2),
        (),
    ]


# ---------------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize("method", ["write", "add", "read"])
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize(
    "box", [box_of((0, 2), (2, 4)), box_of((-1, 1), (0, 2)), box_of((0, 1)), box_of((0, 1), (0, 1), (0, 1))]
)
def test_a_box_outside_of_the_whole_is_refused(box, place, method):
    ours = OffloadBuffer((2, 3), torch.float32, "cpu", place)
    tile = () if method == "read" else (torch.ones(size_of(box)),)
    with pytest.raises(AssertionError, match=r"\[.*\] is not inside of a whole of \(2, 3\) px"):
        getattr(ours, method)(box, *tile)


@pytest.mark.parametrize("size", [(1, 3), (2, 1), (2, 3, 1), (6,)])
def test_a_tile_of_another_size_than_its_box_is_refused(size):
    ours = OffloadBuffer((4, 3), torch.float32, "cpu")
    for put in (ours.write, ours.add):
        with pytest.raises(AssertionError, match=r"px for the box \[1:3, 0:3\] of \(2, 3\) px"):
            put(box_of((1, 3), (0, 3)), torch.ones(size))
    with pytest.raises(AssertionError, match=r"px for the box \[1:1, 0:3\] of \(0, 3\) px"):
        ours.write(box_of((1, 1), (0, 3)), torch.ones(size))


def test_a_tile_of_another_dtype_is_refused():
    ours = OffloadBuffer((2,), torch.float32, "cpu")
    for put in (ours.write, ours.add):
        with pytest.raises(AssertionError, match="a tile of torch.float64 for a whole of torch.float32"):
            put(box_of((0, 2)), torch.ones(2, dtype=torch.float64))


@pytest.mark.parametrize(("place", "hint"), [("hots", "; did you mean 'host'?"), ("moon", ". There"), (None, ". There")])
def test_an_unknown_place_is_refused_with_the_nearest(place, hint):
    with pytest.raises(ValueError, match="device, host, file") as caught:
        OffloadBuffer((2,), torch.float32, "cpu", place)
    assert hint in str(caught.value) and repr(place) in str(caught.value)


@contextlib.contextmanager
def small_files(limit_bytes: int):
    """No file may grow past this meanwhile, so that it finds no room, as on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def refused_words(folder) -> str:
    ours = OffloadBuffer((1, 1, 1000, 1000), torch.float32, "cpu", "file", pool=Pool(folder))
    with pytest.raises(OSError) as caught:
        ours.write(box_of((0, 1), (0, 1), (0, 1), (0, 1)), torch.ones(1, 1, 1, 1))
    assert ours.is_empty and type(caught.value) is OSError
    return str(caught.value)


def test_a_file_that_does_not_fit_says_how_large_where_and_what_to_do(tmp_path):
    with small_files(3_999_999):
        words = refused_words(tmp_path)
    assert f"no file of 4,000,000 bytes, to store a tensor, can be made in {tmp_path}: {os.strerror(errno.EFBIG)}" in words
    assert "make room there, name a folder on a disk that has it, or keep tensors on the host" in words
    assert os.listdir(tmp_path) == []


def test_a_full_disk_and_a_folder_that_is_not_there_are_said_alike(tmp_path):
    with mock.patch("os.posix_fallocate", side_effect=OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))):
        assert f"4,000,000 bytes, to store a tensor, can be made in {tmp_path}: No space left" in refused_words(tmp_path)
    assert f"can be made in {tmp_path / 'none'}: No such file or directory" in refused_words(tmp_path / "none")


def test_a_file_system_that_cannot_reserve_is_asked_for_its_room(tmp_path):
    cannot = mock.patch("os.posix_fallocate", side_effect=OSError(errno.EOPNOTSUPP, "no such thing"))
    full = mock.Mock(f_bavail=999, f_frsize=4000)
    with cannot, mock.patch("os.fstatvfs", return_value=full):
        assert "4,000,000 bytes" in (words := refused_words(tmp_path)) and "No space left" in words
    full.f_bavail = 1000
    with cannot, mock.patch("os.fstatvfs", return_value=full):
        ours = OffloadBuffer((1, 1, 1000, 1000), torch.float32, "cpu", "file", pool=Pool(tmp_path))
        ours.add(box_of((0, 1), (0, 1), (999, 1000), (0, 1000)), torch.ones(1, 1, 1, 1000))
    assert float(ours.whole().sum()) == 1000
