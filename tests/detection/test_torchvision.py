"""Are losses, gradients and what is found those of torchvision's RetinaNet and FCOS, in float64?"""

from __future__ import annotations

from collections import OrderedDict

import pytest
import torch
from torch import Tensor, nn
from torchvision.models.detection import FCOS, RetinaNet
from torchvision.models.detection.anchor_utils import AnchorGenerator
from torchvision.models.detection.image_list import ImageList
from torchvision.ops import box_iou

from widefield.detection.matching import BACKGROUND, BETWEEN, matched_by_overlap
from widefield.detection.targets import rows_of, stacked
from widefield.tasks.detection import build

STRIDES = [8, 16, 32]
SIZES = [(96, 128), (77, 131), (40, 24)]
"""Of images: multiples of the strides, odd ones, and one that the largest boxes fill."""


class Pyramid(nn.Module):
    """A backbone that is not run: maps come from outside."""

    out_channels = 32

    def forward(self, images: Tensor) -> OrderedDict:
        raise AssertionError("not run")


def theirs(method: str, classes: int):
    if method == "fcos":
        anchors = AnchorGenerator(tuple((one,) for one in STRIDES), ((1.0,),) * 3)
        return FCOS(Pyramid(), classes, anchor_generator=anchors).double()
    sizes = tuple((4 * one, int(4 * one * 2 ** (1 / 3)), int(4 * one * 2 ** (2 / 3))) for one in STRIDES)
    return RetinaNet(Pyramid(), classes, anchor_generator=AnchorGenerator(sizes, ((0.5, 1.0, 2.0),) * 3)).double()


