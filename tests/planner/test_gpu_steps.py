"""Is an emulated step of a GPU that of a GPU: batch norm over ranks by its kernels, the host's memory apart from its own?"""

from __future__ import annotations

import itertools

import pytest
import torch

from widefield.config import parse_config
from widefield.planner.cost import step_time
from widefield.planner.cost.gpu_kernels import is_one_pass, least_seconds
from widefield.planner.cost.op_time import OpTimes, host_bytes_per_second
from widefield.planner.emulation import emulated_step, stand_in_data
from widefield.planner.machines import cluster_of
from widefield.planner.step_record import OpEvent, StepRecord

TEXT = (
    "model: {name: unet, options: {widths: [4, 8]}}\ndata: {name: page, batch_size: 2}\n"
    "optimizer: {name: sgd, lr: 0.1}\ntask: {name: segmentation}\nschedule: {length: 1ep}\nprecision: bfloat16\n"
)
RESNET = "model.name=resnet", "model.options={widths: [4, 8], blocks: 1}", "task.name=classification"
IMAGE = (1, 64, 64)
HOST = "of the host's memory"


def record(*overrides: str, ranks: int = 1, on_cpu: bool = False, image=IMAGE) -> StepRecord:
    given = stand_in_data(image, classes=2, task="classification" if RESNET[0] in overrides else "segmentation")
    return emulated_step(parse_config(TEXT, list(overrides)), ranks=ranks, given=given, on_cpu=on_cpu)


def operations(step: StepRecord, name: str) -> list[OpEvent]:
    return [event for event in step.operations if event.name == f"aten.{name}.default"]


# ---------------------------------------------------------------------------------------------- batch norm over ranks


@pytest.mark.parametrize("plan", ["mesh.replicate=2", "mesh.space=[2,1]"])
def test_batch_norm_over_ranks_runs_a_gpu_s_kernels(plan):
    """A CPU widens images of 16 bits before it takes their gradient, and a GPU does not."""
    on_cpu, on_gpu = (record(plan, *RESNET, ranks=2, on_cpu=on_cpu) for on_cpu in (True, False))
    norms = len(operations(on_gpu, "batch_norm_update_stats"))
    assert (
        norms == len(operations(on_gpu, "batch_norm_backward_elemt")) == len(operations(on_cpu, "batch_norm_update_stats")) > 2
    )
    assert not operations(on_cpu, "batch_norm_backward_elemt")
    wide = [[one for one in operations(step, "native_batch_norm") if one.dtype == "float32"] for step in (on_cpu, on_gpu)]
    assert len(wide[0]) == norms and not wide[1]
    assert on_gpu.peak_bytes < 0.7 * on_cpu.peak_bytes
    for event in operations(on_gpu, "batch_norm_backward_elemt"):
        image = event.signature[1][1]
        assert event.dtype == image[3] == "bfloat16" and event.bytes_written == 2 * torch.Size(image[1]).numel()


def normed(name: str, *args: object) -> tuple:
    image = "tensor", (2, 64, 256, 256), (64 * 256 * 256, 1, 64 * 256, 64), "bfloat16"
    return name, (image, *args), ()


def test_a_kernel_that_is_given_its_statistics_moves_images_once():
    training, given = (normed("aten.native_batch_norm.default", None, None, None, None, on) for on in (True, False))
    sums, whole = (
        normed("aten.native_batch_norm_backward.default", *[None] * 8, (image, True, True)) for image in (False, True)
    )
    statistics = normed("aten.batch_norm_update_stats.default", None, None, 0.0)
    elements = normed("aten.batch_norm_backward_elemt.default")
    assert [is_one_pass(one[0], one) for one in (training, given, sums, whole, statistics, elements)] == [
        False, True, True, False, True, True,
    ]  # fmt: skip
    assert not is_one_pass("aten.convolution.default", ()) and not is_one_pass("native_batch_norm", None)
    size = 2 * 2 * 64 * 256 * 256
    seconds = {one[0]: least_seconds(one[0], one, size, "float32") for one in (statistics, elements, sums)}
    assert least_seconds(training[0], training, 2 * size, "bfloat16") == pytest.approx(2 * seconds[statistics[0]])
    assert least_seconds(given[0], given, 2 * size, "bfloat16") == seconds[elements[0]] < seconds[sums[0]] / 3
    times = OpTimes(cluster_of("1xH100-80G"), "bfloat16")
    bytes_alone = times.roofline("aten.relu.default", 0.0, 2 * size, "bfloat16", normed("aten.relu.default"))
    assert times.roofline(given[0], 0.0, 2 * size, "bfloat16", given) == pytest.approx(bytes_alone)
    assert times.roofline(training[0], 0.0, 2 * size, "bfloat16", training) >= 1.5 * bytes_alone


