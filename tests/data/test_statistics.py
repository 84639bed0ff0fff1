"""Are statistics those of all pixels, on any number of ranks, and are images scaled by them as the formulas say?"""

from dataclasses import dataclass, field, replace

import numpy as np
import pytest
import torch
from pydantic import ValidationError
from ranks import on_ranks

from widefield.comm.mesh import Mesh, World
from widefield.config import DataConfig
from widefield.data import BadImageError, Dataset, image_moments
from widefield.data.batch import Batch
from widefield.data.device import Preparation
from widefield.data.intensity import Intensity, moments_of
from widefield.data.loader import SampleReader, reader_of
from widefield.data.order import Key
from widefield.data.statistics import statistics_of
from widefield.data.transforms import Transforms
from widefield.geometry import Interval
from widefield.plans import Plan
from widefield.training.intensity import with_intensity

CPU, NONE = torch.device("cpu"), Transforms([], field="data.read")
LIMITS = {torch.uint8: (0, 256), torch.uint16: (0, 65536), torch.int16: (-32768, 32768)}


@dataclass(frozen=True)
class Numbers:
    """Images of two channels and of two sizes, with all numbers of a dtype; image 3 may be bad."""

    dtype: torch.dtype
    bad: bool = False

    def __len__(self) -> int:
        return 7

    def read(self, index: int):
        if self.bad and index == 3:
            raise BadImageError("cannot read 3")
        random, size = np.random.default_rng(index), (2, 5, 6 + index % 2)
        if self.dtype.is_floating_point:
            image = torch.from_numpy(random.normal(3, 40, size)).to(self.dtype)
            image[0, 0, 0] = float("nan")
            return image, index % 2
        low, high = LIMITS[self.dtype]
        return torch.from_numpy(random.integers(low, high, size)).to(self.dtype), index % 2

    def name_of(self, index: int) -> str:
        return f"numbers/{index}"


def pixels(images: Numbers) -> np.ndarray:
    """(2, pixels) float64."""
    return np.concatenate([images.read(i)[0].to(torch.float64).flatten(1).numpy() for i in range(7)], 1)


def found_on(mesh: Mesh, dtype: torch.dtype):
    return statistics_of(
        Numbers(dtype),
        channels=2,
        dtype=dtype,
        labels="class",
        percents=[33.0],
        rank=mesh.rank,
        ranks=mesh.size,
        gather=mesh.gather_objects,
    ).to_tree()


@dataclass(frozen=True)
class Labelled(Numbers):
    """The same with the classes 0 to 2 and 255 of pixels, or two classes that may both be there."""

    layers: bool = False

    def read(self, index: int):
        image, _ = super().read(index)
        random = np.random.default_rng(100 + index)
        marks = random.integers(0, 2, image.shape) if self.layers else random.choice([0, 1, 2, 255], image.shape[1:])
        return image, torch.from_numpy(marks.astype(np.uint8))


@pytest.mark.parametrize("layers", [False, True])
@pytest.mark.parametrize("dtype", [torch.int16, torch.float32], ids=str)
def test_pixels_of_the_foreground_alone_may_count(dtype, layers):
    images, labels = Labelled(dtype, layers=layers), "layers" if layers else "pixels"
    found = statistics_of(images, channels=2, dtype=dtype, labels=labels, foreground=2 if layers else 3).channels
    pairs = [images.read(index) for index in range(7)]
    inside = [(marks > 0).any(0) if layers else (marks > 0) & (marks < 3) for _, marks in pairs]
    for number, channel in enumerate(found):
        values = np.concatenate(
            [image[number][where].double().numpy() for (image, _), where in zip(pairs, inside, strict=True)]
        )
        values = values[np.isfinite(values)]
        assert channel.pixels == len(values) and channel.mean == pytest.approx(values.mean(), rel=1e-12)
        assert channel.std == pytest.approx(values.std(), rel=1e-12)
        error = np.ptp(values) / 65536 if dtype.is_floating_point else 1e-9
        assert channel.percentiles[99.5] == pytest.approx(np.percentile(values, 99.5), abs=error)


def test_a_foreground_of_labels_of_images_is_refused():
    with pytest.raises(ValueError, match=r"pixels of the foreground have classes.*set data.intensity.area=all"):
        statistics_of(Numbers(torch.uint8), channels=2, dtype=torch.uint8, labels="class", foreground=2)


