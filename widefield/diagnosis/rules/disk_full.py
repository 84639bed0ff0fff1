"""A disk or a quota is full."""

from __future__ import annotations

TITLE = "the disk, or the user's quota, is full"
KIND = "cause"
PATTERNS = (
    r"^(?!.*(?:/dev/shm|shared memory)).*(?:\[Errno 28\] )?No space left on device",
    r"PytorchStreamWriter failed writing file",
    r"[Dd]isk quota exceeded",
    r"inline_container\.cc:\d+.*unexpected pos",
)
CAUSE = "A checkpoint, a log or a cache could not be written. What is half written is no checkpoint."
REMEDY = (
    "Free some space, or keep fewer (checkpoint.keep_last). The newest complete checkpoint still stands: the same command "
    "goes on from there. df -h and quota -s say which of the two it is; df -i, where files are many."
)
WRONG = {
    "saving less often": "it fills later",
}
SOURCE = "PytorchStreamWriter's error hides the disk's"

CASES: list[tuple[str, str | None]] = [
    (
        "RuntimeError: [enforce fail at inline_container.cc:664] . unexpected pos 33216448 vs 33216336\n"
        "RuntimeError: PytorchStreamWriter failed writing file data/73: file write failed",
        "unexpected pos",
    ),
    ("OSError: [Errno 28] No space left on device: 'runs/one/step_200'", "Errno 28"),
    (
        "n1:80:91 [0] misc/shmutils.cc:72 NCCL WARN Error: failed to extend /dev/shm/nccl-Zk3q1c to 33030532 "
        "bytes, error: No space left on device (28)",
        None,
    ),
]