# ---------------------------------------------------------------------------------------------- the host's memory


def transferred(step: StepRecord) -> int:
    return sum(event.bytes_written for event in step.operations if event.is_transfer)


def test_what_a_stream_stores_with_the_host_takes_no_memory_of_the_gpu():
    stream = "stream.tiles=[2,2]"
    device, host, file = (record(stream, f"stream.keep={place}") for place in ("device", "host", "file"))
    assert device.peak_bytes > host.peak_bytes and device.peak_bytes > file.peak_bytes
    assert transferred(device) == 0 < min(transferred(host), transferred(file))
    assert [any(HOST in text for text in step.assumed) for step in (device, host, file)] == [False, True, False]
    for step in (device, host, file):
        assert "stored" not in step.parts and sum(step.parts.values()) == step.peak_bytes
    on_cpu = record(stream, "stream.keep=host", on_cpu=True)
    assert transferred(on_cpu) == 0 and not any(HOST in text for text in on_cpu.assumed)


def test_offloaded_activations_leave_the_gpu_and_come_back():
    kept, offloaded = record(), record("recompute.offload=true")
    assert offloaded.parts["activations"] < kept.parts["activations"] / 2
    by_phase = {
        phase: sum(event.bytes_written for event in events if event.is_transfer)
        for phase, events in itertools.groupby(offloaded.operations, key=lambda event: event.phase)
    }
    assert by_phase["forward"] == by_phase["backward"] > kept.parts["activations"] / 3
    assert by_phase.get("optimizer", 0) == transferred(kept) == 0
    assert any(HOST in text for text in offloaded.assumed)


@pytest.mark.parametrize(("kind", "rate"), [("T4", 12e9), ("A100-80G", 25e9), ("H100-80G", 50e9), ("RTX5090", 50e9)])
def test_what_travels_between_host_and_gpu_takes_the_time_of_their_link(kind, rate):
    cluster = cluster_of(f"1x{kind}")
    assert host_bytes_per_second(cluster.device) == rate
    signature = "aten.copy_.default", (("tensor", (10**9,), (1,), "uint8"),) * 2, ()
    copy, transfer = (
        OpEvent("aten.copy_.default", "forward", "", signature, 0.0, 10**9, 10**9, "uint8", is_transfer)
        for is_transfer in (False, True)
    )
    times = OpTimes(cluster)
    assert times.of(transfer).seconds == 1e9 / rate > 4 * times.of(copy).seconds
    assert times.of(transfer).source == "roofline"


def test_a_step_with_offloaded_activations_takes_longer():
    cluster = cluster_of("1xA100-80G")
    image = (1, 512, 512)
    kept, offloaded = (step_time([record(*more, image=image)], cluster).seconds for more in ([], ["recompute.offload=true"]))
    assert offloaded > 1.2 * kept


def test_offloading_on_a_cpu_is_refused_and_offloaded_shards_are_not_planned():
    with pytest.raises(ValueError, match="the device is the CPU already"):
        record("recompute.offload=true", on_cpu=True)
    sharded = "mesh.shard=2", "sharding.zero=3", "sharding.offload=true"
    with pytest.raises(ValueError, match="the device is the CPU already"):
        record(*sharded, ranks=2, on_cpu=True)
    with pytest.raises(NotImplementedError, match=r"sharding\.offload=true is not planned for GPUs yet.*widefield bench"):
        record(*sharded, ranks=2)