@pytest.mark.parametrize("dtype", [*LIMITS, torch.float32], ids=str)
def test_statistics_are_numpys_of_all_pixels(dtype):
    images = Numbers(dtype)
    found = statistics_of(images, channels=2, dtype=dtype, labels="class", percents=[33.0])
    assert found.images == 7 and found.labels == {0: 4, 1: 3} and found.sizes == {(5, 6): 4, (5, 7): 3}
    for channel, values in zip(found.channels, pixels(images), strict=True):
        values = values[np.isfinite(values)]
        width = 0.0 if not dtype.is_floating_point else 2 * np.ptp(values) / 65536  # that of a bin, twice for the interpolation
        assert channel.pixels == len(values)
        assert channel.mean == pytest.approx(values.mean(), rel=1e-12) and channel.std == pytest.approx(values.std(), rel=1e-12)
        for percent, value in channel.percentiles.items():
            assert value == pytest.approx(np.percentile(values, percent), abs=width + 1e-9)


def all_found(mesh: Mesh):
    return [found_on(mesh, dtype) for dtype in (torch.uint16, torch.float32)]


def test_ranks_share_the_images_and_give_one_ranks_numbers():
    alone = all_found(Mesh(Plan(), World(), CPU))
    assert on_ranks(3, all_found) == [alone] * 3


def bad_on(mesh: Mesh) -> list[str]:
    options = {
        "channels": 2,
        "dtype": torch.uint8,
        "labels": "class",
        "rank": mesh.rank,
        "ranks": mesh.size,
        "gather": mesh.gather_objects,
    }
    with pytest.raises(ValueError) as caught:
        statistics_of(Numbers(torch.uint8, bad=True), **options)
    return [str(caught.value), *statistics_of(Numbers(torch.uint8, bad=True), **options, skip=True).skipped]


def test_an_image_that_one_rank_cannot_read_stops_all_or_is_left_out_by_choice():
    told = "cannot read 3; mend or remove it, or set data.bad_images=skip"
    assert on_ranks(2, bad_on) == [[told, "numbers/3"]] * 2


# ---------------------------------------------------------------------------------------------- scaling


def scaled(intensity, dtype: torch.dtype = torch.uint16) -> tuple[np.ndarray, np.ndarray]:
    """Images as the network gets them in float64, and as numbers of their files; (images, 2, pixels)."""
    images = Numbers(dtype)
    dataset = Dataset(images, images, ["a", "b"], 2, [0.5, 0.5], [0.25, 0.25], True, dtype=dtype)
    config = DataConfig(name="own", intensity=intensity)
    dataset = with_intensity(config, dataset, Mesh(Plan(), World(), CPU)).dataset
    reader = SampleReader(images, NONE, NONE, num_classes=2, seed=0, intensity=dataset.intensity)
    batch = reader.__getitems__([Key(0, n, n) for n in (0, 2, 4)])
    assert batch.problem is None
    prepare = Preparation(
        device=CPU, dtype=torch.float64, mean=dataset.mean, std=dataset.std, num_classes=2, channels_last=False, augment=NONE,
        pixel_dtype=dtype, intensity=dataset.intensity,
    )  # fmt: skip
    again = Intensity.from_tree(dataset.intensity.to_tree())
    assert again == dataset.intensity
    return prepare(batch)[0].flatten(2).numpy(), batch.image.to(torch.float64).flatten(2).numpy()


def column(values) -> np.ndarray:
    return np.array(values)[None, :, None]


SCALED = {
    "range": ("range", lambda x, a: (x / 65535 - 0.5) / 0.25),
    "values": ("values", lambda x, a: x),
    "window": ({"window": {"center": 30000, "width": 20000}}, lambda x, a: (x.clip(20000, 40000) - 20000) / 20000),
    "percentiles": ({"percentiles": [5.0, 95.0]}, lambda x, a: (
        (x.clip(column(np.percentile(a, 5, 1)), column(np.percentile(a, 95, 1))) - column(np.percentile(a, 5, 1)))
        / column(np.percentile(a, 95, 1) - np.percentile(a, 5, 1)))),
    "zscore": ("zscore", lambda x, a: (x - column(a.mean(1))) / column(a.std(1))),
    "clipped zscore": ({"name": "zscore", "percentiles": [1.0, 99.0]}, lambda x, a: (
        x.clip(column(np.percentile(a, 1, 1)), column(np.percentile(a, 99, 1))) - column(a.mean(1))) / column(a.std(1))),
    "image": ("image", lambda x, a: (x - x.mean(2, keepdims=True)) / x.std(2, keepdims=True)),
}  # fmt: skip


