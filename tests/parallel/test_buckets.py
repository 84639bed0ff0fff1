"""Is the size of gradient buckets that is found by measuring a sensible one, and the same on every rank?"""

from __future__ import annotations

import pytest
import torch
from ranks import on_ranks
from torch import nn

from widefield import parallelize
from widefield.parallel.strategies._buckets import bucket_mib, chosen_mib
from widefield.plans import Plan

MIB = 2**20


@pytest.mark.parametrize(
    ("milliseconds", "per_mib", "total", "expected"),
    [
        (0.1, 1.0, 100, 2),  # 2 MiB take 2.1 ms: 0.1 is a twentieth
        (0.0, 1.0, 100, 1),  # nothing to gain by waiting
        (5.0, 1.0, 100, 32),  # slow to begin: a fourth of the gradients, at a power of 2
        (5.0, 1.0, 2, 1),  # few gradients
        (0.4, 1.0, 1000, 8),
    ],
)
def test_a_bucket_hides_what_a_message_costs_and_leaves_early(milliseconds, per_mib, total, expected):
    assert chosen_mib(milliseconds / 1e3, per_mib / 1e3 / MIB, total * MIB) == expected


def measured(mesh):
    return bucket_mib(nn.Linear(1000, 1000), mesh), bucket_mib(nn.Linear(3, 3), mesh)[0]


def test_ranks_agree_on_what_they_measured():
    found = on_ranks(3, measured, plan=Plan(replicate=3, bucket_mib=None))
    assert found == [found[0]] * 3
    (size, (why,)), least = found[0]
    assert size >= 1 and least == 1 and f"gradient.bucket_mib={size:g}: a message takes " in why and "3.82 MiB" in why


def asked(mesh):
    return bucket_mib(nn.Linear(1000, 1000), mesh)


def test_a_size_that_is_given_is_taken_and_nothing_is_sent():
    assert on_ranks(2, asked, plan=Plan(replicate=2, bucket_mib=7.0)) == [(7.0, [])] * 2


def memory_of_steps(mesh) -> tuple[list[int], list[bool]]:
    """Where the first gradient lies after each of five backwards, and whether one that was kept stayed as it was."""
    torch.manual_seed(0)
    model = parallelize(nn.Linear(400, 300), mesh)
    places, kept, stays = [], [], []
    for step in range(5):
        model.zero_grad(set_to_none=True)
        model(torch.full((2, 400), 1.0 + step)).square().sum().backward()
        places.append(model.weight.grad.data_ptr())
        if step == 2:
            kept.append((model.weight.grad, model.weight.grad.clone()))
        stays += [torch.equal(gradient, before) for gradient, before in kept]
    return places, stays


def test_memory_of_gradients_that_are_gone_is_used_again_and_no_other():
    """In new memory every page costs; what somebody keeps of a gradient is theirs."""
    for places, stays in on_ranks(2, memory_of_steps):
        assert all(stays) and len(stays) == 3
        assert places[1] == places[2] and places[3] != places[2] and places[4] == places[3]
