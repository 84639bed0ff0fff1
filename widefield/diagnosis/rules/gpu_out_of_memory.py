"""A GPU's memory was full, often on one rank alone."""

from __future__ import annotations

TITLE = "a GPU is out of memory"
KIND = "cause"
PATTERNS = (
    r"(?:torch\.|torch\.cuda\.)?OutOfMemoryError: (?:CUDA|HIP) out of memory",
    r"RuntimeError: (?:CUDA|HIP) out of memory",
    r"CUDA error: out of memory",
    r"CUBLAS_STATUS_ALLOC_FAILED",
    r"failed: OutOfMemoryError",
)
CAUSE = (
    "One pass of one rank does not fit: its weights, optimizer states and above all what the forward keeps for the "
    "backward. Where one rank alone has too little, it has larger images, another process is on its GPU, or all ranks "
    "use GPU 0 as well. The others then wait for it."
)
REMEDY = (
    "Less per pass: gradient.accumulate=2 (the same step in two passes), recompute, data in tiles (mesh.space over "
    "ranks, stream.tiles one after another), or a sharded model. widefield plan RECIPE --cluster HERE says what fits. "
    "Another process: nvidia-smi."
)
WRONG = {
    "fewer accumulation steps": (
        "memory is that of one pass, whatever their number; more of them, with a smaller pass each, help"
    ),
    "torch.cuda.empty_cache()": "it gives back what no tensor uses, which torch uses anyway before it fails",
    "ZeRO on a convolutional network": "weights and optimizer states are a tenth of its memory, activations the rest",
    "a longer timeout": "the other ranks wait for one that has ended",
}
SOURCE = "composer#3016 and #3510 (one rank alone); DeepSpeed#2302 (activations)"

CASES: list[tuple[str, str | None]] = [
    (
        "[rank1]: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 1 has a total "
        "capacity of 23.64 GiB of which 1.02 GiB is free.",
        "[rank1]",
    ),
    (
        "widefield: rank 0: rank 1 failed: OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB (at "
        "net.py:12 in forward)",
        "rank 1 failed",
    ),
    ("srun: error: n1: task 1: Out Of Memory", None),
]
