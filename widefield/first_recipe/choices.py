"""What a first recipe chooses, each value with its reason: transforms, model, batch size, schedule, weights of classes."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from widefield.config import ModelConfig
from widefield.data import Labels
from widefield.first_recipe.look import Look
from widefield.models import build
from widefield.quantity import bytes_text
from widefield.training.memory import free_host_bytes

TASKS: dict[Labels, str] = {
    "class": "classification", "classes": "multilabel", "values": "regression", "pixels": "segmentation",
    "layers": "multilabel_segmentation",
}  # fmt: skip
SMALL_PX = 256
"""Images of one size up to this are read as they are."""
UNBALANCED = 3.0
"""Classes are weighted where the most frequent one is so many times as frequent as the least."""
PRETRAINED = ("resnet50", "resnet34", "resnet18")
"""Networks of torchvision whose weights are looked for in its cache."""
PATIENCE = 10
"""Epochs without a better evaluation after which a run ends."""
LEAST_PX = 32
"""And on no fewer along a dim, since networks halve it some times."""
MEASURED_PX = 512 * 512
"""Memory is measured on no more pixels than these, and is in proportion to them."""


@dataclass(frozen=True)
class RecipeEntry:
    """A key of the recipe with its value, and the reason."""

    key: str
    value: Any
    reason: str = ""


def choices_for(look: Look) -> list[RecipeEntry]:
    """All choices, in the order of the recipe."""
    is_pixels = look.dataset.labels in ("pixels", "layers")
    size = look.shapes[0][1:] if look.same_size else (look.side, look.side)
    flips = RecipeEntry("data.augment", ["RandomHorizontalFlip", "RandomVerticalFlip"], "of image and mask as one")
    transforms, size = ([flips], size) if is_pixels else _transforms(look)
    model = [*_unet(look)] if is_pixels else [*_classifier(look, size)]
    config = ModelConfig(**{choice.key.partition(".")[2]: choice.value for choice in model})
    batch, *stream = _batch(look, config, size, is_pixels=is_pixels)
    pretrained = bool(config.pretrained)
    learning = [*task_of(look), *optimizer_of(pretrained), *schedule_of(look, pretrained)]
    return [*model, *data_of(look), batch, *transforms, *learning, *stream]


def data_of(look: Look) -> Iterator[RecipeEntry]:
    yield RecipeEntry("data.name", look.data.name)
    yield RecipeEntry("data.path", look.data.path)
    if look.data.hold_out:
        share, count = look.data.hold_out, len(look.dataset.evaluate)
        yield RecipeEntry("data.hold_out", share, f"there is no split to evaluate on, so {count:,} images are held out")
    if look.data.fold is not None:
        count = len(look.dataset.evaluate)
        yield RecipeEntry(
            "data.fold", look.data.fold, f"of splits_final.json, with {count:,} to evaluate; others are 1, 2, ..."
        )


def _transforms(look: Look) -> tuple[list[RecipeEntry], tuple[int, ...]]:
    """Transforms of images with labels of their own, and the size that the model gets."""
    (height, width), side = look.shapes[0][1:], look.side
    if look.same_size and max(height, width) <= SMALL_PX:
        crop = {"RandomCrop": {"size": [height, width], "padding": max(1, side // 8)}}
        return [RecipeEntry("data.augment", [crop], f"all are of {height} x {width} px, and read as they are")], (height, width)
    size = min(224, side // 32 * 32 or side)
    smallest, largest = (f(min(shape[1:]) for shape in look.shapes) for f in (min, max))
    reason = f"shorter sides are of {smallest} to {largest} px, {side} in the middle"
    read = [{"RandomResizedCrop": {"size": size, "scale": [0.5, 1.0], "antialias": True}}]
    evaluate = [{"Resize": {"size": round(size * 8 / 7), "antialias": True}}, {"CenterCrop": {"size": size}}]
    chosen = [RecipeEntry("data.read", read, reason), RecipeEntry("data.read_evaluate", evaluate)]
    if look.dataset.channels == 3:
        chosen.append(RecipeEntry("data.augment", ["RandomHorizontalFlip"], "delete it where left and right mean something"))
    return chosen, (size, size)


# ---------------------------------------------------------------------------------------------- the model


def _classifier(look: Look, size: tuple[int, ...]) -> Iterator[RecipeEntry]:
    count, weights = len(look.dataset.train), _weights_at_hand() if look.dataset.channels == 3 and min(size) >= 64 else None
    if weights is not None:
        yield RecipeEntry("model.name", f"torchvision/{weights}", "its pretrained weights are in torchvision's cache")
        yield RecipeEntry("model.pretrained", True)
        return
    levels = min(5, max(3, int(math.log2(max(1, min(size) / 8))) + 1))
    width, blocks = 16 if count < 2000 else 32, 1 if count < 5000 else 2
    why = "" if look.dataset.channels != 3 or min(size) < 64 else "no pretrained weights are at hand; "
    yield RecipeEntry("model.name", "resnet", f"{why}{levels} stages bring {min(size)} px to {min(size) >> (levels - 1)}")
    widths = [width << level for level in range(levels)]
    yield RecipeEntry("model.options", {"widths": widths, "blocks": blocks}, f"sized for {count:,} images")


def _unet(look: Look) -> Iterator[RecipeEntry]:
    count = len(look.dataset.train)
    levels = min(5, max(3, int(math.log2(max(1, look.side / 16))) + 1))
    width = 16 if count < 500 else 32
    yield RecipeEntry("model.name", "unet", f"{levels} levels see {2 ** (levels + 2)} px and more around a pixel")
    yield RecipeEntry("model.options", {"widths": [width << level for level in range(levels)]}, f"sized for {count:,} images")


def _weights_at_hand() -> str | None:
    """The first network of PRETRAINED whose weights torchvision has in its cache."""
    from torchvision.models import get_model_weights

    place = Path(torch.hub.get_dir()) / "checkpoints"
    files = {name: place / os.path.basename(get_model_weights(name).DEFAULT.url) for name in PRETRAINED}
    return next((name for name, file in files.items() if file.is_file()), None)


# ---------------------------------------------------------------------------------------------- batches and memory


def _batch(look: Look, config: ModelConfig, size: tuple[int, ...], *, is_pixels: bool) -> list[RecipeEntry]:
    """The batch size, and tiles in time where not even one image fits."""
    count, kept, free = len(look.dataset.train), kept_bytes(look, config, size), free_memory()
    fits = int(free / 2 / kept)
    memory = f"an image keeps some {bytes_text(kept)} for the backward, and {bytes_text(free)} are free"
    if is_pixels and not look.same_size:
        batch = RecipeEntry("data.batch_size", 1, f"images are of different sizes; {memory}")
    else:
        of_count = 2 ** round(math.log2(min(64, max(8, count / 20))))
        number = max(1, min(of_count, 2 ** int(math.log2(max(1, fits))), count))
        batch = RecipeEntry("data.batch_size", number, f"some 20 steps an epoch, up to 64; {memory}")
    if fits >= 1 or not is_pixels:
        return [batch]
    return [
        batch,
        RecipeEntry("stream.memory", f"{max(1, int(free / 2**31))}GiB", "one image does not fit: it runs tile after tile"),
    ]


def kept_bytes(look: Look, config: ModelConfig, size: tuple[int, ...]) -> float:
    """The bytes that the forward of an image of `size` keeps for the backward, in float32, twice: gradients are as large."""
    untrained, dims = config.model_copy(update={"pretrained": None}), len(size)
    model = build(untrained, in_channels=look.dataset.channels, num_classes=len(look.dataset.classes), dims=dims)
    share = min(1.0, (MEASURED_PX / math.prod(size)) ** (1 / dims))
    measured = [max(min(extent, LEAST_PX), round(extent * share)) for extent in size]
    image = torch.zeros(1, look.dataset.channels, *measured)
    kept: dict[int, int] = {}

    def note(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    own = {weight.untyped_storage().data_ptr() for weight in model.parameters()}
    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        output = model.train()(image)
    assert output is not None  # alive until here, and with it all that it keeps
    return 2 * sum(size for place, size in kept.items() if place not in own) * math.prod(size) / math.prod(measured) or 1.0


def free_memory() -> int:
    """Free memory of the GPU, or of this machine where there is none."""
    if torch.cuda.is_available():
        return torch.cuda.mem_get_info()[0]
    return free_host_bytes()


# ---------------------------------------------------------------------------------------------- task, optimizer, schedule


def task_of(look: Look) -> Iterator[RecipeEntry]:
    labels, counts = look.dataset.labels, look.counts
    yield RecipeEntry("task.name", TASKS[labels], _classes_in_words(look))
    if labels == "pixels":
        yield RecipeEntry("task.loss", "dice_cross_entropy", "Dice looks at areas, so that small ones count")
    elif labels == "class" and max(counts) > UNBALANCED * max(1, min(counts)):
        reason = f"from {min(counts):,} to {max(counts):,} images of a class, so that each class counts the same"
        yield RecipeEntry("task.class_weights", "balanced", reason)


def _classes_in_words(look: Look) -> str:
    names, total = look.dataset.classes, max(1, sum(look.counts))
    if not look.counts:
        return f"values: {', '.join(names[:8])}"
    each = [f"{name} {100 * count / total:.1f} %" for name, count in zip(names, look.counts, strict=True)]
    unit = "pixels" if look.dataset.labels in ("pixels", "layers") else "images"
    return f"{len(names)} classes, {unit}: {', '.join(each[:8])}{', ...' if len(each) > 8 else ''}"


def optimizer_of(pretrained: bool) -> Iterator[RecipeEntry]:
    yield RecipeEntry("optimizer.name", "adamw", "needs little tuning")
    yield RecipeEntry(
        "optimizer.lr", 3e-4 if pretrained else 1e-3, "small, for the weights are good already" if pretrained else ""
    )
    yield RecipeEntry("optimizer.weight_decay", 0.05)


def schedule_of(look: Look, pretrained: bool) -> Iterator[RecipeEntry]:
    count = len(look.dataset.train)
    seen, least, most = (8_000, 5, 30) if pretrained else (20_000, 10, 100)
    epochs = min(most, max(least, round(seen / count)))
    yield RecipeEntry("schedule.name", "cosine")
    yield RecipeEntry("schedule.length", f"{epochs}ep", f"{epochs * count:,} images in all; double it for more accuracy")
    yield RecipeEntry("schedule.warmup", "1ep")
    if epochs > PATIENCE:
        yield RecipeEntry("evaluate.patience", PATIENCE, f"the run ends after {PATIENCE} evaluations without a better one")
