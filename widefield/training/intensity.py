"""The intensity that a recipe asks for, with its numbers: from the recipe, the run's model.json, or statistics of images."""

from __future__ import annotations

from dataclasses import dataclass, replace

from widefield.comm.mesh import Mesh
from widefield.config import DataConfig
from widefield.config.intensity import IntensityConfig
from widefield.data import Dataset
from widefield.data.intensity import Intensity
from widefield.data.statistics import SplitStatistics, statistics_of
from widefield.training.terminal import ImageProgress


@dataclass(frozen=True)
class Scaled:
    """dataset: with its intensity.  statistics: of the training images, where they were needed.  reasons: for the log."""

    dataset: Dataset
    statistics: SplitStatistics | None = None
    reasons: tuple[str, ...] = ()


def with_intensity(config: DataConfig, dataset: Dataset, mesh: Mesh, *, stored: Dataset | None = None) -> Scaled:
    """The dataset with the intensity of the config.  Every rank calls it; with statistics, each reads a part of the images.

    stored: what the run has of its dataset; its numbers are used again, since the weights belong to them, unless the config
        now asks for other statistics.
    ValueError, on every rank: images that cannot be read, or a channel that is the same everywhere.
    """
    asked = config.intensity
    if asked.name == "range":
        return Scaled(dataset)
    plain = replace(dataset, mean=[0.0] * dataset.channels, std=[1.0] * dataset.channels)
    if not asked.needs_statistics:
        return Scaled(replace(plain, intensity=_without_statistics(config)))
    words = _statistics_in_words(asked)
    if stored is not None and stored.channels == dataset.channels and stored.intensity.statistics == words:
        return Scaled(replace(plain, intensity=stored.intensity), reasons=(f"{_in_words(stored.intensity)}: the run's own",))
    progress = ImageProgress(len(dataset.train), each=mesh.size) if mesh.is_main else None
    statistics = statistics_of(
        dataset.train,
        channels=dataset.channels,
        dtype=dataset.dtype,
        labels=dataset.labels,
        percents=asked.percentiles or (),
        foreground=len(dataset.classes) if asked.area == "foreground" else None,
        rank=mesh.rank,
        ranks=mesh.size,
        gather=mesh.gather_objects,
        skip=config.bad_images == "skip",
        done=(lambda: None) if progress is None else progress.add,
    )
    if progress is not None:
        progress.close()
    intensity = replace(_of_statistics(config, statistics), statistics=words)
    _check_spread(config, intensity)
    reason = f"{_in_words(intensity)}: data.intensity={words} of {statistics.images:,} images to train on"
    return Scaled(replace(plain, intensity=intensity), statistics, (reason,))


def _without_statistics(config: DataConfig) -> Intensity:
    asked = config.intensity
    if asked.name == "image":
        return Intensity(each_image="nonzero" if asked.area == "nonzero" else "all")
    if asked.name == "values":
        return Intensity((0.0,), (1.0,))
    assert asked.center is not None and asked.width is not None
    low, high = asked.center - asked.width / 2, asked.center + asked.width / 2
    return Intensity((low,), (high,), clip=((low,), (high,)))


def _ends(asked: IntensityConfig) -> list[float] | None:
    """The two percentiles, None where there are none."""
    return asked.percentiles or ([0.5, 99.5] if asked.name == "percentiles" else None)


def _statistics_in_words(asked: IntensityConfig) -> str:
    """As `zscore`, or `percentiles 0.5 and 99.5`."""
    ends = _ends(asked)
    area = " of the foreground" if asked.area == "foreground" else ""
    if ends is None:
        return f"{asked.name}{area}"
    between = " and ".join(f"{end:.12g}" for end in ends)
    return (
        f"percentiles {between}{area}" if asked.name == "percentiles" else f"{asked.name} between percentiles {between}{area}"
    )


def _of_statistics(config: DataConfig, statistics: SplitStatistics) -> Intensity:
    asked, channels = config.intensity, statistics.channels
    ends = _ends(asked)
    clip = None
    if ends is not None:
        low, high = (tuple(channel.percentiles[end] for channel in channels) for end in ends)
        clip = (low, high)
        if asked.name == "percentiles":
            return Intensity(low, high, clip)
    return Intensity(
        tuple(channel.mean for channel in channels), tuple(channel.mean + channel.std for channel in channels), clip
    )


def _check_spread(config: DataConfig, intensity: Intensity) -> None:
    assert intensity.low is not None and intensity.high is not None
    for channel, (low, high) in enumerate(zip(intensity.low, intensity.high, strict=True)):
        if not high > low:
            raise ValueError(
                f"data.intensity={config.intensity.name} divides by the spread of pixels, and channel {channel} is {low:g} "
                "almost everywhere in the images to train on; take other percentiles, data.intensity=range, or leave "
                "the channel out"
            )


def _in_words(intensity: Intensity) -> str:
    shown = [
        f"{name} [{', '.join(f'{value:.6g}' for value in side)}]"
        for name, side in (("low", intensity.low), ("high", intensity.high)) if side is not None
    ]  # fmt: skip
    return f"pixels are scaled from {' to '.join(shown)}"
