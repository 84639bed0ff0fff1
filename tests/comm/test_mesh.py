"""Do ranks meet, agree and refuse together?"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading

import pytest
import torch
from devices import on_gpu_too
from ranks import on_ranks
from torch import nn

from widefield import parallelize
from widefield.comm.mesh import World, join, leave
from widefield.plans import Plan, check
from widefield.sharded_state import gather_full_on_main


def place(mesh):
    return (
        mesh.rank,
        mesh.size,
        mesh.is_main,
        mesh.device.type,
        dict(zip(mesh.devices.mesh_dim_names, mesh.devices.shape, strict=True)),
    )


@on_gpu_too
@pytest.mark.parametrize("size", [2, 3])
def test_ranks_know_their_place(size, device):
    axes = {"replicate": size}
    assert on_ranks(size, place) == [(rank, size, rank == 0, device, axes) for rank in range(size)]


def threads_of_a_backward(mesh):
    threads = set[int]()
    leaf = torch.ones(3, device=mesh.device, requires_grad=True)
    product = leaf * 2
    product.register_hook(lambda _: threads.add(threading.get_ident()))
    product.sum().backward()
    return threads == {threading.get_ident()}


@on_gpu_too
def test_a_backward_runs_in_the_thread_that_calls_it():
    assert on_ranks(2, threads_of_a_backward) == [True, True]


def exchanged(mesh):
    number = torch.tensor([mesh.rank + 1.0, 10.0])
    total = mesh.sum_(number)
    first = mesh.broadcast_(torch.tensor([mesh.rank + 5]))
    mesh.barrier()
    return total is number, total.tolist(), first.tolist(), mesh.gather_objects({"rank": mesh.rank})


@on_gpu_too
def test_sums_are_in_place_over_all_ranks_and_rank_zero_is_broadcast():
    assert on_ranks(3, exchanged) == [(True, [6.0, 30.0], [5], [{"rank": 0}, {"rank": 1}, {"rank": 2}])] * 3


@on_gpu_too
def test_on_one_rank_every_message_stays_at_home():
    assert on_ranks(1, exchanged) == [(True, [1.0, 10.0], [5], [{"rank": 0}])]


def disagreement(mesh, problems):
    try:
        mesh.agree(problems[mesh.rank])
    except ValueError as error:
        return str(error)


@on_gpu_too
def test_one_ranks_problem_is_raised_on_every_rank():
    assert on_ranks(3, disagreement, [None, "no such folder", "disk full"]) == ["rank 1: no such folder"] * 3
    assert on_ranks(3, disagreement, [None] * 3) == [None] * 3
    assert on_ranks(1, disagreement, ["no such folder"]) == ["no such folder"]


def checkpoint_group(mesh):
    return mesh.checkpoint_group is not mesh.data_group, mesh.checkpoint_group.size()


@on_gpu_too
def test_checkpoints_have_a_group_of_their_own():
    assert on_ranks(2, checkpoint_group) == [(True, 2)] * 2


def test_on_one_rank_there_is_no_process_group():
    mesh = join(World(), Plan())
    assert mesh.data_group is None and mesh.checkpoint_group is None and not torch.distributed.is_initialized()


# ---------------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(("plan", "ranks", "words"), [
    (Plan(replicate=4), 3, r"the mesh \(replicate 4\) needs 4 ranks and there are 3; set mesh.replicate=3, or start 4 ranks"),
    (Plan(), 2, r"the mesh \(every axis 1\) needs 1 ranks and there are 2; set mesh.replicate=2"),
])  # fmt: skip
def test_a_wrong_number_of_ranks_names_the_axis_to_change(plan, ranks, words):
    with pytest.raises(ValueError, match=words):
        check(plan, ranks=ranks)
    with pytest.raises(ValueError, match=words):
        join(World(size=ranks), plan)


def shards_of(mesh):
    return mesh.shards and (mesh.shards.ndim, mesh.shards.mesh.flatten().tolist(), mesh.data_group.size())


@on_gpu_too
@pytest.mark.parametrize(("plan", "shards"), [
    (Plan(replicate=4), [None] * 4),
    (Plan(shard=4), [(1, [0, 1, 2, 3], 4)] * 4),
    (Plan(shard=2, space=[1, 2]), [(1, [0, 1, 2, 3], 4)] * 4),
    (Plan(replicate=2, shard=2), [(2, [0, 1, 2, 3], 4)] * 4),
])  # fmt: skip
def test_weights_are_cut_over_the_copies_and_tiles_that_replicate_leaves(plan, shards):
    assert on_ranks(4, shards_of, plan=plan) == shards


def test_more_copies_than_samples_are_refused():
    with pytest.raises(ValueError, match="4 copies of the model share a batch of 3 samples.*data.batch_size=4 or more"):
        check(Plan(replicate=4), ranks=4, samples_per_step=3)
    check(Plan(replicate=4), ranks=4, samples_per_step=4)


@pytest.mark.parametrize(("plan", "ranks", "words"), [
    (Plan(replicate=2, data_strategy="data_parallel"), 2, "drives all GPUs from one process and the mesh asks for 2"),
    (Plan(data_strategy="data_parallel"), 1, "batch_norm=synchronized cannot hold; set batch_norm=broadcast"),
])  # fmt: skip
def test_data_parallel_with_ranks_or_exact_batch_norm_is_refused(plan, ranks, words):
    with pytest.raises(ValueError, match=words):
        check(plan, ranks=ranks)


def test_a_meeting_place_without_an_address_is_an_error_and_never_a_world_of_one():
    world = World(rank=1, size=2, address="no-such-host.invalid", port=29500, launcher="slurm")
    with pytest.raises(ValueError) as said:
        join(world, Plan(replicate=2))
    assert "rank 1 of 2 cannot resolve the meeting place no-such-host.invalid:29500" in str(said.value)
    assert "the environment of slurm names it: set MASTER_ADDR" in str(said.value)
    assert not torch.distributed.is_initialized()


ALONE = """
import sys
from widefield.comm.mesh import World, join
from widefield.plans import Plan
try:
    join(World(rank=int(sys.argv[1]), size=2, port=int(sys.argv[2])), Plan(replicate=2), timeout_seconds=2)
