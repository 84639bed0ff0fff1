"""Do torchvision's transforms of colour do to images of 16 bits and of floats what they do to numbers from 0 to 1?"""

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from widefield.config import DataConfig
from widefield.data import Dataset
from widefield.data.loader import reader_of
from widefield.data.order import Key
from widefield.data.transform_checks import check_transforms
from widefield.data.transforms import KEEP_PIXELS_IN_PLACE, OF_256_LEVELS, Transforms
from widefield.geometry import Interval

CPU = torch.device("cpu")
LIMITS = {torch.uint16: (0, 65535), torch.int16: (-32768, 32767), torch.float32: (0, 1)}
LISTED = {
    "ColorJitter": {"brightness": 0.4, "saturation": 0.3, "hue": 0.2},
    "GaussianBlur": {"kernel_size": 5},
    "RandomAdjustSharpness": {"sharpness_factor": 2, "p": 1.0},
    "RandomAutocontrast": {"p": 1.0},
    "RandomEqualize": {"p": 1.0},
    "RandomGrayscale": {"p": 1.0},
    "RandomInvert": {"p": 1.0},
    "RandomPhotometricDistort": {"p": 1.0},
    "RandomPosterize": {"bits": 6, "p": 1.0},
    "RandomSolarize": {"threshold": 0.5, "p": 1.0},
}
"""Arguments, where they are needed for a change that is seen."""
RUN = [name for name in KEEP_PIXELS_IN_PLACE if name not in OF_256_LEVELS]
SAME_CHANNELS = [name for name in RUN if name != "Grayscale"]


def entry(name: str) -> dict:
    return {name: LISTED.get(name, {})}


@dataclass(frozen=True)
class Colours:
    """Images of 3 channels with all numbers of the dtype; labelled: every pixel has a label."""

    dtype: torch.dtype
    labelled: bool = True
    channels: int = 3

    def __len__(self) -> int:
        return 2

    def image(self, index: int) -> Tensor:
        part = torch.rand(self.channels, 31, 45, generator=torch.Generator().manual_seed(index))
        low, high = LIMITS[self.dtype]
        return part if self.dtype.is_floating_point else (part * (high - low) + low).to(torch.int32).to(self.dtype)

    def read(self, index: int) -> tuple[Tensor, int | Tensor]:
        image = self.image(index)
        return image, (torch.arange(31 * 45).view(31, 45) % 2).to(torch.uint8) if self.labelled else 1

    def name_of(self, index: int) -> str:
        return f"colours/{index}"

    @property
    def dataset(self) -> Dataset:
        labels = "pixels" if self.labelled else "class"
        rows = [0.5] * self.channels
        return Dataset(self, self, ["a", "b"], self.channels, rows, rows, True, labels=labels, dtype=self.dtype)


def read(images: Colours, listed: list, *, window=None):
    config = DataConfig(name="colours", augment=listed)
    batch = reader_of(
        config,
        images,
        num_classes=2,
        seed=5,
        train=True,
        device=CPU,
        window=window,
        ignore=255,
        pixels=images.labelled,
        moves_as_one=True,
    ).__getitems__([Key(0, 0, 1)])
    assert batch.problem is None, batch.problem
    return batch


def as_numbers(image: Tensor) -> Tensor:
    """From 0 to 1, in float64."""
    low, high = LIMITS[image.dtype]
    return (image.double() - low) / (high - low)


@pytest.mark.parametrize("name", KEEP_PIXELS_IN_PLACE)
def test_of_every_transform_it_is_known_whether_it_keeps_more_than_8_bits(name):
    image = Colours(torch.float32).image(0)
    found = Transforms([entry(name)], field="data.read")(image, 0)
    levels = (found.double() * 255 - (found.double() * 255).round()).abs().max() < 1e-4
    assert bool(levels) == (name in OF_256_LEVELS)


@pytest.mark.parametrize("labelled", [True, False], ids=["labels of pixels", "one label"])
@pytest.mark.parametrize("dtype", [torch.uint16, torch.int16], ids=str)
@pytest.mark.parametrize("name", RUN)
def test_integers_become_what_the_same_numbers_from_0_to_1_become(name, dtype, labelled):
    images = Colours(dtype, labelled)
    assert check_transforms(DataConfig(name="colours", augment=[entry(name)]), images.dataset, ignore=255, cut=False) == []
    batch, transforms = read(images, [entry(name)]), Transforms([entry(name)], field="data.augment")
    assert batch.image.dtype == dtype and torch.equal(batch.target[0], torch.as_tensor(images.read(1)[1]))
    low, high = LIMITS[dtype]
    wanted = transforms(as_numbers(images.image(1)).float(), Key(0, 0, 1).seed(5, "augment"))
    wanted = (wanted.double() * (high - low) + low).round().clamp(low, high)
    assert (batch.image[0].double() - wanted).abs().max() <= 1, "float32 has 24 bits, so a tie may round to the other side"


