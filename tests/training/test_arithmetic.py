"""Is each precision what it says, and is one that the device lacks refused?"""

import re

import pytest
import torch

from widefield.config import RunConfig
from widefield.training.arithmetic import PRECISIONS, arithmetic_of, choose_precision

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)
LOW = {"bfloat16": torch.bfloat16, "float16": torch.float16}


def test_the_config_offers_every_precision_and_no_other():
    annotation = RunConfig.model_json_schema()["properties"]["precision"]["anyOf"][0]["enum"]
    assert tuple(annotation) == PRECISIONS


@pytest.mark.parametrize("precision", [precision for precision in PRECISIONS if precision != "tf32"])
def test_weights_and_products_have_the_types_of_their_precision(precision):
    arithmetic = arithmetic_of(precision, CPU)
    assert arithmetic.dtype == (torch.float64 if precision == "float64" else torch.float32)
    a = torch.ones(2, 2, dtype=arithmetic.dtype)
    with arithmetic.autocast():
        assert (a @ a).dtype == LOW.get(precision, arithmetic.dtype)
    assert (a @ a).dtype == arithmetic.dtype


@pytest.mark.parametrize("precision", [precision for precision in PRECISIONS if precision != "tf32"])
def test_float16_alone_scales_its_loss(precision):
    assert arithmetic_of(precision, CPU).scaler().is_enabled() == (precision == "float16")


def test_tf32_on_a_cpu_is_refused():
    told = re.escape("precision=tf32 is a mode of NVIDIA GPUs from Ampere on and the device is the CPU; set precision=float32")
    with pytest.raises(ValueError, match=told):
        arithmetic_of("tf32", CPU)


def test_tf32_on_an_older_gpu_is_refused_by_its_name(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Tesla T4")
    with pytest.raises(ValueError, match="from Ampere on and the device is Tesla T4; set precision=float32"):
        arithmetic_of("tf32", CUDA)


@pytest.mark.parametrize(("precision", "rounds"), [("tf32", True), ("float32", False), ("bfloat16", False)])
def test_a_gpu_rounds_products_to_tf32_only_where_asked(monkeypatch, precision, rounds):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    products, layers = torch.backends.cuda.matmul, torch.backends.cudnn
    before = products.allow_tf32, layers.allow_tf32
    try:
        arithmetic_of(precision, CUDA)
        assert (products.allow_tf32, layers.allow_tf32) == (rounds, rounds)
        assert [kind.fp32_precision == "tf32" for kind in (products, layers.conv, layers.rnn)] == [rounds] * 3
        with layers.flags(enabled=False):  # reads all of them, as capturing a model once did
            assert not layers.enabled
    finally:
        products.allow_tf32, layers.allow_tf32 = before


def test_a_precision_that_was_asked_for_is_taken_without_a_word():
    assert choose_precision("float64", CPU) == ("float64", None) == choose_precision("float64", CUDA)


@pytest.mark.parametrize(("bfloat16", "chosen"), [(True, "bfloat16"), (False, "float16")])
def test_the_device_chooses_and_says_why(monkeypatch, bfloat16, chosen):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "the GPU")
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: bfloat16)
    assert choose_precision(None, CPU)[0] == "float32" and "the device is a CPU" in choose_precision(None, CPU)[1]
    precision, reason = choose_precision(None, CUDA)
    assert precision == chosen and reason.startswith(f"precision={chosen}: the GPU ")