def example(size: tuple[int, int], classes: int, seed: int = 0) -> tuple[list[Tensor], list[dict[str, Tensor]]]:
    """Features of three images, and their boxes: several, none, one."""
    torch.manual_seed(seed)
    maps = [torch.randn(3, 32, -(-size[0] // s), -(-size[1] // s), dtype=torch.float64) for s in STRIDES]
    targets = []
    for count in (7, 0, 1):
        start = torch.rand(count, 2, dtype=torch.float64) * torch.tensor([size[1] * 0.7, size[0] * 0.7])
        sides = 3 + torch.rand(count, 2, dtype=torch.float64) * torch.tensor([size[1] * 0.3, size[0] * 0.3]) * 0.9
        boxes = torch.cat([start, torch.minimum(start + sides, torch.tensor([size[1], size[0]]))], dim=1).double()
        targets.append({"boxes": boxes, "labels": torch.randint(classes, (count,))})
    return maps, targets


def output_of(model: nn.Module, maps: list[Tensor]) -> list[tuple[Tensor, ...]]:
    """What the heads give, as maps of each level."""
    head, levels = model.head, []
    for one in maps:
        of_class, of_box = head.classification_head.conv(one), head.regression_head.conv(one)
        parts = [head.classification_head.cls_logits(of_class), head.regression_head.bbox_reg(of_box)]
        if isinstance(model, FCOS):
            parts = [parts[0], parts[1].relu(), head.regression_head.bbox_ctrness(of_box)]
        levels.append(tuple(parts))
    return levels


def anchors_of(model: nn.Module, maps: list[Tensor], size: tuple[int, int]) -> list[Tensor]:
    images = torch.zeros(3, 3, *size, dtype=torch.float64)
    return model.anchor_generator(ImageList(images, [size] * 3), maps)


def sharpened(model: nn.Module) -> nn.Module:
    """Heads with the random weights of a network that has learned something: classes differ, boxes move."""
    torch.manual_seed(3)
    for name, weight in model.head.named_parameters():
        if name.endswith("weight") and weight.ndim == 4:
            nn.init.normal_(weight, std=0.06)
        if name.endswith("cls_logits.bias"):
            nn.init.constant_(weight, -1.0)
    return model


@pytest.mark.parametrize("method", ["retinanet", "fcos"])
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_losses_and_gradients_are_torchvisions(method, size):
    model = sharpened(theirs(method, 5))
    maps, targets = example(size, 5)
    anchors = anchors_of(model, maps, size)
    wanted = model.compute_loss(
        targets, model.head(maps), anchors, *([[m[0, 0].numel() for m in maps]] if method == "fcos" else [])
    )
    total = sum(wanted.values())
    names = [name for name, _ in model.named_parameters()]
    slopes = torch.autograd.grad(total, list(model.parameters()))
    task = build(5, method=method, strides=STRIDES, torchvision_anchors=True)
    target = stacked([rows_of(one["boxes"], one["labels"]) for one in targets], [size] * 3)
    found = task.loss_sum(output_of(model, maps), target) / task.count(target)
    assert found.item() == pytest.approx(total.item(), rel=1e-12)
    ours = torch.autograd.grad(found, list(model.parameters()))
    for name, one, other in zip(names, ours, slopes, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-12, msg=name)
    if size == SIZES[0]:
        plain = build(5, method=method, strides=STRIDES)
        assert (plain.loss_sum(output_of(model, maps), target) / 3).item() == pytest.approx(total.item(), rel=1e-12)


@pytest.mark.parametrize("method", ["retinanet", "fcos"])
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_what_is_found_is_torchvisions(method, size):
    """Of random maps, whose scores are all different."""
    model = sharpened(theirs(method, 5))
    maps, _ = example(size, 5, seed=1)
    anchors = anchors_of(model, maps, size)
    counts = [len(one) for one in split(anchors[0], maps)]
    heads = {name: list(one.split(counts, dim=1)) for name, one in model.head(maps).items()}
    model.score_thresh, model.topk_candidates = 0.05, 60
    wanted = model.postprocess_detections(heads, [split(one, maps) for one in anchors], [size] * 3)
    task = build(5, method=method, strides=STRIDES, torchvision_anchors=True, score=0.05, candidates=60,
                 detections=model.detections_per_img)  # fmt: skip
    with torch.no_grad():
        found = task.found(output_of(model, maps), [size] * 3)
    assert sum(len(one.boxes) for one in found) > 30
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one.boxes, other["boxes"], rtol=0, atol=1e-9)
        torch.testing.assert_close(one.scores, other["scores"], rtol=0, atol=1e-12)
        assert torch.equal(one.labels, other["labels"])


def split(anchors: Tensor, maps: list[Tensor]) -> list[Tensor]:
    places = sum(one[0, 0].numel() for one in maps)
    return list(anchors.split([one[0, 0].numel() * (len(anchors) // places) for one in maps]))


def test_matching_in_pieces_is_that_of_the_whole_table(monkeypatch):
    """A box that no anchor overlaps much takes its best one, wherever that is; a tie takes all."""
    from torchvision.models.detection._utils import Matcher

    torch.manual_seed(0)
    start = torch.randint(0, 60, (40, 2)).double()
    start[:4] = torch.tensor([[0, 0], [20, 20], [21, 21], [22, 24]])
    levels = [torch.cat([start, start + 16], dim=1), torch.cat([start[:9] - 20, start[:9] + 44], dim=1)]
    boxes = torch.tensor([[3.0, 5, 8, 9], [20, 20, 36, 36], [20, 20, 36, 36], [1, 0, 64, 50]], dtype=torch.float64)
    wanted = Matcher(0.5, 0.4, allow_low_quality_matches=True)(box_iou(boxes, torch.cat(levels)))
    for entries in (2**24, 12, 1):
        monkeypatch.setattr("widefield.detection.matching._ENTRIES", entries)
        assert torch.equal(torch.cat(matched_by_overlap(boxes, levels, below=0.4, above=0.5)), wanted)
    assert {BACKGROUND, BETWEEN, 0, 1, 3} <= set(wanted.tolist())


def test_a_box_that_no_anchor_meets_is_learned_by_none():
    """Its largest IoU is 0, which torchvision's Matcher finds at every anchor."""
    far, anchors = torch.tensor([[500.0, 500, 510, 510]]), torch.tensor([[0.0, 0, 16, 16], [16, 0, 32, 16]])
    (found,) = matched_by_overlap(far, [anchors], below=0.4, above=0.5)
    assert found.tolist() == [BACKGROUND, BACKGROUND]
