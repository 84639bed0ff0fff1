"""Replicas whose bits differ are found and named, whatever differs and whatever the plan; those that agree never are."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from command import RECIPES, fingerprint, record
from marks import few
from ranks import RankFailed, on_ranks

from widefield.config import read_config
from widefield.plans import plan_of
from widefield.run import train
from widefield.training.assemble import assemble, learner_of, training_batches
from widefield.training.checksums import PARTS, Checksums, checksum, combined, factor_of
from widefield.training.loop import Learner
from widefield.training.passes import Passes

PAGE = str(RECIPES / "page.yaml")
SETTINGS = ["mesh.space=[]", "mesh.replicate=1", "data.options.size=[48, 40]", "data.options.pages=[8, 2]", "data.batch_size=6",
            "data.workers=0", "model.options.widths=[8, 12]", "log.tensorboard=false", "schedule.length=7step",
            "schedule.name=constant", "schedule.warmup=0step", "evaluate.every=100step", "ema.decay=0.9"]  # fmt: skip
PLANS = {
    "2 copies": (2, ["mesh.replicate=2"]),
    "3 copies": (3, ["mesh.replicate=3"]),
    "tiles": (2, ["mesh.space=[1,2]"]),
    "zero1": (2, ["mesh.shard=2", "sharding.zero=1"]),
    "copies of shards": (4, ["mesh.replicate=2", "mesh.shard=2"]),
    "copies of channels": (4, ["mesh.replicate=2", "mesh.channel=2"]),
    "copies of stages": (4, ["mesh.replicate=2", "mesh.stage=2"]),
}
FLIPS = ("weight", "buffer", "state", "average")


def flip(tensor: torch.Tensor, bit: int = 0) -> None:
    """One bit of one number, so that it is hardly another one."""
    words = tensor.view(-1)[:1].view({8: torch.int64, 4: torch.int32}[tensor.element_size()])
    words ^= 1 << bit


def found(mesh, settings: list[str], rank: int | None, flipped: list[str]) -> list:
    """What `differences` says after two steps: of sound replicas, and after each flip on `rank`."""
    from widefield import sharded_state

    config = read_config(PAGE, [*SETTINGS, *settings])
    parts = assemble(config, mesh)
    learner, _ = learner_of(parts)
    passes = Passes(training_batches(parts, first=0, last=2), 1)
    for _ in range(2):
        learner.learn(passes.next(), stop=False)
    sums = Checksums(mesh, has_same_buffers=True)
    told = [sums.differences(learner.model, learner.optimizer, learner.ema)]
    of = {
        "weight": list(learner.model.parameters()),
        "buffer": [buffer for buffer in learner.model.buffers() if buffer.is_floating_point()],
        "state": [value for values in learner.optimizer.state.values() for value in values.values() if torch.is_tensor(value)],
        "average": list(learner.ema.parameters()),
    }
    for kind in flipped:
        tensor = next(
            one for one in map(sharded_state.local, (t.detach() for t in of[kind])) if one.numel() > 1 and not one.is_meta
        )
        for _ in range(2):
            if mesh.rank == rank:
                flip(tensor)
            told.append(sums.differences(learner.model, learner.optimizer, learner.ema))
    passes.close()
    return [[(one.part, one.ranks, one.replicas, one.is_named, one.names, one.in_words()) for one in some] for some in told]


@pytest.mark.long
@pytest.mark.parametrize("name", few(PLANS, "3 copies", "copies of shards", then=["copies of stages"], is_sweep=True))
def test_a_flipped_bit_is_named_on_every_plan_and_sound_replicas_are_not(name):
    ranks, axes = PLANS[name]
    plan = plan_of(read_config(PAGE, [*SETTINGS, *axes]), ranks)
    shown = on_ranks(ranks, found, axes, ranks - 1, list(FLIPS), plan=plan)
    assert all(one == shown[0] for one in shown)
    for number, kind in enumerate(FLIPS):
        (flipped,), sound = shown[0][1 + 2 * number] or [None], shown[0][2 + 2 * number]
        assert shown[0][0] == sound == []
        if name == "zero1" and kind == "state":
            assert flipped is None  # each state is on one rank alone
            continue
        part, odd, replicas, is_named, names, words = flipped
        assert part == PARTS[FLIPS.index(kind)]
        assert len(names) == 1 and ranks - 1 in odd and names[0] in words
        expected = {2: tuple(range(ranks)), 3: (0, 1, 2), 4: (1, 3)}[ranks]
        assert replicas == expected and is_named == (ranks == 3)
        assert odd == ((2,) if is_named else expected)
        assert ("rank 2 has other bits" in words) == is_named and ("no majority" in words) == (not is_named)


def trained(mesh, folder: Path, settings: list[str], at: int | None) -> str:
    """A run in which the last rank's memory flips a bit after step `at`, once."""
    real, flipped = Learner.learn, []

    def learn(self, passes, *, stop):
        result = real(self, passes, stop=stop)
        if self.step == at and self.mesh.rank == self.mesh.size - 1 and not flipped:
            flipped.append(True)
            flip(next(self.model.parameters()).detach(), bit=20)
        return result

    Learner.learn = learn
    try:
        return train(read_config(PAGE, [*SETTINGS, *settings]), folder, mesh.world).reason
    finally:
        Learner.learn = real


