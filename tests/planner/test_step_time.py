"""The clock of a step: against arithmetic by hand, and against published measurements."""

import sys
import time
from dataclasses import replace

import pytest
from planner import recorded_resnet
from planner.recorded import Z, message, op, record, waited

from widefield.planner.cost import step_time
from widefield.planner.cost.message_time import among, within
from widefield.planner.machines import cluster_of
from widefield.planner.machines.calibration import Calibration
from widefield.planner.machines.catalogue import CPU_LINK
from widefield.planner.machines.link import Link
from widefield.planner.step_record import StepRecord, WaitEvent

MODULE = sys.modules["widefield.planner.cost.step_time"]
GB = 10**9
"""Of reads and writes: long enough that no launch counts."""


@pytest.fixture(autouse=True)
def nothing_measured(tmp_path, monkeypatch):
    """Nor does a GPU wait for the host between steps, but in the test of that: times are reckoned by hand."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(MODULE, "READING_OPERATIONS", 0)


def seconds_of(size: int, cluster) -> float:
    device = cluster.device
    return size / (device.memory_bytes_per_second * device.bandwidth_reached)


def test_operations_follow_each_other():
    cluster = cluster_of("A100")
    events = [op(size=GB), op(phase="backward", size=2 * GB), op(phase="optimizer", size=GB)]
    step = step_time([record(events)], cluster)
    launch, each = cluster.device.launch_seconds, seconds_of(GB, cluster)
    assert step.seconds == pytest.approx(launch + 4 * each)
    assert step.parts["forward"] == pytest.approx(launch + each) and step.parts["backward"] == pytest.approx(2 * each)
    assert sum(step.parts.values()) == pytest.approx(step.seconds)
    assert step.samples_per_second == pytest.approx(8 / step.seconds)
    assert step.low_seconds < step.seconds < step.high_seconds
    assert step.extrapolated == ["aten.relu.default"] and step.sources == {"roofline": 1.0}


def test_a_gpu_waits_once_a_step_for_the_host_and_a_cpu_is_the_host(monkeypatch):
    for name, operations in (("A100", 7), ("cpu:1", 0)):
        cluster = cluster_of(name)
        monkeypatch.setattr(MODULE, "READING_OPERATIONS", 0)
        without = step_time([record([op(size=GB)])], cluster)
        monkeypatch.setattr(MODULE, "READING_OPERATIONS", 7)
        step = step_time([record([op(size=GB)])], cluster)
        waits = step.seconds - without.seconds
        assert waits == pytest.approx(operations * cluster.device.launch_seconds, abs=1e-12)
        assert step.parts["optimizer"] - without.parts["optimizer"] == pytest.approx(waits, abs=1e-12)
        assert sum(step.parts.values()) == pytest.approx(step.seconds)


def test_kernels_of_other_libraries_take_time_and_questions_to_tensors_none():
    """ZeRO-3 packs and unpacks weights by `fsdp.` operations; a plan had them for nothing."""
    cluster = cluster_of("A100")
    seconds = {
        name: step_time([record([op(name, size=GB)])], cluster).seconds for name in ("fsdp.chunk_cat.default", "prim.device")
    }
    assert seconds["fsdp.chunk_cat.default"] == pytest.approx(cluster.device.launch_seconds + seconds_of(GB, cluster))
    assert seconds["prim.device"] == 0


def test_small_kernels_wait_for_their_launch():
    cluster = cluster_of("A100")
    step = step_time([record([op(size=512)] * 1000)], cluster)
    assert step.seconds == pytest.approx(1000 * cluster.device.launch_seconds, rel=0.01)


@pytest.mark.parametrize(("text", "overlaps"), [("2xA100", True), ("cpu:2", False)])
def test_a_message_is_hidden_behind_what_runs_beside_it(text, overlaps):
    """All of it on a GPU; on a CPU the half that its thread computes is not."""
    cluster = cluster_of(text)
    sent = message("all_reduce", 10**8, (0, 1), 1)
    needed = within("all_reduce", 10**8, 2, cluster.inside)
    long = op(phase="backward", size=100 * GB)
    hidden = step_time([record([sent, long, WaitEvent(1)], ranks=2)], cluster)
    alone = step_time([record([long], ranks=2)], cluster)
    shown = step_time([record([*waited(sent), long], ranks=2)], cluster)
    launches = 2 * cluster.device.launch_seconds
    assert shown.seconds - alone.seconds == pytest.approx(needed, abs=launches)
    assert hidden.seconds - alone.seconds == pytest.approx(0 if overlaps else needed / 2, abs=launches)
    assert shown.parts["communication"] == pytest.approx(needed, abs=launches)


@pytest.mark.parametrize("share", [0.0, 0.7, 1.0])
def test_messages_slow_the_computation_by_the_share_that_was_measured(share):
    cluster = cluster_of("cpu:2")
    cluster = replace(cluster, calibration=Calibration({}, cluster.device, CPU_LINK, message_cpu_share=share))
    sent, long = message("send", GB, (0, 1), 1, peer=1), op(size=100 * GB)
    hidden, alone = (step_time([record(events, ranks=2)], cluster) for events in ([sent, long, WaitEvent(1)], [long]))
    assert hidden.seconds - alone.seconds == pytest.approx(share * within("send", GB, 2, cluster.inside), rel=1e-3)


def uneven(text: str, unevenness: float, **more):
    """A cluster whose measured ranks are so uneven; operations and messages have no host's share."""
    cluster = cluster_of(text)
    return replace(cluster, calibration=Calibration({}, cluster.device, CPU_LINK, unevenness=unevenness, **more))


