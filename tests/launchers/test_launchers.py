"""Whoever starts the ranks, each knows its place; and whoever ends them, nothing is left behind."""

from __future__ import annotations

import doctest
import json
import os
import pty
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
import uuid
from functools import partial
from pathlib import Path

import psutil
import pytest
from marks import few

from widefield.comm import mesh
from widefield.comm.mesh import World
from widefield.launchers import _forking, build_mesh, local, mpi, slurm, torchrun, world_from
from widefield.launchers._forking import Forking
from widefield.launchers._rank_processes import RankProcesses
from widefield.naming import load, names_in
from widefield.plans import Plan
from widefield.refusal import TO_BE_CONTINUED

pytestmark = pytest.mark.alone

PACKAGE = "widefield.launchers"
SOON = 20.0
"""In seconds, also on a machine under load; what waits for its grace, or for torch, takes 30."""
ALL_CASES = [
    pytest.param(name, environment, expected, id=f"{name}-{index}")
    for name in names_in(PACKAGE)
    for index, (environment, expected) in enumerate(load(PACKAGE, name).CASES)
]
TORCHRUN, SRUN, MPIRUN = torchrun.CASES[0][0], slurm.CASES[1][0], mpi.CASES[1][0]

# ------------------------------------------------------------------------------------------------ environments


@pytest.mark.parametrize(("name", "environment", "expected"), ALL_CASES)
def test_a_launchers_variables_mean_a_world_or_an_error_in_words(name, environment, expected):
    if isinstance(expected, str):
        with pytest.raises(ValueError, match=expected):
            load(PACKAGE, name).detect(environment)
    else:
        assert load(PACKAGE, name).detect(environment) == expected


@pytest.mark.parametrize(("name", "environment", "expected"), ALL_CASES)
def test_asking_all_launchers_gives_the_same_as_asking_the_one(name, environment, expected):
    if isinstance(expected, str):
        with pytest.raises(ValueError, match=expected):
            world_from(environment)
    elif expected is not None:  # None means "not mine": another file may know the variables
        assert world_from(environment) == expected


@pytest.mark.parametrize(
    ("environment", "launcher"),
    [
        ({**SRUN, **TORCHRUN}, "torchrun"),  # srun torchrun
        ({**MPIRUN, **TORCHRUN}, "torchrun"),
        ({"PET_NNODES": "2", "PET_NPROC_PER_NODE": "4", **TORCHRUN}, "torchrun"),  # a pod's command is torchrun
        ({**SRUN, **MPIRUN}, "mpi"),  # mpirun reached this node by srun
        ({**SRUN, "PMI_RANK": "1", "PMI_SIZE": "2", "PMI_JOBID": "2.0"}, "slurm"),  # srun --mpi=pmi2
    ],
)
def test_the_innermost_launcher_is_believed(environment, launcher):
    world = world_from(environment)
    assert world is not None and world.launcher == launcher


def test_nobody_started_us_is_none():
    assert world_from({"PATH": "/bin", "OMP_NUM_THREADS": "1", "MASTER_PORT": "29500"}) is None


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"RANK": "8"}, "contradicts itself: rank 8 of 8"),
        ({"LOCAL_RANK": "4"}, "4 of 4 on its machine"),
        ({"LOCAL_WORLD_SIZE": "9"}, "1 of 9 on its machine"),
        ({"MASTER_PORT": "0"}, "port 0 to meet at; set MASTER_PORT"),
        ({"MASTER_PORT": "65536"}, "port 65536 to meet at"),
    ],
)
def test_numbers_that_contradict_each_other_are_an_error(change, message):
    with pytest.raises(ValueError, match=message):
        world_from({**TORCHRUN, **change})


def test_a_meeting_place_that_cannot_be_resolved_is_an_error_and_no_world_of_one():
    world = world_from({**slurm.CASES[3][0], "MASTER_ADDR": "no such host"})
    assert world is not None and world.size == 7
    with pytest.raises(ValueError, match="rank 6 of 7 cannot resolve the meeting place no such host:25298.*slurm.*MASTER_ADDR"):
        mesh.join(world, Plan(replicate=7))


def test_slurm_lists_read_as_their_examples_say():
    assert doctest.testmod(slurm).attempted == 2 and doctest.testmod(slurm).failed == 0
    assert slurm.hosts("a[1-2,4]-b,c") == ["a1-b", "a2-b", "a4-b", "c"]
    assert slurm.hosts("n[098-101]") == ["n098", "n099", "n100", "n101"]


