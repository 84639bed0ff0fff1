"""Run a function on several ranks and bring back what each returns: `on_ranks(2, body)`.

Ranks are gloo processes on the CPU, forked from one that has torch and the models' libraries loaded already, and kept for
the tests that follow: until another world size needs their memory, or until they have seen so many plans that their process
groups crowd the machine.  A body travels to them by pipe as file and name, so it must be a top-level function of a test module,
and what it takes and gives must pickle.
A test on CUDA (see devices.py) has ranks with a GPU each and NCCL, or, where there are fewer GPUs, ranks that share them and
gloo.  These are spawned afresh, for CUDA does not outlive a fork.  Tensors that they are given lie on their device, tensors
that they give in the host's memory.
A body that fails or hangs costs its pool: the ranks are killed, the test gets the failing rank's traceback, and the next
call spawns afresh.  Warnings are errors on the ranks too.
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import importlib.util
import inspect
import multiprocessing
import os
import pickle
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import devices
import torch

from widefield.comm.devices import RANKS_PER_GPU
from widefield.plans import Plan, to_text

TIMEOUT_SECONDS = 120.0
PLANS_MOST = {"cpu": 8, "cuda": 24}
"""Plans for which ranks make a mesh, whose process groups have threads and sockets each, before new ranks take over."""
IDLE_SECONDS = {"cpu": 15.0, "cuda": 120.0}
"""After which ranks that nobody asks are not worth what they cost: each process group's thread wakes up 100 times a second.
Ranks on a GPU cost more to start, some ten seconds, for they are not forked."""
RANKS_MOST = 10
"""Ranks of all world sizes that live at the same time."""
PRELOADED = [
    "torch",
    "torchvision",
    "timm",
    "monai.networks.nets",
    "segmentation_models_pytorch",
    "widefield.verification.forward",
]
"""What most bodies import."""
# What a rank says when another died first; such an error is never the one to show.
CONSEQUENCES = (
    "PeerFailedError",
    "Connection closed by peer",
    "Connection reset",
    "Broken pipe",
    "Timed out waiting",
    "Connection refused",
)


class RankFailed(Exception):
    """A body failed on a rank; the text is that rank's traceback."""


def on_ranks(
    world_size: int, body: Callable[..., Any], *args: Any, plan: Plan | None = None, timeout_seconds: float = TIMEOUT_SECONDS
) -> list[Any]:
    """`body(mesh, *args)` on `world_size` ranks; each rank's return value, in rank order.

    mesh: a widefield Mesh of `plan`, by default Plan(replicate=world_size), on the device of the test that runs.
    RankFailed holds the failing rank's traceback, or where every rank stood when the time was up.
    """
    plan = plan or Plan(replicate=world_size)
    pool = _pool_for(world_size, plan)
    try:
        return pool.run(body, args, plan, timeout_seconds)
    except BaseException:
        _POOLS.pop((world_size, devices.CURRENT[-1])).kill()
        raise


def end_idle() -> None:
    """End ranks that have run nothing for IDLE_SECONDS."""
    for (size, device), pool in list(_POOLS.items()):
        if time.monotonic() - pool.used > IDLE_SECONDS[device]:
            _POOLS.pop((size, device)).kill()


def close_all() -> None:
    """End every rank; called when the test session ends."""
    while _POOLS:
        _POOLS.popitem()[1].kill()


# ---------------------------------------------------------------------------------------------- the test's side


