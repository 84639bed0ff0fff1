"""Are variables set that slow a run down, or that differ between ranks?"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from widefield.diagnosis.finding import Facts, Finding, State, who
from widefield.diagnosis.place import Surroundings

ORDER, TITLE, MESSAGES = 64, "environment", False
SLOWS = {
    "CUDA_LAUNCH_BLOCKING": "each kernel is waited for",
    "TORCH_DISTRIBUTED_DEBUG": "every collective is checked against the other ranks",
    "TORCH_NCCL_BLOCKING_WAIT": "each collective is waited for",
    "NCCL_DEBUG_SUBSYS": "NCCL writes a line for what it does",
}
HARMLESS = ("0", "", "OFF", "INFO", "off", "info", "false")
SAME = ("CUBLAS_WORKSPACE_CONFIG", "NCCL_ALGO", "NCCL_PROTO", "NCCL_IB_DISABLE", "NCCL_P2P_DISABLE", "TORCH_DISTRIBUTED_DEBUG",
        "NVIDIA_TF32_OVERRIDE", "WIDEFIELD_RANKS_PER_GPU", "PYTHONHASHSEED")  # fmt: skip
"""Variables that have to be equal on all ranks."""


def look(surroundings: Surroundings) -> dict[str, Any]:
    slows = {name: os.environ[name] for name in SLOWS if os.environ.get(name, "0") not in HARMLESS}
    return {"slows": slows, "same": {name: os.environ.get(name, "") for name in SAME}}


def judge(facts: Sequence[Facts]) -> Finding:
    for name in SAME:
        values = {one["same"][name] for one in facts}
        if len(values) > 1:
            other = [one for one in facts if one["same"][name] != facts[0]["same"][name]]
            ours, theirs = (one["same"][name] or "unset" for one in (facts[0], other[0]))
            figure = f"{name} is {ours} on rank 0 and {theirs} on {who(other)}"
            return Finding(
                "bad",
                figure,
                "set it alike on all ranks: srun --export=ALL, mpirun -x NAME, or in the script that torchrun runs",
            )
    slow: dict[str, str] = next((one["slows"] for one in facts if one["slows"]), {})
    if slow:
        told = "; ".join(f"{name}={value}: {SLOWS[name]}" for name, value in slow.items())
        return Finding("warn", told, "good for finding an error; unset it for training")
    return Finding("ok", "nothing that slows a run is set")


_ONE: dict[str, Any] = {"rank": 0, "host": "n1", "slows": {}, "same": dict.fromkeys(SAME, "")}

CASES: list[tuple[list[Facts], State, str]] = [
    ([_ONE], "ok", "nothing that slows"),
    ([{**_ONE, "slows": {"CUDA_LAUNCH_BLOCKING": "1"}}], "warn", "CUDA_LAUNCH_BLOCKING=1: each kernel is waited for"),
    ([_ONE, {**_ONE, "rank": 1, "host": "n2", "same": {**_ONE["same"], "NCCL_ALGO": "Tree"}}], "bad",
     "NCCL_ALGO is unset on rank 0 and Tree on n2"),
]  # fmt: skip
