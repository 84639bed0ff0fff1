"""NaN, Inf and spikes are seen before the step, by all ranks alike, under every plan, and leave nothing of them behind."""

from __future__ import annotations

import doctest
import json
import math
from pathlib import Path

import pytest
import safetensors.torch
import torch
from command import RECIPES, losses, record
from marks import few
from ranks import RankFailed, on_ranks

from widefield.comm.mesh import World
from widefield.config import GuardConfig, read_config
from widefield.plans import plan_of
from widefield.run import train
from widefield.training import guard as guard_module
from widefield.training import refused_batch
from widefield.training.guard import Guard, RefusedStepError, RollBack, score_of
from widefield.training.loop import Learner

PAGE = str(RECIPES / "page.yaml")
SETTINGS = [
    "mesh.space=[]", "mesh.replicate=1", "data.options.size=[48, 40]", "data.options.pages=[8, 2]", "data.batch_size=4",
    "data.workers=0", "precision=float64", "model.options.widths=[8, 12]", "optimizer.lr=0.003", "log.tensorboard=false",
    "schedule.length=7step", "schedule.name=constant", "schedule.warmup=0step", "evaluate.every=100step",
    "checkpoint.every=2step",
]  # fmt: skip
BAD = 4
"""The step, counted from 0, that goes wrong: the run's fifth."""
PLANS = {
    "one": (1, []),
    "replicate": (2, ["mesh.replicate=2"]),
    "zero3": (2, ["mesh.shard=2"]),
    "zero1": (2, ["mesh.shard=2", "sharding.zero=1"]),
    "space": (2, ["mesh.space=[1,2]"]),
    "channel": (2, ["mesh.channel=2"]),
    "stage": (2, ["mesh.stage=2"]),
    "stream": (1, ["stream.tiles=[2,1]"]),
    "replicate x space": (4, ["mesh.replicate=2", "mesh.space=[2,1]"]),
    "accumulate": (2, ["mesh.replicate=2", "gradient.accumulate=2"]),
}
ACTIONS = ["skip", "roll_back"]


def wrong(kind: str, rank: int):
    """A loss that goes wrong in step BAD, of the samples of one rank's copy only."""
    real = Learner.loss_of

    def loss_of(self, output, target, **more):
        loss = real(self, output, target, **more)
        if self.step != BAD or self.mesh.copy != rank or not self.model.training:
            return loss
        if kind == "gradient":
            return loss + (loss * 0).sqrt()  # 0, whose gradient is 0 / 0
        return loss * {"nan": math.nan, "inf": math.inf, "spike": 1e6}[kind]

    return real, loss_of


def trained(mesh, folder: Path, settings: list[str], kind: str = "nan", rank: int = 0) -> list:
    """Losses that `learn` gave, and the outcome, of a run whose step BAD goes wrong."""
    real, Learner.loss_of = wrong(kind, rank)
    try:
        outcome = train(read_config(PAGE, [*SETTINGS, *settings]), folder, World() if mesh is None else mesh.world)
    finally:
        Learner.loss_of = real
    return [outcome.reason, outcome.step]


def under(name: str, folder: Path, settings: list[str], kind: str = "nan", rank: int = 0) -> None:
    ranks, axes = PLANS[name]
    settings = [*axes, *settings]
    plan = plan_of(read_config(PAGE, [*SETTINGS, *settings]), ranks)
    for reason, step in on_ranks(ranks, trained, folder, settings, kind, rank, plan=plan):
        assert (reason, step) == ("complete", 7)


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return safetensors.torch.load_file(folder / "weights.safetensors")


def assert_equal(one: Path, other: Path) -> None:
    """To rounding: ranks add up in another order."""
    mine, theirs = weights(one), weights(other)
    for name, weight in theirs.items():
        assert torch.isfinite(mine[name]).all(), name
        assert (mine[name] - weight).abs().max() <= 1e-9 * weight.abs().max().clamp(min=1), name