@pytest.mark.parametrize("text", ["", "n[1-", "n[]", "n[a-b]", "n1,,n2", "n[1-2],", "n 1"])
def test_what_is_no_host_list_is_refused(text):
    with pytest.raises(ValueError, match="not a host list"):
        slurm.hosts(text)


def test_steps_of_a_job_and_of_the_next_jobs_never_meet_at_the_same_port():
    ports = [
        slurm._port({"SLURM_JOB_ID": str(job), "SLURM_STEP_ID": str(step)}) for job in range(7, 1257) for step in range(16)
    ]
    assert len(set(ports)) == 1250 * 16 and min(ports) == 10000 and max(ports) == 29999


def test_mpi_jobs_without_a_name_meet_by_their_parent():
    environment = {name: value for name, value in MPIRUN.items() if name not in mpi.JOB_NAMES}
    program = f"import os; from widefield.launchers import mpi; os.write(1, b'%d\\n' % mpi.detect({environment!r}).port)"
    script = f'{sys.executable} -c "$0" & {sys.executable} -c "$0"; wait'
    ports = subprocess.run(["bash", "-c", script, program], capture_output=True, text=True, check=True).stdout.split()
    assert len(ports) == 2 and ports[0] == ports[1]


# ------------------------------------------------------------------------------------------------ how many ranks


@pytest.mark.parametrize(
    ("asked", "gpus", "each", "ranks", "reason"),
    [
        (None, 0, 1, 1, "1 rank: no GPU here; mesh.replicate=N starts N CPU ranks"),
        (None, 1, 1, 1, "1 rank: one per GPU"),
        (None, 4, 1, 4, "4 ranks: one per GPU"),
        (None, 2, 3, 6, "6 ranks: 3 per GPU"),
        (3, 0, 1, 3, "3 ranks: as the mesh asks"),
        (3, 1, 4, 3, "3 ranks: as the mesh asks"),
        (1, 4, 1, 1, "1 rank: as the mesh asks"),
    ],
)
def test_ranks_are_as_many_as_the_mesh_asks_or_else_as_gpus_have_room_for(asked, gpus, each, ranks, reason, monkeypatch):
    monkeypatch.setattr(local, "usable_cores", lambda: 4)
    assert local.local_ranks(asked, gpus, each) == (ranks, reason)


def test_without_a_number_of_replicas_there_is_one_on_a_cpu_and_as_many_as_gpus_have_room_for():
    assert local.local_ranks(None, 0, replica=2) == (2, "2 ranks: as the mesh asks")
    assert local.local_ranks(None, 4, replica=2) == (4, "4 ranks: one per GPU")
    assert local.local_ranks(None, 5, replica=2) == (
        4, "4 ranks: one per GPU, and 1 left out, since replicas have 2 ranks"
    )  # fmt: skip
    with pytest.raises(ValueError, match="asks for 4 ranks and this machine has 2 GPUs"):
        local.local_ranks(None, 2, replica=4)


def test_more_ranks_than_gpus_names_the_axis_to_change():
    with pytest.raises(
        ValueError, match="asks for 4 ranks and this machine has 2 GPUs.*mesh.replicate so that all axes .* make 2"
    ):
        local.local_ranks(4, 2)
    with pytest.raises(ValueError, match="4 ranks and this machine has 1 GPU, for 2 ranks each.* or let 4 ranks share"):
        local.local_ranks(4, 1, 2)


def test_far_more_ranks_than_cores_are_refused_and_more_are_warned_of(monkeypatch):
    monkeypatch.setattr(local, "usable_cores", lambda: 2)
    assert local.local_ranks(16, 0) == (
        16, "16 ranks: as the mesh asks; warning: they share 2 cores, so more ranks are no faster than 2"
    )  # fmt: skip
    told = "asks for 64 ranks and this machine has no GPU and 2 cores; at most 8 ranks .* make at most 16, .*PER_CORE=32"
    with pytest.raises(ValueError, match=told):
        local.local_ranks(64, 0)
    monkeypatch.setenv("WIDEFIELD_RANKS_PER_CORE", "32")
    assert local.local_ranks(64, 0)[0] == 64
    monkeypatch.setenv("WIDEFIELD_RANKS_PER_CORE", "many")
    with pytest.raises(ValueError, match="WIDEFIELD_RANKS_PER_CORE='many' is no count; set it to a whole number"):
        local.local_ranks(2, 0)


