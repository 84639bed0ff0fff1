"""Are Faster R-CNN's losses, gradients and what is found torchvision's, in float64, where both draw the same?"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torchvision.models.detection import FasterRCNN
from torchvision.models.detection.anchor_utils import AnchorGenerator
from torchvision.models.detection.image_list import ImageList
from torchvision.ops import MultiScaleRoIAlign

from widefield.config import ModelConfig
from widefield.detection.region_pooling import RegionPooling
from widefield.detection.sampling import ImageDraws
from widefield.detection.selection import Limits
from widefield.detection.targets import rows_of, stacked
from widefield.models import build as build_model
from widefield.tasks.detection import build

CLASSES = 4
STRIDES = [4, 8, 16]
SIZES = [(96, 128), (77, 131)]
SEEDS = [11, 5, 2**63 - 9]
FEW = {"proposals": (120, 60), "anchors_drawn": 64, "boxes_drawn": 40}
SMALL = {"backbone": "small", "strides": STRIDES, "width": 4, "features": 8, "hidden": 24, "norm": "frozen"}


class Backbone(nn.Module):
    """Ours, with the channels that torchvision's detector asks for."""

    def __init__(self, backbone: nn.Module) -> None:
        super().__init__()
        self.inner, self.out_channels = backbone, backbone.out_channels

    def forward(self, image: Tensor) -> dict[str, Tensor]:
        return self.inner(image)


def ours(seed: int = 0) -> nn.Module:
    """With random weights as of a network that has learned something: classes differ, boxes move."""
    torch.manual_seed(seed)
    model = build_model(ModelConfig(name="faster_rcnn", options=SMALL), in_channels=3, num_classes=CLASSES).double()
    for name, weight in model.named_parameters():
        if weight.ndim > 1 and ("rpn" in name or "roi_heads" in name):
            nn.init.normal_(weight, std=0.15 if "rpn" in name else 0.08)
    return model


def theirs(model: nn.Module, **more) -> FasterRCNN:
    """torchvision's two stages with the same weights, without its resizing."""
    sizes, backbone = tuple((8 * one,) for one in STRIDES), Backbone(model.maps.backbone)
    names = [str(number + 1) for number in range(len(STRIDES))]
    found = FasterRCNN(
        backbone, rpn_anchor_generator=AnchorGenerator(sizes, ((0.5, 1.0, 2.0),) * 3),
        box_roi_pool=MultiScaleRoIAlign(names, 7, 2), box_head=model.roi_heads.box_head,
        box_predictor=model.roi_heads.box_predictor, rpn_pre_nms_top_n_train=120, rpn_post_nms_top_n_train=120,
        rpn_pre_nms_top_n_test=60, rpn_post_nms_top_n_test=60, rpn_batch_size_per_image=64, box_batch_size_per_image=40, **more,
    ).double()  # fmt: skip
    found.rpn.head = model.maps.rpn.head
    assign = found.rpn.assign_targets_to_anchors

    def in_double(*args):  # theirs are float32, and so would be the loss
        labels, boxes = assign(*args)
        return [one.double() for one in labels], boxes

    found.rpn.assign_targets_to_anchors = in_double
    return found


def example(size: tuple[int, int]) -> tuple[Tensor, list[dict[str, Tensor]]]:
    """Three images, and their boxes: several, none, one."""
    torch.manual_seed(1)
    image, targets = torch.randn(3, 3, *size, dtype=torch.float64), []
    for count in (7, 0, 1):
        start = torch.rand(count, 2, dtype=torch.float64) * torch.tensor([size[1] * 0.7, size[0] * 0.7])
        sides = 6 + torch.rand(count, 2, dtype=torch.float64) * torch.tensor([size[1] * 0.3, size[0] * 0.3]) * 0.8
        boxes = torch.cat([start, torch.minimum(start + sides, torch.tensor([size[1], size[0]]))], dim=1).double()
        targets.append({"boxes": boxes, "labels": torch.randint(CLASSES, (count,))})
    return image, targets


