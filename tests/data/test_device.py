"""Do images reach the network scaled, normalized and mixed as the plain formulas say?"""

import numpy as np
import pytest
import torch
from torch.nn import functional as F
from torchvision.transforms import v2

from widefield.data.device import Preparation
from widefield.data.loader import Batch, SampleReader
from widefield.data.order import Key
from widefield.data.transforms import Transforms

MEAN, STD = [0.485, 0.456, 0.406], [0.229, 0.224, 0.225]
CLASSES = 5
NONE = Transforms([], field="data.read")


def preparation(**options) -> Preparation:
    known = {"device": torch.device("cpu"), "dtype": torch.float64, "mean": MEAN, "std": STD, "num_classes": CLASSES}
    return Preparation(**(known | {"channels_last": False, "augment": NONE} | options))


def batch_of(count: int, *, channels: int = 3, **options) -> Batch:
    """Random pixels, of 11 x 14 so that a swapped dim shows."""
    generator = torch.Generator().manual_seed(count)
    image = torch.randint(0, 256, (count, channels, 11, 14), dtype=torch.uint8, generator=generator)
    target = torch.randint(0, CLASSES, (count,), generator=generator)
    return Batch(image, target, torch.arange(count), list(range(count)), count, **options)


class Noise:
    """Images of noise, for the reader to pair."""

    def __len__(self) -> int:
        return 64

    def read(self, index: int):
        batch = batch_of(64)
        return batch.image[index], int(batch.target[index])

    def name_of(self, index: int) -> str:
        return str(index)


def mixed_batch(**mixing) -> Batch:
    """Positions 4 to 18: seven pairs and one sample alone."""
    keys = [Key(0, position, position) for position in range(4, 19)]
    batch = SampleReader(Noise(), NONE, NONE, num_classes=CLASSES, seed=3, **mixing).__getitems__(keys)
    assert batch.problem is None
    return batch


def mixed_one_by_one(batch: Batch, image: torch.Tensor) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """The reference: sample by sample and pixel by pixel, in plain Python, from normalized images."""
    images, targets = [], []
    for number in range(batch.samples):
        other, share = int(batch.partner[number]), float(batch.share[number])
        own, theirs = image[number].numpy(), image[other].numpy()
        top, left, bottom, right = batch.box[number].tolist()
        if bottom > top:
            mixed, pasted = own.copy(), 0
            for y in range(11):
                for x in range(14):
                    if top <= (y + 0.5) / 11 < bottom and left <= (x + 0.5) / 14 < right:
                        mixed[:, y, x] = theirs[:, y, x]
                        pasted += 1
            share = 1 - pasted / (11 * 14)
        else:
            mixed = share * own + (1 - share) * theirs
        target = np.zeros(CLASSES)
        target[int(batch.target[number])] += share
        target[int(batch.target[other])] += 1 - share
        images.append(mixed)
        targets.append(target)
    return images, targets


def test_images_are_normalized_as_torchvision_normalizes_them():
    batch = batch_of(4)
    image, target = preparation()(batch)
    wanted = v2.Normalize(MEAN, STD)(batch.image.double() / 255)
    torch.testing.assert_close(image, wanted, rtol=0, atol=1e-14)  # values up to 3; one addition and one product
    assert torch.equal(target, batch.target)


def test_float32_is_off_by_its_rounding_alone():
    batch = batch_of(4)
    image, _ = preparation(dtype=torch.float32)(batch)
    wanted = v2.Normalize(MEAN, STD)(batch.image.double() / 255)
    assert image.dtype == torch.float32
    torch.testing.assert_close(image.double(), wanted, rtol=0, atol=1e-6)  # 3 units in the last place of values up to 3


def test_one_mean_and_deviation_serve_all_channels():
    image, _ = preparation(mean=[0.5], std=[0.25])(batch_of(2))
    torch.testing.assert_close(image, batch_of(2).image.double() / 255 * 4 - 2, rtol=0, atol=1e-14)


@pytest.mark.parametrize("channels_last", [False, True])
def test_the_memory_format_is_as_asked_and_changes_no_number(channels_last):
    image, _ = preparation(channels_last=channels_last)(batch_of(2))
    assert image.is_contiguous(memory_format=torch.channels_last if channels_last else torch.contiguous_format)
    assert torch.equal(image, preparation()(batch_of(2))[0])


@pytest.mark.parametrize("mixing", [{"mixup": 0.4}, {"cutmix": 1.0}, {"mixup": 0.4, "cutmix": 1.0}])
def test_mixing_is_the_plain_loop_over_samples_and_pixels(mixing):
    batch = mixed_batch(**mixing)
    image, target = preparation()(batch)
    plain, _ = preparation()(Batch(batch.image, batch.target, batch.index, batch.seeds, batch.samples))
    images, targets = mixed_one_by_one(batch, plain)
    torch.testing.assert_close(image, torch.from_numpy(np.stack(images)), rtol=0, atol=1e-14)
    torch.testing.assert_close(target, torch.from_numpy(np.stack(targets)), rtol=0, atol=1e-14)
    assert (target.sum(1) - 1).abs().max() < 1e-15


def test_all_kinds_of_mixing_are_among_the_cases():
    batch = mixed_batch(mixup=0.4, cutmix=1.0)
    cut = batch.box[:, 2] > batch.box[:, 0]
    assert cut.any() and (~cut).any() and (batch.partner == torch.arange(15)).sum() == 1


def test_a_sample_without_partner_keeps_its_image_and_its_class():
    batch = mixed_batch(mixup=0.4, cutmix=1.0)
    image, target = preparation()(batch)
    plain, _ = preparation()(Batch(batch.image, batch.target, batch.index, batch.seeds, batch.samples))
    assert torch.equal(image[14], plain[14])
    assert torch.equal(target[14], F.one_hot(batch.target[14], CLASSES).double())


def test_the_device_augments_each_image_with_its_own_seed_as_the_reader_does():
    listed = ["RandomHorizontalFlip", {"ColorJitter": {"brightness": 0.5}}, {"RandomCrop": {"size": 8}}]
    augment, batch = Transforms(listed, field="data.augment"), batch_of(6)
    image, _ = preparation(augment=augment)(batch)
    read = torch.stack([augment(one, seed) for one, seed in zip(batch.image, batch.seeds, strict=True)])
    wanted, _ = preparation()(Batch(read, batch.target, batch.index))
    assert torch.equal(image, wanted) and image.shape == (6, 3, 8, 8)