@dataclass
class _Pool:
    processes: list[Any]
    pipes: list[Connection]
    folder: tempfile.TemporaryDirectory
    plans: set[str]
    """Of which the ranks have a mesh."""
    used: float = 0.0
    """When they ran something last, by time.monotonic()."""

    def run(self, body: Callable[..., Any], args: tuple, plan: Plan, timeout_seconds: float) -> list[Any]:
        where = (inspect.getsourcefile(body), body.__module__)
        work = pickle.dumps((body, devices.moved(args, "cpu"), plan))
        for pipe in self.pipes:
            pipe.send_bytes(pickle.dumps((where, work)))
        answers = self._collect(time.monotonic() + timeout_seconds)
        self.used = time.monotonic()
        failures = [(rank, answers[rank][1]) for rank in sorted(answers) if not answers[rank][0]]
        if failures:
            first = next((f for f in failures if not any(text in f[1] for text in CONSEQUENCES)), failures[0])
            raise RankFailed(f"rank {first[0]} of {len(self.pipes)}:\n{first[1]}")
        if len(answers) < len(self.pipes):
            raise RankFailed(self._where_they_hang(answers, timeout_seconds))
        return [answers[rank][1] for rank in range(len(self.pipes))]

    def _collect(self, deadline: float) -> dict[int, tuple[bool, Any]]:
        """Answers by rank until all came or time is up; after a first failure the others get 5 s to fail too."""
        answers: dict[int, tuple[bool, Any]] = {}
        while len(answers) < len(self.pipes):
            waiting = [pipe for rank, pipe in enumerate(self.pipes) if rank not in answers]
            ready = wait(waiting, max(0.0, deadline - time.monotonic()))
            if not ready:
                return answers
            for pipe in ready:
                rank = self.pipes.index(pipe)  # type: ignore[arg-type]
                try:
                    answers[rank] = pickle.loads(pipe.recv_bytes())  # type: ignore[union-attr]
                except (EOFError, ConnectionResetError):
                    self.processes[rank].join(5)
                    answers[rank] = (False, f"the process ended with exit code {self.processes[rank].exitcode}")
                if not answers[rank][0]:
                    deadline = min(deadline, time.monotonic() + 5)
        return answers

    def _where_they_hang(self, answers: dict, timeout_seconds: float) -> str:
        """Every silent rank's Python stack."""
        silent = [rank for rank in range(len(self.pipes)) if rank not in answers]
        for rank in silent:
            os.kill(self.processes[rank].pid, signal.SIGUSR1)
        time.sleep(1)
        stacks = [f"rank {rank}:\n{(Path(self.folder.name) / f'stack{rank}').read_text()}" for rank in silent]
        return f"ranks {silent} of {len(self.pipes)} gave no answer within {timeout_seconds:.0f} s\n" + "\n".join(stacks)

    def kill(self) -> None:
        for pipe in self.pipes:
            pipe.close()
        for process in self.processes:
            process.kill()
            process.join()
            process.close()
        self.folder.cleanup()


_POOLS: dict[tuple[int, str], _Pool] = {}
"""By world size and kind of device, the last one used at the end."""
atexit.register(close_all)


def _pool_for(world_size: int, plan: Plan) -> _Pool:
    """The ranks that are there, or new ones, with room made for them."""
    device = devices.CURRENT[-1]
    pool, text = _POOLS.pop((world_size, device), None), to_text(plan)
    if pool is not None and text not in pool.plans and len(pool.plans) >= PLANS_MOST[device]:
        pool.kill()
        pool = None
    if pool is None:
        while _POOLS and sum(size for size, _ in _POOLS) + world_size > RANKS_MOST:
            _POOLS.pop(next(iter(_POOLS))).kill()
        pool = _spawn(world_size, device)
    pool.plans.add(text)
    _POOLS[world_size, device] = pool
    return pool


def _spawn(world_size: int, device: str) -> _Pool:
    folder = tempfile.TemporaryDirectory(prefix="widefield_ranks_")
    if device == "cpu":
        context, variables = multiprocessing.get_context("forkserver"), {"CUDA_VISIBLE_DEVICES": ""}
        context.set_forkserver_preload(PRELOADED)
    else:
        context = multiprocessing.get_context("spawn")
        each = -(-world_size // max(1, torch.cuda.device_count()))
        variables = {RANKS_PER_GPU: str(each), "CUBLAS_WORKSPACE_CONFIG": ":4096:8"}  # with which cuBLAS can be deterministic
    pool = _Pool([], [], folder, set())
    with _environment(OMP_NUM_THREADS="1", **variables):  # read when the child imports torch
        for rank in range(world_size):
            ours, theirs = context.Pipe()
            arguments = (rank, world_size, folder.name, theirs, device)
            process = context.Process(target=_serve, args=arguments, daemon=True, name=f"rank {rank} of {world_size}")
            process.start()
            theirs.close()
            pool.processes.append(process)
            pool.pipes.append(ours)
    return pool


@contextlib.contextmanager
def _environment(**values: str):
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name) if value is None else os.environ.update({name: value})


