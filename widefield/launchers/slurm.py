"""Slurm: `srun widefield train ...`, in a batch script or under salloc.

Reads, as https://slurm.schedmd.com/srun.html ("OUTPUT ENVIRONMENT VARIABLES") lists them: SLURM_PROCID, SLURM_STEP_NUM_TASKS
or SLURM_NTASKS, SLURM_LOCALID, SLURM_NODEID, SLURM_STEP_TASKS_PER_NODE or SLURM_TASKS_PER_NODE, SLURM_STEP_NODELIST or
SLURM_JOB_NODELIST, SLURM_JOB_ID and SLURM_STEP_ID.  MASTER_ADDR and MASTER_PORT win where they are set.

Ranks meet on the step's first node, where rank 0 runs.  SLURM_LAUNCH_NODE_IPADDR is not that: it is where srun was typed,
often a login node.  Host lists are read here, because scontrol is missing in most containers.

One task alone gets None: it is how a GPU node is used by hand (`srun --pty bash`), and local ranks may be started there.

`widefield launch slurm` writes the batch script, see _slurm_script.py.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from widefield.comm.world import World
from widefield.launchers import numbers, require
from widefield.launchers._slurm_script import HELP, JOB, JOBS, write

__all__ = ["CASES", "HELP", "JOB", "JOBS", "PRIORITY", "detect", "hosts", "tasks_per_node", "write"]

PRIORITY = 30
"""After mpi.py: mpirun starts its ranks through srun, so that they have Slurm's variables too, with other values."""

FIRST_SPECIAL_STEP = 0xFFFF_FFF0
"""Step numbers from here on are Slurm's own: the batch script, the interactive step of salloc (slurm.h)."""


def detect(environment: Mapping[str, str]) -> World | None:
    """The World of this task of a step; None outside of Slurm and for a single task.

    ValueError in a batch script or under salloc without srun where the job has several tasks or nodes.
    """
    if "SLURM_JOB_ID" not in environment:
        return None
    if not _in_step(environment):
        _refuse_lone_process_of_many(environment)
        return None
    tasks = "SLURM_STEP_NUM_TASKS" if "SLURM_STEP_NUM_TASKS" in environment else "SLURM_NTASKS"
    rank, size, local_rank, node = numbers(
        environment, ("SLURM_PROCID", tasks, "SLURM_LOCALID", "SLURM_NODEID"), launcher="srun"
    )
    if size == 1:
        return None
    local_sizes = tasks_per_node(_first_set(environment, "SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE"))
    if sum(local_sizes) != size or node >= len(local_sizes):
        raise ValueError(
            f"Slurm's variables contradict each other: {tasks}={size}, node number {node}, tasks per node {local_sizes}; "
            "start with one plain srun, or with torchrun"
        )
    address = environment.get("MASTER_ADDR") or _meeting_host(environment, one_node=len(local_sizes) == 1)
    return World(rank, size, local_rank, local_sizes[node], address, _port(environment), "slurm", _job(environment))


def _job(environment: Mapping[str, str]) -> str:
    """As `123.0`, or `123.0 restart 2` where the job was queued again."""
    restarts = environment.get("SLURM_RESTART_COUNT") or "0"
    again = f" restart {restarts}" if restarts != "0" else ""
    return f"{environment['SLURM_JOB_ID']}.{environment['SLURM_STEP_ID']}{again}"


def _in_step(environment: Mapping[str, str]) -> bool:
    return "SLURM_STEP_ID" in environment and numbers(environment, ["SLURM_STEP_ID"], launcher="srun")[0] < FIRST_SPECIAL_STEP


def _refuse_lone_process_of_many(environment: Mapping[str, str]) -> None:
    """ValueError: the job has several tasks or nodes; outside of srun the other ranks would never be started."""
    tasks, nodes = (int(environment.get(name) or 1) for name in ("SLURM_NTASKS", "SLURM_NNODES"))
    if tasks > 1 or nodes > 1:
        raise ValueError(
            f"Slurm job {environment['SLURM_JOB_ID']} has {tasks} tasks on {nodes} nodes and this process is none of them "
            "(a batch script, or a shell under salloc); start with srun: srun widefield ..., or ask for one task on one node"
        )


