"""Are ranks that call different collectives named before they wait for each other?"""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from ranks import on_ranks

from widefield.comm.attempt import attempt
from widefield.comm.fingerprints import Fingerprints, RanksDifferError, is_possible
from widefield.comm.mesh import Mesh
from widefield.private_torch.process_groups import get_default_store

pytestmark = pytest.mark.skipif(not is_possible(dist.ProcessGroup), reason="this torch has no hooks of process groups")


def compared(mesh: Mesh, number: int, odd_rank: int | None, odd_step: int, what: str) -> tuple[str, list[int]]:
    """Three steps of three collectives, of which `odd_rank` calls another one; what is raised, on whichever rank it is."""
    prints = Fingerprints(dist.PrefixStore(f"test/{number}", get_default_store().clone()), [mesh.group], rank=mesh.rank)
    said, culprits = "", list[int]()

    def steps(own: Mesh) -> None:
        nonlocal said, culprits
        prints = Fingerprints(dist.PrefixStore(f"own/{number}", get_default_store().clone()), [own.group], rank=own.rank)
        try:
            for step in range(3):
                prints.begin_step()
                dist.all_reduce(torch.ones(4), group=own.group)
                odd = own.rank == odd_rank and step == odd_step
                if odd and what == "operation":
                    dist.broadcast(torch.ones(6), group_src=0, group=own.group)
                else:
                    count, dtype = (
                        (5 if odd and what == "shape" else 6),
                        torch.float64 if odd and what == "dtype" else torch.float32,
                    )
                    dist.all_reduce(torch.ones(count, dtype=dtype), group=own.group)
                dist.all_reduce(torch.ones(2), group=own.group)
        except RanksDifferError as error:
            said, culprits = str(error), error.culprits
            raise MemoryError from error
        finally:
            prints.close()

    prints.close()
    attempt(mesh, steps, gives_up=lambda error: "differs" if isinstance(error, MemoryError) else None)
    return said, culprits


def several(mesh: Mesh, cases: list) -> list:
    return [compared(mesh, number, *case) for number, case in enumerate(cases)]


def of_all(found: list) -> list[tuple[str, list[int]]]:
    """What was raised in each case, by the ranks that raised."""
    return [next((one for one in of_case if one[0]), ("", [])) for of_case in zip(*found, strict=True)]


@pytest.mark.long
def test_of_two_ranks_both_are_named_at_first_and_then_the_one_that_changed():
    cases = [(1, 0, "operation"), (1, 1, "operation"), (0, 1, "shape"), (1, 1, "dtype"), (None, 0, "")]
    first, second, shape, dtype, nothing = of_all(on_ranks(2, several, cases))
    assert first[1] == [0, 1] and "ranks 0, 1 do not agree" in first[0] and "in step 1 of this process" in first[0]
    assert (
        second[1] == [1]
        and "rank 1 is the odd one" in second[0]
        and "collective 5 of a group of 2 ranks, in step 2" in second[0]
    )
    assert "rank 1 calls broadcast (float32, 6 numbers) at " in second[0] and "rank 0 calls allreduce (float32, 6" in second[0]
    assert "test_fingerprints.py" in second[0] and "in steps" in second[0]
    assert shape[1] == [0] and "rank 0 calls allreduce (float32, 5 numbers)" in shape[0]
    assert dtype[1] == [1] and "allreduce (float64, 6 numbers)" in dtype[0]
    assert nothing == ("", [])


@pytest.mark.long
def test_of_more_ranks_the_odd_one_is_in_the_minority():
    cases = [(2, 0, "operation"), (0, 0, "shape"), (1, 0, "shape")]
    for (said, culprits), (odd, *_) in zip(of_all(on_ranks(3, several, cases)), cases, strict=True):
        assert culprits == [odd] and f"rank {odd} is the odd one" in said


def test_later_steps_cost_nothing():
    assert on_ranks(2, hooks_after_three_steps) == [[True, True, False]] * 2


def hooks_after_three_steps(mesh: Mesh) -> list[bool]:
    prints = Fingerprints(dist.PrefixStore("later", get_default_store().clone()), [mesh.group], rank=mesh.rank)
    found = []
    for _ in range(3):
        prints.begin_step()
        dist.all_reduce(torch.ones(3), group=mesh.group)
        found.append(prints.is_open)
    return found
