"""The options of the task `detection`, and the heads that they ask for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

from widefield.detection.anchor_heads import AnchorHeads, BoxLoss
from widefield.detection.anchors import MapLevels
from widefield.detection.default_box_heads import DefaultBoxHeads
from widefield.detection.point_heads import PointHeads
from widefield.detection.region_heads import Drawn, Proposals, RegionHeads
from widefield.detection.region_pooling import RegionPooling
from widefield.detection.selection import Limits

Method = Literal["retinanet", "fcos", "ssd", "faster_rcnn"]
Heads = AnchorHeads | PointHeads | DefaultBoxHeads | RegionHeads

COARSEST_POOLED = 32
"""Boxes are looked at on levels of strides up to this, as torchvision's: the level that is pooled of the last has proposals
alone."""
_SSD_STRIDES = (8, 16, 32, 64, 100, 300)
_SSD_SCALES = (0.07, 0.15, 0.33, 0.51, 0.69, 0.87, 1.05)
_DEFAULTS: dict[str, dict[str, Any]] = {
    "retinanet": {},
    "fcos": {"score": 0.2, "suppress": 0.6},
    "ssd": {"strides": _SSD_STRIDES, "score": 0.01, "suppress": 0.45, "overlap": (0.5, 0.5), "candidates": 400,
            "detections": 200},
    "faster_rcnn": {"strides": (4, 8, 16, 32, 64), "anchor_scale": 8.0, "octaves": 1, "overlap": (0.3, 0.7)},
}  # fmt: skip
_USUAL: dict[str, Any] = {
    "strides": (8, 16, 32, 64, 128), "anchor_scale": 4.0, "octaves": 3, "overlap": (0.4, 0.5), "score": 0.05, "suppress": 0.5,
    "candidates": 1000, "detections": 100,
}  # fmt: skip


@dataclass(frozen=True)
class DetectorOptions:
    """method: retinanet or faster_rcnn, heads with anchors, ssd, with default boxes, or fcos, without.  strides: pixels of the
    image per place, of each level.  Where None stands, a method has its own number; see the guide.

    Of retinanet and faster_rcnn: anchor_scale, the side of the smallest anchor in strides; octaves, how many sizes, up to twice
    that.  overlap, below which IoU an anchor is background, and from which it learns a box; of ssd the second counts.
    box_loss, of retinanet: `l1`, `smooth_l1` or `giou`.  ratios: of height to width; of ssd, of each level, beside squares of
    two sizes.
    Of fcos: radius, in strides, about a box's center, in which places learn it.  alpha, gamma: of the focal loss, of retinanet
    and fcos.  torchvision_anchors: places lie `image // map` apart, as in torchvision, and not a stride; of ssd a stride apart,
    as in torchvision's SSD300, and not image / map.
    Of ssd: scales, of each level and one more, shares of the image's sides or, with scales_in_px, pixels; negatives, how many
    default boxes count as background for each that learns a box.
    Of faster_rcnn: features, channels of the pyramid; proposals, the most in training and else, which are also the most
    candidates of a level; anchors_drawn and boxes_drawn, how many count in an image's losses, all for a megapixel.
    score: the least of what is found.  suppress: the largest IoU of two boxes of one class.  candidates: the most of a level,
    of ssd of a class, and detections: of an image, both per megapixel, and for smaller images as for one.
    """

    method: Method = "retinanet"
    strides: Sequence[int] | None = None
    anchor_scale: float | None = None
    octaves: int | None = None
    ratios: Any = None
    overlap: Sequence[float] | None = None
    radius: float = 1.5
    alpha: float = 0.25
    gamma: float = 2.0
    box_loss: BoxLoss = "l1"
    torchvision_anchors: bool = False
    scales: Sequence[float] | None = None
    scales_in_px: bool = False
    negatives: float = 3.0
    features: int = 256
    proposals: Sequence[int] = (2000, 1000)
    anchors_drawn: int = 256
    boxes_drawn: int = 512
    score: float | None = None
    suppress: float | None = None
    candidates: int | None = None
    detections: int | None = None

    def of(self, name: str) -> Any:
        """The option, or what the method has where it is None."""
        value = getattr(self, name)
        return (_USUAL | _DEFAULTS.get(self.method, {})).get(name) if value is None else value

    @property
    def limits(self) -> Limits:
        candidates = max(self.proposals) if self.method == "faster_rcnn" else self.of("candidates")
        return Limits(self.of("score"), self.of("suppress"), candidates, self.of("detections"))

    @property
    def levels(self) -> MapLevels:
        return MapLevels(tuple(self.of("strides")), self.torchvision_anchors)

    @property
    def anchor_sizes(self) -> tuple[tuple[int, ...], ...]:
        """Of each level, in pixels."""
        octaves, scale = self.of("octaves"), self.of("anchor_scale")
        return tuple(
            tuple(int(scale * stride * 2 ** (part / octaves)) for part in range(octaves)) for stride in self.of("strides")
        )

    @property
    def plain_ratios(self) -> tuple[float, ...]:
        return (0.5, 1.0, 2.0) if self.ratios is None else tuple(map(float, self.ratios))

    @property
    def level_ratios(self) -> tuple[tuple[float, ...], ...]:
        """Of ssd: with six levels (2), (2, 3) three times, (2), (2), as in SSD300; with others (2, 3) of each."""
        count = len(self.of("strides"))
        if self.ratios is not None:
            return tuple(tuple(map(float, own)) for own in self.ratios)
        return ((2.0,), *[(2.0, 3.0)] * 3, (2.0,), (2.0,)) if count == len(_SSD_STRIDES) else ((2.0, 3.0),) * count

    @property
    def level_scales(self) -> tuple[float, ...]:
        """Of ssd: those of SSD300 with its strides; with others evenly from 0.15 to 0.9 and then 1, as in torchvision."""
        strides = tuple(self.of("strides"))
        if self.scales is not None:
            return tuple(map(float, self.scales))
        if strides == _SSD_STRIDES:
            return _SSD_SCALES
        steps = max(1, len(strides) - 1)
        return (*(0.15 + 0.75 * level / steps for level in range(len(strides))), 1.0 if len(strides) > 1 else 0.9)


def heads_of(num_classes: int, asked: DetectorOptions) -> Heads:
    """ValueError: options out of range."""
    _check(asked)
    return _HEADS[asked.method](num_classes, asked)


def _anchor_heads(classes: int, asked: DetectorOptions) -> AnchorHeads:
    shares = {"below": float(asked.of("overlap")[0]), "above": float(asked.of("overlap")[1])}
    focal = {"alpha": asked.alpha, "gamma": asked.gamma}
    return AnchorHeads(
        classes, asked.levels, asked.anchor_sizes, asked.plain_ratios, **shares, **focal, box_loss=asked.box_loss
    )


def _point_heads(classes: int, asked: DetectorOptions) -> PointHeads:
    return PointHeads(classes, asked.levels, asked.radius, asked.alpha, asked.gamma)


def _default_box_heads(classes: int, asked: DetectorOptions) -> DefaultBoxHeads:
    places = (asked.levels, asked.level_scales, asked.level_ratios, asked.scales_in_px, asked.torchvision_anchors)
    return DefaultBoxHeads(classes, *places, float(asked.of("overlap")[1]), asked.negatives)


def _region_heads(classes: int, asked: DetectorOptions) -> RegionHeads:
    below, above = map(float, asked.of("overlap"))
    return RegionHeads(
        classes, asked.levels, asked.anchor_sizes, RegionPooling(pooled_strides(asked.of("strides"))), asked.plain_ratios,
        asked.features, Proposals(*asked.proposals), Drawn(asked.anchors_drawn, 0.5, below, above),
        Drawn(asked.boxes_drawn, 0.25, 0.5, 0.5),
    )  # fmt: skip


def pooled_strides(strides: Sequence[int]) -> tuple[int, ...]:
    """Of the levels that boxes are looked at on."""
    return tuple(stride for stride in strides if stride <= COARSEST_POOLED) or tuple(strides[:1])


_HEADS: dict[str, Callable[[int, DetectorOptions], Heads]] = {
    "retinanet": _anchor_heads, "fcos": _point_heads, "ssd": _default_box_heads, "faster_rcnn": _region_heads,
}  # fmt: skip


# ---------------------------------------------------------------------------------------------- options out of range


def _check(asked: DetectorOptions) -> None:
    """ValueError: options out of range."""
    rules = [*_of_all(asked), *(_of_ssd(asked) if asked.method == "ssd" else _of_regions(asked))]
    told = next((what for is_right, what in rules if not is_right), None)
    if told is not None:
        raise ValueError(f"task.options.{told}")


def _of_all(asked: DetectorOptions) -> list[tuple[bool, str]]:
    strides, octaves, overlap, box_loss = asked.of("strides"), asked.of("octaves"), asked.of("overlap"), asked.box_loss
    limits = asked.limits
    counts = [limits.candidates, limits.detections]
    return [
        (asked.method in get_args(Method),
         f"method is {asked.method!r}; {', '.join(get_args(Method))} are there, others have losses of other kinds"),
        (_all(strides, lambda one: type(one) is int and one > 0) and sorted(set(strides)) == list(strides),
         f"strides is {strides!r}; whole numbers that rise are wanted, one of each level"),
        (_is_count(octaves), f"octaves is {octaves!r}; a whole number of 1 or more is wanted"),
        (asked.method == "ssd" or asked.ratios is None or _all(asked.ratios, _is_above_0),
         f"ratios is {asked.ratios!r}; numbers above 0 are wanted"),
        (len(overlap) == 2 and 0 <= overlap[0] <= overlap[1] <= 1,
         f"overlap is {overlap!r}; two rising numbers from 0 to 1 are wanted"),
        (box_loss in get_args(BoxLoss), f"box_loss is {box_loss!r}; {', '.join(get_args(BoxLoss))} are there"),
        (_all([limits.score, limits.overlap], lambda one: 0 <= one <= 1),
         f"score is {limits.score!r} and suppress {limits.overlap!r}; shares from 0 to 1 are wanted"),
        (_all(counts, _is_count),
         f"candidates is {counts[0]!r} and detections {counts[1]!r}; whole numbers of 1 or more are wanted"),
    ]  # fmt: skip


def _of_ssd(asked: DetectorOptions) -> list[tuple[bool, str]]:
    levels, ratios, scales = len(asked.of("strides")), asked.ratios, asked.scales
    return [
        (ratios is None or (_all(ratios, lambda own: own == [] or _all(own, _is_above_0)) and len(ratios) == levels),
         f"ratios is {ratios!r}; of ssd a list of numbers above 0 is wanted for each of the {levels} levels"),
        (scales is None or (_all(scales, _is_above_0) and len(scales) == levels + 1),
         f"scales is {scales!r}; {levels + 1} numbers above 0 are wanted, of the {levels} levels and of one more"),
        (scales is not None or not asked.scales_in_px, "scales_in_px is true and scales is not set; give scales in pixels"),
        (_is_above_0(asked.negatives), f"negatives is {asked.negatives!r}; a number above 0 is wanted"),
    ]  # fmt: skip


def _of_regions(asked: DetectorOptions) -> list[tuple[bool, str]]:
    counts = [asked.features, asked.anchors_drawn, asked.boxes_drawn]
    pooled = pooled_strides(asked.of("strides"))
    powers = [pooled[0] * 2**number for number in range(len(pooled))]
    is_power = pooled[0] & (pooled[0] - 1) == 0 and list(pooled) == powers
    return [
        (_all(counts, _is_count),
         f"features is {counts[0]!r}, anchors_drawn {counts[1]!r} and boxes_drawn {counts[2]!r}; whole numbers of 1 or more "
         "are wanted"),
        (_all(asked.proposals, _is_count) and len(asked.proposals) == 2,
         f"proposals is {asked.proposals!r}; two whole numbers of 1 or more are wanted, of training and else"),
        (asked.method != "faster_rcnn" or is_power,
         f"strides is {list(asked.of('strides'))}; boxes are looked at on those up to {COARSEST_POOLED}, which are to be "
         "neighbouring powers of two, as [4, 8, 16, 32, 64]"),
    ]  # fmt: skip


def _is_count(value: Any) -> bool:
    return type(value) is int and value > 0


def _is_above_0(value: Any) -> bool:
    return type(value) in (int, float) and value > 0


def _all(values: Any, is_right: Callable[[Any], bool]) -> bool:
    return isinstance(values, list | tuple) and bool(values) and all(map(is_right, values))