def with_sums(times: int, ranks: int, size: int = GB) -> list:
    return [event for n in range(times) for event in (op(size=size), *waited(message("all_reduce", 8, range(ranks), n)))]


def seconds_late(text: str, events: list, unevenness: float = 0.01) -> float:
    """How much later a step of these events ends where ranks are so uneven."""
    ranks = cluster_of(text).ranks
    seconds = [step_time([record(events, ranks=ranks)], uneven(text, each)).seconds for each in (0.0, unevenness)]
    return seconds[1] - seconds[0]


def test_the_last_of_uneven_ranks_is_the_later_the_longer_they_have_computed():
    each = seconds_of(GB, cluster_of("cpu:2")) + cluster_of("cpu:2").device.launch_seconds
    assert seconds_late("cpu:2", with_sums(1, 2)) == pytest.approx(0.01 * each**0.5)
    assert seconds_late("cpu:2", with_sums(3, 2)) == pytest.approx(3 * 0.01 * each**0.5)  # they have met in between
    twice = seconds_of(2 * GB, cluster_of("cpu:2")) + cluster_of("cpu:2").device.launch_seconds
    assert seconds_late("cpu:2", with_sums(1, 2, 2 * GB)) == pytest.approx(0.01 * twice**0.5)


def test_threads_that_slept_need_the_same_time_to_wake_however_long_and_however_many():
    def late(events: list, ranks: int = 2) -> float:
        cluster = uneven(f"cpu:{ranks}", 0.0)
        woken = replace(cluster, calibration=replace(cluster.calibration, waking_seconds=1e-4))
        before, after = (step_time([record(events, ranks=ranks)], one).seconds for one in (cluster, woken))
        return after - before

    assert late(with_sums(1, 2)) == late(with_sums(1, 2, 2 * GB)) == pytest.approx(1e-4)
    assert late(with_sums(3, 2)) == pytest.approx(3e-4) and late(with_sums(1, 8), 8) == pytest.approx(1e-4)
    assert 0 < late(with_sums(1, 2, 8)) < 0.5e-4, "they are still awake"


def test_the_last_of_many_uneven_ranks_is_later_than_of_two():
    """Means of the largest of 2, 4 and 8 normal numbers: 0.5642, 1.0294, 1.4236 (Teichroew 1956)."""
    of_two = seconds_late("cpu:2", with_sums(1, 2))
    assert seconds_late("cpu:4", with_sums(1, 4)) / of_two == pytest.approx(1.0294 / 0.5642, rel=0.03)
    assert seconds_late("cpu:8", with_sums(1, 8)) / of_two == pytest.approx(1.4236 / 0.5642, rel=0.04)


def test_uneven_ranks_that_send_to_each_other_wait_once_and_not_for_what_is_hidden():
    both = [message("receive", 8, (0, 1), 1, peer=1), message("send", 8, (0, 1), 2, peer=1)]
    shown = [op(size=GB), *both, WaitEvent(1), WaitEvent(2)]
    each = seconds_of(GB, cluster_of("cpu:2")) + cluster_of("cpu:2").device.launch_seconds
    assert seconds_late("cpu:2", shown) == pytest.approx(0.01 * each**0.5)
    hidden = [op(size=GB), *both, op(size=100 * GB), WaitEvent(1), WaitEvent(2)]
    assert seconds_late("cpu:2", hidden) == pytest.approx(0.0, abs=1e-9)
    assert seconds_late("cpu:2", [op(size=GB)]) == 0.0


