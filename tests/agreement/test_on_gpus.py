"""Servers, pairs and replicas whose ranks have a GPU: their numbers are the CPU's, from the same log or by hand."""

from __future__ import annotations

import pytest
import torch
from agreement import test_compressed_runs as compressed
from agreement import test_pair_runs as pairs
from agreement import test_replicas as replicas
from agreement import test_server_runs as server
from agreement import test_several_servers as several
from devices import on_gpu_alone
from ranks import on_ranks

from widefield.plans import plan_of

SERVERS = {
    "asynchronous": server.RUNS["asynchronous"],
    "AdamW": server.RUNS["AdamW"],
    "bound": server.RUNS["bound"],
    "compensated": server.RUNS["compensated"],
    "synchronous": server.RUNS["synchronous"],
    "int8": compressed.RUNS["int8"],
    "topk": compressed.RUNS["topk"],
    "overlap": several.ONE["overlap"],
}


def weights_from_the_cpu(mesh, body, *args):
    """Tests' nets draw their initial weights on the CPU, as those that they are compared with; widefield moves them."""
    with torch.device("cpu"):
        return body(mesh, *args)


def assert_replayed(rooms, folder, runs, *, tolerance=1e-9):
    with torch.device("cpu"):
        for name, settings in runs.items():
            expected, found = rooms.replayed(folder / name, settings), rooms.weights_of(folder / name)
            server.assert_close(found, expected, tolerance)


@on_gpu_alone
def test_a_server_and_its_workers(tmp_path):
    on_ranks(3, weights_from_the_cpu, server.ran_all, tmp_path, SERVERS, plan=plan_of(server.config_of(SERVERS["bound"]), 3))
    assert_replayed(server, tmp_path, SERVERS)


@on_gpu_alone
def test_several_servers(tmp_path):
    runs = {name: several.SERVERS[2][name] for name in ("asynchronous", "AdamW", "overlap")}
    plan = plan_of(server.config_of(runs["AdamW"]), 4)
    on_ranks(4, weights_from_the_cpu, server.ran_all, tmp_path, runs, plan=plan)
    assert_replayed(server, tmp_path, runs)


@on_gpu_alone
def test_workers_in_pairs(tmp_path):
    runs = {name: pairs.RUNS[name] for name in ("sgd", "adamw")}
    on_ranks(4, weights_from_the_cpu, pairs.ran_all, tmp_path, runs, plan=plan_of(pairs.config_of([]), 4))
    assert_replayed(pairs, tmp_path, runs)


@on_gpu_alone
@pytest.mark.parametrize("name", ["local", "slowmo", "diloco", "averaged weights"])
def test_replicas_that_average(name):
    config = replicas.config_of(replicas.AGREEMENTS[name])
    found = on_ranks(2, weights_from_the_cpu, replicas.trained, replicas.AGREEMENTS[name], plan=plan_of(config, 2))
    with torch.device("cpu"):
        replicas.check(found, replicas.ByHand(config, 2).train(replicas.STEPS), each=1, tolerance=1e-9)


@on_gpu_alone
def test_replicas_that_mix_with_a_few():
    found = on_ranks(4, weights_from_the_cpu, replicas.trained_by_gossip)
    with torch.device("cpu"):
        for name, settings in replicas.GOSSIP.items():
            hand = replicas.ByHand(replicas.config_of(settings), 4).train(replicas.STEPS)
            replicas.check([one[name] for one in found], hand, each=1, tolerance=1e-9)
