"""The section `data` of a recipe: the dataset, batches, transforms."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from widefield.config.field_types import Listed, Options, Positive, Share, Spread
from widefield.section import Section


class DataConfig(Section):
    name: str
    """A file in widefield/data/formats/ (`digits`, `imagefolder`, `page`), or `package.module:callable`."""
    path: str | None = None
    """The folder that the format reads; `digits` and `page` need none."""
    options: Options = {}
    """Arguments of the format, as `size: [4096, 4096]` for page."""
    batch_size: Positive = 64
    """Samples per optimizer step, of all ranks together, so that the number of ranks changes no result."""
    evaluate_batch_size: Positive | None = None
    """Samples per rank and batch in evaluation; changes only memory and speed."""
    hold_out: Share | None = None
    """Share of samples held out for evaluation where the folder has no val/ of its own."""
    sampling: Literal["balanced", "weights"] | None = None
    """Draw the samples of an epoch with replacement, as many as it has: `balanced`, so that every class is drawn equally often,
    or `weights`, in proportion to the manifest's weights; null reads every sample once."""
    workers: Annotated[int, Field(ge=0)] | None = None
    """Processes per rank that read and decode."""
    read: Listed = []
    """torchvision.transforms.v2 by name, or one of your own, as an image is read, in training: `[CenterCrop: {size: 8}]`."""
    read_evaluate: Listed = []
    """The same in evaluation and prediction."""
    augment: Listed = []
    """The same, only in training; on the device where no labels of pixels move with the image."""
    mean: Annotated[list[Annotated[float, Field(ge=0, le=1)]], Field(min_length=1)] | None = None
    """Per channel, of pixels scaled to 0..1; the format's own where null."""
    std: Annotated[list[Spread], Field(min_length=1)] | None = None
    """Per channel, of pixels scaled to 0..1; the format's own where null."""
    mixup: Annotated[float, Field(ge=0)] = 0.0
    """Alpha of mixup's beta distribution; 0 is off.  Neighbours in the order of samples are mixed."""
    cutmix: Annotated[float, Field(ge=0)] = 0.0
    """Alpha of cutmix's beta distribution; 0 is off.  With mixup on too, each pair draws one of the two."""
    bad_images: Literal["stop", "skip"] = "stop"
    """What to do with an unreadable image: stop the run and name it, or leave it out and count it."""
