"""A real Slurm: a controller and nodes, each a host of its own, with one munged; all of it ends with the hosts.

Its configuration and files are in one folder, which all hosts share.  Preemption requeues; a node that does not answer is
down after some seconds, and a requeued job starts again after some seconds, where a cluster takes minutes.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from cluster.hosts import Host, Network, environment, network, wait_for

PROGRAMS = ("munged", "slurmctld", "slurmd", "srun", "sbatch", "scontrol", "squeue")
CONFIG = """
ClusterName=widefield
SlurmctldHost=head({head})
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket,cred_expire={cred_expire}
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool_%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd_%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd_%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
MpiDefault=none
SchedulerParameters=sched_interval=2,sched_min_interval=0
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
JobRequeue=1
ReturnToService=1
SlurmdTimeout={down_after}
KillWait=5
{nodes}
PartitionName=low Nodes=ALL Default=YES PriorityTier=1 PreemptMode=REQUEUE GraceTime={grace} State=UP
PartitionName=high Nodes=ALL PriorityTier=2 PreemptMode=OFF State=UP
"""
"""cred_expire: also how many seconds a requeued job waits before it starts again."""


@dataclass
class Slurm:
    """A running cluster.  Its commands run on the host `head`, where no job does."""

    folder: Path
    network: Network
    nodes: list[str]

    @property
    def head(self) -> Host:
        return self.network.hosts["head"]

    @property
    def environment(self) -> dict[str, str]:
        """What jobs inherit: this process's environment, one thread per rank, and where the cluster's configuration is."""
        return {**environment(), "SLURM_CONF": str(self.folder / "slurm.conf")}

    def run(self, *command: str | Path) -> str:
        return self.head.run(*command, env=self.environment)

    def submit(self, *command: str | Path) -> str:
        """sbatch with these arguments; the number of the job."""
        return re.findall(r"^\d+", self.run("sbatch", "--parsable", *command))[0]

    def facts(self, job: str) -> dict[str, str]:
        """What `scontrol show job` says: JobState, Restarts, ExitCode, Reason and so on."""
        told = self.run("scontrol", "show", "job", "--oneliner", job)
        return dict(word.split("=", 1) for word in told.split() if "=" in word)

    def state(self, job: str) -> str:
        return self.facts(job)["JobState"]

    def nodes_of(self, job: str) -> set[str]:
        """The nodes that a job runs on, or ran on last."""
        return set(self.run("scontrol", "show", "hostnames", self.facts(job)["NodeList"]).split())

    def wait_for_state(self, job: str, *states: str, seconds: float = 300) -> dict[str, str]:
        """The facts of the job once it is in one of these states.  AssertionError, with the logs: it does not come to be."""
        try:
            return wait_for(lambda: self._in(job, states), f"job {job} in {' or '.join(states)}", seconds=seconds)
        except AssertionError as error:
            raise AssertionError(f"{error}; it is {self.facts(job)}\n{self.logs()}") from None

    def _in(self, job: str, states: tuple[str, ...]) -> dict[str, str] | None:
        facts = self.facts(job)
        return facts if facts["JobState"] in states else None

    def unplug(self, name: str) -> None:
        """Cut the cable of a node, and then its power, so that nobody hears of it."""
        self.network.hosts[name].cut_cable()
        self.network.hosts[name].power_off()

    def replace(self, name: str) -> None:
        """Put a new host in the place of one that is off, and wait until Slurm takes it."""
        self.network.add(name)
        self.start_node(name)
        self.wait_for_nodes("idle", name)

    def start_node(self, name: str) -> None:
        """Start slurmd on the host `name`."""
        with (self.folder / f"slurmd_{name}.out").open("w") as out:
            self.network.hosts[name].start("slurmd", "-D", "-N", name, env=self.environment, stdout=out)

    def wait_for_nodes(self, state: str, *names: str, seconds: float = 60) -> None:
        wanted = {(name, state) for name in names}
        wait_for(lambda: wanted <= self._nodes(), f"nodes {names} in state {state}\n{self.logs()}", seconds=seconds)

    def _nodes(self) -> set[tuple[str, str]]:
        lines = self.run("sinfo", "--Node", "--noheader", "--format=%N %T").splitlines()
        return {(name, state) for name, state in (line.split() for line in lines)}

    def logs(self) -> str:
        """The last lines of what the daemons have written."""
        files = sorted(self.folder.glob("*.log")) + sorted(self.folder.glob("*.out"))
        return "\n".join(f"--- {file.name}\n{_end_of(file)}" for file in files)


def _end_of(file: Path, *, lines: int = 15) -> str:
    return "\n".join(file.read_text(errors="replace").splitlines()[-lines:])


def missing_programs() -> str | None:
    """Which of Slurm's programs are not there, with what to do; None where all are."""
    missing = [name for name in PROGRAMS if shutil.which(name) is None]
    if not missing:
        return None
    return (
        f"Slurm is not installed: {', '.join(missing)} not found; make test-cluster installs slurm-wlm and munge with apt-get"
    )


@contextlib.contextmanager
def slurm(*, nodes: int = 3, grace: int = 10, down_after: int = 10, cred_expire: int = 5) -> Iterator[Slurm]:
    """A cluster of `head` and nodes n0, n1, ..., each of one core, with partitions `low` and `high`, while the context lasts.

    grace: seconds that a job of `low` has after SIGTERM when one of `high` takes its nodes.  down_after: seconds until a
    node that does not answer is down.
    """
    folder = Path(tempfile.mkdtemp(prefix="widefield_slurm_"))
    folder.chmod(0o755)  # munged takes no socket in a folder that others cannot enter
    names = [f"n{number}" for number in range(nodes)]
    try:
        with network(["head", *names]) as net:
            lines = [f"NodeName={name} NodeAddr={net.hosts[name].address} CPUs=1 State=UNKNOWN" for name in names]
            (folder / "state").mkdir()
            text = CONFIG.format(
                folder=folder, head=net.hosts["head"].address, grace=grace, down_after=down_after, cred_expire=cred_expire,
                nodes="\n".join(lines),
            )  # fmt: skip
            (folder / "slurm.conf").write_text(text)
            cluster = Slurm(folder, net, names)
            _start_daemons(cluster)
            cluster.wait_for_nodes("idle", *names)
            yield cluster
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _start_daemons(cluster: Slurm) -> None:
    folder = cluster.folder
    key, socket = folder / "munge.key", folder / "munge.socket"
    key.write_bytes(os.urandom(128))
    key.chmod(0o600)
    places = [f"--{name}-file={folder / f'munge.{name}'}" for name in ("pid", "log", "seed")]
    with (folder / "daemons.out").open("w") as out:
        command = ["munged", "--foreground", "--num-threads=2", f"--socket={socket}", f"--key-file={key}", *places]
        cluster.head.start(*command, stdout=out)
        wait_for(socket.exists, f"munged\n{_end_of(folder / 'daemons.out')}")
        cluster.head.start("slurmctld", "-D", stdout=out, env=cluster.environment)
    for name in cluster.nodes:
        cluster.start_node(name)
