"""Whole models of other people, in training mode, forward and backward: exact on tiles, or refused in words."""

from __future__ import annotations

import pytest
import torch
from marks import few
from ranks import on_ranks
from zoo.models import MODELS

from widefield.comm import halo
from widefield.plans import Plan
from widefield.verification.forward import compare
from widefield.verification.verdict import Verdict

FIRST = ["timm/vit_tiny", "torchvision/squeezenet1_1", "monai/UNet 3-D", "widefield/unet batch", "DCGAN generator"]
THEN = ["timm/resnet18", "timm/efficientnet_b0", "timm/convnext_atto", "timm/swin_tiny", "smp/Unet"]
"""A model of each kind, the small ones in `make test`."""
AT_LEAST = 60
AT_MOST_REFUSED = 3

BY_TWO = [
    "timm/resnet18", "timm/ghostnet_050", "timm/convnext_atto", "timm/vit_tiny", "timm/pvt_v2_b0",
    "torchvision/fasterrcnn backbone", "smp/DeepLabV3Plus", "monai/UNet 2-D", "widefield/unet batch", "pix2pixHD generator",
    "pix2pixHD discriminator",
]  # fmt: skip
VOLUMES_BY_TWO = ["monai/DynUNet 3-D", "monai/SegResNet 3-D"]
IN_THREE = [
    "timm/resnext26ts", "timm/efficientnet_b0", "timm/regnety_002", "torchvision/squeezenet1_1", "timm/swin_tiny",
    "smp/Unet", "smp/FPN", "monai/BasicUNet 3-D", "monai/AttentionUnet", "widefield/unet group", "DCGAN discriminator",
]  # fmt: skip
UNEVEN = {
    "timm/resnet18": [[0, 20, 97], None],
    "timm/convnext_atto": [[0, 71, 97], None],
    "smp/Unet": [[0, 20, 64], None],
    "smp/PSPNet": [[0, 3, 64], None],
    "monai/DynUNet 2-D": [[0, 61, 64], None],
    "monai/UNet 3-D": [[0, 5, 32], None, None],
    "pix2pixHD generator": [[0, 33, 88], None],
}
EVALUATED = ["timm/resnet18", "timm/xception41", "timm/vit_tiny", "smp/UnetPlusPlus", "monai/VNet 3-D", "DCGAN generator"]


def verdict_of(mesh, name: str, cuts=None, train: bool = True) -> tuple[Verdict, float]:
    """What `compare` says of a model, and the largest share of a tensor that a rank got in one exchange."""
    model = MODELS[name]
    halo.TRAFFIC.clear()
    return compare(model.make(), model.shape, mesh, cuts=cuts, train=train), halo.TRAFFIC.largest_share


def plan_for(shape: tuple[int, ...], *tiles: int) -> Plan:
    """The first dims of an image cut into so many tiles."""
    return Plan(space=[*tiles] + [1] * (len(shape) - 2 - len(tiles)))


def check(name: str, *tiles: int, cuts=None, train: bool = True) -> None:
    """The model is exact, or refuses as it is known to."""
    model, ranks = MODELS[name], torch.Size(tiles).numel()
    verdict, share = on_ranks(ranks, verdict_of, name, cuts, train, plan=plan_for(model.shape, *tiles), timeout_seconds=300)[0]
    if model.refuses is not None:
        assert verdict.refusal is not None and model.refuses in verdict.refusal, str(verdict)
        return
    assert verdict.ok, f"{name}:\n{verdict}"
    assert share > 0, f"{name} ran without a message"
    assert {row.kind for row in verdict.rows} >= ({"output", "layer", "gradient"} if train else {"output", "layer"})


@pytest.mark.parametrize("name", few(MODELS, *FIRST, then=THEN, is_sweep=True))
def test_a_whole_model_is_exact_or_refuses_in_words(name):
    check(name, 2)


def test_few_models_refuse():
    assert len(MODELS) >= AT_LEAST
    assert sum(model.refuses is not None for model in MODELS.values()) <= AT_MOST_REFUSED


@pytest.mark.long
@pytest.mark.parametrize("name", few(BY_TWO + VOLUMES_BY_TWO, "widefield/unet batch", is_sweep=True))
def test_tiles_two_by_two_are_exact(name):
    check(name, 2, 2)


@pytest.mark.parametrize("name", few(IN_THREE, "monai/AttentionUnet", is_sweep=True))
def test_three_tiles_are_exact(name):
    check(name, 3)


@pytest.mark.parametrize("name", few(UNEVEN, "monai/UNet 3-D", is_sweep=True))
def test_uneven_tiles_are_exact(name):
    check(name, 2, cuts=UNEVEN[name])


@pytest.mark.parametrize("name", few(EVALUATED, "DCGAN generator", "timm/vit_tiny"))
def test_evaluation_is_exact(name):
    check(name, 2, train=False)


def broken(mesh, name: str) -> bool:
    """Whether `compare` finds a model exact of which every halo pixel was changed a little on its way."""
    original = halo.assemble
    halo.assemble = lambda move, tile, pieces: original(move, tile, [(box, piece + 1e-6) for box, piece in pieces])
    try:
        return compare(MODELS[name].make(), MODELS[name].shape, mesh).ok
    finally:
        halo.assemble = original


def test_a_wrong_halo_pixel_is_seen():
    assert on_ranks(2, broken, "DCGAN discriminator", plan=Plan(space=[2, 1])) == [False, False]