@pytest.fixture(scope="module")
def one_rank(tmp_path_factory):
    """The weights of one rank that never has the bad batch: it is left out of the order, by hand."""
    folder = tmp_path_factory.mktemp("one")
    real = Learner.learn

    def learn(self, passes, *, stop):
        if self.step != BAD:
            return real(self, passes, stop=stop)
        self.pass_over(passes)
        return 0.0, False

    def run(name: str) -> Path:
        if not (folder / name).exists():
            Learner.learn = learn
            try:
                train(read_config(PAGE, [*SETTINGS, *PLANS[name][1], "mesh.replicate=1"]), folder / name, World())
            finally:
                Learner.learn = real
        return folder / name

    return run


FIRST = [(name, action) for name in ("one", "replicate", "stream") for action in ACTIONS]
IN_TURN = [(name, ACTIONS[n % 2]) for n, name in enumerate(PLANS) if (name, ACTIONS[n % 2]) not in FIRST]


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "action"),
    few([(name, action) for name in PLANS for action in ACTIONS], *FIRST, then=IN_TURN, is_sweep=True),
)
def test_a_refused_batch_changes_nothing_on_any_plan(tmp_path, one_rank, name, action):
    """Weights and running statistics are those of a run that was never given the batch."""
    under(name, tmp_path / "run", [f"guard.non_finite={action}"])
    assert_equal(tmp_path / "run", one_rank("accumulate" if name == "accumulate" else "one"))
    guard = record(tmp_path / "run", "guard")
    assert [line["action"] for line in guard] == [action] + ["roll_back", "pass_over"] * (action == "roll_back")
    assert [guard[0][key] for key in ("found", "batch_step", "value", "samples")] == ["non-finite loss", 5, "nan", 4]
    assert len(guard[0]["index"]) == len(guard[0]["images"]) == 4
    steps = [line["step"] for line in record(tmp_path / "run", "step")]
    assert steps == ([1, 2, 3, 4, 5, 6, 7] if action == "skip" else [1, 2, 3, 4, 6, 7])
    if action == "roll_back":
        assert (guard[1]["left"], guard[1]["to"], guard[2]["step"]) == (4, 4, 5)
    kept = refused_batch.joined(tmp_path / "run", 5)
    assert sum(batch.samples for batch in kept) == 4 and kept[0].image.shape[2:] == (48, 40)
    assert sorted(int(i) for batch in kept for i in batch.index) == sorted(guard[0]["index"])


@pytest.mark.parametrize(
    "name", few(PLANS, "replicate", then=["zero3", "space", "stage", "stream", "accumulate"], is_sweep=True)
)
def test_a_gradient_that_is_no_number_is_seen_though_the_loss_is_finite(tmp_path, one_rank, name):
    rank = 1 if name in ("replicate", "accumulate", "zero1", "zero3") else 0
    under(name, tmp_path / "run", ["guard.non_finite=skip"], "gradient", rank)
    (line,) = record(tmp_path / "run", "guard")
    assert (line["found"], line["value"], line["batch_step"]) == ("non-finite gradient", "nan", 5)
    assert math.isfinite(line["loss"])
    assert_equal(tmp_path / "run", one_rank("accumulate" if name == "accumulate" else "one"))


@pytest.mark.long
def test_spikes_are_skipped_by_their_score_on_one_rank_and_on_two(tmp_path, one_rank):
    settings = ["guard.spike=skip", "guard.window=8"]
    for name in ("one", "replicate"):
        under(name, tmp_path / name, settings, "spike")
        (line,) = record(tmp_path / name, "guard")
        assert (line["action"], line["found"], line["batch_step"]) == ("skip", "loss spike", 5)
        assert line["score"] > 1000 and line["usual"] == pytest.approx(line["value"] / 1e6, rel=3)
        assert_equal(tmp_path / name, one_rank("one"))
    scores = [record(tmp_path / name, "guard")[0]["score"] for name in ("one", "replicate")]
    assert 1 < scores[0] / scores[1] < 4  # of two copies, the loss of one was multiplied


def test_the_usual_is_saved_so_that_a_resumed_run_judges_alike(tmp_path):
    settings = ["guard.spike=skip", "guard.window=8"]
    first = read_config(PAGE, [*SETTINGS, *settings, "schedule.length=4step"])
    train(first, tmp_path / "run", World())
    under("one", tmp_path / "run", settings, "spike")
    assert [line["batch_step"] for line in record(tmp_path / "run", "guard")] == [5]