@pytest.mark.parametrize("name", SCALED)
def test_pixels_are_scaled_as_the_formula_says(name):
    asked, formula = SCALED[name]
    got, raw = scaled(asked)
    np.testing.assert_allclose(got, formula(raw, pixels(Numbers(torch.uint16))), rtol=1e-9, atol=1e-9)


def test_pixels_of_zero_do_not_count_where_asked_for():
    image = torch.tensor([[[0, 2, 4], [0, 0, 6]], [[0, 0, 0], [0, 0, 0]]], dtype=torch.int16)
    assert moments_of(image, "nonzero").tolist() == [[4.0, pytest.approx((8 / 3) ** 0.5)], [0.0, 1.0]]


@dataclass(frozen=True)
class Counted(Numbers):
    """Notes what is read of which image."""

    noted: list = field(default_factory=list)

    def read(self, index: int):
        self.noted.append(index)
        return super().read(index)


@dataclass(frozen=True)
class CountedWindows(Counted):
    def shape(self, index: int):
        return tuple(Numbers.read(self, index)[0].shape)

    def read_window(self, index: int, window):
        self.noted.append((index, *window))
        image, target = Numbers.read(self, index)
        return image[..., *(slice(run.start, run.stop) for run in window)], target


def corner(size) -> tuple[Interval, Interval]:
    return Interval(1, 3), Interval(0, 4)


@pytest.mark.parametrize("kind", [Counted, CountedWindows])
@pytest.mark.parametrize("window", [None, corner])
@pytest.mark.parametrize("listed", [[], ["RandomRotate90"]])
def test_each_image_is_read_once_for_its_pixels_and_its_moments(kind, window, listed):
    images, read = kind(torch.uint16), []
    config = DataConfig(name="own", augment=listed)
    options = {
        "num_classes": 2,
        "seed": 0,
        "train": True,
        "device": CPU,
        "window": window,
        "intensity": Intensity(each_image="all"),
    }
    reader = reader_of(config, images, moves_as_one=bool(listed), **options)
    for epoch in range(2):
        batches = [reader.__getitems__([Key(epoch, n, n)]) for n in (0, 2, 4)]
        for number, batch in zip((0, 2, 4), batches, strict=True):
            assert batch.problem is None
            assert torch.equal(batch.moments, moments_of(Numbers.read(images, number)[0], "all")[None])
        plain = [replace(reader, images=Numbers(torch.uint16)).__getitems__([Key(epoch, n, n)]) for n in (0, 2, 4)]
        assert all(torch.equal(one.image, other.image) for one, other in zip(batches, plain, strict=True))
        read.append(list(images.noted))
        images.noted.clear()
    assert read[0] == [0, 2, 4], "the first time, the whole"
    windows = kind is CountedWindows and window is not None and not listed
    assert read[1] == ([(n, *corner(None)) for n in (0, 2, 4)] if windows else [0, 2, 4])


def test_moments_are_kept_of_so_many_images_only(monkeypatch):
    monkeypatch.setattr(image_moments, "MOST_KEPT", 2)
    images = CountedWindows(torch.uint16)
    known = image_moments.measured(images, "all")
    for index in (0, 2, 4, 4, 0):
        known.read_window(index, corner(None))
    assert images.noted == [0, 2, 4, (4, *corner(None)), 0]


def test_images_that_are_random_have_their_own_moments_each_time():
    class Random(Numbers):
        is_random = True

        def read(self, index: int):
            return torch.randint(0, 255, (2, 3, 3), dtype=torch.uint8), 0

    reader = SampleReader(Random(torch.uint8), NONE, NONE, num_classes=2, seed=0, intensity=Intensity(each_image="all"))
    batches = [reader.__getitems__([Key(epoch, 0, 1)]) for epoch in (0, 1)]
    for batch in batches:
        assert torch.equal(batch.moments[0], moments_of(batch.image[0], "all"))
    assert not torch.equal(batches[0].moments, batches[1].moments)


