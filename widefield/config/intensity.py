"""The section `data.intensity`: from pixels as files have them to numbers of about 0 to 1, or of mean 0."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, ValidationInfo, field_validator, model_validator

from widefield.section import Section

Percent = Annotated[float, Field(ge=0, le=100)]


class IntensityConfig(Section):
    name: Literal["range", "values", "window", "percentiles", "zscore", "image"] = "range"
    """`range`: the limits of the dtype become 0 and 1; floating-point pixels stay.  `values`: pixels stay numbers.  `window`:
    as below.  `percentiles`: two percentiles of the training images become 0 and 1, per channel.  `zscore`: less the mean of
    the training images, by their standard deviation.  `image`: less each image's own mean, by its own deviation."""
    percentiles: Annotated[list[Percent], Field(min_length=2, max_length=2)] | None = None
    """The two percentiles, as [0.5, 99.5], which is what null means for `percentiles`.  Pixels outside are clipped; with
    `zscore` too, where null clips nothing."""
    center: float | None = None
    """Of the `window` of pixel values that become 0 to 1; pixels outside are clipped.  For CT, in Hounsfield units."""
    width: Annotated[float, Field(gt=0)] | None = None
    """Of that window."""
    area: Literal["all", "nonzero", "foreground"] = "all"
    """The pixels that statistics are of: `nonzero` ones, with `image`; those of any class but the first, with `zscore` and
    `percentiles`, as nnU-Net has it for CT: `{name: zscore, percentiles: [0.5, 99.5], area: foreground}`."""

    @model_validator(mode="before")
    @classmethod
    def _in_short(cls, given: Any) -> Any:
        """`zscore` for {name: zscore}; {window: {center: 40, width: 400}} and {percentiles: [1, 99]} name themselves."""
        if isinstance(given, str):
            return {"name": given}
        if not isinstance(given, dict):
            return given
        if isinstance(given.get("window"), dict):
            others = {key: value for key, value in given.items() if key != "window"}
            return {"name": "window", **others, **given["window"]}
        return {"name": "percentiles", **given} if "percentiles" in given else given

    @field_validator("center", "width")
    @classmethod
    def _of_a_window(cls, value: float | None, about: ValidationInfo) -> float | None:
        if value is not None and about.data.get("name", "window") != "window":
            raise ValueError(f"it is of name=window and name is {about.data['name']}; leave it out")
        return value

    @model_validator(mode="after")
    def _fits(self) -> IntensityConfig:
        if self.name == "window" and (self.center is None or self.width is None):
            raise ValueError("the window needs a center and a width, as {window: {center: 40, width: 400}}")
        if self.percentiles is not None and self.name not in ("percentiles", "zscore"):
            raise ValueError(f"percentiles are of name=percentiles and zscore, and name is {self.name}; leave them out")
        if self.percentiles is not None and self.percentiles[0] >= self.percentiles[1]:
            raise ValueError(f"percentiles are {self.percentiles}; the lower one comes first")
        areas = {"image": ("all", "nonzero"), "zscore": ("all", "foreground"), "percentiles": ("all", "foreground")}
        if self.area not in areas.get(self.name, ("all",)):
            fit = [name for name, some in areas.items() if self.area in some]
            raise ValueError(f"area={self.area} is of name={' and '.join(fit)} and name is {self.name}; leave it out")
        return self

    @property
    def needs_statistics(self) -> bool:
        """Whether all training images have to be read first."""
        return self.name in ("percentiles", "zscore")
