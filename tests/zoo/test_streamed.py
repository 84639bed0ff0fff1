"""Whole models of other people tile after tile: the outputs, gradients and buffers of the whole run, in float64."""

from __future__ import annotations

import pytest
import torch
from marks import few
from zoo.models import MODELS

from widefield.capture.trace import trace
from widefield.streaming.schedule import TileSchedule, program_of
from widefield.streaming.spatial import SpatialStream
from widefield.streaming.storage import offload_buffer
from widefield.streaming.storage.windowed_image import SINGLE_RANK, from_reader
from widefield.streaming.tile_planner import units_of
from widefield.verification.api import verify

AT_LEAST = 34

NAMES: dict[tuple[int, ...], tuple[str, ...]] = {
    (97, 73): (
        "timm/resnet18", "timm/resnet50", "timm/seresnet33ts", "timm/ecaresnet26t", "timm/densenet121", "timm/efficientnet_b0",
        "timm/mobilenetv3_small_050", "timm/ghostnet_050", "timm/regnety_002", "timm/nf_regnet_b0", "timm/repvgg_a0",
        "timm/convnext_atto", "timm/convnextv2_atto", "torchvision/shufflenet_v2_x0_5", "torchvision/regnet_y_400mf",
        "torchvision/squeezenet1_1", "torchvision/fasterrcnn backbone", "widefield/unet batch", "widefield/unet group",
        "pix2pixHD discriminator",
    ),
    (71, 67): (
        "timm/pvt_v2_b0", "timm/edgenext_xx_small", "timm/hgnetv2_b0", "timm/mobilevit_xxs", "torchvision/swin_v2", "smp/Unet",
        "monai/UNet 2-D", "DCGAN discriminator",
    ),
    (96, 64): ("timm/hrnet_w18_small", "timm/dla34", "smp/UnetPlusPlus", "smp/Unet efficientnet", "smp/FPN", "smp/Segformer"),
    (64, 96): ("smp/MAnet", "smp/UPerNet"),
    (80, 64): ("smp/DeepLabV3Plus", "smp/PSPNet"),
    (65, 49): ("torchvision/lraspp_mobilenet_v3_large",),
    (64, 76): ("monai/AttentionUnet",),
    (88, 72): ("pix2pixHD generator",),
    (1, 1): ("DCGAN generator",),
    (112, 112): ("timm/swin_tiny",),
    (64, 64): ("timm/vit_tiny",),
    (24, 32, 16): ("monai/SegResNet 3-D",),
    (32, 32, 32): ("monai/VNet 3-D",),
    (32, 24, 28): ("monai/DynUNet 3-D",),
    (17, 16, 35): ("monai/BasicUNet 3-D",),
    (33, 32, 35): ("monai/DenseNet 3-D",),
    (5, 33, 31): ("torchvision/r3d_18",),
}  # fmt: skip
"""Models by the pixels of the images that they are trained on, odd where they take such; as many images as `MODELS` says."""

FIRST = ["timm/vit_tiny", "monai/SegResNet 3-D", "widefield/unet batch", "DCGAN generator"]
THEN = ["timm/resnet18", "smp/Unet"]
"""A model of each kind, the small ones in `make test`."""
TRAINED = {name: pixels for pixels, names in NAMES.items() for name in names}
MANY = [
    "timm/resnet50", "timm/densenet121", "timm/efficientnet_b0", "timm/convnext_atto", "timm/hrnet_w18_small", "timm/pvt_v2_b0",
    "smp/Unet", "smp/DeepLabV3Plus", "widefield/unet batch", "widefield/unet group", "DCGAN generator", "DCGAN discriminator",
    "pix2pixHD discriminator",
]  # fmt: skip
MANY_OF_VOLUMES = {"monai/SegResNet 3-D": (2, 3, 2), "monai/VNet 3-D": (3, 2), "monai/DynUNet 3-D": (1, 3, 2)}
ONE_BY_ONE = [
    "timm/resnet50", "timm/efficientnet_b0", "timm/convnext_atto", "timm/swin_tiny", "torchvision/fasterrcnn backbone",
    "smp/Unet", "smp/FPN", "widefield/unet batch", "widefield/unet group", "DCGAN generator", "DCGAN discriminator",
]  # fmt: skip
CONVOLUTIONAL = [
    "timm/resnet50", "timm/densenet121", "timm/efficientnet_b0", "timm/convnext_atto", "timm/nf_regnet_b0",
    "timm/hrnet_w18_small", "smp/Unet", "smp/FPN", "smp/DeepLabV3Plus", "monai/SegResNet 3-D", "monai/VNet 3-D",
    "monai/BasicUNet 3-D", "widefield/unet batch", "widefield/unet group", "pix2pixHD generator", "pix2pixHD discriminator",
]  # fmt: skip
IN_ONE_PASS = [
    "timm/resnet50", "timm/densenet121", "timm/hrnet_w18_small", "smp/Unet", "smp/UnetPlusPlus",
    "torchvision/fasterrcnn backbone", "monai/VNet 3-D", "widefield/unet batch",
]  # fmt: skip
EVALUATED = ["timm/resnet50", "timm/vit_tiny", "timm/swin_tiny", "smp/Unet", "smp/DeepLabV3Plus", "monai/SegResNet 3-D"]