# ---------------------------------------------------------------------------------------------- the rank's side


def _serve(rank: int, world_size: int, folder: str, pipe: Connection, device: str) -> None:
    """A rank's life: run what comes through the pipe until it closes."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole terminal; the test session ends its ranks
    stack = open(Path(folder) / f"stack{rank}", "w")  # open as long as the process lives
    faulthandler.register(signal.SIGUSR1, file=stack)
    mesh_of = _meet(rank, world_size, folder, device)
    while True:
        try:
            message = pipe.recv_bytes()
        except (EOFError, OSError):
            os._exit(0)  # torch's own teardown may wait for peers that are gone
        try:
            pipe.send_bytes(pickle.dumps((True, _run(message, mesh_of))))
        except BaseException:
            pipe.send_bytes(pickle.dumps((False, traceback.format_exc())))


def _meet(rank: int, world_size: int, folder: str, kind: str) -> Callable[[Plan], Any]:
    """Join the process group; what it returns gives the mesh of a plan, the same one for equal plans."""
    import datetime

    import torch.distributed as dist

    from widefield.comm.devices import backend_for, device_of
    from widefield.comm.mesh import World, join

    torch.set_num_threads(1)
    device = torch.device("cpu") if kind == "cpu" else device_of(rank, rank)
    assert device.type == kind, f"rank {rank} was to run on {kind} and has none"
    if Path("/sys/class/net/lo").exists():
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # a host name without an address must not stop the tests
    timeout = datetime.timedelta(seconds=TIMEOUT_SECONDS)
    if world_size > 1:
        backend = backend_for(device)
        bound = {"device_id": device} if "nccl" in backend else {}
        place = f"file://{folder}/store"  # a file: no port that another session could take
        dist.init_process_group(backend, init_method=place, rank=rank, world_size=world_size, timeout=timeout, **bound)
    world = World(rank=rank, size=world_size, local_rank=rank, local_size=world_size, launcher="tests")
    meshes: dict[str, Any] = {}

    def mesh_of(plan: Plan) -> Any:
        if to_text(plan) not in meshes:
            meshes[to_text(plan)] = join(world, plan, device=device)
        return meshes[to_text(plan)]

    return mesh_of


def _run(message: bytes, mesh_of: Callable[[Plan], Any]) -> Any:
    (path, module), work = pickle.loads(message)
    _import(path, module)
    body, args, plan = pickle.loads(work)
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float32)
    torch.use_deterministic_algorithms(False)
    mesh = mesh_of(plan)
    with warnings.catch_warnings(), devices.running_on(mesh.device):
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", "Guards may run slower on Python 3.13.0", RuntimeWarning)
        warnings.filterwarnings("ignore", "Attempting to run cuBLAS, but there was no current CUDA context", UserWarning)
        found = body(mesh, *devices.moved(args, mesh.device))
    return devices.moved(found, "cpu")


def _import(path: str, module: str) -> None:
    """Make `module` importable under the name that the test session knows it by, once."""
    if module in sys.modules or module.split(".")[0] == "widefield":
        return
    spec = importlib.util.spec_from_file_location(module, path)
    assert spec is not None and spec.loader is not None, f"{path} is no Python file"
    loaded = importlib.util.module_from_spec(spec)
    sys.modules[module] = loaded
    try:
        spec.loader.exec_module(loaded)
    except BaseException:
        del sys.modules[module]
        raise
