"""torchrun on several hosts: one command per host, printed to be typed there, or run over ssh.

The first host is where the ranks meet.  ssh must log in without a password; the folder, the recipe and the run folder must be
the same on all hosts.  When one host's torchrun ends with an error, the others notice it by themselves, see comm/failure.py.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Iterator
from typing import Any, Literal

from pydantic import field_validator

from widefield.config.field_types import Positive
from widefield.launchers._job import Allocation, JobFiles, TrainCommand, shell
from widefield.launchers._pod_shell import PATIENCE
from widefield.launchers.local import python_of_ranks

HELP = """\
Train on several hosts without a scheduler: prints a command for each host, to be typed there.  The first host
is where the ranks meet; the folder and the run folder must be the same on all:

  widefield launch torchrun my.yaml --hosts a,b --gpus 8
  widefield launch torchrun my.yaml --hosts a,b --gpus 8 --run runs/first --run-by ssh

With --run-by ssh the commands run over ssh, which must log in without a password; their output comes here,
and Ctrl-C ends all of them.
"""
_HOST = re.compile(r"(?:[\w.-]+@)?[A-Za-z0-9]([\w.-]*\w)?|(?:[\w.-]+@)?\[?[0-9A-Fa-f:]+\]?")


class HostsJob(Allocation):
    """The hosts, and who starts torchrun on them."""

    hosts: str = ""
    """A,B,...: the hosts, the first of which the others must be able to reach"""
    port: Positive = 29500
    """PORT: where the ranks meet on the first host (29500)"""
    run_by: Literal["hand", "ssh"] = "hand"
    """HOW: hand prints the commands, ssh runs them (hand)"""
    restarts: int = 0
    """N: how often torchrun starts the ranks again after a failure (0)"""
    grace: Positive = 300
    """SECONDS: how long ranks may take to save once they are asked to stop (300)"""
    ssh: list[str] = []
    """OPTION: a further option of ssh, as --ssh=-p2222; may be given several times"""

    @field_validator("hosts", mode="after")
    @classmethod
    def _are_hosts(cls, text: str) -> str:
        names = text.split(",")
        wrong = next((name for name in names if not _HOST.fullmatch(name)), None)
        if wrong is not None:
            raise ValueError(f"{wrong!r} is no host; write names or addresses with commas, as --hosts a,b")
        if len(set(names)) < len(names):
            raise ValueError("a host is named twice; --gpus says how many ranks each has")
        return text

    @field_validator("port", mode="after")
    @classmethod
    def _is_a_port(cls, port: int) -> int:
        if port >= 65536:
            raise ValueError("ports are below 65536; leave it out for 29500")
        return port

    @property
    def names(self) -> list[str]:
        return [name for name in self.hosts.split(",") if name]

    @property
    def ranks(self) -> int:
        return len(self.names) * self.per_node


def write(command: TrainCommand, options: HostsJob) -> JobFiles:
    """The command of each host.  ValueError: no hosts, or another number of nodes."""
    if not options.names:
        raise ValueError("torchrun needs hosts; name them, as --hosts a,b")
    if options.nodes not in (1, len(options.names)):
        raise ValueError(f"--hosts names {len(options.names)} hosts and --nodes asks for {options.nodes}; leave --nodes out")
    lines = tuple(_lines(command, options))
    if options.run_by == "hand":
        return JobFiles(by_hand=lines)
    notes = ("ssh starts a fresh shell, so variables that are set here are not set there",)
    return JobFiles(on_hosts=tuple((host, _by_ssh(host, line, options)) for host, line in lines), notes=notes)


def _by_ssh(host: str, line: str, options: HostsJob) -> tuple[str, ...]:
    """`-tt`: with a terminal there, so that what runs there ends with ssh.  No password is asked for."""
    return ("ssh", "-tt", "-o", "BatchMode=yes", *options.ssh, "--", host, line)


def _lines(command: TrainCommand, options: HostsJob) -> Iterator[tuple[str, str]]:
    """(host, the line of shell that starts its ranks)."""
    first = options.names[0].rpartition("@")[2].strip("[]")
    job = secrets.token_hex(4)  # one of a start, so that its ranks meet none of another at the same address
    for number, host in enumerate(options.names):
        torchrun = {
            "rdzv-id": job,
            "nnodes": len(options.names),
            "nproc-per-node": options.per_node,
            "node-rank": number,
            "master-addr": first,
            "master-port": options.port,
            **({"max-restarts": options.restarts} if options.restarts else {}),
        }
        words = [f"--{name}={value}" for name, value in torchrun.items()]
        program = [
            "env",
            f"{PATIENCE}={options.grace}",
            *python_of_ranks(),
            "-m",
            "torch.distributed.run",
            *words,
            "-m",
            "--",
            "widefield",
        ]
        yield host, f"cd {shell([command.here])} && {shell([*program, *command.arguments()])}"


JOB = HostsJob

JOBS: list[tuple[dict[str, Any], list[str] | str]] = [
    (
        {"hosts": "a,me@b", "gpus": 8},
        [
            "cd /work && env TORCH_ELASTIC_SHUTDOWN_TIMEOUT=300 ",
            "--nnodes=2 --nproc-per-node=8 --node-rank=1 --master-addr=a --master-port=29500 -m -- widefield ",
        ],
    ),
    ({"hosts": "a,b", "run_by": "ssh", "ssh": ["-p2222"]}, ["ssh -tt -o BatchMode=yes -p2222 -- b cd /work && "]),
    ({"hosts": "me@a", "restarts": 3}, ["--node-rank=0 --master-addr=a --master-port=29500 --max-restarts=3 -m"]),
    ({}, "torchrun needs hosts; name them, as --hosts a,b"),
    ({"hosts": "a,,b"}, "'' is no host; write names or addresses with commas"),
    ({"hosts": "-oProxyCommand=x"}, "'-oProxyCommand=x' is no host"),
    ({"hosts": "a,a"}, "a host is named twice"),
    ({"hosts": "a,b", "nodes": 3}, "--hosts names 2 hosts and --nodes asks for 3"),
    ({"hosts": "a", "port": 70000}, "ports are below 65536"),
    ({"hosts": "a", "run_by": "rsh"}, "'run_by' is 'rsh'"),
]  # fmt: skip
