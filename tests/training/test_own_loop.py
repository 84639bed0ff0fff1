"""Loops of one's own: the same losses on any number of ranks and from any checkpoint, and an exact evaluation."""

from __future__ import annotations

import pytest
import torch
from marks import few
from ranks import RankFailed, on_ranks
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics.aggregation import CatMetric, MaxMetric, MeanMetric
from torchmetrics.classification import MulticlassAccuracy, MulticlassAUROC

import widefield as wf
from widefield.comm.mesh import Mesh, World, join
from widefield.plans import Plan

SAMPLES, BATCH, CLASSES = 23, 5, 3  # the last batch has 3


def one() -> Mesh:
    return join(World(), Plan())


def data() -> TensorDataset:
    draws = torch.Generator().manual_seed(1)
    return TensorDataset(torch.randn(SAMPLES, 2, 8, 6, dtype=torch.float64, generator=draws), torch.arange(SAMPLES) % CLASSES)


def net(dropout: float = 0.3) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(2, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 6, 3, padding=1),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Dropout(dropout), nn.Linear(6, CLASSES),
    ).double()  # fmt: skip


def learn(
    mesh: Mesh, *, epochs: int, folder=None, save_at: int | None = None, dropout: float = 0.3
) -> tuple[list[float], dict]:
    """The loss of every step, as one device would print it, and the scores of an exact evaluation."""
    samples, losses = data(), []
    model = wf.parallelize(
        net(dropout).to(mesh.device), mesh, sample=torch.empty(BATCH, 2, 8, 6, dtype=torch.float64, device="meta")
    )
    optimizer = wf.share_states(torch.optim.AdamW(model.parameters(), lr=0.01), mesh)
    batches = wf.sampler(samples, mesh, batch_size=BATCH, seed=3)
    found = None if folder is None else wf.load(folder, model=model, optimizer=optimizer, mesh=mesh)
    done = 0 if found is None else found.step
    for epoch in range(done // batches.steps.per_epoch, epochs):
        batches.set_epoch(epoch, start=max(0, done - epoch * batches.steps.per_epoch))
        for step, (image, target) in enumerate(DataLoader(samples, batch_sampler=batches), batches.start):
            optimizer.zero_grad()
            torch.manual_seed(100 * epoch + step)
            image = wf.tile(image, mesh) if mesh.grid.sizes else image
            loss = wf.backward_of(
                model, image, target,
                loss_of=lambda output, target: F.cross_entropy(wf.whole(output), target, reduction="sum"),
                scaled=lambda loss, step=step: loss * batches.scale(step),
            )  # fmt: skip
            optimizer.step()
            done += 1
            losses.append(float(mesh.sum_(loss.double() * batches.scale(step)) / mesh.size))
            if done == save_at:
                wf.save(folder, model=model, optimizer=optimizer, step=done, mesh=mesh, extra={"note": [done, "x"]})
    metrics = {"top1": MulticlassAccuracy(CLASSES, average="micro"), "loss": each_loss, "auc": MulticlassAUROC(CLASSES)}
    scores = wf.evaluate_exactly(model, samples, metrics, mesh, batch_size=4)
    assert scores.images == SAMPLES and scores.duplicates == 0 and scores.tally.tolist() == [1] * SAMPLES
    assert model.training
    return losses, scores.values


def each_loss(output, target):
    return F.cross_entropy(output, target, reduction="none")


def assert_equal(got, expected):
    assert got[0] == pytest.approx(expected[0], rel=1e-10, abs=0)
    assert got[1] == pytest.approx(expected[1], rel=1e-10, abs=0)


PLANS = {
    "copies": Plan(replicate=2),
    "weights": Plan(shard=2),
    "states": Plan(shard=2, sharding={"zero": 1}),
    "space": Plan(space=[2, 1]),
    "channel": Plan(channel=2),
    "stage": Plan(stage=2),
}


@pytest.mark.parametrize("name", few(PLANS, "weights", "space", "states"))
def test_a_loop_of_ones_own_has_one_device_s_losses_and_scores_and_goes_on_under_any_plan(name, tmp_path):
    there, back, dropout = str(tmp_path / "there"), str(tmp_path / "back"), 0.0 if name == "stage" else 0.3
    expected = learn(one(), epochs=2, folder=back, save_at=7, dropout=dropout)
    for got in on_ranks(2, on_a_mesh, there, 7, dropout, plan=PLANS[name]):
        assert_equal(got, expected)
    rest = (expected[0][7:], expected[1])
    assert_equal(learn(one(), epochs=2, folder=there, dropout=dropout), rest)  # written on two ranks, and read by one
    for got in on_ranks(2, on_a_mesh, back, None, dropout, plan=PLANS[name]):  # and the other way round
        assert_equal(got, rest)


def on_a_mesh(mesh, folder, save_at, dropout):
    return learn(mesh, epochs=2, folder=folder, save_at=save_at, dropout=dropout)


@pytest.mark.parametrize("copies", [1, 2, 3])
def test_every_sample_is_drawn_once_and_a_batch_is_the_same_on_any_number_of_copies(copies):
    def batches(rank: int, ranks: int) -> list[list[int]]:
        mesh = Mesh(Plan(replicate=ranks), World(rank=rank, size=ranks), torch.device("cpu"))
        made = wf.sampler(data(), mesh, batch_size=BATCH, seed=3)
        made.set_epoch(4)
        assert made.scale(4) == ranks / 3
        return list(made)

    whole = batches(0, 1)
    assert sorted(sum(whole, [])) == list(range(SAMPLES)) and [len(batch) for batch in whole] == [5, 5, 5, 5, 3]
    shares = [batches(rank, copies) for rank in range(copies)]
    assert [sum(parts, []) for parts in zip(*shares, strict=True)] == whole


def test_a_last_batch_that_leaves_a_copy_without_a_sample_is_refused():
    mesh = Mesh(Plan(replicate=4), World(size=4), torch.device("cpu"))
    with pytest.raises(ValueError, match="23 samples in batches of 5 leave 3 in the last one, for 4 copies .* drop_last=True"):
        wf.sampler(data(), mesh, batch_size=5)
    assert sum(len(batch) for batch in wf.sampler(data(), mesh, batch_size=5, drop_last=True)) == 4 * 2
    with pytest.raises(ValueError, match="batch_size is 0; 1 or more is wanted"):
        wf.sampler(data(), mesh, batch_size=0)


def test_what_was_saved_beside_the_model_comes_back_and_a_damaged_checkpoint_is_passed_over(tmp_path, capsys):
    model, optimizer = net(), None
    places = [wf.save(tmp_path, model=model, step=step, extra={"schedule": {"last": step, "lr": [0.5]}}) for step in (1, 2)]
    assert [place.name for place in places] == ["step_00000001", "step_00000002"]
    torch.manual_seed(9)
    wf.save(tmp_path, model=model, step=3)
    expected = torch.rand(3)
    next(places[1].parent.glob("step_00000003/tensors_0.safetensors")).write_bytes(b"no")
    assert wf.load(tmp_path, model=model, optimizer=optimizer).extra == {"schedule": {"last": 2, "lr": [0.5]}}
    assert "step_00000003 is passed over" in capsys.readouterr().out
    wf.save(tmp_path, model=model, step=4, keep_last=1)
    assert [place.name for place in sorted(tmp_path.iterdir())] == ["step_00000004"]
    assert wf.load(tmp_path / "nowhere", model=model) is None and expected.shape == (3,)


def test_random_states_go_on(tmp_path):
    torch.manual_seed(9)
    wf.save(tmp_path, model=net(), step=1)
    torch.manual_seed(5)
    wf.save(tmp_path, model=nn.Linear(2, 2), step=1)
    expected = torch.rand(3)
    assert wf.load(tmp_path, model=nn.Linear(2, 2)).random
    assert torch.equal(torch.rand(3), expected)


def test_what_cannot_be_saved_or_loaded_is_said_in_words(tmp_path):
    with pytest.raises(ValueError, match="set"):
        wf.save(tmp_path, model=net(), extra={"names": {1, 2}})
    with pytest.raises(ValueError, match="keep_last is 0; 1 or more is wanted"):
        wf.save(tmp_path, model=net(), keep_last=0)
    (tmp_path / "file").touch()
    with pytest.raises(ValueError):
        wf.save(tmp_path / "file", model=net())
    wf.save(tmp_path, model=net(), step=1)
    model = net()
    with pytest.raises(ValueError, match="has no optimizer, since none was saved; load it without optimizer="):
        wf.load(tmp_path, model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
    with pytest.raises(ValueError, match="is of another model"):
        wf.load(tmp_path, model=nn.Linear(2, 2))


def test_states_of_all_kinds_are_merged_as_on_one_rank():
    expected = states(one())
    for got in on_ranks(2, states):
        assert got["cat"].tolist() == expected["cat"].tolist()
        assert {k: v for k, v in got.items() if k != "cat"} == pytest.approx({k: v for k, v in expected.items() if k != "cat"})


class Pair:
    """A metric of (output, target), of the outputs alone."""

    @staticmethod
    def of(kind):
        class OfOutput(kind):
            def update(self, output, target):
                super().update(output.double().sum(1))

        return OfOutput()


def states(mesh):
    metrics = {"cat": Pair.of(CatMetric), "max": Pair.of(MaxMetric), "mean": Pair.of(MeanMetric)}
    return wf.evaluate_exactly(net(), data(), metrics, mesh, batch_size=4).values


def test_metrics_that_cannot_be_merged_or_have_another_shape_are_refused():
    class Own(MeanMetric):
        def __init__(self):
            super().__init__()
            self.add_state("own", torch.zeros(1), dist_reduce_fx="mean")

    with pytest.raises(ValueError, match=r"the state 'own' of the metric 'm' \(Own\) is none that adds up over ranks"):
        wf.evaluate_exactly(net(), data(), {"m": Own()}, one())
    with pytest.raises(ValueError, match=r"the metric 'm' returns \(\) for 23 samples; a number of each is wanted, \(23,\)"):
        wf.evaluate_exactly(net(), data(), {"m": F.cross_entropy}, one())
    with pytest.raises(ValueError, match="there are 0 samples and 1 metrics to evaluate; 1 or more of each is wanted"):
        wf.evaluate_exactly(net(), [], {"m": F.cross_entropy}, one())


def made_mesh(mesh):
    zero = wf.build_mesh(shard=2, zero=1, recompute=["layer*"])
    stages = wf.build_mesh(stage=2, micro_batches=3)
    return str(zero), zero.plan.recompute.blocks, stages.plan.pipeline.micro_batches


def test_a_mesh_takes_the_choices_of_strategies_and_is_one_line():
    for rank, (text, blocks, micro_batches) in enumerate(on_ranks(2, made_mesh)):
        assert text == f"Mesh(shard=2, ZeRO-1, recompute; rank {rank} of 2 on cpu)"
        assert (blocks, micro_batches) == (["layer*"], 3)


def without_a_mesh(mesh):
    wf.save("nowhere", model=net())


def test_a_rank_that_names_no_mesh_is_refused():
    with pytest.raises(RankFailed, match="this is one of 2 ranks; pass the mesh that they train on, as mesh=mesh"):
        on_ranks(2, without_a_mesh)
