"""Loader workers, or NCCL, found no shared memory left."""

from __future__ import annotations

TITLE = "shared memory (/dev/shm) is full"
KIND = "cause"
PATTERNS = (
    r"DataLoader worker \(pid[^)]*\) is killed by signal: Bus error",
    r"Unexpected bus error encountered in worker",
    r"/dev/shm/nccl-\S+.*(?:No space left|\(28\))",
    r"unable to allocate shared memory\(shm\)",
    r"unable to (?:write to file|open shared memory object|mmap \d+ bytes from file) </torch_\S+",
)
CAUSE = (
    "Workers hand their batches over in /dev/shm, and NCCL its messages inside a machine. Docker gives a container 64 "
    "MiB of it."
)
REMEDY = (
    "Give it more: docker run --shm-size=16g or --ipc=host; in Kubernetes mount an emptyDir with medium: Memory at "
    "/dev/shm. df -h /dev/shm shows what there is; widefield doctor checks it before a run."
)
WRONG = {
    "num_workers=0": "nothing is handed over then, and the GPU waits for every image to be read",
    "a smaller batch": "it comes back with more workers or larger images; the size of /dev/shm is what is wrong",
}
SOURCE = "pytorch/pytorch#5040, #108861"

CASES: list[tuple[str, str | None]] = [
    (
        "ERROR: Unexpected bus error encountered in worker. This might be caused by insufficient shared memory (shm).\n"
        "RuntimeError: DataLoader worker (pid 4242) is killed by signal: Bus error. It is possible that "
        "dataloader's workers are out of shared memory. Please try to raise your shared memory limit.",
        "Unexpected bus error",
    ),
    (
        "n1:80:91 [0] misc/shmutils.cc:72 NCCL WARN Error: failed to extend /dev/shm/nccl-Zk3q1c to 33030532 "
        "bytes, error: No space left on device (28)",
        "/dev/shm/nccl-Zk3q1c",
    ),
    ("RuntimeError: DataLoader worker (pid 4242) is killed by signal: Killed.", None),
]
