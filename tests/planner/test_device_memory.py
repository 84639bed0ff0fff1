"""Allocated and reserved on a GPU, plain on a CPU."""

import random

import pytest
from planner.recorded import Z, message, op, record

from widefield.config import parse_config
from widefield.planner.cost import device_memory
from widefield.planner.cost.device_memory import packed
from widefield.planner.emulation import emulated_step, stand_in_data
from widefield.planner.machines import cluster_of
from widefield.planner.step_record import AllocatedBlock


@pytest.fixture(autouse=True)
def nothing_measured(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


def test_on_a_cpu_memory_is_what_is_allocated():
    memory = device_memory(record([], peak=100 * Z), cluster_of("cpu"))
    assert memory.allocated == memory.reserved == memory.total == 100 * Z and memory.fits and not memory.assumed


def test_on_a_gpu_context_workspace_and_slack_come_on_top():
    events = [
        op("aten.convolution.default", size=100 * Z),
        message("all_reduce", Z, (0, 1), 1),
        message("all_reduce", Z, (0, 1), 2),
    ]
    cluster = cluster_of("2xA100-40G")
    memory = device_memory(record(events, ranks=2, peak=1000 * Z), cluster)
    assert memory.allocated == 1000 * Z and memory.workspace == 109 * Z
    assert memory.reserved == 1050 * Z + 109 * Z
    assert memory.context == cluster.device.context_bytes + 128 * Z  # one group, however many messages
    assert memory.total == memory.reserved + memory.context == cluster.device.memory_bytes - memory.free
    assert any("slack" in line for line in memory.assumed)


def test_what_does_not_fit_says_how_much_is_missing():
    memory = device_memory(record([], peak=50 * 2**30), cluster_of("A100-40G"))
    assert not memory.fits and memory.free == cluster_of("A100-40G").device.memory_bytes - memory.total < 0


@pytest.mark.parametrize(
    ("blocks", "allocated", "reserved"),
    [
        ([(0, None, 1)], 512, 2 * Z),  # rounded up, in a small segment
        ([(0, None, 600 * 1024), (1, None, 1400 * 1024)], 2000 * 1024, 22 * Z),  # 1.4 MiB is large already
        ([(0, None, 5 * Z), (1, None, 5 * Z), (2, None, 5 * Z)], 15 * Z, 20 * Z),  # one segment is cut
        ([(0, None, 11 * Z + 1)], 11 * Z + 512, 12 * Z),  # a segment of its own, to 2 MiB
        ([(0, 1, 30 * Z), (1, None, 30 * Z)], 30 * Z, 30 * Z),  # freed, then used again
        ([(0, 1, 30 * Z), (1, None, 31 * Z)], 31 * Z, 62 * Z),  # too small for what comes
        ([(0, 2, 5 * Z), (1, 2, 5 * Z), (3, None, 9 * Z)], 10 * Z, 20 * Z),  # neighbours are joined
        ([(1, 1, 30 * Z), (1, 1, 30 * Z), (2, None, 30 * Z)], 60 * Z, 60 * Z),  # freed at the event that made it
    ],
)
def test_the_caching_allocators_segments(blocks, allocated, reserved):
    assert packed(blocks, 512) == (allocated, reserved)


def test_where_the_driver_has_no_more_free_segments_go_back_to_it():
    blocks = [(0, 1, 30 * Z), (1, 2, 31 * Z), (2, None, 40 * Z)]  # each is too large for what was freed before
    assert packed(blocks, 512) == (40 * Z, 102 * Z)
    assert packed(blocks, 512, limit=60 * Z) == (40 * Z, 40 * Z)
    assert packed(blocks, 512, limit=80 * Z) == (40 * Z, 62 * Z)
    assert packed([(0, 2, 15 * Z), (0, None, 5 * Z), (1, 2, 20 * Z)], 512, limit=30 * Z)[1] == 56 * Z, "a part of one stays"


def test_blocks_of_a_record_are_put_into_segments():
    step = record([], peak=62 * Z)
    step.blocks = [AllocatedBlock(0, 1, 30 * Z), AllocatedBlock(1, None, 31 * Z)]
    memory = device_memory(step, cluster_of("A100"))
    assert memory.allocated == 31 * Z and memory.reserved - memory.workspace == 62 * Z
    assert not any("slack" in line for line in memory.assumed)


def test_no_two_blocks_overlap_and_all_that_is_freed_comes_back():
    """Random programs: reserved is never below allocated, and a second round of the same needs no more."""
    draw = random.Random(3)
    for _ in range(20):
        once = []
        for begin in range(200):
            size = int(10 ** draw.uniform(2, 8))
            once.append((begin, begin + draw.randint(1, 40), size))
        allocated, reserved = packed(once, 512)
        assert allocated <= reserved
        twice = [*once, *((begin + 300, end + 300, size) for begin, end, size in once)]
        assert packed(twice, 512)[0] == allocated
        assert packed(twice, 512)[1] <= reserved * 1.5


@pytest.mark.long
def test_an_emulated_steps_blocks_are_all_that_it_holds():
    """They add up to the peak that the emulation saw, but for what a CPU's kernel holds while it runs."""
    config = parse_config(
        """
model: {name: resnet, options: {widths: [8, 16], blocks: 1}}
data: {name: digits, batch_size: 8}
task: {name: classification}
schedule: {name: constant, length: 1ep}
""",
        [],
    )
    step = emulated_step(config, ranks=1, given=stand_in_data((3, 64, 64), classes=5))
    memory = device_memory(step, cluster_of("T4"))
    exact, _ = packed([(one.made, one.freed, one.bytes) for one in step.blocks], 1)
    assert step.peak_bytes - step.parts["transient"] <= exact <= step.peak_bytes
    assert exact <= memory.allocated < 1.05 * exact + 512 * len(step.blocks)
    assert memory.allocated <= memory.reserved - memory.workspace
