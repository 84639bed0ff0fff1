"""Kubernetes: a pod of a Kubeflow TrainJob (PET_* variables) or PyTorchJob (RANK and WORLD_SIZE too).

Reads PET_NNODES, PET_NPROC_PER_NODE, PET_NODE_RANK, PET_MASTER_ADDR and PET_MASTER_PORT
(https://www.kubeflow.org/docs/components/trainer/user-guides/pytorch/).  They are torchrun's flags (PET_X_Y is --x-y), so
with several processes per pod torchrun is what must be started: `torchrun -m widefield train ... --run-dir DIR` reads
them itself.  With one process per pod a pod is a rank.  For a single pod with `auto` processes the result is None, so that
local.py starts a rank per GPU in it, which is what auto means.

`widefield launch kubernetes` writes the manifests, see _kubernetes_manifests.py; its Indexed Job sets the same variables.
"""

from __future__ import annotations

from collections.abc import Mapping

from widefield.comm.world import World
from widefield.launchers import numbers, require
from widefield.launchers._kubernetes_manifests import HELP, JOB, JOBS, write

__all__ = ["CASES", "HELP", "JOB", "JOBS", "PRIORITY", "detect", "write"]

PRIORITY = 10
"""Before mpi.py and slurm.py, which do not run inside of such a pod; after torchrun.py, which does."""

MEETING = ("PET_NODE_RANK", "PET_MASTER_ADDR", "PET_MASTER_PORT")
POD = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def detect(environment: Mapping[str, str]) -> World | None:
    """The World of a pod that runs one process; None outside of such pods, and in a single pod with `auto` processes.

    ValueError: the pod is to run several processes, the number of pods is elastic, or a variable is missing.
    """
    if not any(name.startswith("PET_") for name in environment):
        return None
    if any(environment.get(name) for name in POD[:2]):
        return _pytorch_job(environment)
    if any(name in environment for name in MEETING):
        require(environment, ("PET_NNODES", *MEETING), launcher="Kubeflow")  # never a world of one beside other pods
    pods, processes = environment.get("PET_NNODES") or "1", environment.get("PET_NPROC_PER_NODE") or "1"
    if pods == "1" and (processes in ("auto", "gpu", "cpu") or "PET_NPROC_PER_NODE" not in environment):
        return None
    if processes != "1" or not pods.isdigit():
        raise _needs_torchrun(pods, processes)
    if pods == "1":
        return World(launcher="kubernetes")
    return _one_per_pod(environment)


def _one_per_pod(environment: Mapping[str, str]) -> World:
    require(environment, MEETING, launcher="Kubeflow")
    size, rank, port = numbers(environment, ("PET_NNODES", "PET_NODE_RANK", "PET_MASTER_PORT"), launcher="Kubeflow")
    return World(rank, size, 0, 1, environment["PET_MASTER_ADDR"], port, "kubernetes")


def _pytorch_job(environment: Mapping[str, str]) -> World:
    """A PyTorchJob counts pods in RANK and WORLD_SIZE, unless it was asked for several processes per pod."""
    processes = environment.get("PET_NPROC_PER_NODE") or "1"
    if processes.isdigit() and processes != "1":
        raise _needs_torchrun(environment.get("PET_NNODES") or "1", processes)
    require(environment, POD, launcher="Kubeflow")
    rank, size, port = numbers(environment, ("RANK", "WORLD_SIZE", "MASTER_PORT"), launcher="Kubeflow")
    return World(rank, size, 0, 1, environment["MASTER_ADDR"], port, "kubernetes")


def _needs_torchrun(pods: str, processes: str) -> ValueError:
    return ValueError(
        f"Kubeflow wants PET_NPROC_PER_NODE={processes} processes in each of PET_NNODES={pods} pods and has started one, which "
        "has no RANK; make the container's command `torchrun -m widefield ...`: torchrun reads these variables and starts all"
    )


_POD_1 = {
    "PET_NNODES": "2",
    "PET_NPROC_PER_NODE": "1",
    "PET_NODE_RANK": "1",
    "PET_MASTER_ADDR": "job-node-0-0.job",
    "PET_MASTER_PORT": "29400",
}
_JOB_POD_1 = {
    "RANK": "1",
    "WORLD_SIZE": "2",
    "MASTER_ADDR": "job-master-0",
    "MASTER_PORT": "23456",
    "PET_NPROC_PER_NODE": "auto",
}

CASES: list[tuple[dict[str, str], World | str | None]] = [
    ({}, None),
    ({"KUBERNETES_SERVICE_HOST": "10.0.0.1"}, None),
    (_POD_1, World(1, 2, 0, 1, "job-node-0-0.job", 29400, "kubernetes")),
    (
        {k: v for k, v in _POD_1.items() if k != "PET_NPROC_PER_NODE"},
        World(1, 2, 0, 1, "job-node-0-0.job", 29400, "kubernetes"),
    ),
    ({**_POD_1, "PET_NPROC_PER_NODE": "4"}, "PET_NPROC_PER_NODE=4 .* PET_NNODES=2 .*torchrun -m widefield"),
    ({**_POD_1, "PET_NPROC_PER_NODE": "auto"}, "torchrun -m widefield"),
    ({**_POD_1, "PET_NPROC_PER_NODE": "gpu"}, "torchrun -m widefield"),
    ({**_POD_1, "PET_NNODES": "1:4"}, "PET_NNODES=1:4 .*torchrun -m widefield"),
    ({k: v for k, v in _POD_1.items() if k != "PET_NODE_RANK"}, "lacks PET_NODE_RANK;"),
    ({**_POD_1, "PET_MASTER_ADDR": ""}, "lacks PET_MASTER_ADDR;"),
    ({k: v for k, v in _POD_1.items() if k != "PET_NNODES"}, "lacks PET_NNODES;"),
    ({"PET_NNODES": "2"}, "lacks PET_NODE_RANK, PET_MASTER_ADDR, PET_MASTER_PORT;"),
    ({"PET_NNODES": "1", "PET_NPROC_PER_NODE": "auto"}, None),
    ({"PET_NPROC_PER_NODE": "gpu"}, None),
    ({"PET_LOG_DIR": "/logs"}, None),
    ({"PET_NNODES": "1", "PET_NPROC_PER_NODE": "1"}, World(launcher="kubernetes")),
    ({"PET_NNODES": "1", "PET_NPROC_PER_NODE": "4"}, "torchrun -m widefield"),
    (_JOB_POD_1, World(1, 2, 0, 1, "job-master-0", 23456, "kubernetes")),
    ({**_JOB_POD_1, "PET_NPROC_PER_NODE": "2"}, "torchrun -m widefield"),
    ({**_JOB_POD_1, "MASTER_ADDR": ""}, "lacks MASTER_ADDR;"),
]