def _meeting_host(environment: Mapping[str, str], *, one_node: bool) -> str:
    """The step's first node; 127.0.0.1 where it is the only one, so that no name must be resolved."""
    first = hosts(_first_set(environment, "SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST"))[0]
    return "127.0.0.1" if one_node else first


def _port(environment: Mapping[str, str]) -> int:
    """MASTER_PORT, or one from the numbers of job and step: 10000 to 29999, below the ephemeral ports of Linux.

    16 ports per job, so that the steps of a job differ from each other and from those of the next 1,249 jobs.
    """
    if environment.get("MASTER_PORT"):
        return numbers(environment, ["MASTER_PORT"], launcher="srun")[0]
    job, step = numbers(environment, ("SLURM_JOB_ID", "SLURM_STEP_ID"), launcher="srun")
    return 10000 + (16 * job + step % 16) % 20000


def _first_set(environment: Mapping[str, str], *names: str) -> str:
    found = next((environment[name] for name in names if environment.get(name)), None)
    if found is None:
        require(environment, names, launcher="srun")
    assert found is not None
    return found


def hosts(hostlist: str) -> list[str]:
    """The host names of a Slurm host list, in order.  ValueError: it is no host list.

    >>> hosts("n[01-03,07],gpu9"), hosts("r[1-2]n[9-10]")
    (['n01', 'n02', 'n03', 'n07', 'gpu9'], ['r1n9', 'r1n10', 'r2n9', 'r2n10'])
    """
    number = r"\d+(?:-\d+)?"
    host = rf"(?:[^,\[\]\s]|\[{number}(?:,{number})*\])+"
    if not re.fullmatch(rf"{host}(?:,{host})*", hostlist):
        raise ValueError(f"not a host list like n[01-03,07],gpu9: {hostlist!r}; set MASTER_ADDR to rank 0's host instead")
    return [name for word in re.findall(host, hostlist) for name in _expand(word)]


def _expand(word: str) -> list[str]:
    before, bracket, rest = word.partition("[")
    if not bracket:
        return [word]
    inside, _, after = rest.partition("]")
    return [before + number + end for number in _range_numbers(inside) for end in _expand(after)]


def _range_numbers(inside: str) -> Iterator[str]:
    """`01-03,07` as 01, 02, 03, 07: leading zeros belong to the name."""
    for part in inside.split(","):
        first, _, last = part.partition("-")
        yield from (str(number).zfill(len(first)) for number in range(int(first), int(last or first) + 1))


def tasks_per_node(text: str) -> list[int]:
    """The number of tasks on each node of a step.  ValueError: the text has another form.

    >>> tasks_per_node("2(x3),1")
    [2, 2, 2, 1]
    """
    if not re.fullmatch(r"\d+(\(x\d+\))?(,\d+(\(x\d+\))?)*", text):
        raise ValueError(f"SLURM_TASKS_PER_NODE={text!r} is not a list of tasks like 2(x3),1; srun sets it, so start with srun")
    counts = re.findall(r"(\d+)(?:\(x(\d+)\))?", text)
    return [int(tasks) for tasks, nodes in counts for _ in range(int(nodes or 1))]


