"""The section `data` of a recipe: the dataset, batches, transforms."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, ValidationInfo, WithJsonSchema, field_validator

from widefield.config.field_types import Listed, Options, Positive, Share, Spread
from widefield.config.intensity import IntensityConfig
from widefield.config.patches import PatchesConfig
from widefield.section import Section


def _size(value: int | str) -> int | str:
    if value == "auto":
        return value
    if isinstance(value, str):
        raise ValueError("a whole number of 1 or more is wanted, or auto")
    if value < 1:
        raise ValueError("input should be greater than or equal to 1")
    return value


_SIZE: dict[str, Any] = {"anyOf": [{"type": "integer", "minimum": 1}, {"const": "auto"}]}


class DataConfig(Section):
    name: str
    """A file in widefield/data/formats/, as `digits`, `imagefolder`, `manifest`, `masks`, `pairs`, `coco`, `webdataset`, or
    `package.module:callable`."""
    path: str | None = None
    """The folder or file that the format reads; `digits` and `page` need none."""
    options: Options = {}
    """Arguments of the format, as `size: [4096, 4096]` for page."""
    batch_size: Annotated[int | str, AfterValidator(_size), WithJsonSchema(_SIZE)] = 64
    """Samples per optimizer step, of all ranks together, so that the number of ranks changes no result; `auto` finds the
    largest that fits the memory and leaves 20 steps an epoch."""
    evaluate_batch_size: Positive | None = None
    """Samples per rank and batch in evaluation; changes only memory and speed."""
    hold_out: Share | None = None
    """Share of samples held out for evaluation where the data has no split of its own, of each class and by groups."""
    fold: Annotated[int, Field(ge=0)] | None = None
    """Instead of `hold_out`: which of `folds` is held out, counted from 0, for cross-validation."""
    folds: Annotated[int, Field(ge=2)] = 5
    """Into how many parts `fold` divides the samples, each class alike and by groups."""
    sampling: Literal["balanced", "weights"] | None = None
    """Draw the samples of an epoch with replacement, as many as it has: `balanced`, so that every class is drawn equally often,
    or `weights`, in proportion to the manifest's weights; null reads every sample once."""
    patches: PatchesConfig | None = None
    tissue: Annotated[str, Field(min_length=1)] | None = None
    """What of slides counts: `otsu`, by a threshold of saturation, or a folder with a mask per slide, `STEM.png`, of any lower
    resolution.  Patches are drawn there; without `data.patches`, it is a last channel of 0 and 1, by which a model may pool."""
    workers: Annotated[int, Field(ge=0)] | None = None
    """Processes per rank that read and decode."""
    read: Listed = []
    """torchvision.transforms.v2 by name, or one of your own, as an image is read, in training: `[CenterCrop: {size: 8}]`."""
    read_evaluate: Listed = []
    """The same in evaluation and prediction."""
    augment: Listed = []
    """The same, only in training; on the device where no labels of pixels move with the image."""
    visible: Share = 0.1
    """Of objects' boxes: one that a transform moves out of the image is left out if a smaller share of it stays visible."""
    intensity: IntensityConfig = IntensityConfig()
    mean: Annotated[list[float], Field(min_length=1)] | None = None
    """Per channel, of pixels scaled as `data.intensity` says, by default to 0..1; the format's own where null, or 0 with
    another intensity."""
    std: Annotated[list[Spread], Field(min_length=1)] | None = None
    """Per channel, of the same; the format's own where null, or 1 with another intensity."""
    mixup: Annotated[float, Field(ge=0)] = 0.0
    """Alpha of mixup's beta distribution; 0 is off.  Neighbours in the order of samples are mixed."""
    cutmix: Annotated[float, Field(ge=0)] = 0.0
    """Alpha of cutmix's beta distribution; 0 is off.  With mixup on too, each pair draws one of the two."""
    bad_images: Literal["stop", "skip"] = "stop"
    """What to do with an unreadable image: stop the run and name it, or leave it out and count it."""

    @property
    def batch(self) -> int:
        """`batch_size`, the number.  ValueError: it is to be found."""
        if isinstance(self.batch_size, str):
            raise ValueError("data.batch_size=auto is found where training begins; set data.batch_size to a number here")
        return self.batch_size

    @property
    def cut_multiple(self) -> int:
        """A batch is cut at multiples of this: mixup and cutmix mix pairs, which stay on one rank."""
        return 2 if self.mixup > 0 or self.cutmix > 0 else 1

    @property
    def batch_if_known(self) -> int | None:
        """`batch_size`, or None where it is to be found."""
        return None if isinstance(self.batch_size, str) else self.batch_size

    @field_validator("mean")
    @classmethod
    def _fits_scaled_pixels(cls, mean: list[float] | None, about: ValidationInfo) -> list[float] | None:
        """ValueError: a mean outside of what pixels are scaled to."""
        odd = next((value for value in mean or [] if not 0 <= value <= 1), None)
        intensity = about.data.get("intensity")
        if odd is not None and (intensity is None or intensity.name == "range"):
            raise ValueError(
                f"{odd:g} is outside 0..1, to which pixels are scaled; divide by 255, or set data.intensity=values for means "
                "of pixels as they are"
            )
        return mean