def test_a_mesh_of_more_ranks_than_the_script_has_says_how_to_start_them(monkeypatch):
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    told = r"the mesh is of 4 ranks and this script runs on one, .*: torchrun --nproc-per-node 4 SCRIPT.py"
    with pytest.raises(ValueError, match=told):
        build_mesh(space=(2, 1), shard=2)


# ------------------------------------------------------------------------------------------------ starting and ending

DRIVER = """
import os, signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
from widefield.launchers import local
from widefield.launchers._forking import Forking
before = dict(os.environ), [signal.getsignal(number) for number in local.STOP_SIGNALS]
way, ranks, grace, worker, *arguments = sys.argv[1:]
if way == "started":
    status = local.start(int(ranks), arguments, grace_seconds=float(grace), program=[sys.executable, "-c", worker])
else:
    with local.environment_of_ranks(int(ranks)):
        forked = Forking([sys.executable, "-c", os.environ["TEST_FORKED"], worker, "digits"], local.new_run_id())
    status = local.start(int(ranks), arguments, grace_seconds=float(grace), forked=forked)
    forked.end()
assert before == (dict(os.environ), [signal.getsignal(number) for number in local.STOP_SIGNALS]), "start changed its process"
sys.exit(status)
"""

FORKED = """
import sys
import numpy.random  # before the fork, as torch's libraries do
worker = sys.argv.pop(1)
from widefield import forked_ranks
forked_ranks.load_all_of = lambda data: None
if forked_ranks.main():
    exec(worker)
"""
"""The process that ranks are forked from; here a rank runs a worker of these tests in place of the command."""

WORKER = """
import json, os, pathlib, signal, subprocess, sys, time
rank, here = int(os.environ["RANK"]), pathlib.Path(os.environ["TEST_FOLDER"])
def note(name, text=""):
    (here / f"{name}.new").write_text(str(text))
    (here / f"{name}.new").rename(here / name)
def on(numbers, act):
    for number in numbers:
        signal.signal(number, act)
def save(number, frame):
    note(f"saved{rank}", number)
    sys.exit(75)
def ready():
    note(f"ready{rank}", os.getpid())
    deadline = time.time() + 20
    while len(list(here.glob("ready?"))) < int(os.environ["WORLD_SIZE"]) and time.time() < deadline:
        time.sleep(0.01)
INT, TERM = signal.SIGINT, signal.SIGTERM
"""


class Launched:
    """A launcher process under test; `left()` are the processes that it, or anything it started, left behind."""

    def __init__(
        self, folder: Path, way: str, body: str, *arguments: str, ranks: int = 2, grace: float = 30.0, **options
    ) -> None:
        self.folder, self.way, self.mark = folder, way, uuid.uuid4().hex
        (folder / "tmp").mkdir()
        environment = {
            name: value for name, value in os.environ.items() if not re.match("RANK|WORLD_|LOCAL_|MASTER_|OMP_", name)
        }
        environment |= {
            "TEST_FOLDER": str(folder),
            "TEST_MARK": self.mark,
            "TMPDIR": str(folder / "tmp"),
            "TEST_FORKED": FORKED,
        }
        command = [sys.executable, "-c", DRIVER, way, str(ranks), str(grace), WORKER + body, *arguments]
        self.errors = (folder / "stderr").open("w")
        hears = partial(signal.signal, signal.SIGHUP, signal.SIG_DFL)  # nohup made its children deaf to it
        options = {"stderr": self.errors, "stdout": self.errors, "preexec_fn": hears, **options}
        self.process = subprocess.Popen(command, env=environment, **options)

    def until(self, *names: str, seconds: float = 30.0) -> None:
        deadline = time.monotonic() + seconds
        while not all((self.folder / name).exists() for name in names):
            assert time.monotonic() < deadline and self.process.poll() is None, (names, self.said())
            time.sleep(0.01)

    def until_it_hears(self, number: int, seconds: float = 30.0) -> None:
        """Wait until the launcher handles a signal: it does so from the start of the ranks on."""
        deadline = time.monotonic() + seconds
        status = Path(f"/proc/{self.process.pid}/status")
        while not int(re.search(r"SigCgt:\s*(\w+)", status.read_text())[1], 16) >> (number - 1) & 1:
            assert time.monotonic() < deadline, self.said()
            time.sleep(0.01)

    def ends(self, seconds: float = 30.0) -> int:
        try:
            return self.process.wait(seconds)
        finally:
            self.process.kill()
            self.errors.close()

    def said(self) -> str:
        return (self.folder / "stderr").read_text()

    def read(self, name: str) -> str:
        return (self.folder / name).read_text()

    def left(self) -> list[psutil.Process]:
        found = []
        for process in psutil.process_iter():
            try:
                if process.environ().get("TEST_MARK") == self.mark and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
            except psutil.Error:
                pass
        return found


