"""What is measured on this machine: calls rebuilt from signatures, the file, and what a measurement changes."""

import json
import math
import os
import platform
import subprocess
import sys
import time
from dataclasses import replace
from unittest import mock

import pytest
import torch
from planner.recorded import Z, message, op, record, recorded, waited
from ranks import on_ranks
from torch import nn

import widefield as wf
from widefield.comm.link_times import cpu_share_of_sums, seconds_of_meetings
from widefield.planner.cost import step_time
from widefield.planner.cost.op_time import OpTimes, convolution_form
from widefield.planner.machines import cluster_of, timing
from widefield.planner.machines.calibrate import NO_SHEET, _fitted, gpu_host_seconds, host_seconds, local_messages
from widefield.planner.machines.calibration import (
    Calibration,
    Kernel,
    SentMessage,
    calibration_path,
    read_calibration,
    write_calibration,
)
from widefield.planner.machines.catalogue import CPU_LINK, DEVICES, cpu_core, gpu_named
from widefield.planner.machines.cnn_kernels import cnn_kernels, convolution, spec
from widefield.planner.machines.gpu_calls import gpu_function
from widefield.planner.machines.lateness import fitted
from widefield.planner.machines.own_kernels import OwnKernels
from widefield.planner.machines.signature import Call, call_of
from widefield.planner.machines.timing import measure_signatures
from widefield.planner.step_record import OpEvent

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


def small_net() -> nn.Module:
    layers = [nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(8, 8, 3, groups=2)]
    return nn.Sequential(*layers, nn.GELU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 5))


def calibration(**more) -> Calibration:
    return Calibration({"device": "here"}, cpu_core(), CPU_LINK, **more)


def test_kernels_of_a_step_run_again_from_their_signatures():
    """All that cost time: names, shapes, strides and dtypes of the results are those of the step."""
    step, _ = recorded(small_net(), torch.rand(2, 3, 16, 16).contiguous(memory_format=torch.channels_last))
    ran = {}
    for event in step.operations:
        call = call_of(event.signature, CPU)
        if call is not None:
            with torch.no_grad():
                out = call()
            first = out[0] if isinstance(out, tuple | list) else out
            if first is not None and event.bytes_written:
                assert str(first.dtype) == f"torch.{event.dtype}"
            ran[event.name] = True
    missing = {event.name for event in step.operations} - set(ran)
    assert not missing, missing


def test_channels_last_stays_so():
    spec = ("tensor", (1, 4, 5, 6), (120, 1, 24, 4), "float64")
    call = call_of(("aten.relu.default", (spec,), ()), CPU)
    assert call is not None and call.tensors[0].stride() == (120, 1, 24, 4) and call.tensors[0].dtype is torch.float64
    assert call().is_contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize("signature", ["text", ("aten.no_such_thing.default", (), ()), ("aten.relu.default",), 3, None])
def test_what_is_no_call_is_none(signature):
    assert call_of(signature, CPU) is None


def test_a_calibrations_kernels_all_run():
    for event in cnn_kernels(CPU):
        size = event.bytes_read + event.bytes_written
        if size < 2**20 and event.flops < 1e7:
            call = call_of(event.signature, CPU)
            assert call is not None, event
            call()


def test_a_gpus_peaks_stay_those_of_its_data_sheet():
    """An H200 took 55 us for a convolution of 0.6 GFLOP in float32, 11 TFLOP/s of 67, most of which was its launch."""
    kernel = Kernel(("aten.convolution.default", (), ()), "aten.convolution.default", "float32", 603979776.0, 4341760, 5.47e-05)
    sheet = gpu_named("NVIDIA H200")
    assert _fitted(sheet, [kernel]) == replace(sheet, source=f"{sheet.source}; kernels measured on this machine")
    unknown, long = replace(sheet, source=NO_SHEET), replace(kernel, seconds=1e-3, flops=2e10)
    assert _fitted(unknown, [kernel, long]).flops_per_second["float32"] == pytest.approx(2e13)
    assert _fitted(cpu_core(), [kernel]).flops_per_second["float32"] == pytest.approx(1.104e13, rel=1e-3)