def test_without_an_answer_the_run_stops_with_its_weights_and_says_which_step(tmp_path):
    with pytest.raises(RankFailed, match="NonFiniteLossError: the norm of the gradient of step 5 is nan, though its loss is"):
        on_ranks(2, trained, tmp_path / "run", ["mesh.replicate=2"], "gradient", 1)
    assert losses(tmp_path / "run") and len(losses(tmp_path / "run")) == BAD
    assert json.loads((tmp_path / "run/nan.json").read_text())["step"] == 5
    (line,) = record(tmp_path / "run", "guard")
    assert (line["action"], line["batch"]) == ("stop", "guard/step_00000005")
    assert record(tmp_path / "run", "end")[-1]["reason"] == "failed"


def test_the_scaler_of_float16_is_no_matter_of_the_guard(tmp_path, monkeypatch):
    """Its first steps overflow on purpose, since the scale begins too high; no step is refused."""
    monkeypatch.setattr(torch.amp.GradScaler, "__init__", _scaler_of(2.0**126))
    settings = [*SETTINGS, "precision=float16", "guard.non_finite=skip", "model.options.widths=[4, 4]"]
    outcome = train(read_config(PAGE, settings), tmp_path / "run", World())
    assert outcome.reason == "complete" and record(tmp_path / "run", "guard") == []


def _scaler_of(scale: float):
    real = torch.amp.GradScaler.__init__

    def made(self, *arguments, **options):
        real(self, *arguments, **(options | {"init_scale": scale}))

    return made


def test_without_a_checkpoint_there_is_no_way_back_and_the_run_says_so(tmp_path):
    with pytest.raises(RankFailed, match="the loss of step 5 is nan, and there is no checkpoint to go back to; lower"):
        on_ranks(1, trained, tmp_path / "run", ["guard.non_finite=roll_back", "checkpoint.every=100step"])


def test_too_many_refused_batches_end_the_run(tmp_path, monkeypatch):
    real = Learner.loss_of
    monkeypatch.setattr(Learner, "loss_of", lambda self, *given, **more: real(self, *given, **more) * math.nan)
    with pytest.raises(RefusedStepError, match="of the last 100 steps 3 batches are refused, where guard.most=2; so it is not"):
        train(read_config(PAGE, [*SETTINGS, "guard.non_finite=skip", "guard.most=2"]), tmp_path / "run", World())


def test_powersgd_and_skip_exclude_each_other(tmp_path):
    settings = ["guard.non_finite=skip", "gradient.compression=powersgd", "mesh.replicate=2"]
    with pytest.raises(RankFailed, match="guard.non_finite=skip leaves out a step, and with gradient.compression=powersgd"):
        on_ranks(2, trained, tmp_path / "run", settings)


# ---------------------------------------------------------------------------------------------- scores


def test_scores_are_those_of_the_median():
    assert doctest.testmod(guard_module).failed == 0
    usual = [1.0, 1.1, 0.9, 1.05, 0.95, 1.0, 1.02, 0.98]
    median, score = score_of(3.0, usual, least=4)
    assert median == 1.0 and score == pytest.approx(2.0 / (1.4826 * 0.035), rel=1e-6)
    assert score_of(3.0, usual, least=9)[1] == 0.0 and score_of(0.0, usual, least=4)[1] < 0
    assert score_of(1.02, [1.0] * 9, least=4)[1] == pytest.approx(1.0)  # a fiftieth of the median counts as a deviation


def test_what_was_refused_says_nothing_of_what_is_usual():
    guard = Guard(GuardConfig(spike="skip", window=8))
    for step in range(8):
        assert guard.judge(step, 1.0 + step / 100, 2.0) is None
    usual = list(guard.losses)
    for loss, norm, kind in ((90.0, 2.0, "loss spike"), (1.0, 90.0, "gradient spike"), (math.nan, None, "non-finite loss")):
        refusal = guard.judge(9, loss, norm)
        assert refusal is not None and refusal.kind == kind and list(guard.losses) == usual
    again = Guard(guard.config)
    again.load(json.loads(json.dumps(guard.state())))
    assert again.losses == guard.losses and again.norms == guard.norms
    assert isinstance(RollBack("x", None), Exception)
