"""The five precisions, and the dtypes, autocast and switches of torch that each means."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch

from widefield.plans import Plan

PRECISIONS = ("float64", "float32", "tf32", "bfloat16", "float16")


@dataclass(frozen=True)
class Arithmetic:
    """dtype: of weights and images.  low: the dtype of autocast; None: no autocast."""

    precision: str
    device: torch.device
    dtype: torch.dtype
    low: torch.dtype | None = None

    def autocast(self) -> AbstractContextManager:
        """The context to run the forward in."""
        if self.low is None:
            return nullcontext()
        return torch.autocast(self.device.type, dtype=self.low)

    def scaler(self) -> torch.amp.GradScaler:
        """A loss scaler, which is disabled except in float16."""
        return torch.amp.GradScaler(self.device.type, enabled=self.low == torch.float16)


def choose_precision(asked: str | None, device: torch.device) -> tuple[str, str | None]:
    """The precision to use and, where the program chose it, the reason."""
    if asked is not None:
        return asked, None
    if device.type == "cpu":
        return "float32", "precision=float32: the device is a CPU, where narrower types are slower"
    name = torch.cuda.get_device_name(device)
    if torch.cuda.is_bf16_supported(including_emulation=False):
        return "bfloat16", f"precision=bfloat16: {name} computes in it at full speed; precision=float32 for exact comparisons"
    return "float16", f"precision=float16: {name} has no bfloat16; gradients are scaled"


def arithmetic_of(precision: str, device: torch.device) -> Arithmetic:
    """Set torch's TF32 switches for `precision` and return its dtypes.  ValueError: tf32 without such a GPU."""
    if precision == "tf32" and (device.type != "cuda" or torch.cuda.get_device_capability(device) < (8, 0)):
        raise ValueError(
            f"precision=tf32 is a mode of NVIDIA GPUs from Ampere on and the device is {_name(device)}; set precision=float32"
        )
    if device.type == "cuda":
        # By the older of torch's two names, which sets the newer one (fp32_precision) too.  After the newer one alone, whoever
        # reads the older gets an error: torch.backends.cudnn.flags() does (torch 2.14).
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = precision == "tf32"
    low = {"bfloat16": torch.bfloat16, "float16": torch.float16}.get(precision)
    return Arithmetic(precision, device, torch.float64 if precision == "float64" else torch.float32, low)


def _name(device: torch.device) -> str:
    return "the CPU" if device.type == "cpu" else torch.cuda.get_device_name(device)


def choose_format(asked: bool | None, arithmetic: Arithmetic, *, dims: int) -> tuple[bool, str | None]:
    """Whether to use channels last and, where the program chose it, why.  asked: model.channels_last; dims: of images."""
    if asked is not None:
        return asked, None
    if dims == 3:
        return False, "model.channels_last=false: of volumes it was not measured; set it to true to try"
    if arithmetic.device.type == "cuda" and arithmetic.low is not None:
        return True, f"model.channels_last=true: convolutions of {arithmetic.precision} on tensor cores read it"
    return False, f"model.channels_last=false: {arithmetic.precision} on {arithmetic.device.type} gains nothing by it"


def check_scaling(arithmetic: Arithmetic, plan: Plan) -> None:
    """ValueError: loss scaling where ranks could disagree on whether gradients overflowed, and so on whether to step."""
    for axis, size in (("channel", plan.channel), ("stage", plan.stage)):
        if size > 1 and arithmetic.scaler().is_enabled():
            raise ValueError(
                f"precision={arithmetic.precision} scales gradients and leaves out a step where one overflows, which "
                f"each of the {size} ranks of mesh.{axis} would find out for itself; set precision=bfloat16 or float32, or "
                f"mesh.{axis}=1"
            )
