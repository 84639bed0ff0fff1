"""What the tests on hosts of their own need of this machine, and the run that all of them must equal."""

from __future__ import annotations

from collections.abc import Iterator

import command
import pytest
from cluster import hosts
from cluster.cable import netem_refusal
from cluster.runs import Run, run_in
from cluster.slurm_cluster import Slurm, missing_programs, slurm


@pytest.fixture(scope="session", autouse=True)
def machine() -> None:
    """Ends the tests in words where this machine cannot have hosts."""
    problem = hosts.refusal()
    if problem is not None:
        pytest.exit(f"make test-cluster: {problem}", returncode=2)


@pytest.fixture(scope="session")
def undisturbed(machine, tmp_path_factory) -> Run:
    """The run on two ranks of this machine that nothing happens to."""
    run = run_in(tmp_path_factory.mktemp("undisturbed"))
    command.run(*run.words, env=hosts.environment(), seconds=600)
    return run


@pytest.fixture(scope="session")
def cluster(machine) -> Iterator[Slurm]:
    problem = missing_programs()
    if problem is not None:
        pytest.exit(f"make test-cluster: {problem}", returncode=2)
    with slurm() as made:
        yield made


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    problem = netem_refusal() if hosts.refusal() is None else None
    if problem is not None:
        terminalreporter.write_line(f"slow cables were this program's own, since the kernel has no netem: {problem}")