@pytest.fixture(params=few(["started", "forked"], "forked"))
def launch(tmp_path, request):
    started = []

    def start(body: str, *arguments: str, **options) -> Launched:
        started.append(Launched(tmp_path, request.param, body, *arguments, **options))
        return started[-1]

    yield start
    for launched in started:
        if launched.process.poll() is None:
            launched.process.kill()
            launched.process.wait()
        left = launched.left()
        for process in left:
            process.kill()
        assert not left, f"left behind: {left}"
        assert not list((tmp_path / "tmp").iterdir()), "files left behind in the folder for temporary ones"


def test_importing_the_launcher_does_not_import_torch():
    program = "import sys, widefield.launchers.local; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program]).returncode == 0


def test_ranks_end_well_with_their_arguments_their_threads_and_no_port_kept(launch):
    odd = ["mesh.replicate=2", "a$$b", "${local_rank}", "two words"]
    body = """
note(f"rank{rank}", json.dumps([sys.argv[1:], *map(os.environ.get, ("OMP_NUM_THREADS", "MASTER_ADDR", "MASTER_PORT"))]))
"""
    launched = launch(body, *odd)
    assert launched.ends() == 0 and launched.said() == ""
    cores = len(os.sched_getaffinity(0))
    for rank in (0, 1):
        arguments, threads, address, port = json.loads(launched.read(f"rank{rank}"))
        assert arguments == odd and int(threads) == max(1, cores // 2)
        assert address == "127.0.0.1"  # a full host name may not resolve
    with socket.socket() as free:
        free.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # refused all the same where someone listens
        free.bind((address, int(port)))


def test_ranks_have_torchruns_variables(monkeypatch):
    monkeypatch.delenv("TORCH_NCCL_ASYNC_ERROR_HANDLING", raising=False)
    first, second = local._environments(2, "a run that never was", "127.0.0.1", 29500)
    assert torchrun.detect(second) == World(1, 2, 1, 2, "127.0.0.1", 29500, "torchrun", "a run that never was")
    assert first["TORCH_NCCL_ASYNC_ERROR_HANDLING"] == "1" and first["TORCHELASTIC_USE_AGENT_STORE"] == "True"
    monkeypatch.setenv("TORCH_NCCL_ASYNC_ERROR_HANDLING", "3")
    assert local._environments(1, "", "", 1)[0]["TORCH_NCCL_ASYNC_ERROR_HANDLING"] == "3"


def test_the_users_thread_count_stands(launch, monkeypatch):
    program = """
import os
from widefield.launchers import local
with local.environment_of_ranks(2):
    print(os.environ["OMP_NUM_THREADS"])
"""
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    assert subprocess.run([sys.executable, "-c", program], capture_output=True, text=True).stdout == "7\n"


def test_a_rank_that_fails_gives_its_exit_code_and_ends_one_that_will_not_listen(launch):
    body = """
if rank == 0:
    on([TERM], lambda *_: note("asked"))
ready()
if rank == 1:
    print("the reason", file=sys.stderr, flush=True)
    note("died", time.time())
    sys.exit(3)
while True:
    time.sleep(0.1)
"""
    launched = launch(body)
    assert launched.ends() == 3
    assert time.time() - float(launched.read("died")) < SOON  # 1 s, SIGTERM, 1 s, SIGKILL; torch alone takes 30 s
    assert (launched.folder / "asked").exists()
    assert launched.said() == "the reason\nwidefield: rank 1 ended with exit code 3; its message is above\n"


def test_a_failing_rank_leaves_the_others_time_to_say_what_is_wrong(launch):
    body = "ready()\nif rank == 0:\n    time.sleep(0.5)\n    print('the reason', flush=True)\nsys.exit(2)"
    launched = launch(body)
    assert launched.ends() == 2
    assert launched.said() == "the reason\nwidefield: rank 1 ended with exit code 2; its message is above\n"


def test_a_killed_rank_ends_all_and_not_even_what_it_started_is_left(launch):
    body = """
import multiprocessing.util
from widefield.launchers._scratch import use_own_folder
use_own_folder(os.environ)
(pathlib.Path(multiprocessing.util.get_temp_dir()) / "a socket").touch()
subprocess.Popen(["sleep", "100"])
subprocess.Popen(["sleep", "100"], start_new_session=True)
note(f"kept{rank}", len(list((here / "tmp").glob(f"*-{rank}/a socket"))))
ready()
time.sleep(100)
"""
    launched = launch(body)
    launched.until("ready0", "ready1")
    assert len(launched.left()) == 7 + (launched.way == "forked")  # the launcher, 2 ranks, 2 processes of each; what forks
    assert launched.read("kept0") == launched.read("kept1") == "1"
    os.kill(int(launched.read("ready1")), signal.SIGKILL)
    killed = time.monotonic()
    assert launched.ends() == 137
    assert time.monotonic() - killed < SOON
    assert launched.said() == "widefield: rank 1 was killed by SIGKILL; the machine may be out of memory\n"


@pytest.mark.parametrize(
    ("endings", "status", "verdict"),
    [
        (["exit 1", "kill -TERM $$", "exit 0"], 143, "rank 1 was killed by SIGTERM"),
        (["exit 4", "kill -ABRT $$", "exit 0"], 4, "rank 0 ended with exit code 4; its message is above"),
        (["exit 0", "kill -ABRT $$", "exit 0"], 134, "rank 1 was killed by SIGABRT; its message is above"),
    ],
)
def test_of_ranks_found_dead_together_the_killed_one_has_the_blame(endings, status, verdict):
    party = RankProcesses("a run that never was", 1.0)
    party.processes = {rank: subprocess.Popen(["bash", "-c", ending]) for rank, ending in enumerate(endings)}
    for process in party.processes.values():
        process.wait()
    assert party.has_failure() and (party.status, party.verdict) == (status, verdict)


@pytest.mark.parametrize(
    ("sent", "status", "received"),
    [
        (signal.SIGTERM, TO_BE_CONTINUED, signal.SIGTERM),
        (signal.SIGINT, 130, signal.SIGINT),
        (signal.SIGUSR1, TO_BE_CONTINUED, signal.SIGTERM),
        (signal.SIGHUP, TO_BE_CONTINUED, signal.SIGTERM),  # the terminal is gone: ranks save upon SIGTERM
    ],
)
def test_ranks_save_upon_a_signal_to_their_launcher(launch, sent, status, received):
    launched = launch("on([INT, TERM], save)\nready()\nwhile True: time.sleep(0.1)")
    launched.until("ready0", "ready1")
    launched.process.send_signal(sent)
    assert launched.ends() == status
    assert launched.read("saved0") == launched.read("saved1") == str(int(received))
    assert "the ranks save and end, in 30 s at most" in launched.said() and launched.said().count("\n") == 1


def test_ranks_that_die_of_the_signal_are_no_failure(launch):
    launched = launch("ready()\ntime.sleep(100)")
    launched.until("ready0", "ready1")
    launched.process.send_signal(signal.SIGTERM)
    assert launched.ends() == 143 and "killed" not in launched.said()


def test_ranks_that_were_about_to_succeed_have_succeeded(launch):
    launched = launch("on([TERM], lambda *_: sys.exit(0))\nready()\nwhile True: time.sleep(0.1)")
    launched.until("ready0", "ready1")
    launched.process.send_signal(signal.SIGTERM)
    assert launched.ends() == 0


def test_a_signal_to_one_rank_alone_ends_the_run_to_be_continued(launch):
    launched = launch("ready()\nif rank: time.sleep(0.3)\nsys.exit(75)")
    assert launched.ends() == TO_BE_CONTINUED and launched.said() == ""


def test_a_second_signal_ends_all_at_once(launch):
    launched = launch("on([INT, TERM], lambda *_: note(f'asked{rank}'))\nready()\nwhile True: time.sleep(0.1)")
    launched.until("ready0", "ready1")
    launched.process.send_signal(signal.SIGINT)
    launched.until("asked0", "asked1")
    asked = time.monotonic()
    launched.process.send_signal(signal.SIGINT)
    assert launched.ends() == 130
    assert time.monotonic() - asked < SOON
    assert "killed" not in launched.said()


def test_a_rank_that_fails_while_saving_is_told_and_the_others_do_not_wait_out_their_grace(launch):
    body = "on([TERM], (lambda *_: sys.exit(5)) if rank else (lambda *_: None))\nready()\nwhile True: time.sleep(0.1)"
    launched = launch(body)
    launched.until("ready0", "ready1")
    launched.process.send_signal(signal.SIGTERM)
    sent = time.monotonic()
    assert launched.ends() == 5
    assert time.monotonic() - sent < SOON
    assert launched.said().endswith("rank 1 ended with exit code 5; its message is above\n")


def test_a_rank_that_outstays_its_grace_is_killed_and_named(launch):
    launched = launch("on([TERM], (lambda *_: None) if rank else save)\nready()\nwhile True: time.sleep(0.1)", grace=1)
    launched.until("ready0", "ready1")
    launched.process.send_signal(signal.SIGTERM)
    assert launched.ends() == 137
    assert (launched.folder / "saved0").exists()
    assert launched.said().endswith("widefield: rank 1 had not ended 1 s after SIGTERM and was killed\n")


@pytest.mark.parametrize("launch", ["forked"], indirect=True)
class TestForked:
    """What can go wrong with the process that ranks are forked from."""

    def test_ranks_that_are_forked_differ_in_what_they_draw_and_have_a_name(self, launch):
        told = "[random.random(), numpy.random.rand(), os.getsid(0) == os.getpid(), open('/proc/self/comm').read()]"
        launched = launch(f"import random, numpy; note(f'rank{{rank}}', json.dumps({told}))")
        assert launched.ends() == 0 and launched.said() == ""
        first, second = (json.loads(launched.read(f"rank{rank}")) for rank in (0, 1))
        assert first[0] != second[0] and first[1] != second[1] and first[2] and second[2]
        assert [first[3], second[3]] == ["widefield-0\n", "widefield-1\n"]

    def test_a_signal_while_it_loads_ends_the_command(self, launch, monkeypatch):
        monkeypatch.setattr(sys.modules[__name__], "FORKED", "import time; time.sleep(60)")
        launched = launch("")
        launched.until_it_hears(signal.SIGTERM)
        launched.process.send_signal(signal.SIGTERM)
        assert launched.ends() == 143
        assert launched.said() == "widefield: SIGTERM: ended before the ranks had begun\n"

    def test_what_it_cannot_load_is_told(self, launch, monkeypatch):
        monkeypatch.setattr(sys.modules[__name__], "FORKED", "import sys; sys.exit('no such module')")
        launched = launch("")
        assert launched.ends() == 1
        expected = "no such module\nwidefield: the process that forks ranks ended with exit code 1; its message is above\n"
        assert launched.said() == expected

    def test_it_is_killed_and_so_are_its_ranks(self, launch):
        launched = launch("note(f'parent{rank}', os.getppid())\nready()\ntime.sleep(100)")
        launched.until("ready0", "ready1")
        os.kill(int(launched.read("parent0")), signal.SIGKILL)
        assert launched.ends() == 137
        assert launched.said() == "widefield: rank 0 was killed by SIGKILL; the machine may be out of memory\n"

    def test_a_killed_launcher_leaves_ranks_without_their_parent(self, launch):
        body = "parent = os.getppid()\nready()\nwhile os.getppid() == parent: time.sleep(0.01)\nnote(f'left{rank}')"
        launched = launch(body)
        launched.until("ready0", "ready1")
        launched.process.kill()
        assert launched.ends() == -signal.SIGKILL
        deadline = time.monotonic() + 10
        while launched.left() and time.monotonic() < deadline:
            time.sleep(0.05)
        assert (launched.folder / "left0").exists() and (launched.folder / "left1").exists()

    def test_it_does_not_hear_what_stops_a_run(self, launch):
        launched = launch("on([TERM], save)\nnote(f'parent{rank}', os.getppid())\nready()\nwhile True: time.sleep(0.1)")
        launched.until("ready0", "ready1")
        for number in local.STOP_SIGNALS:
            os.kill(int(launched.read("parent0")), number)
        time.sleep(0.3)
        launched.process.send_signal(signal.SIGTERM)
        assert launched.ends() == TO_BE_CONTINUED and launched.read("saved1") == str(int(signal.SIGTERM))


def test_what_was_to_fork_ranks_ends_where_none_are_wanted():
    forked = Forking([sys.executable, "-c", FORKED, ""], "a run that never was")
    forked.end()
    assert forked.poll() == -signal.SIGKILL and forked.begun() == {}


def test_ranks_are_not_forked_beside_a_gpu(monkeypatch, tmp_path):
    monkeypatch.setattr(_forking, "GPUS", (str(tmp_path),))
    assert not _forking.may_fork()
    monkeypatch.setattr(_forking, "GPUS", ())
    assert _forking.may_fork() == (sys.platform == "linux")


def test_loading_before_a_fork_starts_no_thread():
    program = (
        "import threading, os; from widefield.forked_ranks import load_all_of; load_all_of('digits')\n"
        "print(threading.active_count(), len(os.listdir('/proc/self/task')))"
    )
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=environment)
    assert done.stdout == "1 1\n", done.stderr  # a lock that a thread holds would never be free in a forked rank


