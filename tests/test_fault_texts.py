"""What may be asked of WIDEFIELD_FAULTS, and what is drawn from a seed."""

from __future__ import annotations

import math

import pytest
import torch

from widefield.faults.fault import ACTS, KINDS_OF_PHASE, PlantedFault, faults_of
from widefield.faults.injector import InjectedFaultError, Injector, left_of, note_in
from widefield.faults.tensors import one_less, spoil_


def test_a_text_names_faults_one_by_one():
    one, other = faults_of("rank=1 step=7 phase=forward kind=kill; rank=0 step=5+ phase=data kind=delay seconds=0.2 ;", ranks=2)
    assert (one.rank, one.phase, one.kind, one.first, one.last, one.call, one.every) == (1, "forward", "kill", 7, 7, 1, False)
    assert other.is_at(5) and other.is_at(10**6) and not other.is_at(4) and other.every and other.seconds == 0.2
    assert str(one) == "rank=1 step=7 phase=forward kind=kill call=1" and faults_of(str(one), ranks=2)[0].kind == "kill"
    assert str(faults_of("rank=0 step=any phase=load kind=io_error", ranks=1)[0]).startswith("rank=0 step=any phase=load")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("rank=1 phase=data kind=kill", "it lacks step"),
        ("rank=2 step=1 phase=data kind=kill", "rank 2 is not among the 2 of this run"),
        ("rank=1 step=x phase=data kind=kill", "step=x is no whole number"),
        ("rank=1 step=5-3 phase=data kind=kill", "the steps 5-3 end before they begin"),
        ("rank=1 step=1 phase=loss kind=kill", "phase=loss is none of data, forward, halo"),
        ("rank=1 step=1 phase=data kind=skip", "kind=skip is none of exception, kill, stop"),
        ("rank=1 step=1 phase=data kind=kill call=0", "calls are counted from 1"),
        ("rank=1 step=1 phase=data kind=delay seconds=-1", "no time of up to a million seconds"),
        ("rank=1 step=1 phase=data kind", "'kind' is none of rank=..., step=..."),
        ("who=1", "'who=1' is none of"),
    ],
)
def test_what_cannot_be_read_is_refused_in_words(text, words):
    with pytest.raises(ValueError, match="cannot be injected") as error:
        faults_of(text, ranks=2)
    assert words in str(error.value)


def test_a_resumed_run_on_fewer_ranks_leaves_out_the_faults_of_others():
    assert faults_of("rank=3 step=1 phase=data kind=kill", ranks=2, goes_on=True) == []


def test_what_is_left_open_is_drawn_from_the_seed():
    drawn = [faults_of(f"rank=any step=3-9 phase=any kind=any seed={seed}", ranks=4)[0] for seed in range(200)]
    again = [faults_of(f"rank=any step=3-9 phase=any kind=any seed={seed}", ranks=4)[0] for seed in range(200)]
    assert drawn == again
    assert {fault.rank for fault in drawn} == set(range(4)) and {fault.first for fault in drawn} == set(range(3, 10))
    assert {fault.phase for fault in drawn} == set(KINDS_OF_PHASE)
    assert all(fault.kind in KINDS_OF_PHASE[fault.phase] for fault in drawn)


def injector(text: str, noted: list | None = None, rank: int = 0) -> Injector:
    note = lambda fault, step: (noted if noted is not None else []).append((str(fault), step))  # noqa: E731
    return Injector(faults_of(text, ranks=2), rank=rank, device=torch.device("cpu"), note=note)


def test_a_fault_comes_once_at_its_step_and_call_on_its_rank():
    noted: list = []
    here, elsewhere = (injector("rank=0 step=2 phase=data kind=exception call=2", noted, rank) for rank in (0, 1))
    for step in (1, 2, 3, 2):
        here.step = elsewhere.step = step
        for call in (1, 2, 3):
            elsewhere.before("data")
            if (step, call, len(noted)) == (2, 2, 0):
                with pytest.raises(InjectedFaultError, match="injected on rank 0 in data"):
                    here.before("data")
            else:
                here.before("data")
            here.before("forward")
    assert noted == [("rank=0 step=2 phase=data kind=exception call=2", 2)] and here.left == []


def test_a_fault_of_every_step_comes_again_and_again():
    noted: list = []
    one = injector("rank=0 step=2+ phase=data kind=delay seconds=0", noted)
    for step in range(1, 5):
        one.step = step
        one.before("data")
        one.before("data")
    assert [step for _, step in noted] == [2, 3, 4]


@pytest.mark.parametrize(("kind", "error"), [("out_of_memory", RuntimeError), ("io_error", OSError), ("disk_full", OSError)])
def test_what_is_raised_is_what_the_system_raises(kind, error):
    phase = "save" if kind == "disk_full" else "data"
    texts = {"out_of_memory": "memory", "io_error": r"Errno 5\]", "disk_full": r"Errno 28\] No space left on device"}
    with pytest.raises(error, match=texts[kind]):
        injector(f"rank=0 step=0 phase={phase} kind={kind}").before(phase)


def test_a_record_has_each_fault_before_it_comes_and_a_resumed_run_passes_it_over(tmp_path):
    record = tmp_path / "record.jsonl"
    faults = faults_of("rank=0 step=1 phase=data kind=kill; rank=0 step=1+ phase=data kind=delay", ranks=1)
    note_in(record)(faults[0], 1)
    assert not record.exists() and left_of(faults, record) == faults
    record.write_text('{"kind": "start"}\n')
    note_in(record)(faults[0], 1)
    note_in(record)(faults[1], 1)
    assert left_of(faults, record) == [faults[1]]


# ---------------------------------------------------------------------------------------------- numbers


def fault(kind: str, seed: int) -> PlantedFault:
    return faults_of(f"rank=0 step=1 phase=optimizer kind={kind} seed={seed}", ranks=1)[0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.uint8])
@pytest.mark.parametrize("kind", ["nan", "bit_flip"])
def test_exactly_one_number_is_made_wrong(dtype, kind):
    for seed in range(20):
        before = torch.arange(24).reshape(2, 3, 4).to(dtype).permute(2, 0, 1)
        after = before.clone()
        spoil_(after, fault(kind, seed))
        bits = (before.contiguous().view(torch.uint8) ^ after.contiguous().view(torch.uint8)).tolist()
        wrong = (before != after) | after.isnan()
        assert wrong.sum() == 1 or (kind == "bit_flip" and before[wrong].numel() == 0)  # -0 is 0
        if kind == "nan" and dtype.is_floating_point:
            assert math.isnan(after[wrong].item())
        if kind == "bit_flip":
            assert sum(value.bit_count() for value in torch.tensor(bits).flatten().tolist()) == 1
    spoil_(torch.empty(0), fault(kind, 0))


def test_a_wrong_shape_is_one_number_less():
    assert one_less(torch.ones(2, 3)).shape == (5,) and one_less(torch.ones(())).shape == (2,)


def test_every_phase_may_meet_what_any_code_may():
    assert all({"exception", "kill", "stop", "delay", "out_of_memory"} <= set(kinds) for kinds in KINDS_OF_PHASE.values())
    assert set(ACTS) <= {kind for kinds in KINDS_OF_PHASE.values() for kind in kinds}