@pytest.mark.long
def test_a_run_whose_replicas_differ_ends_before_anything_is_saved_and_names_the_rank(tmp_path):
    settings = ["mesh.replicate=3", "guard.checksum_every=100", "checkpoint.every=2step"]
    with pytest.raises(RankFailed, match="after step 4 rank 2 has other bits in weights .* than the 2 other replicas"):
        on_ranks(3, trained, tmp_path / "run", settings, 3)
    assert [entry.name for entry in (tmp_path / "run/checkpoints").iterdir()] == ["step_00000002"]
    told = record(tmp_path / "run", "guard")
    assert told[0]["found"] == "replicas differ" and told[0]["ranks"] == [2] and told[0]["is_named"]


@pytest.mark.long
def test_a_run_that_goes_back_ends_with_the_weights_of_one_that_was_never_wrong(tmp_path):
    settings = ["mesh.replicate=2", "guard.checksum_every=1", "checkpoint.every=2step", "guard.differs=roll_back"]
    assert on_ranks(2, trained, tmp_path / "flipped", settings, 3) == ["complete"] * 2
    assert on_ranks(2, trained, tmp_path / "sound", settings, None) == ["complete"] * 2
    assert fingerprint(tmp_path / "flipped", ranks=2) == fingerprint(tmp_path / "sound", ranks=2)
    told = record(tmp_path / "flipped", "guard")
    assert {line["action"] for line in told} == {"roll_back"} and (told[-1]["left"], told[-1]["to"]) == (3, 2)
    assert record(tmp_path / "sound", "guard") == []


@pytest.mark.long
def test_where_nothing_is_compared_the_run_says_so(tmp_path):
    settings = ["mesh.stage=2", "guard.checksum_every=2"]
    plan = plan_of(read_config(PAGE, [*SETTINGS, *settings]), 2)
    assert on_ranks(2, trained, tmp_path / "run", settings, None, plan=plan) == ["complete"] * 2
    assert any("guard.checksum_every=2 compares nothing under" in line["text"] for line in record(tmp_path / "run", "warning"))


@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16", "float16", "int64", "int32", "uint8", "bool"])
def test_any_flipped_bit_changes_the_checksum(dtype):
    draw = torch.Generator().manual_seed(0)
    for shape in ((), (1,), (7,), (4, 3, 5, 2), (0,)):
        tensor = (torch.rand(shape, generator=draw) * 100).to(getattr(torch, dtype))
        for stored in (tensor, tensor.to(memory_format=torch.channels_last) if tensor.ndim == 4 else tensor.clone()):
            before, memory = int(checksum(stored)), stored.untyped_storage()
            assert before == int(checksum(stored.clone()))
            for place in {0, stored.nbytes // 2, stored.nbytes - 1} if stored.nbytes else ():
                bit = 1 if dtype == "bool" else 1 << int(torch.randint(8, (), generator=draw))
                memory[place] ^= bit
                assert int(checksum(stored)) != before
                memory[place] ^= bit


def test_equal_tensors_under_exchanged_names_have_another_sum():
    one, two = torch.ones(4), torch.zeros(4)
    assert int(combined([("a", one), ("b", two)])) != int(combined([("a", two), ("b", one)]))
    assert combined([]) is None and factor_of("a") % 2 == 1 and factor_of("a") == factor_of("a") != factor_of("b")
