"""Are detectors torchvision's, parameter by parameter and number by number, without what it does to images beforehand?"""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torchvision.models import detection

from widefield.config import ModelConfig
from widefield.models import build, load_weights_file


def made(name: str, channels: int = 3, classes: int = 7, **options) -> nn.Module:
    torch.manual_seed(0)
    return build(ModelConfig(name=name, options=options), in_channels=channels, num_classes=classes)


@pytest.mark.parametrize(
    ("name", "options", "theirs"),
    [
        ("retinanet", {}, detection.retinanet_resnet50_fpn),
        ("retinanet", {"p6_from_c5": True, "head_norm": "group"}, detection.retinanet_resnet50_fpn_v2),
        ("fcos", {}, detection.fcos_resnet50_fpn),
    ],
)
def test_weights_load_into_torchvisions_detector_and_give_its_maps(name, options, theirs):
    ours, other = (
        made(name, **options).double().eval(),
        theirs(weights=None, weights_backbone=None, num_classes=7).double().eval(),
    )
    assert list(ours.state_dict()) == list(other.state_dict())
    other.load_state_dict(ours.state_dict())
    image = torch.randn(2, 3, 96, 64, dtype=torch.float64)
    with torch.no_grad():
        levels, features = ours(image), list(other.backbone(image).values())
        wanted = other.head(features)
    for part, (key, values) in enumerate(wanted.items()):
        maps = [level[part] for level in levels]
        rows = [
            one.view(2, -1, values.shape[2], *one.shape[2:]).permute(0, 3, 4, 1, 2).reshape(2, -1, values.shape[2])
            for one in maps
        ]
        torch.testing.assert_close(torch.cat(rows, dim=1), values, rtol=1e-12, atol=1e-12, msg=key)


def test_a_file_of_torchvisions_faster_rcnn_gives_both_of_its_stages(tmp_path):
    other = detection.fasterrcnn_resnet50_fpn(weights=None, weights_backbone=None, num_classes=8).eval()
    torch.save(other.state_dict(), tmp_path / "theirs.pt")
    ours = made("faster_rcnn").eval()
    names = {"backbone.": "maps.backbone.", "rpn.": "maps.rpn."}
    load_weights_file(ModelConfig(name="faster_rcnn", weights=str(tmp_path / "theirs.pt"), weights_map=names), ours)
    ours, other = ours.double(), other.double()
    image, pooled = torch.randn(1, 3, 96, 64, dtype=torch.float64), torch.randn(2, 256, 7, 7, dtype=torch.float64)
    with torch.no_grad():
        levels, features = ours(image), list(other.backbone(image).values())
        wanted = [*zip(*other.rpn.head(features), features, strict=True)]
        second = other.roi_heads.box_predictor(other.roi_heads.box_head(pooled))
        pairs = [*zip(levels, wanted, strict=True), (ours.roi_heads(pooled), second)]
    for maps, others in pairs:
        for own, one in zip(maps, others, strict=True):
            torch.testing.assert_close(own, one, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    ("options", "strides"),
    [
        ({"backbone": "resnet18", "strides": [8, 16, 32], "features": 32}, [8, 16, 32]),
        (
            {"backbone": "resnet18", "strides": [4, 8, 16, 32, 64, 128], "features": 32, "norm": "frozen"},
            [4, 8, 16, 32, 64, 128],
        ),
        ({"backbone": "timm/resnet18", "strides": [8, 16, 32, 64, 128], "features": 32}, [8, 16, 32, 64, 128]),
        ({"backbone": "small", "strides": [2, 4, 8], "features": 8, "width": 4, "norm": "group"}, [2, 4, 8]),
    ],
)
def test_maps_have_the_places_that_their_strides_say(options, strides):
    if options.get("norm") == "group":
        options = options | {"width": 8}
    model = made("retinanet", channels=2, anchors=2, **options).eval()
    with torch.no_grad():
        levels = model(torch.randn(1, 2, 77, 91))
    assert [one.shape for one, _ in levels] == [(1, 14, -(-77 // stride), -(-91 // stride)) for stride in strides]
    assert [two.shape[1] for _, two in levels] == [8] * len(strides)


@pytest.mark.parametrize(
    ("name", "options", "told"),
    [
        ("retinanet", {"backbone": "resnet51"}, "model.options.backbone is 'resnet51'; did you mean 'resnet50'?"),
        (
            "retinanet",
            {"strides": [8, 32]},
            "model.options.strides is [8, 32]; of resnet50 wanted are neighbouring powers of two",
        ),
        ("retinanet", {"strides": [8, 16, 32, 64]}, "with 64 and 128 after 32 or without both"),
        ("retinanet", {"strides": [2, 4], "backbone": "resnet18"}, "from 4 to 32"),
        ("retinanet", {"backbone": "small", "strides": [3]}, "model.options.strides is [3]; of small wanted are"),
        ("retinanet", {"norm": "group"}, "batch or frozen is wanted, or group with backbone=small"),
        ("retinanet", {"norm": "layer", "backbone": "small"}, "model.options.norm is 'layer'"),
        ("retinanet", {"backbone": "timm/nothing18"}, "timm/nothing18 gives no features of the strides [8, 16, 32]"),
        ("retinanet", {"head_norm": "batch"}, "model.options.head_norm is 'batch' and features 256"),
        ("retinanet", {"anchors": 0}, "model.options.anchors is 0"),
        ("fcos", {"features": 48}, "give a multiple of 32"),
        (
            "torchvision/retinanet_resnet50_fpn",
            {},
            "torchvision/retinanet_resnet50_fpn resizes and normalizes images by itself",
        ),
        ("torchvision/fasterrcnn_resnet50_fpn", {}, "take model.name=faster_rcnn, the same network, and"),
        ("torchvision/fasterrcnn_resnet50_fpn_v2", {}, "take model.name=faster_rcnn and task.name=detection"),
        ("torchvision/ssd300_vgg16", {}, "take model.name=ssd, the same network"),
        ("torchvision/ssdlite320_mobilenet_v3_large", {}, "is SSD on MobileNet with layers of its own"),
        ("torchvision/keypointrcnn_resnet50_fpn", {}, "finds masks or key points"),
        ("faster_rcnn", {"hidden": 0}, "model.options.hidden is 0"),
        ("faster_rcnn", {"strides": [4, 8, 64]}, "model.options.strides is [4, 8, 64]"),
    ],
)
def test_what_there_is_not_is_refused_with_what_there_is(name, options, told):
    with pytest.raises((ValueError, NotImplementedError)) as caught:
        made(name, **options)
    assert told in str(caught.value)