def test_what_a_run_has_stored_is_used_again():
    images = Numbers(torch.uint8, bad=True)  # which cannot be read whole
    dataset = Dataset(images, images, ["a", "b"], 2, [0.5, 0.5], [0.25, 0.25], True)
    stored = replace(dataset, intensity=Intensity((1.0, 2.0), (3.0, 4.0), statistics="zscore"))
    config, mesh = DataConfig(name="own", intensity="zscore"), Mesh(Plan(), World(), CPU)
    assert with_intensity(config, dataset, mesh, stored=stored).dataset.intensity == stored.intensity
    with pytest.raises(ValueError, match="cannot read 3"):
        with_intensity(config, dataset, mesh)


@pytest.mark.parametrize(
    ("before", "now", "words"),
    [
        ("zscore", {"percentiles": [1.0, 99.0]}, "percentiles 1 and 99"),
        ({"percentiles": [0.5, 99.5]}, {"percentiles": [1.0, 99.0]}, "percentiles 1 and 99"),
        ("zscore", {"name": "zscore", "percentiles": [1.0, 99.0]}, "zscore between percentiles 1 and 99"),
        ("range", "zscore", "zscore"),
        ("image", "percentiles", "percentiles 0.5 and 99.5"),
    ],
)
def test_where_a_recipe_asks_for_other_statistics_than_before_they_are_taken(before, now, words):
    images, mesh = Numbers(torch.uint16), Mesh(Plan(), World(), CPU)
    dataset = Dataset(images, images, ["a", "b"], 2, [0.5, 0.5], [0.25, 0.25], True, dtype=torch.uint16)
    stored = with_intensity(DataConfig(name="own", intensity=before), dataset, mesh).dataset
    fresh = with_intensity(DataConfig(name="own", intensity=now), dataset, mesh)
    again = with_intensity(DataConfig(name="own", intensity=now), dataset, mesh, stored=stored)
    assert again == fresh and again.statistics is not None and again.dataset.intensity.statistics == words
    assert f"data.intensity={words} of 7 images" in again.reasons[0]
    kept = with_intensity(DataConfig(name="own", intensity=now), dataset, mesh, stored=again.dataset)
    assert kept.statistics is None and kept.dataset.intensity == fresh.dataset.intensity


def test_a_channel_that_is_the_same_everywhere_is_refused():
    class Flat(Numbers):
        def read(self, index: int):
            return torch.full((2, 3, 3), 7, dtype=torch.uint8), 0

    dataset = Dataset(Flat(torch.uint8), Flat(torch.uint8), ["a"], 2, [0.5] * 2, [0.5] * 2, True)
    with pytest.raises(ValueError, match=r"data.intensity=zscore divides by the spread of pixels, and channel 0 is 7 almost"):
        with_intensity(DataConfig(name="own", intensity="zscore"), dataset, Mesh(Plan(), World(), CPU))


@pytest.mark.parametrize(("asked", "told"), [
    ({"name": "window"}, "the window needs a center and a width"),
    ({"name": "range", "width": 3.0}, "it is of name=window and name is range"),
    ({"name": "image", "percentiles": [1.0, 9.0]}, "percentiles are of name=percentiles and zscore"),
    ({"percentiles": [9.0, 1.0]}, "the lower one comes first"),
    ({"name": "range", "area": "nonzero"}, "area=nonzero is of name=image and name is range"),
    ({"name": "image", "area": "foreground"}, "area=foreground is of name=zscore and percentiles and name is image"),
])  # fmt: skip
def test_intensities_that_do_not_fit_are_refused(asked, told):
    with pytest.raises(ValidationError, match=told):
        DataConfig(name="own", intensity=asked)


def test_uint8_images_have_the_numbers_of_before():
    batch = Batch(torch.arange(256, dtype=torch.uint8).view(1, 1, 16, 16), torch.zeros(1), torch.zeros(1))
    prepare = Preparation(
        device=CPU, dtype=torch.float32, mean=[0.3], std=[0.4], num_classes=2, channels_last=False, augment=NONE
    )
    mean, std = torch.tensor([0.3]), torch.tensor([0.4])
    wanted = torch.addcmul((-mean / std).view(1, 1, 1, 1), batch.image.float(), (1 / (255 * std)).view(1, 1, 1, 1))
    assert torch.equal(prepare(batch)[0], wanted)
