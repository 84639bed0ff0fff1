"""Are the losses of coarser levels those of plain torch under every plan, and do MONAI's networks of volumes train on tiles?"""

from __future__ import annotations

import pytest
import torch
from command import RECIPES
from ranks import on_ranks
from torch import Tensor
from torch.nn import functional as F

from widefield.comm.mesh import Mesh, World
from widefield.config import read_config
from widefield.models import build
from widefield.plans import Plan, plan_of
from widefield.sharded_state import gather_full_on_main
from widefield.training.assemble import assemble, evaluate_parts, learner_of, training_batches
from widefield.training.heads import labels_for, weights_of

SIZE = (11, 18, 13)
SETTINGS = [
    "mesh.space=[]", "mesh.replicate=1", f"data.options={{size: {list(SIZE)}, volumes: [4, 2], vessels: 1, blobs: 1}}",
    "data.workers=0", "data.batch_size=2", "precision=float64", "optimizer.name=sgd", "optimizer.lr=0.1",
    "schedule.length=2step",
    "schedule.name=constant", "schedule.warmup=0step", "optimizer.weight_decay=0", "data.augment=[]", "task.metrics=[]",
]  # fmt: skip
UNET = ["model.options={widths: [4, 4, 6, 6], shrink: [[1, 2, 2], 2, 2]}", "model.deep_supervision=true"]
CROSS_ENTROPY = ["task.loss=cross_entropy", "task.loss_options={}"]
PLANS = {
    "copies": (2, ["mesh.replicate=2"]), "channel": (2, ["mesh.channel=2"]), "planes": (2, ["mesh.space=[2,1,1]"]),
    "rows": (2, ["mesh.space=[1,2,1]"]), "stream": (1, ["stream.tiles=[2,2,1]"]),
}  # fmt: skip
MONAI = {
    "UNet": "{channels: [4, 6, 8], strides: [2, 2], num_res_units: 1}",
    "DynUNet": "{kernel_size: [[1, 3, 3], 3, 3], strides: [1, [1, 2, 2], 2], upsample_kernel_size: [[1, 2, 2], 2], "
    "filters: [4, 6, 8]}",
    "SegResNet": "{init_filters: 8, blocks_down: [1, 1], blocks_up: [1]}",
    "AttentionUnet": "{channels: [4, 6, 8], strides: [2, 2]}",
    "SegResNetDS": "{init_filters: 8, blocks_down: [1, 1, 1]}",
}
LONG = [*((name, False) for name in MONAI if name != "UNet"), ("SegResNetDS", True)]
BOTH = {"planes": PLANS["planes"], "stream": PLANS["stream"]}


def learnt(mesh: Mesh, settings: list[str]) -> tuple[list[float], dict[str, Tensor]]:
    """Losses and weights of two steps."""
    torch.manual_seed(0)
    parts = assemble(read_config(str(RECIPES / "volume.yaml"), settings), mesh)
    learner, _ = learner_of(parts)
    batches = training_batches(parts, first=0, last=2)
    losses = [learner.learn([next(batches)], stop=False)[0] for _ in range(2)]
    return losses, gather_full_on_main(learner.model, mesh, dict(learner.model.state_dict()))


def on_plan(name: str, settings: list[str]) -> tuple[list[float], dict[str, Tensor]]:
    ranks, axes = PLANS.get(name, (1, []))
    every = [*settings, *axes]
    plan = plan_of(read_config(str(RECIPES / "volume.yaml"), every), ranks)
    return on_ranks(ranks, learnt, every, plan=plan)[0]


