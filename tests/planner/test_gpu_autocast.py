"""Does an emulated step of a GPU have the dtypes that a GPU's autocast gives, and not those of a CPU's?"""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from widefield.config import parse_config
from widefield.planner.emulation import emulated_step, stand_in_data
from widefield.planner.emulation.gpu_autocast import AS_THEY_ARE, DTYPE, FLOAT32, GpuAutocast
from widefield.training.given import Given

CALLED = {"__pow__": "pow", "interpolate": "upsample_bilinear2d", "pad": "reflection_pad2d", "norm": "norm.Scalar"}
"""Functions by another name than the operation's."""


def test_the_casts_are_those_that_torch_has_registered_for_gpus_alone_or_for_cpus_alone():
    has = torch._C._dispatch_has_kernel_for_dispatch_key
    names = [name for name in torch._C._dispatch_get_all_op_names() if name.startswith("aten::")]
    on = {
        key: {one.removeprefix("aten::").split(".")[0] for one in names if has(one, key)}
        for key in ("AutocastCUDA", "AutocastCPU")
    }  # fmt: skip
    for name in FLOAT32 | DTYPE:
        assert CALLED.get(name, name).split(".")[0] in on["AutocastCUDA"] - on["AutocastCPU"], name
    for name in AS_THEY_ARE:
        assert CALLED.get(name, name) in on["AutocastCPU"] - on["AutocastCUDA"], name


@pytest.mark.parametrize(
    ("function", "on_cpu", "on_gpu"),
    [
        (lambda x: F.layer_norm(x, x.shape[1:]), torch.bfloat16, torch.float32),
        (lambda x: F.group_norm(x, 2), torch.bfloat16, torch.float32),
        (lambda x: F.interpolate(x, scale_factor=2, mode="bilinear"), torch.bfloat16, torch.float32),
        (lambda x: F.interpolate(x, scale_factor=2, mode="area"), torch.bfloat16, torch.bfloat16),
        (lambda x: x.softmax(1), torch.bfloat16, torch.float32),
        (lambda x: x.softmax(1, dtype=torch.bfloat16), torch.bfloat16, torch.bfloat16),
        (lambda x: x**2, torch.bfloat16, torch.float32),
        (lambda x: x.exp(), torch.bfloat16, torch.float32),
        (lambda x: F.relu(x) + x, torch.bfloat16, torch.bfloat16),
        (lambda x: F.pad(x, (1, 1, 1, 1), mode="reflect"), torch.float32, torch.bfloat16),
        (lambda x: F.conv2d(x.float(), torch.ones(1, 4, 1, 1)), torch.bfloat16, torch.bfloat16),
    ],
)
def test_a_function_gives_the_dtype_of_a_gpu(function, on_cpu, on_gpu):
    x = torch.rand(2, 4, 6, 6, dtype=torch.bfloat16)
    with torch.autocast("cpu", torch.bfloat16):
        assert function(x).dtype == on_cpu
        with GpuAutocast():
            assert function(x).dtype == on_gpu
    with GpuAutocast():
        assert x.exp().dtype == torch.bfloat16, "only where autocast is on"


@pytest.mark.long
def test_an_emulated_step_of_a_gpu_has_more_in_float32():
    net = nn.Sequential(
        nn.Conv2d(3, 4, 3, padding=1), nn.GroupNorm(2, 4), nn.Upsample(scale_factor=2, mode="bilinear"), nn.AvgPool2d(2),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 5),
    )  # fmt: skip
    text = "model: {name: resnet}\ndata: {name: digits, batch_size: 4}\nprecision: bfloat16\n"
    given = Given(model=net, data=stand_in_data((3, 32, 32), classes=5).data)

    def dtypes(on_cpu: bool) -> dict[str, str]:
        step = emulated_step(parse_config(text, []), ranks=1, given=given, on_cpu=on_cpu)
        return {event.name.split(".")[1]: event.dtype for event in step.operations if event.phase == "forward"}

    on_cpu, on_gpu = dtypes(True), dtypes(False)
    resizes = "upsample_bilinear2d"
    assert on_cpu[resizes] == on_cpu["native_group_norm"] == on_gpu["convolution"] == "bfloat16"
    assert on_gpu[resizes] == on_gpu["native_group_norm"] == "float32"
