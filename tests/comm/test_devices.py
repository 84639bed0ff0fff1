"""Which GPU does a rank take, what carries its messages, and what is refused?"""

from __future__ import annotations

import pytest
import torch
from ranks import on_ranks

from widefield.comm.devices import RANKS_PER_GPU, backend_for, device_of, message_device, passes_the_host, ranks_per_gpu
from widefield.comm.mesh import World, join
from widefield.parallel.parallelize import parallelize, reasons
from widefield.plans import Plan

CPU, GPU = torch.device("cpu"), torch.device("cuda", 1)


@pytest.fixture
def two_gpus(monkeypatch):
    """A machine with two of them, as far as ranks ask; the GPUs that ranks have taken."""
    taken: list[torch.device] = []
    for name, found in {"is_available": lambda: True, "device_count": lambda: 2, "set_device": taken.append}.items():
        monkeypatch.setattr(torch.cuda, name, found)
    return taken


def test_each_rank_has_a_gpu_of_its_own_and_nccl(two_gpus):
    assert [device_of(rank, rank % 2) for rank in (4, 5)] == two_gpus == [torch.device("cuda", 0), torch.device("cuda", 1)]
    assert backend_for(GPU) == "cpu:gloo,cuda:nccl"


def test_ranks_that_share_gpus_are_dealt_out_in_turns_and_gloo_carries_their_messages(two_gpus, monkeypatch):
    monkeypatch.setenv(RANKS_PER_GPU, "2")
    assert [device_of(rank, rank).index for rank in range(4)] == [0, 1, 0, 1]
    assert backend_for(GPU) == "gloo"


def test_without_gpus_ranks_compute_on_the_cpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert device_of(3, 3) == CPU and backend_for(CPU) == "gloo"


def test_more_ranks_than_gpus_are_refused_unless_they_may_share(two_gpus, monkeypatch):
    with pytest.raises(
        ValueError, match="rank 7 is number 3 on its machine and that has 2 GPUs; start at most 2 ranks per"
    ) as said:
        device_of(7, 3)
    assert f"or let 2 share a GPU, which is slow ({RANKS_PER_GPU}=2)" in str(said.value)
    monkeypatch.setenv(RANKS_PER_GPU, "2")
    with pytest.raises(ValueError, match="has 2 GPUs, for 2 ranks each; start at most 4 ranks per machine, or let 3 share"):
        device_of(4, 4)
    assert not two_gpus


@pytest.mark.parametrize("said", ["", "0", "-1", "two", "1.5"])
def test_no_number_of_ranks_per_gpu_is_refused(said, monkeypatch):
    monkeypatch.setenv(RANKS_PER_GPU, said)
    with pytest.raises(ValueError, match=f"{RANKS_PER_GPU}='{said}' is no number of ranks; set it to 1 or more"):
        ranks_per_gpu()


def carried(mesh):
    """Whether messages between GPUs would pass the host's memory, where such a message lies, and what is said of it."""
    group, gpu = mesh.group, torch.device("cuda", 0)
    said = [passes_the_host(group, device) for device in (CPU, gpu)], message_device(group, gpu), message_device(group, CPU)
    on_gpu = type(mesh)(**(vars(mesh) | {"device": gpu}))
    return said, [len(mesh.reasons), *(("go by gloo" in why) for why in on_gpu.reasons)]


def test_gloo_takes_messages_between_gpus_by_the_host_and_the_mesh_says_so():
    assert on_ranks(2, carried) == [(([False, True], CPU, CPU), [0, True])] * 2


def reasons_of_sharing(mesh):
    shared = type(mesh)(**(vars(mesh) | {"device": torch.device("cuda", 0)}))
    model = torch.nn.Linear(2, 2)
    parallelize(model, mesh)
    return shared.reasons[0] in reasons(model), mesh.reasons


def test_ranks_on_the_cpu_have_nothing_to_say_of_gpus():
    assert on_ranks(2, reasons_of_sharing) == [(False, [])] * 2


def test_a_rank_may_be_told_its_device(two_gpus):
    assert join(World(), Plan(), device=CPU).device == CPU and not two_gpus
