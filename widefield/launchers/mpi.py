"""MPI: `mpirun -n 4 widefield train ...`.  MPI starts the ranks; their messages go through torch's own backends.

Reads what Open MPI sets (OMPI_COMM_WORLD_RANK, _SIZE, _LOCAL_RANK, _LOCAL_SIZE:
https://docs.open-mpi.org/en/main/tuning-apps/environment-var.html) or what Hydra, the starter of MPICH and Intel MPI, sets
(PMI_RANK, PMI_SIZE, MPI_LOCALRANKID, MPI_LOCALNRANKS: https://github.com/pmodels/mpich/blob/main/doc/wiki/how_to/Using_the_Hydra_Process_Manager.md).
MPI gives no address for the rendezvous: on one machine it is 127.0.0.1 and a port derived from the job's name; on several,
MASTER_ADDR and MASTER_PORT must be set (`mpirun -x MASTER_ADDR=... -x MASTER_PORT=...`).
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Mapping

from widefield.comm.world import World
from widefield.launchers import numbers

PRIORITY = 20
"""Before slurm.py, for mpirun uses srun to reach other nodes; after torchrun.py, for torchrun can run under mpirun."""

OPEN_MPI = ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE")
HYDRA = ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS")
JOB_NAMES = ("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid", "PMI_JOBID")
"""Variables with the job's name, which is the same on all ranks of one mpirun and differs between jobs."""


def detect(environment: Mapping[str, str]) -> World | None:
    """The World of MPI's variables; None where there are none, or where they are srun's own PMI_*.

    ValueError: some are missing, or the ranks are on several machines and MASTER_ADDR or MASTER_PORT is not set.
    """
    names = next((names for names in (OPEN_MPI, HYDRA) if any(name in environment for name in names)), None)
    if names is None or (names is HYDRA and _is_from_srun(environment)):
        return None
    rank, size, local_rank, local_size = numbers(environment, names, launcher="mpirun")
    address, port = _meeting_place(environment, rank, size, local_size)
    return World(rank, size, local_rank, local_size, address, port, "mpi", _job_name(environment) or "")


def _is_from_srun(environment: Mapping[str, str]) -> bool:
    """`srun --mpi=pmi2` sets PMI_RANK and PMI_SIZE; only Hydra sets the local ones."""
    return "SLURM_STEP_ID" in environment and "MPI_LOCALRANKID" not in environment


def _meeting_place(environment: Mapping[str, str], rank: int, size: int, local_size: int) -> tuple[str, int]:
    missing = [name for name in ("MASTER_ADDR", "MASTER_PORT") if not environment.get(name)]
    if missing and local_size < size:
        raise ValueError(
            f"rank {rank} of {size} is one of {local_size} on its machine, so there are several machines, and mpirun does not "
            f"say where to meet; {' and '.join(missing)} not set. Set MASTER_ADDR to rank 0's host and MASTER_PORT to a "
            "port free there: mpirun -x MASTER_ADDR=HOST -x MASTER_PORT=29500 (Hydra: -genv MASTER_ADDR HOST)"
        )
    given = "MASTER_PORT" not in missing
    port = numbers(environment, ["MASTER_PORT"], launcher="mpirun")[0] if given else _port(environment)
    return environment.get("MASTER_ADDR") or "127.0.0.1", port


def _port(environment: Mapping[str, str]) -> int:
    """A port from 10000 to 29999 by the job's name or, without one, by the parent process, the same for all ranks."""
    job = _job_name(environment) or f"parent {os.getppid()}"
    return 10000 + zlib.crc32(job.encode()) % 20000


def _job_name(environment: Mapping[str, str]) -> str | None:
    return next((environment[name] for name in JOB_NAMES if environment.get(name)), None)


_OPEN_MPI = {**dict(zip(OPEN_MPI, ("1", "2", "1", "2"), strict=True)), "PMIX_NAMESPACE": "3141592653"}
_HYDRA = {**dict(zip(HYDRA, ("1", "2", "1", "2"), strict=True)), "PMI_JOBID": "kvs_8_0"}
_MEET = {"MASTER_ADDR": "n1", "MASTER_PORT": "29500"}
_ON_SEVERAL = {"OMPI_COMM_WORLD_SIZE": "8", "OMPI_COMM_WORLD_RANK": "6"}

CASES: list[tuple[dict[str, str], World | str | None]] = [
    ({}, None),
    (_OPEN_MPI, World(1, 2, 1, 2, "127.0.0.1", 10000 + zlib.crc32(b"3141592653") % 20000, "mpi", "3141592653")),
    (_HYDRA, World(1, 2, 1, 2, "127.0.0.1", 10000 + zlib.crc32(b"kvs_8_0") % 20000, "mpi", "kvs_8_0")),
    ({**_OPEN_MPI, **_ON_SEVERAL, **_MEET}, World(6, 8, 1, 2, "n1", 29500, "mpi", "3141592653")),
    ({**_OPEN_MPI, **_MEET, "MASTER_PORT": "x"}, "MASTER_PORT='x' is not a whole number"),
    ({**_OPEN_MPI, **_ON_SEVERAL}, "rank 6 of 8 .* MASTER_ADDR and MASTER_PORT not set"),
    ({**_OPEN_MPI, **_ON_SEVERAL, "MASTER_ADDR": "n1"}, "where to meet; MASTER_PORT not set"),
    ({"PMI_RANK": "0", "PMI_SIZE": "2"}, "lacks MPI_LOCALRANKID, MPI_LOCALNRANKS"),
    ({"PMI_RANK": "0", "PMI_SIZE": "2", "SLURM_STEP_ID": "0"}, None),  # srun --mpi=pmi2
    (
        {**_HYDRA, **_MEET, "SLURM_STEP_ID": "0"},
        World(1, 2, 1, 2, "n1", 29500, "mpi", "kvs_8_0"),
    ),  # mpiexec that reached us through srun
    ({"OMPI_COMM_WORLD_SIZE": "2"}, "lacks OMPI_COMM_WORLD_RANK"),
]
