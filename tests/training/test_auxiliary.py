"""Are the losses of auxiliary heads added with their weight, as plain torch adds them, under every plan?"""

from __future__ import annotations

import pytest
import torch
from command import RECIPES
from ranks import on_ranks
from torch import Tensor, nn
from torch.nn import functional as F

from widefield.comm.mesh import Mesh, World
from widefield.config import read_config
from widefield.plans import Plan, plan_of
from widefield.sharded_state import gather_full_on_main
from widefield.training.assemble import assemble, evaluate_parts, learner_of, training_batches
from widefield.training.given import Given

SETTINGS = [
    "mesh.space=[]", "mesh.replicate=1", "data.options.size=[12, 10]", "data.options.digit_px=[8, 8]", "data.workers=0",
    "data.options.pages=[4, 2]", "data.batch_size=4", "precision=float64", "optimizer.name=sgd", "optimizer.lr=0.1",
    "schedule.length=2step", "schedule.name=constant", "schedule.warmup=0step", "model.auxiliary=0.25",
    "optimizer.weight_decay=0",
]  # fmt: skip
PLANS = {
    "copies": (2, ["mesh.replicate=2"]), "zero3": (2, ["mesh.shard=2"]), "channel": (2, ["mesh.channel=2"]),
    "stage": (2, ["mesh.stage=2"]), "tiles": (2, ["mesh.space=[2,1]"]), "stream": (1, ["stream.tiles=[2,1]"]),
}  # fmt: skip


class TwoHeads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.body = nn.Conv2d(1, 4, 3, padding=1), nn.Conv2d(4, 4, 3, padding=1)
        self.head, self.aux = nn.Conv2d(4, 11, 1), nn.Conv2d(4, 11, 1)

    def forward(self, image: Tensor) -> dict[str, Tensor]:
        early = self.stem(image).relu()
        return {"aux": self.aux(early), "out": self.head(self.body(early).relu())}


def net() -> TwoHeads:
    torch.manual_seed(0)
    return TwoHeads().double()


def learnt(mesh: Mesh, settings: list[str]) -> tuple[list[float], dict[str, Tensor]]:
    parts = assemble(read_config(str(RECIPES / "page.yaml"), settings), mesh, given=Given(model=net()))
    learner, _ = learner_of(parts)
    batches = training_batches(parts, first=0, last=2)
    losses = [learner.learn([next(batches)], stop=False)[0] for _ in range(2)]
    return losses, gather_full_on_main(learner.model, mesh, dict(learner.model.state_dict()))


def by_plain_torch() -> tuple[list[float], dict[str, Tensor]]:
    mesh = Mesh(Plan(), World(), torch.device("cpu"))
    parts = assemble(read_config(str(RECIPES / "page.yaml"), SETTINGS), mesh, given=Given(model=net()))
    model, prepare, losses = net(), parts.preparation(train=True), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for batch in training_batches(parts, first=0, last=2):
        image, target = prepare(batch)
        outputs = model(image)
        loss = F.cross_entropy(outputs["out"], target) + 0.25 * F.cross_entropy(outputs["aux"], target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, dict(model.state_dict())


@pytest.mark.parametrize("name", ["one", *PLANS])
def test_auxiliary_losses_are_added_with_their_weight_under_every_plan(name):
    ranks, axes = PLANS.get(name, (1, []))
    settings = [*SETTINGS, *axes]
    losses, weights = on_ranks(ranks, learnt, settings, plan=plan_of(read_config(str(RECIPES / "page.yaml"), settings), ranks))[
        0
    ]
    wanted_losses, wanted = by_plain_torch()
    assert losses == pytest.approx(wanted_losses, rel=1e-12) and sorted(weights) == sorted(wanted)
    for key, value in wanted.items():
        torch.testing.assert_close(weights[key], value, rtol=1e-10, atol=1e-13)


def test_an_evaluation_looks_at_the_main_output_alone():
    parts = assemble(
        read_config(str(RECIPES / "page.yaml"), SETTINGS), Mesh(Plan(), World(), torch.device("cpu")), given=Given(model=net())
    )
    prepare, model, losses = parts.preparation(train=False), net(), []
    for batch in parts.evaluation_batches():
        image, target = prepare(batch)
        losses.append(F.cross_entropy(model(image)["out"], target).item())
    found = evaluate_parts(parts, parts.model)
    assert found.loss == pytest.approx(sum(losses) / len(losses), rel=1e-12) and parts.model.training


@pytest.mark.parametrize("name", ["copies", "tiles"])
def test_a_loss_that_is_finished_from_sums_has_auxiliary_ones_too(name):
    """Dice of the batch: as on one device, and not as without auxiliary heads."""
    dice = [*SETTINGS, "task.loss=dice", "task.loss_options={batch: true}"]
    found = {}
    for key, (ranks, more) in {"one": (1, []), name: PLANS[name], "none": (1, ["model.auxiliary=0"])}.items():
        settings = [*dice, *more]
        plan = plan_of(read_config(str(RECIPES / "page.yaml"), settings), ranks)
        found[key] = on_ranks(ranks, learnt, settings, plan=plan)[0]
    assert found[name][0] == pytest.approx(found["one"][0], rel=1e-12) and found["none"][0][0] < found["one"][0][0]
    for key, value in found["one"][1].items():
        torch.testing.assert_close(found[name][1][key], value, rtol=1e-9, atol=1e-12)
    assert not torch.equal(found["one"][1]["aux.weight"], net().aux.weight)