@pytest.mark.parametrize("dtype", [torch.uint16, torch.int16], ids=str)
@pytest.mark.parametrize("name", ["Identity", "RGB", "RandomChannelPermutation"])
def test_what_only_reorders_channels_keeps_every_bit(name, dtype):
    images = Colours(dtype)
    one, other = read(images, [entry(name)]).image[0].to(torch.int32), images.image(1).to(torch.int32)
    assert torch.equal(one.flatten(1).sum(1).sort()[0], other.flatten(1).sum(1).sort()[0])
    assert torch.equal(one.sort(0)[0], other.sort(0)[0])


@pytest.mark.parametrize("name", RUN)
def test_floats_are_as_they_are(name):
    images = Colours(torch.float32)
    wanted = Transforms([entry(name)], field="x").steps[0]
    torch.manual_seed(Key(0, 0, 1).seed(5, "augment"))
    assert torch.equal(read(images, [entry(name)]).image[0], wanted.run(images.image(1)))


def quarter(size) -> tuple[Interval, Interval]:
    return Interval(size[0] // 2, size[0]), Interval(7, size[1] - 6)


@pytest.mark.parametrize("dtype", LIMITS, ids=str)
@pytest.mark.parametrize("name", SAME_CHANNELS)
@pytest.mark.parametrize("labelled", [True, False], ids=["labels of pixels", "one label"])
def test_a_tile_is_that_part_of_the_whole_bit_for_bit(name, dtype, labelled):
    listed = [entry(name), {"RandomRotation": {"degrees": [20, 40]}}, {"ColorJitter": {"brightness": 0.3, "saturation": 0.5}}]
    images = Colours(dtype, labelled)
    whole, part = read(images, listed), read(images, listed, window=quarter)
    rows, columns = (slice(run.start, run.stop) for run in part.window)
    assert torch.equal(part.image, whole.image[..., rows, columns]) and part.image.dtype == dtype


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64], ids=str)
def test_other_floats_keep_their_dtype(dtype):
    image = Colours(torch.float32).image(0).to(dtype)
    made = Transforms([{"RandomInvert": {"p": 1.0}}], field="x")(image, 0)
    assert made.dtype == dtype and torch.allclose(made.double(), 1 - image.double(), atol=1e-2)  # bfloat16 has 8 bits


# ---------------------------------------------------------------------------------------------- refusals


def told(listed: list, images: Colours) -> str:
    with pytest.raises(ValueError) as caught:
        check_transforms(DataConfig(name="colours", augment=listed), images.dataset, ignore=255, cut=False)
    return str(caught.value)


@pytest.mark.parametrize("dtype", LIMITS, ids=str)
def test_what_needs_8_bits_or_moves_nothing_is_refused(dtype):
    for name in ("RandomEqualize", "RandAugment"):
        assert f"data.augment has {name}, which changes uint8 images" in told([name], Colours(dtype, labelled=False))


@pytest.mark.parametrize(
    ("listed", "channels", "words"),
    [
        ({"ColorJitter": {"hue": 0.1}}, 5, "ColorJitter, which torchvision cannot run on images of 5 channels of uint16"),
        ({"RandomSolarize": {"threshold": 128}}, 3, "Threshold should be less or equal the maximum value of the dtype"),
        ({"RandomAutocontrast": {"p": 0.0}}, 2, "permitted channel values are 1 or 3"),
    ],
)
def test_what_torchvision_cannot_run_is_refused_in_its_words_before_anything_is_read(listed, channels, words):
    assert words in told([listed], Colours(torch.uint16, channels=channels))


@pytest.mark.parametrize("name", [name for name in RUN if name not in ("Identity", "RGB")])
def test_floats_outside_of_0_to_1_are_refused_where_they_would_be_clipped(name):
    class Wide(Colours):
        def image(self, index: int) -> Tensor:
            return super().image(index) * 2000 - 1000

    config, images = DataConfig(name="colours", augment=[entry(name)]), Wide(torch.float32)
    made = reader_of(config, images, num_classes=2, seed=5, train=True, device=CPU, pixels=True, moves_as_one=True)
    problem = made.__getitems__([Key(0, 0, 1)]).problem
    if name in ("GaussianBlur", "Grayscale", "RandomChannelPermutation", "RandomGrayscale"):
        assert problem is None
        return
    assert f"colours/1: {name} takes floating-point pixels to be from 0 to 1, and here are -99" in problem