except ValueError as error:
    print(error)
"""


@pytest.mark.long
def test_a_rank_whose_peers_never_come_says_so():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-c", ALONE, "0", str(port)]
    said = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    assert f"rank 1 of 2 did not come to 127.0.0.1:{port} within 2 s; 1 came, as rank 0" in said.stdout, said.stderr
    assert "See that all were started, with the same address, and that the port is open" in said.stdout


def groups_left(mesh):
    """How many process groups there are, and the smallest one's ranks, with the mesh of another plan and after it."""
    from torch.distributed.distributed_c10d import _world

    found = []
    for plan in (Plan(replicate=2, space=[2]), Plan(shard=2, channel=2), Plan(replicate=4)):
        before = set(_world.pg_map)
        other = join(mesh.world, plan, device=mesh.device)
        made = set(_world.pg_map) - before
        sizes = {torch.distributed.get_world_size(group) for group in made}
        total = other.sum_(torch.ones(1)).item()
        leave(other)
        found.append((len(made) > 0, min(sizes) > 1, total, set(_world.pg_map) == before))
    return found, mesh.sum_(torch.ones(1)).item()


@on_gpu_too
def test_a_mesh_has_no_group_of_one_rank_and_leaves_none_behind():
    assert on_ranks(4, groups_left) == [([(True, True, 4.0, True)] * 3, 4.0)] * 4


def wholes_of_meshes_in_turn(mesh):
    """The weights that rank 0 puts together, and torch itself, on three equal meshes, each left before the next one."""
    found = []
    for _ in range(3):
        other = join(mesh.world, Plan(replicate=2, shard=2), device=mesh.device)
        layer = nn.Linear(3, 5, bias=False, dtype=torch.float64)
        nn.init.constant_(layer.weight, 0.5)
        model = parallelize(layer, other)
        model(torch.ones(2, 3, dtype=torch.float64)).sum().backward()
        torch.optim.Adam(model.parameters()).step()
        wholes = gather_full_on_main(model, other, dict(model.state_dict()))
        found.append(
            (wholes["weight"].sum().item() if mesh.is_main else None, model.weight.detach().full_tensor().sum().item())
        )
        leave(other)
    return found


def test_a_mesh_that_was_left_does_not_reach_into_an_equal_one():
    expected = pytest.approx(15 * (0.5 - 1e-3), rel=1e-6)
    for rank, found in enumerate(on_ranks(4, wholes_of_meshes_in_turn)):
        assert found == [(expected if rank == 0 else None, expected)] * 3


def own_lines(mesh):
    from torch.distributed.distributed_c10d import _resolve_process_group

    spaces = [_resolve_process_group(name) for _, name in mesh.grid.groups]
    return [group is not None and group is not mesh.group for group in [*spaces, mesh.stage_group][:1]]


@pytest.mark.parametrize("plan", [Plan(space=[2]), Plan(stage=2)])
def test_messages_between_two_ranks_have_a_group_of_their_own(plan):
    """Else a watch for missing ranks, which compares how many collectives of all ranks have begun, would name the wrong one."""
    assert on_ranks(2, own_lines, plan=plan) == [[True]] * 2