def test_a_signal_that_was_ignored_still_is_as_under_nohup(launch):
    launched = launch("ready()\ntime.sleep(1)", preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_IGN))
    launched.until("ready0", "ready1")
    launched.process.send_signal(signal.SIGHUP)
    assert launched.ends() == 0 and launched.said() == ""


def test_a_program_that_does_not_exist_is_an_error_and_leaves_nothing(tmp_path):
    with pytest.raises(FileNotFoundError, match="no-such-program"):
        local.start(2, [], program=[str(tmp_path / "no-such-program")])


def test_ranks_write_to_the_terminal_itself(launch):
    here, there = pty.openpty()
    try:
        launched = launch("note(f'tty{rank}', sys.stdout.isatty() and sys.stderr.isatty())", stdout=there, stderr=there)
        assert launched.ends() == 0
        assert launched.read("tty0") == launched.read("tty1") == "True"
    finally:
        os.close(here)
        os.close(there)


# ------------------------------------------------------------------------------------------------ the real launchers

JOIN = """
import os, sys, torch
from widefield.comm import mesh
from widefield.comm.mesh import World
from widefield.launchers import world_from
from widefield.plans import Plan
from widefield.refusal import TO_BE_CONTINUED
def main():  # not at the top: a DeviceMesh that lives until Python's end makes Gloo abort the process there, at times
    world = world_from(os.environ)
    joined = mesh.join(world, Plan(replicate=world.size), timeout_seconds=60)
    total = joined.sum_(torch.tensor([float(world.rank)])).item()
    words = (world.rank, world.size, world.local_rank, world.local_size, world.launcher, total)
    sys.stdout.write(" ".join(map(str, words)) + "\\n")  # in one piece: both ranks write to one pipe
    mesh.leave(joined)
main()
"""


