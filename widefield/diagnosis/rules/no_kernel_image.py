"""torch has no code for this GPU."""

from __future__ import annotations

TITLE = "this build of torch has no code for this GPU"
KIND = "cause"
PATTERNS = (
    r"no kernel image is available for execution on the device",
    r"with CUDA capability sm_\d+ is not compatible with the current PyTorch installation",
)
CAUSE = "Each build of torch holds code for a list of architectures; this GPU is older, or newer, than all of them."
REMEDY = "Install a build that has it: torch.cuda.get_arch_list() beside torch.cuda.get_device_capability() shows both."
WRONG = {
    "CUDA_LAUNCH_BLOCKING=1": "it shows where; the code is still missing",
}
SOURCE = "pytorch/pytorch, releases"

CASES: list[tuple[str, str | None]] = [
    ("RuntimeError: CUDA error: no kernel image is available for execution on the device", "no kernel image"),
    ("RuntimeError: CUDA error: device-side assert triggered", None),
]
