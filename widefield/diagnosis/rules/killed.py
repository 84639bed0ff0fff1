"""A process was killed with signal 9."""

from __future__ import annotations

from widefield.diagnosis.evidence import Evidence, Sighting

TITLE = "a process was killed (signal 9), most likely because the machine's memory was full"
KIND = "cause"
PATTERNS = (
    r"exitcode\s*: ?-9\b",
    r"Signal 9 \(SIGKILL\) received",
    r"is killed by signal: Killed",
    r"was killed by SIGKILL",
    r"terminated with signal SIGKILL",
    r"(?:^|\s)\d+ Killed\s+\S*(?:python|torchrun|widefield)",
    r"[Ee]xit(?:ed with exit)? code:? 137\b",
    r"^Killed$",
)
CAUSE = (
    "Nobody but the kernel, or an operator, sends signal 9, and a process cannot report it. Memory of the host is meant, "
    "not of the GPU: loader workers count too, each with its own copy of what the dataset holds."
)
REMEDY = (
    "See dmesg -T | grep -i oom, or the job's memory (sacct -j JOB --format=MaxRSS,ReqMem). Ask for more (--mem), start "
    "fewer workers, or hold the dataset in arrays or files in place of Python lists, which every worker copies as it "
    "reads them."
)
WRONG = {
    "a longer timeout": "the killed rank never comes",
    "fewer accumulation steps": "they change no memory of the host",
    "torch.cuda.empty_cache()": "it frees memory of the GPU, and that was not what was missing",
}
SOURCE = "MONAI model-zoo#395, nnU-Net#2659, the memory of workers: pytorch/pytorch#13246"

WITH_RANK = r"rank\s*: (?P<rank>\d+) \(local_rank: \d+\)\s+(?P<seen>exitcode\s*: ?-9\b)"
"""In torchrun's summary, which names the rank; what it prints before names the one on the machine."""


def find(evidence: Evidence) -> Sighting | None:
    """The place that names the rank, if there is one."""
    return evidence.first(WITH_RANK) or evidence.first(*PATTERNS)


CASES: list[tuple[str, str | None]] = [
    (
        "torch.distributed.elastic.multiprocessing.errors.ChildFailedError:\n"
        "Root Cause (first observed failure):\n"
        "[0]:\n"
        "  rank      : 1 (local_rank: 1)\n"
        "  exitcode  : -9 (pid: 36071)\n"
        "  error_file: <N/A>\n"
        "  traceback : Signal 9 (SIGKILL) received by PID 36071",
        "exitcode  : -9",
    ),
    ("RuntimeError: DataLoader worker (pid 4242) is killed by signal: Killed.", "Killed"),
    ("widefield: rank 1 was killed by SIGKILL; the machine may be out of memory", "rank 1 was killed"),
    (
        "  exitcode  : -15 (pid: 36070)\n  traceback : Signal 15 (SIGTERM) received by PID 36070",
        None,
    ),
]
