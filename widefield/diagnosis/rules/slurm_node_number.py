"""The batch script's shell, not the node's, expanded the node's number."""

from __future__ import annotations

from widefield.diagnosis.evidence import Evidence, Sighting

TITLE = "every node was told the same node number (SLURM_NODEID or SLURM_PROCID of the batch script)"
KIND = "cause"
CAUSE = (
    "$SLURM_NODEID and $SLURM_PROCID in the batch script are those of the script, which runs on the first node: 0. srun "
    "passes the finished words on, so that every torchrun is node 0."
)
REMEDY = (
    "Let each task expand it: srun bash -c 'torchrun --node-rank $SLURM_NODEID ...' in single quotes; or leave the "
    "number out (--rdzv-backend c10d needs none); or have no torchrun: srun widefield train ... reads the number of each "
    "task itself."
)
WRONG = {
    "SLURM_PROCID in place of SLURM_NODEID": (
        "in the batch script both are 0; with one task per node they are equal on the nodes too"
    ),
}
SOURCE = "pytorch/pytorch#73656; hpcfund#47"


def find(evidence: Evidence) -> Sighting | None:
    """The line of a batch script, or two agents that say they are node 0 of several."""
    command = r"(?:(?!bash -c|sh -c)(?:[^\n]|\\\n))*torchrun(?:[^\n]|\\\n)*"
    script = evidence.first(rf"^\s*srun\b{command}--node[-_]rank[= ]\"?\$\{{?SLURM_(?:NODEID|PROCID)")
    if script is not None:
        return script
    zeros = list(evidence.all(r"rdzv_configs\s*: \{[^}]*'rank': 0\b"))
    return zeros[1] if len(zeros) > 1 and evidence.has(r"min_nodes\s*: (?:[2-9]|\d\d)") else None


CASES: list[tuple[str, str | None]] = [
    (
        "#!/bin/bash\n"
        "#SBATCH --nodes=2\n"
        "srun torchrun --nnodes 2 \\\n"
        "  --node_rank $SLURM_PROCID \\\n"
        "  --nproc_per_node 4 train.py",
        "srun torchrun",
    ),
    (
        "  min_nodes        : 2\n"
        "  rdzv_configs     : {'rank': 0, 'timeout': 900}\n"
        "  min_nodes        : 2\n"
        "  rdzv_configs     : {'rank': 0, 'timeout': 900}",
        "'rank': 0",
    ),
    (
        "#SBATCH --nodes=2\nsrun bash -c 'torchrun --nnodes 2 --node_rank $SLURM_PROCID train.py'",
        None,
    ),
    (
        "  min_nodes        : 2\n"
        "  rdzv_configs     : {'rank': 0, 'timeout': 900}\n"
        "  min_nodes        : 2\n"
        "  rdzv_configs     : {'rank': 1, 'timeout': 900}",
        None,
    ),
]