def nearest(target: Tensor, pixels: tuple[int, ...]) -> Tensor:
    """By indices, in whole numbers."""
    for dim, (old, new) in enumerate(zip(target.shape[1:], pixels, strict=True), start=1):
        target = target.index_select(dim, (2 * torch.arange(new) + 1) * old // (2 * new))
    return target


def by_plain_torch(settings: list[str]) -> tuple[list[float], dict[str, Tensor]]:
    config = read_config(str(RECIPES / "volume.yaml"), settings)
    parts = assemble(config, Mesh(Plan(), World(), torch.device("cpu")))
    torch.manual_seed(0)
    model, prepare, losses = parts.model.train(), parts.preparation(train=True), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for batch in training_batches(parts, first=0, last=2):
        image, target = prepare(batch)
        outputs, loss = model(image), torch.zeros((), dtype=torch.float64)
        assert len(outputs) == 3 and outputs[1].shape[2:] == (11, 9, 6) and outputs[2].shape[2:] == (5, 4, 3)
        for output, weight in zip(outputs, (4 / 7, 2 / 7, 1 / 7), strict=True):
            loss = loss + weight * F.cross_entropy(output, nearest(target, output.shape[2:]).long())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, dict(model.state_dict())


def assert_equal(found: tuple[list[float], dict[str, Tensor]], wanted: tuple[list[float], dict[str, Tensor]]) -> None:
    assert found[0] == pytest.approx(wanted[0], rel=1e-11) and sorted(found[1]) == sorted(wanted[1])
    for key, value in wanted[1].items():
        torch.testing.assert_close(found[1][key], value, rtol=1e-8, atol=1e-11)  # norms of few voxels amplify 1e-16


@pytest.fixture(scope="module")
def plain() -> tuple[list[float], dict[str, Tensor]]:
    return by_plain_torch([*SETTINGS, *UNET, *CROSS_ENTROPY])


@pytest.mark.parametrize(
    "name", ["one", "planes", "stream", *(pytest.param(name, marks=pytest.mark.long) for name in ("copies", "channel", "rows"))]
)
def test_coarser_levels_are_compared_with_the_nearest_labels_under_every_plan(name, plain):
    assert_equal(on_plan(name, [*SETTINGS, *UNET, *CROSS_ENTROPY]), plain)


@pytest.mark.parametrize("name", BOTH)
def test_dice_of_every_level_is_that_of_one_rank(name):
    one = on_plan("one", [*SETTINGS, *UNET])
    assert_equal(on_plan(name, [*SETTINGS, *UNET]), one)
    assert one[0] != on_plan("one", [*SETTINGS, UNET[0]])[0]


def test_an_evaluation_looks_at_the_finest_level_alone():
    config = read_config(str(RECIPES / "volume.yaml"), [*SETTINGS, *UNET, *CROSS_ENTROPY])
    parts = assemble(config, Mesh(Plan(), World(), torch.device("cpu")))
    prepare, model, losses = parts.preparation(train=False), parts.model.eval(), []
    for batch in parts.evaluation_batches():
        image, target = prepare(batch)
        losses.append(F.cross_entropy(model(image), target.long()).item())
    assert evaluate_parts(parts, model).loss == pytest.approx(sum(losses) / len(losses), rel=1e-12)


def test_weights_are_halved_from_level_to_level_and_labels_may_be_layers():
    config = read_config(str(RECIPES / "volume.yaml"), [*SETTINGS, *UNET]).model
    assert weights_of(config, 3) == pytest.approx([4 / 7, 2 / 7, 1 / 7])
    layers = torch.randint(0, 2, (2, 3, 7, 9), dtype=torch.uint8)
    found = labels_for(torch.zeros(2, 3, 4, 5), layers)
    assert found.dtype == torch.uint8 and torch.equal(found, nearest(layers.flatten(0, 1), (4, 5)).view(2, 3, 4, 5))


# ---------------------------------------------------------------------------------------------- MONAI


@pytest.mark.parametrize(
    ("network", "deep"),
    [("UNet", False), ("DynUNet", True), *(pytest.param(name, deep, marks=pytest.mark.long) for name, deep in LONG)],
)
def test_networks_of_monai_train_on_tiles_and_in_a_stream_as_on_one_rank(network, deep):
    pytest.importorskip("monai")
    size = "data.options={size: [8, 16, 16], volumes: [4, 2], vessels: 1, blobs: 1}"
    settings = [*SETTINGS, size, f"model.name=monai/{network}", f"model.options={MONAI[network]}"]
    settings += [f"model.deep_supervision={str(deep).lower()}", "optimizer.lr=0.01"]
    one = on_plan("one", settings)
    for name in BOTH:
        assert_equal(on_plan(name, settings), one)


# ---------------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        (["model.name=resnet", "model.options={}"], "resnet gives no outputs of coarser levels and model.deep_supervision"),
        (["model.name=monai/SegResNet", "model.options={}"], "monai/SegResNet gives no outputs of coarser levels"),
        (["model.name=smp/Unet", "model.options={}"], "smp/Unet gives no outputs of coarser levels"),
        (["model.options={widths: [4, 6]}"], "needs levels between the first and the deepest, and model.options.widths has 2"),
        (["model.auxiliary=0.5"], "deep_supervision has weights of its own, and auxiliary is 0.5"),
        (["model.options={deep_supervision: true}"], "options has deep_supervision, and its losses need"),
    ],
)
def test_what_has_no_levels_is_refused(settings, told):
    with pytest.raises(ValueError, match=told):
        config = read_config(str(RECIPES / "volume.yaml"), [*SETTINGS, *UNET[1:], *settings])
        build(config.model, in_channels=1, num_classes=3)
