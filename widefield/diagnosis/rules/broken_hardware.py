"""A GPU or its link is broken."""

from __future__ import annotations

TITLE = "a GPU, or its connection, is failing"
KIND = "cause"
PATTERNS = (
    r"uncorrectable (?:NVLink |ECC )?error",
    r"NVRM: Xid \([^)]*\): (?:48|63|64|74|79|92|94|95)\b",
    r"GPU has fallen off the bus",
    r"CUDA error: (?:an illegal instruction was encountered|hardware stack error)",
    r"Unable to determine the device handle for GPU",
)
CAUSE = (
    "The driver reports memory that it cannot correct, or a card that no longer answers. Another run on this host will "
    "fail as well."
)
REMEDY = (
    "nvidia-smi -q -d ECC,ROW_REMAPPER on that host; reset the GPU or leave the host out (#SBATCH --exclude=HOST), and "
    "tell its operator."
)
WRONG = {
    "a smaller batch": "it may miss the bad memory for a while",
}
SOURCE = "NVIDIA, XID errors"

CASES: list[tuple[str, str | None]] = [
    ("RuntimeError: CUDA error: uncorrectable ECC error encountered", "ECC"),
    ("[ 811.2] NVRM: Xid (PCI:0000:3b:00): 79, pid=1, GPU has fallen off the bus.", "79"),
    ("[ 811.2] NVRM: Xid (PCI:0000:3b:00): 31, pid=1", None),
]
