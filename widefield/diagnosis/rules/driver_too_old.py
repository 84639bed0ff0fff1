"""The driver is older than torch's CUDA."""

from __future__ import annotations

TITLE = "the NVIDIA driver is older than the CUDA that torch was built for"
KIND = "cause"
PATTERNS = (
    r"The NVIDIA driver on your system is too old",
    r"CUDA driver version is insufficient for CUDA runtime version",
)
CAUSE = "A build of torch for CUDA 13 wants a driver of 580 or later, one for CUDA 12 one of 525 or later."
REMEDY = (
    "Update the driver on that host, or install torch for the CUDA that nvidia-smi shows in its first line. widefield "
    "doctor compares both on all hosts."
)
WRONG = {
    "installing the CUDA toolkit": "torch brings its own; only the driver counts",
}
SOURCE = "NVIDIA, CUDA compatibility"

CASES: list[tuple[str, str | None]] = [
    (
        "RuntimeError: The NVIDIA driver on your system is too old (found version 12040). Please update your GPU driver",
        "12040",
    ),
    ("UserWarning: CUDA initialization: Found no NVIDIA driver on your system.", None),
]