def test_messages_of_a_group_queue():
    cluster = cluster_of("2xA100")
    sent = [message("all_reduce", 10**8, (0, 1), number) for number in range(4)]
    step = step_time([record([*sent, *(WaitEvent(number) for number in range(4))], ranks=2)], cluster)
    assert step.seconds == pytest.approx(4 * within("all_reduce", 10**8, 2, cluster.inside), rel=1e-2)


def test_small_messages_pass_large_ones():
    """BatchNorm's statistics have a process group of their own, so they do not wait for buckets of gradients."""
    cluster = cluster_of("2xA100")
    large, small = message("all_reduce", 10**9, (0, 1), 1), message("all_reduce", 1000, (0, 1), 2)
    step = step_time([record([large, small, WaitEvent(2)], ranks=2)], cluster)
    assert step.seconds < within("all_reduce", 10**9, 2, cluster.inside) / 10


def test_a_mark_on_one_rank_alone_does_not_part_a_message():
    """What is on the host here may be on the device there."""
    mine, other = (waited(message("broadcast", 8, (0, 1), 1, control=control)) for control in (True, False))
    step = step_time([record(mine, ranks=2), record(other, rank=1, ranks=2)], cluster_of("2xA100"))
    assert step.seconds < 1e-3


def pipeline(stages: int, batches: int) -> list[StepRecord]:
    """GPipe: every stage runs all forwards, then all backwards, which take twice as long; messages are tiny."""

    def crossing(stage: int, kind: str, peer: int, number: int) -> list:
        return waited(message(kind, 16, range(stages), number, peer=peer)) if 0 <= peer < stages else []

    records = []
    for stage in range(stages):
        events: list = []
        for phase, size, source, target in (("forward", GB, stage - 1, stage + 1), ("backward", 2 * GB, stage + 1, stage - 1)):
            for batch in range(batches):
                number = 2 * (batch + batches * (phase == "backward"))
                events += crossing(stage, "receive", source, number)
                events.append(op(phase=phase, size=size))
                events += crossing(stage, "send", target, number + 1)
        records.append(record(events, rank=stage, ranks=stages, samples=batches))
    return records


@pytest.mark.parametrize(("stages", "batches"), [(2, 4), (4, 4), (8, 8), (8, 24)])
def test_a_pipelines_bubble_comes_out_of_waiting(stages, batches):
    """(stages - 1) / (batches + stages - 1) of the step, GPipe (Huang et al. 2019)."""
    cluster = cluster_of(f"{stages}xA100")
    step = step_time(pipeline(stages, batches), cluster)
    each = 3 * seconds_of(GB, cluster)
    assert step.seconds == pytest.approx((batches + stages - 1) * each, rel=0.01)
    busy = batches / (batches + stages - 1)
    assert step.busy == pytest.approx(busy, rel=0.02)
    assert step.parts["bubble"] > 0
    if (stages, batches) == (8, 24):
        assert 0.70 < step.busy < 0.80


def test_a_recorded_step_of_one_device_gives_the_efficiency():
    cluster = cluster_of("4xA100")
    alone = record([op(size=400 * GB)], samples=8)
    halved = step_time([record([op(size=200 * GB)], ranks=4, samples=8)], cluster, alone=alone)
    assert halved.efficiency == pytest.approx(0.5, rel=1e-3)


def test_data_that_come_late_show():
    cluster = cluster_of("A100")
    events = [op(size=GB)]
    fast = step_time([record(events)], cluster, samples_per_second=1e9)
    slow = step_time([record(events)], cluster, samples_per_second=8.0)
    assert fast.parts["data"] == 0 and slow.seconds == pytest.approx(1.0)


def test_records_that_do_not_belong_together_are_refused():
    with pytest.raises(ValueError, match="no record of a step was given"):
        step_time([], cluster_of("A100"))
    with pytest.raises(ValueError, match="recorded for 4 ranks and the cluster 2xA100 has 2 devices"):
        step_time([record([], ranks=4)], cluster_of("2xA100"))
    with pytest.raises(ValueError, match="not of different ranks of one step"):
        step_time([record([], ranks=2), record([], ranks=2)], cluster_of("2xA100"))
    with pytest.raises(AssertionError, match="wait for each other: rank 0 at event 1"):
        lone = record(waited(message("all_reduce", 8, (0, 1), 1)), ranks=2)
        step_time([lone, record([], rank=1, ranks=2)], cluster_of("2xA100"))