def same_draws(monkeypatch) -> None:
    """Let torchvision draw what ImageDraws does: of each image anchors and then, in a second round, boxes."""
    draws, asked = [torch.Generator().manual_seed(seed) for seed in SEEDS], []

    def drawn(count: int, device=None) -> Tensor:
        asked.append(count)
        of_image = draws[(len(asked) - 1) // 2 % len(draws)]  # positive and negative ones of each image
        most = (32, 64, 10, 40)[(len(asked) - 1) // 6 * 2 + (len(asked) - 1) % 2]
        if len(asked) % 2 == 0:
            most -= min(asked[-2], most // 2 if most == 64 else most // 4)
        return torch.arange(count) if count <= most else permutation(count, generator=of_image)

    permutation = torch.randperm
    monkeypatch.setattr("torchvision.models.detection._utils.torch.randperm", drawn)


def targets_of(targets, size) -> Tensor:
    return stacked([rows_of(one["boxes"], one["labels"]) for one in targets], [size] * 3)


@pytest.mark.parametrize("size", SIZES, ids=str)
def test_losses_and_gradients_are_torchvisions(size, monkeypatch):
    model, task = ours(), build(CLASSES, method="faster_rcnn", strides=STRIDES, features=8, torchvision_anchors=True, **FEW)
    image, targets = example(size)
    target, names = targets_of(targets, size), [name for name, _ in model.named_parameters()]
    done = task.completed(model(image), model.roi_heads, [size] * 3, target=target, seeds=SEEDS, trains=True)
    found = task.loss_sum(done, target) / 3
    slopes = torch.autograd.grad(found, list(model.parameters()))
    assert {len(one.logits) for one in done.drawn} == {40} and done.proposed is None
    assert all(slope.any() for slope in slopes)
    other = theirs(model).train()
    same_draws(monkeypatch)
    features = other.backbone(image)
    behind = [one | {"labels": one["labels"] + 1} for one in targets]
    proposals, of_anchors = other.rpn(ImageList(image, [size] * 3), features, behind)
    _, of_boxes = other.roi_heads(features, proposals, [size] * 3, behind)
    sums = task.sums(done, target)
    parts = [
        of_anchors["loss_objectness"],
        of_anchors["loss_rpn_box_reg"],
        of_boxes["loss_classifier"],
        of_boxes["loss_box_reg"],
    ]
    shares = [sums[0] / sums[2], sums[1] / sums[2], sums[3] / sums[5], sums[4] / sums[5]]
    for one, wanted in zip(shares, parts, strict=True):
        assert one.item() == pytest.approx(wanted.item(), rel=1e-12) and one > 0
    for name, one, wanted in zip(names, slopes, torch.autograd.grad(sum(parts), list(model.parameters())), strict=True):
        torch.testing.assert_close(one, wanted, rtol=1e-10, atol=1e-12, msg=name)


@pytest.mark.parametrize("size", SIZES, ids=str)
def test_what_is_found_is_torchvisions(size):
    model, limits = ours().eval(), {"score": 0.22, "detections": 20}
    task = build(CLASSES, method="faster_rcnn", strides=STRIDES, features=8, torchvision_anchors=True, **FEW, **limits)
    image, _ = example(size)
    other = theirs(model, box_score_thresh=0.22, box_detections_per_img=20).eval()
    with torch.no_grad():
        done = task.completed(model(image), model.roi_heads, [size] * 3)
        found, features = task.found(done, [size] * 3), other.backbone(image)
        proposals, _ = other.rpn(ImageList(image, [size] * 3), features)
        wanted, _ = other.roi_heads(features, proposals, [size] * 3)
    for one, boxes in zip(done.proposed, proposals, strict=True):
        torch.testing.assert_close(one.asked.boxes, boxes, rtol=0, atol=1e-9)
    assert sum(len(one.boxes) for one in found) > 12
    for one, boxes in zip(found, wanted, strict=True):
        torch.testing.assert_close(one.boxes, boxes["boxes"], rtol=0, atol=1e-9)
        torch.testing.assert_close(one.scores, boxes["scores"], rtol=0, atol=1e-12)
        assert torch.equal(one.labels, boxes["labels"] - 1)


# ---------------------------------------------------------------------------------------------- draws, pooling, empty images


def test_draws_are_of_a_seed_alone_and_take_at_most_what_they_may():
    learns, others = torch.arange(300_000) % 50_000 == 7, torch.arange(300_000) % 2 == 0

    def drawn(seed: int) -> list[list[int]]:
        return [one.tolist() for one in ImageDraws(seed).balanced(learns, others & ~learns, most=100, share=0.04)]

    positive, negative = drawn(3)
    assert (positive, negative) == tuple(drawn(3)) and drawn(3) != drawn(4)
    assert (len(positive), len(negative), len(set(negative))) == (4, 96, 96)
    assert learns[positive].all() and (others & ~learns)[negative].all() and negative == sorted(negative)
    few = ImageDraws(3).balanced(learns, torch.zeros_like(others), most=100, share=0.5)
    assert [one.tolist() for one in few] == [learns.nonzero().flatten().tolist(), []]


def test_each_place_is_drawn_equally_often():
    counts = torch.zeros(70_000)
    for seed in range(300):
        _, chosen = ImageDraws(seed).balanced(counts < -1, counts > -1, most=700, share=0.5)
        counts[chosen] += 1
    assert counts.mean() == 3 and counts.var() == pytest.approx(3 * 0.99, rel=0.03)


def test_pooling_is_torchvisions_and_of_no_box_nothing():
    torch.manual_seed(0)
    maps = [torch.randn(2, 5, 256 // stride, 192 // stride, dtype=torch.float64) for stride in (4, 8, 16, 32)]
    start = torch.rand(60, 2, dtype=torch.float64) * 150
    boxes = torch.cat([start, start + 1 + torch.rand(60, 2, dtype=torch.float64) ** 3 * 800], dim=1)
    own = RegionPooling((4, 8, 16, 32))
    named = {str(number): one for number, one in enumerate(maps)}
    wanted = MultiScaleRoIAlign(list(named), 7, 2)(named, [boxes[:23], boxes[23:]], [(256, 192)] * 2)
    torch.testing.assert_close(own.pooled(maps, [boxes[:23], boxes[23:]]), wanted, rtol=1e-12, atol=1e-12)
    assert set(own.levels_of(boxes).tolist()) == {0, 1, 2, 3}
    assert own.pooled(maps, [boxes[:0]] * 2).shape == (0, 5, 7, 7)


def test_a_batch_without_boxes_learns_the_background_and_crowds_are_nothing():
    model, task = ours(), build(CLASSES, method="faster_rcnn", strides=STRIDES, features=8, **FEW)
    image, targets = example(SIZES[1])
    crowds = rows_of(targets[0]["boxes"], targets[0]["labels"], crowd=[1] * 7)
    losses = []
    for rows in ([rows_of([], [])] * 3, [crowds, rows_of([], []), crowds]):
        target = stacked(rows, [SIZES[1]] * 3)
        asked = {"target": target, "seeds": SEEDS, "trains": True}
        done = task.completed(model(image), model.roi_heads, [SIZES[1]] * 3, **asked)
        sums = task.sums(done, target)
        assert sums[1] == sums[4] == 0 and sums[2] == 3 * 64 and sums[5] == 3 * 40
        losses.append(task.loss_sum(done, target))
    assert losses[0] == losses[1] and losses[0].isfinite() and losses[0] > 0


def test_limits_and_draws_grow_with_the_area():
    """As of torchvision for a megapixel or less."""
    task = build(CLASSES, method="faster_rcnn")
    assert task.limits == Limits(0.05, 0.5, 2000, 100) and task.heads.pooling.strides == (4, 8, 16, 32)
    model = ours().eval()
    few = build(CLASSES, method="faster_rcnn", strides=STRIDES, features=8, proposals=(9, 6), boxes_drawn=3, anchors_drawn=8)
    for height, times in ((64, 1), (31_200, 2)):
        size, target = (height, 64), stacked([rows_of([], [])], [(height, 64)])
        with torch.no_grad():
            maps = model(torch.randn(1, 3, *size, dtype=torch.float64))
            done = few.completed(maps, model.roi_heads, [size], target=target, seeds=[3])
        assert 6 * times - 6 < len(done.proposed[0].logits) <= 6 * times and len(done.drawn[0].logits) == 3 * times
        assert len(done.anchors[0].others) == 8 * times
