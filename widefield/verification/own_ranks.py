"""Starts the ranks of `verify`: gloo processes on this machine, forked, so that the model need not be pickled."""

from __future__ import annotations

import datetime
import multiprocessing
import os
import tempfile
import traceback
import warnings
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from widefield.comm.mesh import World, join
from widefield.plans import Plan

Answer = TypeVar("Answer")


def on_own_ranks(plan: Plan, body: Callable[..., Answer], timeout_seconds: float) -> Answer:
    """Fork `plan.ranks` gloo ranks that run `body(mesh=...)`; returns rank 0's answer.  RuntimeError: a rank failed."""
    context = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory(prefix="widefield_verify_") as folder, warnings.catch_warnings():
        warnings.simplefilter(
            "ignore", DeprecationWarning
        )  # Python warns of forking a process with threads; the child uses none of them
        ranks = []
        for rank in range(plan.ranks):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(rank, plan, f"file://{folder}/store", body, theirs), daemon=True)
            process.start()
            theirs.close()
            ranks.append((process, ours))
        try:
            return _first_answer(ranks, timeout_seconds)
        finally:
            for process, _ in ranks:
                process.kill()
                process.join()


def _first_answer(ranks: list, timeout_seconds: float) -> Any:
    """Rank 0's answer, or the first failure."""
    pipes: list[Connection] = [pipe for _, pipe in ranks]
    while pipes:
        ready = wait(pipes, timeout_seconds)
        if not ready:
            raise RuntimeError(f"the ranks gave no answer within {timeout_seconds:.0f} s; try a smaller image")
        for pipe in ready:
            try:
                ok, answer = pipe.recv()  # type: ignore[union-attr]
            except EOFError:
                ok, answer = False, "a rank ended without an answer (killed, perhaps for memory)"
            if not ok:
                raise RuntimeError(f"the model failed on ranks:\n{answer}")
            if pipe is ranks[0][1]:
                return answer
            pipes.remove(pipe)  # type: ignore[arg-type]
    raise RuntimeError("no rank answered")


def _serve(rank: int, plan: Plan, store: str, body: Callable[..., Any], pipe: Connection) -> None:
    try:
        torch.set_num_threads(1)
        if os.path.exists("/sys/class/net/lo"):
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
        if plan.ranks > 1:
            wait_for = datetime.timedelta(minutes=10)
            dist.init_process_group("gloo", init_method=store, rank=rank, world_size=plan.ranks, timeout=wait_for)
        world = World(rank, plan.ranks, rank, plan.ranks, launcher="verify")
        pipe.send((True, body(mesh=join(world, plan, device=torch.device("cpu")))))
    except BaseException:
        pipe.send((False, traceback.format_exc()))
    finally:
        os._exit(0)