def test_formulas_of_messages():
    """By hand, with a latency of 1 s and 1 byte per second."""
    link = Link("slow", "network", 1.0, 1.0)
    assert within("all_reduce", 1000, 4, link) == pytest.approx(2 * 3 + 2 * 0.75 * 1000)
    assert within("all_reduce", 0, 16, link) == pytest.approx(2 * 4)  # the tree
    assert within("all_gather", 250, 4, link) == pytest.approx(3 + 750)
    assert within("reduce_scatter", 1000, 4, link) == pytest.approx(3 + 750)
    assert within("broadcast", 100, 8, link) == pytest.approx(3 + 100)
    assert within("send", 100, 2, link) == within("receive", 100, 2, link) == 101
    assert within("barrier", 0, 8, link) == 6


def test_nodes_share_what_they_send():
    """Sums inside nodes first: eight ranks on a node send an eighth each."""
    cluster = cluster_of("4x8xA100")
    size = 10**9
    flat = within("all_reduce", size, 32, Link("", "network", 5e-6, cluster.network_bytes_per_second()))
    shared = among("all_reduce", size, 4, 8, cluster)
    between = within("all_reduce", size // 8, 4, Link("", "network", 5e-6, cluster.network_bytes_per_second()))
    assert between < shared < flat / 4
    one_node = among("all_reduce", size, 1, 8, cluster)
    assert one_node < shared
    assert among("all_gather", size // 32, 4, 8, cluster) < shared


def test_16384_ranks_are_arithmetic():
    cluster = cluster_of("2048x8xH100")
    ranks = tuple(range(16384))
    events: list = []
    for number in range(160):
        events += [op(phase="backward", size=10 * Z, signature=number), message("all_reduce", 25 * Z, ranks, number)]
    began = time.process_time()
    step = step_time([record([*events, *(WaitEvent(number) for number in range(160))], ranks=16384)], cluster)
    assert time.process_time() - began < 1.0
    few = step_time([record([*events, *(WaitEvent(number) for number in range(160))], ranks=16384)], cluster_of("2048x8xH100"))
    assert step.seconds == few.seconds > 160 * among("all_reduce", 25 * Z, 2048, 8, cluster) * 0.99


@pytest.mark.parametrize(("device", "precision", "measured", "off"), recorded_resnet.PUBLISHED)
def test_resnet50_is_as_fast_as_nvidia_measured(device, precision, measured, off):
    """Images per second on one GPU, without data loading's limit (DeepLearningExamples, PyTorch, resnet50v1.5, README of 2021).

    The parts of the peaks were fitted to the V100; the A100 was held out.
    """
    step = step_time([recorded_resnet.resnet50(precision)], cluster_of(device), precision=precision)
    assert step.samples_per_second == pytest.approx(measured, rel=off)
    low, high = (step.samples_per_second * step.seconds / one for one in (step.high_seconds, step.low_seconds))
    assert low < measured < high


def test_mixed_precision_is_at_least_twice_as_fast_where_tensor_cores_serve():
    full, mixed = recorded_resnet.resnet50("float32"), recorded_resnet.resnet50("float16")

    def gain(device: str) -> float:
        faster, plain = (step_time([one], cluster_of(device)).samples_per_second for one in (mixed, full))
        return faster / plain

    assert 2 < gain("V100") < 4
    assert gain("cpu") < 1.3


def test_the_timeline_covers_the_step():
    cluster = cluster_of("4xA100")
    step = step_time(pipeline(4, 4), cluster)
    assert {span.rank for span in step.spans} == {0, 1, 2, 3}
    assert max(span.start + span.seconds for span in step.spans) == pytest.approx(step.seconds)
    for rank in range(4):
        mine = sorted((s.start, s.start + s.seconds) for s in step.spans if s.rank == rank and s.kind != "message")
        assert all(before[1] <= after[0] + 1e-12 for before, after in zip(mine, mine[1:], strict=False))
    assert step_time(pipeline(4, 4), cluster, spans=False).spans == []