def test_a_gpus_kernel_that_does_not_fill_it_is_no_neighbour():
    cluster = cluster_of("1xH200")
    small, large = (next(convolution((batch, 64, 32, 32), 64, 3, 1, "bfloat16", last=True)) for batch in (8, 16))
    times = {}
    for seconds in (None, 1.5e-5, 5.5e-4):
        rows = (
            {}
            if seconds is None
            else {small.signature: Kernel(small.signature, small.name, small.dtype, small.flops, 2**21, seconds)}
        )
        measured = replace(cluster, calibration=Calibration({}, cluster.device, CPU_LINK, rows, [], 0.0, 0.0))
        times[seconds] = OpTimes(measured).of(large)
    assert times[1.5e-5] == times[None] and times[None].source == "roofline"
    assert times[5.5e-4].source == "interpolated" and times[5.5e-4].seconds > 3e-4


def test_a_gpu_is_asked_for_large_batches_first_and_for_channels_last_in_half_precision():
    first, *others = cnn_kernels(torch.device("cuda"))
    shape, strides, dtype = first.signature[1][0][1:]
    assert (shape, strides, dtype) == ((512, 64, 32, 32), (65536, 1, 2048, 64), "bfloat16")
    batches = [event.signature[1][0][1][0] for event in others if event.name == "aten.convolution.default"]
    assert min(batches[: len(batches) // 2]) == 64 and max(batches[len(batches) // 2 :]) == 32


def test_convolutions_of_the_calibration_count_as_recorded_ones_do():
    """Flops, bytes and signatures are those that a recorded step has, so that neighbours are alike."""
    step, _ = recorded(nn.Sequential(nn.Conv2d(64, 64, 3, padding=1, bias=False), nn.Flatten(), nn.Linear(64 * 32 * 32, 2)),
                       torch.rand(8, 64, 32, 32, requires_grad=True))  # fmt: skip
    of_step = {event.name: event for event in step.operations if "convolution" in event.name}
    of_table = {(event.name, event.signature[1][:2]): event for event in cnn_kernels(CPU)}
    assert len(of_step) == 2
    for event in of_step.values():
        same = of_table[event.name, event.signature[1][:2]]
        assert (same.name, same.flops, same.bytes_read, same.bytes_written, same.signature[1]) == (
            event.name, event.flops, event.bytes_read, event.bytes_written, event.signature[1]
        )  # fmt: skip


def test_measured_kernels_are_used_as_measured():
    step, _ = recorded(small_net(), torch.rand(2, 3, 16, 16))
    own = calibration()
    before = step_time([step], cluster_of("cpu", calibration=own))
    found = measure_signatures(step, own, budget_seconds=20)
    assert found and own.kernels.keys() == {kernel.signature for kernel in found}
    after = step_time([step], cluster_of("measured", calibration=own))
    assert before.sources == {"roofline": 1.0} and after.sources["measured"] > 0.9
    assert "aten.convolution.default" in before.extrapolated and "aten.convolution.default" not in after.extrapolated
    assert measure_signatures(step, own, budget_seconds=20) == []
    spread = (after.high_seconds - after.low_seconds) / after.seconds
    assert spread < (before.high_seconds - before.low_seconds) / before.seconds


def test_a_convolution_is_as_fast_as_those_of_its_form():
    """Of two neighbours of the same size the one with its channels counts, and a lone small image is not like a batch."""
    own = calibration()
    plain = OpTimes(cluster_of("cpu", calibration=own))
    (narrow, _), (wide, _) = (list(convolution((8, channels, 32, 32), channels, 3, 1, "float32")) for channels in (16, 64))
    for one, slower in ((narrow, 4), (wide, 1)):
        size, seconds = one.bytes_read + one.bytes_written, slower * plain.of(one).seconds
        own.add([Kernel(one.signature, one.name, "float32", one.flops, size, seconds)])
    times = OpTimes(cluster_of("cpu", calibration=own))
    for channels, slower in ((16, 4), (64, 1)):
        asked, _ = convolution((4, channels, 48, 48), channels, 3, 1, "float32")
        assert times.of(asked).seconds / plain.of(asked).seconds == pytest.approx(slower, rel=0.3)
    alone, _ = convolution((1, 16, 32, 32, 32), 16, 3, 1, "float32")
    batch, _ = convolution((2, 16, 32, 32, 32), 16, 3, 1, "float32")
    assert convolution_form(alone.name, alone.signature)[-1] > convolution_form(batch.name, batch.signature)[-1] == 0


def test_giving_memory_takes_no_time():
    times = OpTimes(cluster_of("cpu", calibration=calibration()))
    assert times.of(op("aten.new_empty.default", size=2**30)).seconds == 0


def test_a_neighbour_gives_its_efficiency():
    """Half of the roofline's speed at one shape is half at another; a shape far away says nothing."""
    own = calibration()
    plain = OpTimes(cluster_of("cpu", calibration=own))
    known = op("aten.convolution.default", flops=1e9, size=Z)
    own.add([Kernel(known.signature, known.name, "float32", 1e9, Z, 2 * plain.of(known).seconds)])
    times = OpTimes(cluster_of("cpu", calibration=own))
    near, far = (op(known.name, flops=flops, size=int(Z * flops / 1e9)) for flops in (2e9, 1e13))
    assert times.of(known).source == "measured"
    assert times.of(near).source == "interpolated"
    assert times.of(near).seconds == pytest.approx(2 * plain.of(near).seconds)
    assert times.of(far).source == "roofline"
    assert times.of(op("aten.relu.default")).source == "roofline"


def test_messages_between_measured_sizes_are_interpolated():
    sent = [SentMessage("all_reduce", 2, size, seconds) for size, seconds in ((1000, 1.0), (2000, 3.0))]
    own = calibration(messages=sent)

    def seconds(size: int, ranks: int = 2) -> float:
        cluster = cluster_of(f"cpu:{ranks}", calibration=own)
        return step_time([record(waited(message("all_reduce", size, range(ranks), 1)), ranks=ranks)], cluster).seconds

    assert [seconds(size) for size in (10, 1000, 1500, 4000)] == pytest.approx([1.0, 1.0, 2.0, 6.0])
    assert seconds(1500, ranks=4) > seconds(1500)


def test_the_file_holds_what_was_measured():
    own = calibration(messages=[SentMessage("send", 2, 8, 1e-5)], host_seconds=1e-5)
    own.add(
        [
            Kernel(
                ("aten.relu.default", (("tensor", (2, 3), (3, 1), "float32"),), ()),
                "aten.relu.default",
                "float32",
                0.0,
                48,
                1e-6,
            )
        ]
    )
    path = calibration_path("cpu", 1)
    write_calibration(own, path)
    assert read_calibration(path) == own == read_calibration()
    assert cluster_of("measured:2").calibration == own
    assert list(path.parent.iterdir()) == [path]


def test_a_measurement_is_used_for_the_same_threads_and_the_same_gpu(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    one, two, gpu = (calibration(host_seconds=seconds) for seconds in (1.0, 2.0, 3.0))
    gpu.device = replace(DEVICES["l4"], memory_bytes_per_second=1e11)
    write_calibration(two, calibration_path("cpu", 2))
    write_calibration(one, calibration_path("cpu", 1))
    write_calibration(gpu, calibration_path("cuda", 0))
    assert cluster_of("cpu:2").calibration == two and cluster_of("cpu:2").notes == ()
    assert cluster_of("measured").calibration == gpu and cluster_of("measured").inside.kind == "pcie"
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert cluster_of("cpu").calibration in (one, two)
    other = cluster_of("cpu", calibration=Calibration({"threads": "1"}, cpu_core(), CPU_LINK)).advice()
    assert other == [
        "a rank has 3 threads here and was measured with 1, so times are off; measure again with OMP_NUM_THREADS=3 widefield "
        "plan --calibrate"
    ]
    assert cluster_of("8xL4").calibration == gpu and cluster_of("8xL4").device.memory_bytes_per_second == 1e11
    assert cluster_of("8xA100").calibration is None


def test_no_file_is_no_measurement_and_a_damaged_one_is_refused():
    assert read_calibration() is None
    path = calibration_path("cpu", 1)
    path.parent.mkdir(parents=True)
    for text in ("{", "[]", json.dumps({"format": 99})):
        path.write_text(text)
        with pytest.raises(ValueError, match="no measurement that this version reads .* widefield plan --calibrate, or delete"):
            cluster_of("measured")
    write_calibration(calibration(), path)
    path.write_text(json.dumps(json.loads(path.read_text()) | {"format": 1}))
    with pytest.raises(ValueError, match="its format is 1, and 2 is read.* measure again"):  # its kernels were timed otherwise
        cluster_of("measured")


@pytest.mark.parametrize(
    ("name", "row"),
    [
        ("NVIDIA A100-SXM4-80GB", "A100-80G"),
        ("NVIDIA A100-SXM4-40GB", "A100-40G"),
        ("NVIDIA H100 80GB HBM3", "H100-80G"),
        ("Tesla V100-SXM2-32GB", "V100-32G"),
        ("Tesla T4", "T4"),
        ("NVIDIA GeForce RTX 4090", "RTX4090"),
        ("NVIDIA H100 PCIe", "H100-PCIe"),
        ("NVIDIA A100-PCIE-40GB", "A100-40G"),
        ("NVIDIA L4", "L4"),
        ("NVIDIA L40S", "L40S"),
        ("NVIDIA A10G", "A10"),
        ("NVIDIA RTX A6000", "A6000"),
        ("AMD Instinct MI300X", "MI300X"),
        *((name, None) for name in ("NVIDIA L40", "NVIDIA A30", "NVIDIA A40", "NVIDIA GeForce RTX 3080", "Quadro RTX 8000")),
    ],
)
def test_a_gpu_is_known_by_its_drivers_name(name, row):
    known = gpu_named(name)
    assert (known and known.name) == row
    if name == "NVIDIA A100-SXM4-80GB":
        assert gpu_named("NVIDIA A100", 40 * 2**30).name == "A100-40G"


def test_the_hosts_share_of_operations_and_messages_counts_on_a_cpu():
    own = calibration(host_seconds=1.0, message_host_seconds=10.0, messages=[SentMessage("all_reduce", 2, 8, 100.0)])
    events = [op(size=8), *waited(message("all_reduce", 8, (0, 1), 1)), op(size=8)]
    step = step_time([record(events, ranks=2)], cluster_of("cpu:2", calibration=own))
    assert step.seconds == pytest.approx(1 + 10 + 100 + 1, rel=1e-6)
    assert step.parts["communication"] == pytest.approx(100, rel=1e-6)


def test_zero_has_a_host_share_for_each_weight_tensor():
    """A third for each gathering and for the scattering; what is split out of a gathered whole goes with it."""
    weights, rest = (spec((8,), "float32"),) * 5, (1, 2)
    names = ("fsdp.all_gather_copy_in.default", "fsdp.split_with_sizes_copy.default", "fsdp.chunk_cat.default")
    events = [OpEvent(name, "forward", "", (name, (weights, *rest), ()), 0.0, 40, 40, "float32") for name in names]
    plain, shared = (
        [OpTimes(cluster_of("cpu:2", calibration=own)).of(one).seconds for one in events]
        for own in (calibration(), calibration(zero_host_seconds=3.0))
    )
    assert [b - a for a, b in zip(plain, shared, strict=True)] == pytest.approx([5.0, 0.0, 5.0])


def test_only_the_first_operand_of_a_timed_kernel_is_in_the_caches():
    """In a step the operation before has just written it."""
    order = []

    class Watched(torch.Tensor):
        def sum(self):
            order.append(self.label)

    def watched(name):
        found = torch.ones(2).as_subclass(Watched)
        found.label = name
        return found

    first, other = watched("first"), watched("other")
    call = Call(lambda *_: order.append("call"), (first, other), {})
    with mock.patch.object(timing, "_filler", lambda: watched("filler")):
        timing.on_cpu(call, other=True)
        assert order[:6] == ["filler", "first", "call"] * 2
        order.clear()
        timing.on_cpu(Call(lambda *_: order.append("call"), ([first, other],), {}), other=True)
        assert order[:4] == ["filler", "call"] * 2, "a list's tensors are weights or gradients: none of them is new"
        order.clear()
        timing.on_cpu(call, other=False)
        assert set(order) == {"call"}


def test_the_maxima_of_a_pooling_lie_in_different_places():
    images = (("tensor", (2, 3, size, size), (3 * size * size, size * size, size, 1), kind) for size, kind in (
        (4, "float32"), (8, "float32"), (4, "int64"),
    ))  # fmt: skip
    grad, image, indices = images
    pooled = (grad, image, (2, 2), (2, 2), (0, 0), (1, 1), False, indices)
    call = call_of(("aten.max_pool2d_with_indices_backward.default", pooled, ()), CPU)
    assert call is not None and call.args[-1].unique().tolist() == list(range(0, 64, 4))
    assert (call() != 0).sum() == 2 * 3 * 16


def test_what_a_gpu_runs_for_attention_and_batch_norm_is_what_was_recorded():
    heads = [torch.rand(2, 3, 5, 4, dtype=torch.float64) for _ in range(4)]
    attention = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    out, sums = attention.default(*heads[:3])
    function, args = gpu_function("aten._scaled_dot_product_flash_attention_for_cpu.default", (*heads[:3], 0.0, False))
    torch.testing.assert_close(function(*args), out)
    back = "_scaled_dot_product_flash_attention_for_cpu_backward"
    given = (heads[3], *heads[:3], out, sums, 0.0, False)
    function, args = gpu_function(f"aten.{back}.default", given)
    with torch.no_grad():
        torch.testing.assert_close(function(*args), getattr(torch.ops.aten, back).default(*given))
    image, ones = torch.rand(2, 3, 4, 4, dtype=torch.bfloat16), torch.ones(3, dtype=torch.bfloat16)
    given = (image, image, ones.float(), None, None, ones, ones, True, 1e-5, [True, True, True])
    _, args = gpu_function("aten.native_batch_norm_backward.default", given)
    assert [one.dtype for one in args if isinstance(one, torch.Tensor)] == [torch.bfloat16] * 2 + [torch.float32] * 3
    assert gpu_function("aten.relu.default", (image,)) is None


@pytest.mark.long
def test_a_plans_own_kernels_are_timed_and_kept(tmp_path):
    """Where the machines are this one, as it was measured; of others nothing is timed."""
    known = calibration(host_seconds=1e-5)
    known.conditions |= {"kind": "cpu", "threads": "1", "host": platform.node()}
    path = calibration_path("cpu", 1)
    write_calibration(known, path)
    recipe = {"data": {"name": "digits"}, "model": {"name": "resnet", "options": {"widths": [4], "blocks": 1}}}
    with mock.patch.dict(os.environ, {"OMP_NUM_THREADS": "1"}):
        before = wf.plan(recipe, cluster="cpu:1", seconds=1, scales=False)
        assert not read_calibration(path).kernels and before.best.extrapolated
        found = wf.plan(recipe, cluster="cpu:1", seconds=1, scales=False, kernel_seconds=30)
        assert read_calibration(path).kernels and not [one for one in found.best.extrapolated if "convolution" in one]
        known.conditions["host"] = "another"
        write_calibration(known, path)
        wf.plan(recipe, cluster="cpu:1", seconds=1, scales=False, kernel_seconds=30)
        assert not read_calibration(path).kernels


def test_kernels_that_would_fill_the_machine_are_not_timed():
    known = calibration()
    known.conditions |= {"kind": "cpu", "threads": "1", "host": platform.node()}
    step, _ = recorded(small_net(), torch.rand(2, 3, 16, 16))
    most = max(event.bytes_read + event.bytes_written for event in step.operations)
    cluster = cluster_of("cpu:1", calibration=known)
    kernels = OwnKernels(replace(cluster, device=replace(cluster.device, memory_bytes=4 * most)), seconds=30)
    kernels.measure([step])
    large = [event for event in step.operations if event.bytes_read + event.bytes_written > most / 2]
    assert known.kernels and large and not {event.signature for event in large} & known.kernels.keys()
    assert kernels.left < 30 and kernels.added == len(known.kernels)


def test_what_is_measured_of_the_host_is_in_microseconds():
    assert 1e-6 <= host_seconds(CPU) < 1e-3
    assert 1e-6 <= gpu_host_seconds(CPU) < 1e-3, "a GPU's has no kernel to take off; here they are counted with it"


CALIBRATES = """
import torch
from widefield.planner.machines import calibrate
torch.set_num_threads(2)
calibrate.RANKS = (2,)
calibrate.SIZES = (2**10, 2**18)
said = []
found = calibrate.calibrate(seconds=3, say=said.append)
paths = [calibrate.calibration_path("cpu", threads) for threads in (1, 2)]
assert [line for line in said if "kept" in line] == [f"kept in {path}" for path in paths], said
assert found.conditions["threads"] == "2" and torch.get_num_threads() == 2
"""


@pytest.mark.long
def test_a_machine_is_measured_with_one_thread_and_with_its_own(tmp_path, monkeypatch):
    """In a process of its own, since it forks ranks that run a backward."""
    subprocess.run([sys.executable, "-c", CALIBRATES], check=True, timeout=100)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    one, two = (read_calibration(calibration_path("cpu", threads)) for threads in (1, 2))
    assert one is not None and two is not None and one.messages == two.messages
    assert cluster_of("measured").calibration == one
    for found in (one, two):
        device = found.device
        assert device.source == found.link.source == "measured on this machine"
        assert 1e8 < device.peak_flops("float32") < 1e14 and 1e8 < found.link.bytes_per_second < 1e12
        assert found.kernels and 0 < found.host_seconds < 1e-2 and 0 <= found.message_host_seconds < 0.1
        assert 0 <= found.unevenness < 1 and 0 <= found.waking_seconds < 1
        assert 0 < found.message_cpu_share < 2 and 0 < found.zero_host_seconds < 1e-2


def test_ranks_that_compute_longer_are_timed_as_such():
    """By what each of two ranks computes; the rest of a round is at least a message."""
    (_, first), (short, waited), (long, _) = on_ranks(2, _meetings)[0]
    assert 0.004 < short < 0.02 and 2.5 * short < long < 6 * short
    assert 0 < first < 1 and 0 < waited < 1


@pytest.mark.parametrize(("waking", "unevenness"), [(2e-4, 5e-3), (0.0, 1e-2), (3e-4, 0.0)])
def test_waits_are_told_apart_into_what_each_costs_and_what_grows(waking, unevenness):
    rows = [(computed, waking + unevenness * computed**0.5) for computed in (5e-4, 1e-3, 4e-3, 1.6e-2)]
    assert fitted(rows) == pytest.approx((waking, unevenness), abs=1e-9)


def test_neither_part_of_a_wait_is_below_nothing():
    """Waits that grow faster than the root of the time, that grow less, and ranks that come before their time."""
    waking, unevenness = fitted([(1e-3, 1e-4), (1e-2, 1e-3)])
    assert waking == 0 and 0 < unevenness < 1e-2
    waking, unevenness = fitted([(1e-3, 4e-4), (1e-2, 2e-4)])
    assert unevenness == 0 and 2e-4 < waking < 4e-4
    assert fitted([(1e-3, -1e-4), (1e-2, -1e-4)]) == (0, 0)


def test_the_share_of_a_message_in_which_its_thread_computes():
    (share, again) = on_ranks(2, _cpu_share)
    assert share == again and 0 < share < 2


def _cpu_share(mesh):
    return cpu_share_of_sums(2**20, group=mesh.group, rounds=10)


def _meetings(mesh):
    def compute():
        until = time.thread_time() + 0.005
        while time.thread_time() < until:
            pass

    return seconds_of_meetings(compute, (0, 1, 4), group=mesh.group, rounds=10)


@pytest.mark.long
def test_messages_of_local_ranks_take_time():
    rows = local_messages(2, sizes=(2**10, 2**20), timeout_seconds=60)
    assert {(row.kind, row.ranks) for row in rows} == {
        (kind, 2) for kind in ("all_reduce", "all_gather", "reduce_scatter", "send")
    }
    assert all(0 < row.seconds < 5 and math.isfinite(row.seconds) for row in rows)
    assert {row.bytes for row in rows if row.kind == "all_reduce"} == {2**10, 2**20}
    assert {row.bytes for row in rows if row.kind == "all_gather"} == {2**9, 2**19}