def check(name: str, tiles: tuple[int, ...], *, batch: int | None = None, train: bool = True) -> None:
    """The model is exact tile after tile, and as much was compared as it has."""
    model, pixels = MODELS[name].make(), TRAINED[name]
    count, channels = MODELS[name].shape[:2]
    verdict = verify(model, (batch or count, channels, *pixels), stream=tiles, train=train)
    assert verdict.ok, f"{name}:\n{verdict}"
    gradients = [row for row in verdict.rows if row.kind == "gradient"]
    assert len(gradients) > (0.6 * sum(1 for _ in model.parameters()) if train else -1)  # PSPNet leaves much of its encoder out
    assert sum(row.kind == "buffer" for row in verdict.rows) == sum(1 for _ in model.buffers())
    assert verdict.zero_gradients <= 0.1 * len(gradients)  # ReLUs that are off for every pixel


@pytest.mark.parametrize("name", few(TRAINED, *FIRST, then=THEN, is_sweep=True))
def test_a_whole_model_is_exact_tile_after_tile(name):
    check(name, (2,) * len(TRAINED[name]))


@pytest.mark.parametrize("name", few(MANY, "widefield/unet group", is_sweep=True))
def test_many_tiles_are_exact(name):
    check(name, (3, 5))


@pytest.mark.long
@pytest.mark.parametrize("name", few(MANY_OF_VOLUMES, "monai/DynUNet 3-D", is_sweep=True))
def test_many_tiles_of_a_volume_are_exact(name):
    check(name, MANY_OF_VOLUMES[name])


@pytest.mark.parametrize("name", few(ONE_BY_ONE, "widefield/unet batch", is_sweep=True))
def test_an_image_alone_is_exact(name):
    check(name, (2, 2), batch=1)


@pytest.mark.parametrize("name", few(EVALUATED, "timm/vit_tiny", is_sweep=True))
def test_evaluation_is_exact(name):
    check(name, (3,) * len(TRAINED[name]), train=False)


def planned(name: str, *, train: bool) -> TileSchedule:
    """What a stream of two images of about a megapixel each must keep, before it chooses to keep more; nothing is run."""
    model, channels = MODELS[name].make().train(train), MODELS[name].shape[1]
    pixels = (1024, 768) if len(TRAINED[name]) == 2 else (64, 96, 64)
    span = SpatialStream(SINGLE_RANK, (4,) * len(pixels))
    with torch.set_grad_enabled(train):
        graph = trace(model, model.forward, (from_reader(_unread, (2, channels, *pixels)),), {})
    return program_of(graph, units_of(graph, span.virtual, {v: span.cut(v.shape, None) for v in graph.inputs}))


def _unread(window: tuple[slice, ...]) -> None:
    raise AssertionError("no pixel is read before a program runs")


@pytest.mark.parametrize("name", few(CONVOLUTIONAL, "timm/convnext_atto", "smp/DeepLabV3Plus", "widefield/unet batch"))
def test_no_layer_of_a_convolutional_net_runs_on_the_whole_image(name):
    """It would hold the whole image; small ones, as of squeeze-and-excite, do and may."""
    program = planned(name, train=True)
    (image,) = program.graph.inputs
    whole = [
        unit for stage in program.stages for unit in stage.once if sum(unit.reads[n].bytes for n in unit.wide) > image.bytes / 8
    ]
    assert whole == []


@pytest.mark.parametrize("name", few(IN_ONE_PASS, "widefield/unet batch", is_sweep=True))
def test_evaluation_without_sums_over_the_image_need_keep_its_outputs_alone(name):
    program = planned(name, train=False)
    (image,) = program.graph.inputs
    assert [value for value in program.kept if value.bytes > image.bytes / 8 and value not in program.graph.results] == []


def test_many_models_are_streamed():
    assert len(TRAINED) >= AT_LEAST


@pytest.mark.parametrize("moved", ["read", "add"])
def test_a_wrong_pixel_between_segments_is_seen(moved, monkeypatch):
    """What is read of a kept value in the forward, or added to its gradient in the backward, by a part in a million."""
    original = getattr(offload_buffer.OffloadBuffer, moved)
    wrong = {
        "read": lambda self, box: original(self, box) * (1 + 1e-6),
        "add": lambda self, box, tile: original(self, box, tile * (1 + 1e-6)),
    }
    monkeypatch.setattr(offload_buffer.OffloadBuffer, moved, wrong[moved])
    assert not verify(MODELS["DCGAN discriminator"].make(), (2, 3, 71, 67), stream=(2, 2)).ok