# Slurm 22.05: what `srun -n2` gave task 1 on one node, and what a batch script (`sbatch -n2`) and `salloc -n2` gave
_ONE_NODE = {
    "SLURM_JOB_ID": "3",
    "SLURM_JOB_NODELIST": "vm",
    "SLURM_LAUNCH_NODE_IPADDR": "127.0.0.1",
    "SLURM_LOCALID": "1",
    "SLURM_NNODES": "1",
    "SLURM_NODEID": "0",
    "SLURM_NPROCS": "2",
    "SLURM_NTASKS": "2",
    "SLURM_PROCID": "1",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NODELIST": "vm",
    "SLURM_STEP_NUM_TASKS": "2",
    "SLURM_STEP_TASKS_PER_NODE": "2",
    "SLURM_TASKS_PER_NODE": "2",
}
_SALLOC = {"SLURM_JOB_ID": "5", "SLURM_NNODES": "1", "SLURM_NTASKS": "2", "SLURM_TASKS_PER_NODE": "2", "SLURM_NODELIST": "vm"}
_BATCH = {**_SALLOC, "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NODEID": "0"}
_ALONE = {**_ONE_NODE, "SLURM_NTASKS": "1", "SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0", "SLURM_LOCALID": "0"}
_FOUR_NODES = {
    **_ONE_NODE,
    "SLURM_JOB_ID": "123456",
    "SLURM_STEP_ID": "2",
    "SLURM_JOB_NODELIST": "login,n[08-10,12]",
    "SLURM_STEP_NODELIST": "n[08-10,12]",
    "SLURM_LAUNCH_NODE_IPADDR": "10.0.0.1",
    "SLURM_STEP_NUM_TASKS": "7",
    "SLURM_NTASKS": "7",
    "SLURM_PROCID": "6",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "3",
    "SLURM_STEP_TASKS_PER_NODE": "2(x3),1",
}

CASES: list[tuple[dict[str, str], World | str | None]] = [
    ({}, None),
    (_ONE_NODE, World(1, 2, 1, 2, "127.0.0.1", 10048, "slurm", "3.0")),
    ({**_ONE_NODE, "SLURM_STEP_ID": "1"}, World(1, 2, 1, 2, "127.0.0.1", 10049, "slurm", "3.1")),
    (_FOUR_NODES, World(6, 7, 0, 1, "n08", 25298, "slurm", "123456.2")),
    (
        {**_FOUR_NODES, "MASTER_ADDR": "n08-ib", "MASTER_PORT": "29500"},
        World(6, 7, 0, 1, "n08-ib", 29500, "slurm", "123456.2"),
    ),
    ({**_ONE_NODE, "SLURM_RESTART_COUNT": "2"}, World(1, 2, 1, 2, "127.0.0.1", 10048, "slurm", "3.0 restart 2")),
    (_ALONE, None),
    (_SALLOC, "job 5 has 2 tasks on 1 nodes and this process is none of them.*srun widefield"),
    (_BATCH, "this process is none of them"),
    ({**_BATCH, "SLURM_STEP_ID": "4294967291"}, "this process is none of them"),  # as newer versions number the batch script
    ({**_BATCH, "SLURM_NTASKS": "1"}, None),
    ({"SLURM_JOB_ID": "5", "SLURM_NNODES": "1"}, None),  # sbatch -N1 sets no SLURM_NTASKS
    ({"SLURM_JOB_ID": "5", "SLURM_NNODES": "2"}, "has 1 tasks on 2 nodes"),
    ({**_ONE_NODE, "SLURM_LOCALID": ""}, "lacks SLURM_LOCALID"),
    ({**_ONE_NODE, "SLURM_STEP_TASKS_PER_NODE": "3"}, "contradict each other: SLURM_STEP_NUM_TASKS=2.*\\[3\\]"),
    ({**_ONE_NODE, "SLURM_STEP_TASKS_PER_NODE": "two"}, "SLURM_TASKS_PER_NODE='two' is not a list of tasks"),
    ({**_FOUR_NODES, "SLURM_STEP_NODELIST": "n[08-10"}, "not a host list like .*: 'n\\[08-10'; set MASTER_ADDR"),
    ({k: v for k, v in _FOUR_NODES.items() if "NODELIST" not in k}, "lacks SLURM_STEP_NODELIST, SLURM_JOB_NODELIST"),
    ({**_FOUR_NODES, "MASTER_PORT": "any"}, "MASTER_PORT='any' is not a whole number"),
]
