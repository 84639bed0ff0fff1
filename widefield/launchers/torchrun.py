"""torchrun, and every launcher that sets its variables: `torchrun --nproc-per-node 8 -m widefield train ... --run-dir DIR`.

Reads RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT, as
https://docs.pytorch.org/docs/stable/elastic/run.html ("Environment Variables") lists them.  The ranks that widefield
starts itself (local.py) are torchrun's too.

`widefield launch torchrun` writes the command of each of several hosts, see _torchrun_hosts.py.
"""

from __future__ import annotations

from collections.abc import Mapping

from widefield.comm.world import World
from widefield.launchers import numbers, require
from widefield.launchers._torchrun_hosts import HELP, JOB, JOBS, write

__all__ = ["CASES", "HELP", "JOB", "JOBS", "MEETING", "OWN", "PRIORITY", "detect", "write"]

PRIORITY = 0
"""First: torchrun runs inside the others, whose variables its ranks inherit."""

OWN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
MEETING = ("MASTER_ADDR", "MASTER_PORT")


def detect(environment: Mapping[str, str]) -> World | None:
    """The World of torchrun's variables; None where none is set.  ValueError: some are missing."""
    if not any(environment.get(name) for name in OWN):
        return None
    if "LOCAL_RANK" not in environment and any(name.startswith("PET_") for name in environment):
        return None  # a PyTorchJob gives every pod RANK and WORLD_SIZE and no LOCAL_RANK: kubernetes.py reads it
    require(environment, (*OWN, *MEETING), launcher="torchrun")
    rank, size, local_rank, local_size, port = numbers(environment, (*OWN, "MASTER_PORT"), launcher="torchrun")
    job = environment.get("TORCHELASTIC_RUN_ID") or ""
    return World(rank, size, local_rank, local_size, environment["MASTER_ADDR"], port, "torchrun", job)


_RANK_5 = {
    "RANK": "5",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "4",
    "MASTER_ADDR": "node0",
    "MASTER_PORT": "29500",
}

CASES: list[tuple[dict[str, str], World | str | None]] = [
    (_RANK_5, World(5, 8, 1, 4, "node0", 29500, "torchrun")),
    ({**_RANK_5, "TORCHELASTIC_RUN_ID": "one"}, World(5, 8, 1, 4, "node0", 29500, "torchrun", "one")),
    ({}, None),
    ({"MASTER_ADDR": "node0", "MASTER_PORT": "29500"}, None),  # set for Slurm or MPI: says where, not who
    (
        {"RANK": "0", "WORLD_SIZE": "2"},
        "has RANK=0, WORLD_SIZE=2 and lacks LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR, MASTER_PORT",
    ),
    ({**_RANK_5, "MASTER_ADDR": ""}, "lacks MASTER_ADDR;"),
    ({"LOCAL_RANK": "0"}, "lacks RANK, WORLD_SIZE"),
    ({**_RANK_5, "RANK": "first"}, "RANK='first' is not a whole number"),
    ({**_RANK_5, "RANK": "-1"}, "RANK='-1' is not a whole number"),
]
