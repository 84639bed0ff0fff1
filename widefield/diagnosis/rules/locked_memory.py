"""The limit of locked memory is too low for InfiniBand."""

from __future__ import annotations

TITLE = "too little memory may be locked, which InfiniBand needs"
KIND = "cause"
PATTERNS = (
    r"ibv_(?:reg_mr\w*|create_cq|create_qp) failed with error Cannot allocate memory",
    r"ibv_(?:reg_mr\w*|create_cq|create_qp) failed(?::| with) ?.*(?:Cannot allocate memory|ENOMEM)",
)
CAUSE = "A network card writes into memory that must not be moved, and ulimit -l is small: 64 KiB or 8 MiB by default."
REMEDY = (
    "ulimit -l unlimited on every host: memlock in /etc/security/limits.conf, LimitMEMLOCK=infinity for slurmd, docker "
    "run --ulimit memlock=-1. Log in anew, and see what a rank has: srun bash -c 'ulimit -l'."
)
WRONG = {
    "NCCL_IB_DISABLE=1": "it works, over TCP, at a fraction of the speed",
    "a GPU with more memory": "this memory is the host's",
}
SOURCE = "NCCL, troubleshooting, InfiniBand; nccl-tests#206"

CASES: list[tuple[str, str | None]] = [
    (
        "n1:4016:4653 [7] misc/ibvwrap.cc:190 NCCL WARN Call to ibv_create_cq failed with error Cannot allocate memory",
        "ibv_create_cq",
    ),
    ("n1:4016:4653 [7] NCCL INFO Failed to open libibverbs.so[.1]", None),
]