def _join_under(tmp_path: Path, *launcher: str) -> list[str]:
    """What the two ranks of JOIN say, in rank order, under a launcher."""
    script = tmp_path / "join.py"
    script.write_text(JOIN)
    command = [part.replace("SCRIPT", str(script)) for part in launcher]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TMPDIR": str(tmp_path)}  # torchrun leaves a folder of logs there
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment)
    assert done.returncode == 0, done.stderr
    return sorted(re.findall(r"\d \d \d \d \w+ \d\.\d", done.stdout))


@pytest.mark.parametrize(
    "launcher",
    [
        ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "SCRIPT"),
        (
            "-c",
            "import sys; from widefield.launchers.local import start; sys.exit(start(2, ['SCRIPT'], program=[sys.executable]))",
        ),
    ],
    ids=["torchrun", "local"],
)
def test_ranks_of_torchrun_and_of_our_own_start_meet(tmp_path, launcher):
    assert _join_under(tmp_path, sys.executable, *launcher) == ["0 2 0 2 torchrun 1.0", "1 2 1 2 torchrun 1.0"]


@pytest.mark.skipif(shutil.which("mpirun") is None, reason="no mpirun here; its variables are in mpi.CASES")
def test_ranks_of_mpirun_meet(tmp_path):
    options = ["--allow-run-as-root", "--oversubscribe"] if "Open MPI" in _version("mpirun") else []
    ranks = _join_under(tmp_path, "mpirun", *options, "-n", "2", sys.executable, "SCRIPT")
    assert ranks == ["0 2 0 2 mpi 1.0", "1 2 1 2 mpi 1.0"]


def _version(program: str) -> str:
    return subprocess.run([program, "--version"], capture_output=True, text=True).stdout
