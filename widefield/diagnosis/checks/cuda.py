"""Do torch's CUDA, the driver and the GPUs fit?"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from widefield.diagnosis.finding import Facts, Finding, State, differing, who
from widefield.diagnosis.place import Surroundings

ORDER, TITLE, MESSAGES = 24, "CUDA and driver", False


def look(surroundings: Surroundings) -> dict[str, Any]:
    available = torch.cuda.is_available()
    return {
        "built": torch.version.cuda or torch.version.hip or "", "driver": driver_cuda(), "available": available,
        "has_card": Path("/proc/driver/nvidia/version").exists() or Path("/dev/kfd").exists(),
        "code_for": torch.cuda.get_arch_list() if available else [],
        "capabilities": sorted({_capability(index) for index in range(torch.cuda.device_count())}) if available else [],
    }  # fmt: skip


def driver_cuda() -> str:
    """The newest CUDA that the driver runs, as `12.8`; empty without a driver."""
    try:
        library, number = ctypes.CDLL("libcuda.so.1"), ctypes.c_int()
    except OSError:
        return ""
    if library.cuDriverGetVersion(ctypes.byref(number)) != 0:
        return ""
    return f"{number.value // 1000}.{number.value % 1000 // 10}"


def _capability(index: int) -> str:
    major, minor = torch.cuda.get_device_capability(index)
    return f"sm_{major}{minor}"


def judge(facts: Sequence[Facts]) -> Finding:
    lame = [one for one in facts if one["has_card"] and not one["built"]]
    if lame:
        return Finding("bad", f"{who(lame)}: a GPU's driver is there, and torch was built without CUDA", TORCH)
    old = [one for one in facts if one["built"] and one["driver"] and _major(one["driver"]) < _major(one["built"])]
    if old:
        figure = f"{who(old)}: torch wants CUDA {old[0]['built']} and the driver has {old[0]['driver']}"
        return Finding("bad", figure, f"update the driver, or {TORCH}")
    lost = [one for one in facts if one["has_card"] and not one["available"]]
    if lost:
        return Finding("bad", f"{who(lost)}: a driver is there, and torch finds no GPU", LOST)
    missing = [one for one in facts if not all(runs_on(kind, one["code_for"]) for kind in one["capabilities"])]
    if missing:
        figure = f"{who(missing)}: no code for {', '.join(missing[0]['capabilities'])} in {', '.join(missing[0]['code_for'])}"
        return Finding("bad", figure, TORCH)
    if told := differing(facts, "driver"):
        return Finding("warn", f"drivers differ: {told}", "bring all hosts to one driver")
    if not facts[0]["available"]:
        return Finding("not here", "no GPU; ranks compute on the CPU")
    return Finding("ok", f"torch for CUDA {facts[0]['built']}, driver for {facts[0]['driver']}")


def _major(version: str) -> int:
    return int(version.partition(".")[0])


def runs_on(capability: str, code_for: Sequence[str]) -> bool:
    """Whether a build runs on a GPU: it has code of the same major number, up to this minor one, or PTX of an older one."""
    number = int(capability.removeprefix("sm_"))
    codes = [text.rstrip("af").partition("_") for text in code_for]
    exact = any(kind == "sm" and int(of) // 10 == number // 10 and int(of) <= number for kind, _, of in codes)
    return exact or any(kind == "compute" and int(of) <= number for kind, _, of in codes) or not code_for


TORCH = "install torch built for this CUDA and these GPUs"
LOST = "nvidia-smi has to list them; CUDA_VISIBLE_DEVICES must not be empty; a container needs --gpus all"

_GPU = {"rank": 0, "host": "n1", "built": "12.8", "driver": "12.8", "available": True, "has_card": True,
        "code_for": ["sm_80", "sm_90"], "capabilities": ["sm_90"]}  # fmt: skip
_CPU = {**_GPU, "built": "", "driver": "", "available": False, "has_card": False, "code_for": [], "capabilities": []}

CASES: list[tuple[list[Facts], State, str]] = [
    ([_GPU], "ok", "torch for CUDA 12.8, driver for 12.8"),
    ([_CPU], "not here", "no GPU"),
    ([{**_CPU, "has_card": True}], "bad", "torch was built without CUDA"),
    ([_GPU, {**_GPU, "rank": 1, "host": "n2", "driver": "11.8"}], "bad", "n2: torch wants CUDA 12.8 and the driver has 11.8"),
    ([{**_GPU, "available": False}], "bad", "torch finds no GPU"),
    ([{**_GPU, "capabilities": ["sm_120"]}], "bad", "no code for sm_120 in sm_80, sm_90"),
    ([{**_GPU, "capabilities": ["sm_86"]}], "ok", "12.8"),
    ([_GPU, {**_GPU, "rank": 1, "host": "n2", "driver": "12.9"}], "warn", "drivers differ"),
]
