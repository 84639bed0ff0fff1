"""What is planned for kernels of a GPU, beside what ten models took on one."""

from __future__ import annotations

import gzip
import json
import math
import statistics
from pathlib import Path

import pytest
import torch
from planner.comparison import emulated
from planner.gpu_nets import GpuCase, is_held_out, names
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

from widefield.planner.cost.device_memory import device_memory
from widefield.planner.cost.gpu_kernels import SHORTEST_SECONDS, channels_reach, convolution_flops, least_seconds
from widefield.planner.cost.op_time import OpTimes
from widefield.planner.cost.step_time import step_time
from widefield.planner.machines.calibration import read_calibration
from widefield.planner.machines.cluster import Cluster
from widefield.planner.machines.cluster_text import cluster_of
from widefield.planner.machines.cnn_kernels import convolution, pointwise, spec

RESULTS = Path(__file__).parents[2] / "benchmarks/results"
H200 = cluster_of("1xH200")


def errors_of(name: str, cluster: Cluster = H200) -> tuple[float, float, float]:
    """Planned over measured, less 1: seconds of all kernels, of the step, and bytes allocated."""
    measured = json.loads((RESULTS / "gpu_ops.json").read_text())["models"][name]
    records = emulated(GpuCase(name))
    assert not isinstance(records, str), records
    times = OpTimes(cluster, "bfloat16")
    kernels = sum(times.of(event).seconds for event in records[0].operations)
    step = step_time(records, cluster, spans=False, precision="bfloat16").seconds
    memory = device_memory(records[0], cluster)
    allocated = (memory.allocated + memory.workspace) / measured["allocated bytes"]
    return kernels / measured["kernel seconds"] - 1, step / measured["seconds"] - 1, allocated - 1


@pytest.mark.long
@pytest.mark.parametrize("name", ["vgg", "unet 3-D"])
def test_kernels_of_a_gpu_take_what_is_planned(name):
    """Images with their channels last, and volumes with theirs first."""
    assert max(map(abs, errors_of(name))) < 0.2


@pytest.mark.long
@pytest.mark.sweep
def test_held_out_models_take_what_is_planned():
    kernels, steps, memory = zip(*(errors_of(name) for name in names() if is_held_out(name)), strict=True)
    assert -0.01 < min(memory) and max(memory) < 0.08, "a plan that fits does so on the GPU"
    kernels, steps = ([abs(error) for error in each] for each in (kernels, steps))
    assert statistics.median(kernels) < 0.15 and max(kernels) < 0.3
    assert statistics.median(steps) < 0.2 and max(steps) < 0.3


@pytest.fixture
def with_own_kernels(tmp_path):
    """The H200 with what was measured of the kernels of the ten models on it, on the day when their steps were."""
    (tmp_path / "kernels.json").write_bytes(gzip.decompress((RESULTS / "gpu_kernels.json.gz").read_bytes()))
    calibration = read_calibration(tmp_path / "kernels.json")
    return cluster_of("1xH200", calibration=calibration)


@pytest.mark.long
@pytest.mark.parametrize("name", ["vgg", "unet 3-D"])
def test_a_step_whose_own_kernels_were_timed_takes_what_is_planned(with_own_kernels, name):
    kernels, step, _ = errors_of(name, with_own_kernels)
    assert abs(kernels) < 0.06 and abs(step) < 0.03


@pytest.mark.long
@pytest.mark.sweep
def test_steps_of_ten_models_whose_own_kernels_were_timed_take_what_is_planned(with_own_kernels):
    steps = {name: abs(errors_of(name, with_own_kernels)[1]) for name in names()}
    held_out = [error for name, error in steps.items() if is_held_out(name)]
    for errors in (steps.values(), held_out):
        assert statistics.median(errors) < 0.05
        assert sorted(errors)[math.ceil(0.9 * len(errors)) - 1] < 0.2


def seconds_of(event) -> float:
    return least_seconds(event.name, event.signature, event.bytes_read + event.bytes_written, event.dtype)


def norm_of(events):
    return next(event for event in events if "batch_norm" in event.name)


def test_few_channels_reach_little_of_a_product():
    assert (
        channels_reach(512, 512) > 0.99 > channels_reach(64, 64) > 2 * channels_reach(64, 8) > 0.1 > channels_reach(64, 3) > 0
    )
    rates = []
    for channels in (16, 64, 256):
        forward = next(convolution((256, channels, 16, 16), channels, 3, 1, "bfloat16", last=True))
        rates.append(forward.flops / seconds_of(forward))
    assert 6 * rates[0] < rates[1] and 1.8 * rates[1] < rates[2]
    assert seconds_of(next(convolution((1, 16, 4, 4), 16, 3, 1, "bfloat16", last=True))) == SHORTEST_SECONDS


def test_batch_norm_of_channels_first_takes_a_block_of_threads_each():
    few, many = (
        next(one for one in pointwise((8, count, 64, 64), "bfloat16") if "batch_norm" in one.name) for count in (16, 128)
    )
    assert seconds_of(few) == pytest.approx(seconds_of(many)), "all channels at the same time"
    last = norm_of(pointwise((8, 16, 64, 64), "bfloat16", last=True))
    assert seconds_of(few) > 1.3 * seconds_of(last)


def test_a_biass_sum_is_counted():
    image, weight = spec((64, 64, 64, 64), "bfloat16", last=True), spec((64, 64, 3, 3), "bfloat16", last=True)
    form = ((1, 1), (1, 1), (1, 1), False, (0, 0), 1)
    with_bias, without = (
        least_seconds("aten.convolution.default", ("", (image, weight, bias, *form), ()), 2**26, "bfloat16")
        for bias in (spec((64,), "bfloat16"), None)
    )
    assert with_bias - without == pytest.approx(4 * 64**4 / 2.7e12)


@pytest.mark.parametrize("groups", [1, 32])
@pytest.mark.parametrize("stride", [1, 2])
def test_operations_of_convolutions_are_counted_by_their_groups(groups, stride):
    forward, backward = convolution((2, 32, 9, 8), 32, 3, stride, "float32", groups=groups)
    assert convolution_flops("convolution", forward.signature) == forward.flops
    assert convolution_flops("convolution_backward", backward.signature) == backward.flops == 2 * forward.flops


def test_operations_of_a_transposed_convolution_are_those_of_its_input():
    image, weight, made = (spec(shape, "float32") for shape in ((2, 8, 5, 6), (8, 4, 2, 2), (2, 4, 10, 12)))
    form = ((2, 2), (0, 0), (1, 1), True, (0, 0), 1)
    with FlopCounterMode(display=False) as counter:
        one, kernel = torch.rand(image[1], requires_grad=True), torch.rand(weight[1], requires_grad=True)
        F.conv_transpose2d(one, kernel, stride=2).sum().backward()
    forward = convolution_flops("convolution", ("", (image, weight, None, *form), ()))
    backward = convolution_flops("convolution_backward", ("", (made, image, weight, (0,), *form, (True, True, False)), ()))
    assert forward + backward == counter.get_total_flops() == 3 * forward
