"""Is every sample read once, as the same picture, however ranks, workers and passes share the work?"""

import doctest
import os
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from torch import Tensor

from widefield.config import DataConfig
from widefield.data import BadImageError, loader, mixing, open_dataset, order
from widefield.data.loader import Batch, SampleReader, load_batches, reader_of
from widefield.data.order import EvaluateSampler, Key, Steps, TrainSampler, order_of, share_of
from widefield.data.transforms import Step, Transforms
from widefield.geometry import Interval

CPU = torch.device("cpu")
NONE = Transforms([], field="data.read")
MIXING = {"mixup": 0.4, "cutmix": 1.0}
layouts = {
    "samples": st.integers(1, 70),
    "batch": st.integers(1, 24),
    "ranks": st.integers(1, 5),
    "passes": st.integers(1, 4),
    "multiple": st.integers(1, 3),
}


@dataclass(frozen=True)
class Dots:
    """Image i is (1, 2, 2) of value i, of class i % 3; some cannot be read, some are larger, some labels are wrong."""

    count: int
    bad: set[int] = field(default_factory=set)
    large: set[int] = field(default_factory=set)
    labels: dict[int, int] = field(default_factory=dict)

    def __len__(self) -> int:
        return self.count

    def read(self, index: int) -> tuple[Tensor, int]:
        if index in self.bad:
            raise BadImageError(f"cannot read the image dots/{index}")
        side = 3 if index in self.large else 2
        return torch.full((1, side, side), index, dtype=torch.uint8), self.labels.get(index, index % 3)

    def name_of(self, index: int) -> str:
        return f"dots/{index}"


def sampler_of(steps: Steps, *, rank=0, ranks=1, passes=1, multiple=1, first=0, last=None, seed=0) -> TrainSampler:
    last = steps.per_epoch if last is None else last
    return TrainSampler(steps, seed=seed, first=first, last=last, rank=rank, ranks=ranks, passes=passes, multiple=multiple)


def reading(images, **options) -> SampleReader:
    return SampleReader(images, options.pop("transforms", NONE), NONE, num_classes=3, seed=0, **options)


def keys(*indices: int, real: bool = True) -> list[Key]:
    return [Key(0, position, index, real) for position, index in enumerate(indices)]


def test_the_examples_in_the_docstrings_hold():
    result = doctest.testmod(order)
    assert result.failed == 0 and result.attempted == 2


# ---------------------------------------------------------------------------------------------- who reads what


@given(**layouts, epoch=st.integers(0, 2))
def test_every_position_of_an_epoch_is_read_exactly_once(samples, batch, ranks, passes, multiple, epoch):
    steps = Steps(samples, batch)
    span = {"first": epoch * steps.per_epoch, "last": (epoch + 1) * steps.per_epoch}
    layout = {"ranks": ranks, "passes": passes, "multiple": multiple, **span}
    owns = [list(sampler_of(steps, rank=rank, **layout)) for rank in range(ranks)]
    read = [key for own in owns for keys in own for key in keys if key.real]
    for number in range(steps.per_epoch * passes):  # all ranks run a pass, or none does since nobody has a sample for it
        somebody = any(key.real for own in owns for key in own[number])
        assert [bool(own[number]) for own in owns] == [somebody] * ranks
    assert sorted(key.position for key in read) == list(range(samples))
    order = order_of(0, epoch, samples)
    assert all(key.index == order[key.position] and key.epoch == epoch for key in read)


@given(**layouts)
def test_a_pass_of_all_ranks_together_is_the_same_images_on_any_number_of_ranks(samples, batch, ranks, passes, multiple):
    steps = Steps(samples, batch)
    for step in range(steps.per_epoch):
        positions = steps.positions(step)
        cut = {"passes": passes, "multiple": multiple}
        alone = share_of(positions, rank=0, ranks=1, **cut)
        shares = [share_of(positions, rank=rank, ranks=ranks, **cut) for rank in range(ranks)]
        for number, part in enumerate(alone):
            assert [position for share in shares for position in share[number]] == list(part)


@given(start=st.integers(0, 50), length=st.integers(0, 40), ranks=st.integers(1, 5), passes=st.integers(1, 4))
def test_a_mixed_pair_is_never_split_over_ranks_or_passes(start, length, ranks, passes):
    step = Interval(start, start + length)
    shares = [part for rank in range(ranks) for part in share_of(step, rank=rank, ranks=ranks, passes=passes, multiple=2)]
    for part in shares:
        for position in part:
            assert position ^ 1 in part or position ^ 1 not in step


@given(length=st.integers(0, 200), ranks=st.integers(1, 9))
def test_shares_of_ranks_differ_by_one_sample_at_most(length, ranks):
    sizes = [len(share_of(Interval(7, 7 + length), rank=rank, ranks=ranks, passes=1, multiple=1)[0]) for rank in range(ranks)]
    assert max(sizes) - min(sizes) <= 1


@given(samples=st.integers(0, 90), batch=st.integers(1, 20), ranks=st.integers(1, 7))
def test_evaluation_reads_every_image_once_in_order(samples, batch, ranks):
    lists = []
    for rank in range(ranks):
        sampler = EvaluateSampler(samples, batch=batch, rank=rank, ranks=ranks)
        own = list(sampler)
        assert len(sampler) == len(own) and all(0 < len(keys) <= batch for keys in own)
        lists += own
    assert [key.index for keys in lists for key in keys] == list(range(samples))


@given(samples=st.integers(1, 90), batch=st.integers(1, 20), ranks=st.integers(1, 7))
def test_even_evaluation_reads_the_same_and_gives_every_rank_as_many_batches(samples, batch, ranks):
    lists = [list(EvaluateSampler(samples, batch=batch, rank=rank, ranks=ranks, even=True)) for rank in range(ranks)]
    own = [len(EvaluateSampler(samples, batch=batch, rank=rank, ranks=ranks)) for rank in range(ranks)]
    assert {len(batches) for batches in lists} == {max(own)}
    assert [key.index for own in lists for keys in own for key in keys if key.real] == list(range(samples))
    assert all(not key.real for count, batches in zip(own, lists, strict=True) for keys in batches[count:] for key in keys)


def test_the_order_of_an_epoch_is_a_permutation_of_seed_and_epoch_alone():
    torch.manual_seed(1)
    first = order_of(3, 5, 100)
    torch.manual_seed(2)
    assert torch.equal(first, order_of(3, 5, 100)) and sorted(first.tolist()) == list(range(100))
    others = [order_of(3, 6, 100), order_of(4, 5, 100), torch.arange(100)]
    assert not any(torch.equal(first, other) for other in others)


@given(samples=st.integers(1, 70), batch=st.integers(1, 24), step=st.integers(0, 60))
def test_the_samples_seen_before_a_step_are_the_sum_of_the_steps_before_it(samples, batch, step):
    steps = Steps(samples, batch)
    assert steps.seen(step) == sum(len(steps.positions(before)) for before in range(step))
    assert steps.epoch_of(step) == steps.seen(step) // samples


# ---------------------------------------------------------------------------------------------- what it becomes


def pictures(ranks: int, workers: int, *, batch: int, passes: int = 1, **options) -> dict[int, tuple]:
    """What becomes of each of 40 digits in epoch 1, by index: its bits, class, seed, partner, share and box."""
    config = DataConfig(
        name="digits",
        read=[{"RandomCrop": {"size": 8, "padding": 1}}],
        augment=["RandomHorizontalFlip", {"ColorJitter": {"brightness": 0.5}}],
        **options,
    )
    reader = reader_of(config, open_dataset(config).train, num_classes=10, seed=5, train=True, device=CPU)
    steps, found = Steps(40, batch), {}
    for rank in range(ranks):
        span = {"first": steps.per_epoch, "last": 2 * steps.per_epoch}
        sampler = sampler_of(steps, rank=rank, ranks=ranks, passes=passes, multiple=2, seed=5, **span)
        for one in load_batches(reader, sampler, workers=workers, device=CPU):
            assert one.problem is None
            for place in range(one.samples):
                assert int(one.index[place]) not in found
                found[int(one.index[place])] = _picture(one, place)
    return found


def _picture(batch: Batch, place: int) -> tuple:
    image, target, seed = batch.image[place].numpy().tobytes(), int(batch.target[place]), batch.seeds[place]
    if batch.partner is None:
        return image, target, seed
    return image, target, seed, int(batch.index[batch.partner[place]]), float(batch.share[place]), batch.box[place].tolist()


@pytest.fixture(scope="module")
def alone() -> dict[int, tuple]:
    return pictures(1, 0, batch=13, **MIXING)


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
@pytest.mark.parametrize(("ranks", "workers", "passes"), [(1, 2, 1), (2, 0, 1), (3, 0, 2), (3, 2, 1), (4, 0, 3)])
def test_augmentation_and_mixing_are_the_same_bits_for_any_ranks_workers_and_passes(alone, ranks, workers, passes):
    """13 is odd, so steps begin at odd positions too, where pairs are easily torn apart."""
    assert pictures(ranks, workers, batch=13, passes=passes, **MIXING) == alone


def test_mixing_does_mix_and_mixes_pairs(alone):
    assert len(alone) == 40
    pairs = {index: picture[3] for index, picture in alone.items()}
    mixed = {index for index, partner in pairs.items() if partner != index}
    assert len(mixed) == 36, "4 of 40 stand where a step of 13 begins or ends amid a pair"
    assert all(pairs[pairs[index]] == index and alone[index][4:] == alone[pairs[index]][4:] for index in mixed)
    assert {picture[5] == [0.0] * 4 for picture in alone.values()} == {True, False}, "both mixup and cutmix are drawn"
    assert all(0 <= picture[4] <= 1 for picture in alone.values())


def test_epochs_augment_differently(alone):
    config = DataConfig(name="digits", augment=[{"ColorJitter": {"brightness": 0.5}}])
    reader = reader_of(config, open_dataset(config).train, num_classes=10, seed=5, train=True, device=CPU)
    images = [reader.__getitems__([Key(epoch, 0, 3)]).image for epoch in (0, 1)]
    assert not torch.equal(*images)


def test_without_mixing_a_batch_has_no_partners():
    assert len(pictures(2, 0, batch=16)[0]) == 3


def test_the_share_and_box_of_cutmix_agree_where_the_box_is_not_clipped():
    """A share s leaves 1 - s of the image to the box, which is as high as wide in shares of the image."""
    draws = [mixing.draw(0, 0, pair, cutmix=1.0) for pair in range(300)]
    whole = [(share, box) for share, box in draws if min(box) > 0 and max(box) < 1]
    assert len(whole) > 20
    for share, (top, left, bottom, right) in whole:
        assert abs((bottom - top) * (right - left) - (1 - share)) < 1e-12 and abs((bottom - top) - (right - left)) < 1e-12


def test_each_pair_of_each_epoch_draws_its_own_share():
    draws = {mixing.draw(0, epoch, pair, mixup=1.0)[0] for epoch in range(5) for pair in range(20)}
    assert len(draws) == 100


def test_shares_are_drawn_from_the_beta_distribution_of_alpha():
    shares = np.array([mixing.draw(0, 0, pair, mixup=0.4)[0] for pair in range(4000)])
    # Beta(a, a) has mean 1/2 and variance 1 / (4 (2 a + 1)); 4 standard errors of 4,000 draws
    assert abs(shares.mean() - 0.5) < 4 * (1 / 7.2 / 4000) ** 0.5 and abs(shares.var() - 1 / 7.2) < 0.008


def test_evaluation_neither_augments_nor_mixes():
    config = DataConfig(name="digits", augment=["RandomHorizontalFlip"], read=["RandomVerticalFlip"], **MIXING)
    images = open_dataset(config).evaluate
    reader = reader_of(config, images, num_classes=10, seed=0, train=False, device=CPU)
    batch = reader.__getitems__(keys(*range(20)))
    assert torch.equal(batch.image, images.images[:20]) and batch.partner is None


def test_a_device_that_augments_itself_gets_plain_images():
    config = DataConfig(name="digits", augment=["RandomHorizontalFlip"], read=["RandomVerticalFlip"])
    images = open_dataset(config).train
    reader = reader_of(config, images, num_classes=10, seed=0, train=True, device=torch.device("cuda", 0))
    assert not reader.augment.steps and reader.transforms.steps


@settings(max_examples=30)
@given(first=st.integers(0, 11), passes=st.integers(1, 3), ranks=st.integers(1, 3))
def test_a_run_resumed_amid_an_epoch_reads_the_batches_that_were_left(first, passes, ranks):
    steps, reader = Steps(40, 9), reading(Dots(40), **MIXING)
    for rank in range(ranks):
        layout = {"rank": rank, "ranks": ranks, "passes": passes, "multiple": 2, "last": 12}
        whole = [reader.__getitems__(keys) for keys in islice(sampler_of(steps, **layout), first * passes, None)]
        left = [reader.__getitems__(keys) for keys in sampler_of(steps, first=first, **layout)]
        assert len(left) == len(whole) == (12 - first) * passes
        for one, other in zip(left, whole, strict=True):
            assert one.idle == other.idle
            assert one.samples == other.samples and one.seeds == other.seeds
            assert all(
                torch.equal(getattr(one, name), getattr(other, name))
                for name in ("image", "index", "share", "box")[: 2 if one.idle else 4]
            )


# ---------------------------------------------------------------------------------------------- stand-ins


def test_a_rank_without_samples_gets_a_stand_in_that_does_not_count():
    own = list(sampler_of(Steps(7, 3), rank=2, ranks=3))[-1]
    batch = reading(Dots(7)).__getitems__(own)
    assert [key.real for key in own] == [False]
    assert batch.samples == 0 and batch.image.shape == (1, 1, 2, 2) and batch.problem is None and batch.skipped == []


def test_a_stand_in_that_cannot_be_read_is_another_image_and_is_not_counted_as_skipped():
    """The rank whose sample it is counts it; counted here as well, one bad image would be two in the report."""
    batch = reading(Dots(7, bad={3, 4}), bad_images="skip", **MIXING).__getitems__(keys(3, real=False))
    assert (batch.samples, batch.index.tolist(), batch.skipped, batch.problem) == (0, [5], [], None)


# ---------------------------------------------------------------------------------------------- bad images


def test_an_unreadable_image_stops_with_its_name_and_what_to_do():
    batch = reading(Dots(9, bad={4})).__getitems__(keys(3, 4, 5))
    assert batch.problem == (
        "cannot read the image dots/4; mend or remove it, or set data.bad_images=skip to leave such images out"
    )


def test_an_unreadable_image_is_left_out_and_counted_where_asked():
    batch = reading(Dots(9, bad={4}), bad_images="skip").__getitems__(keys(3, 4, 5))
    assert (batch.samples, batch.index.tolist(), batch.skipped, batch.problem) == (2, [3, 5], ["dots/4"], None)
    assert batch.image[:, 0, 0, 0].tolist() == [3, 5] and batch.target.tolist() == [0, 2] and len(batch.seeds) == 2


def test_a_share_of_unreadable_images_becomes_a_stand_in():
    batch = reading(Dots(9, bad={3, 4, 5}), bad_images="skip").__getitems__(keys(3, 4, 5))
    assert (batch.samples, len(batch.image), batch.problem) == (0, 1, None)
    assert batch.skipped == ["dots/3", "dots/4", "dots/5"]


def test_a_folder_of_unreadable_images_stops_even_where_they_may_be_skipped():
    batch = reading(Dots(3, bad={0, 1, 2}), bad_images="skip").__getitems__(keys(1, 2))
    assert batch.problem == "none of the 3 images can be read; the first is dots/0"


def test_a_sample_whose_partner_cannot_be_read_stays_pure():
    batch = reading(Dots(9, bad={4}), bad_images="skip", mixup=0.4).__getitems__(keys(3, 4, 5, 6))
    assert batch.index.tolist() == [3, 5, 6] and batch.partner.tolist() == [0, 2, 1]


@pytest.mark.parametrize("kept", [0, 200])
def test_an_empty_or_torn_photograph_is_named_by_its_path(tmp_path, kept):
    for split in ("train", "val"):
        (tmp_path / split / "cat").mkdir(parents=True)
        for name in ("a.jpg", "b.jpg"):
            pixels = np.random.default_rng(0).integers(0, 256, (32, 32, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(tmp_path / split / "cat" / name)
    torn = tmp_path / "train" / "cat" / "b.jpg"
    torn.write_bytes(torn.read_bytes()[:kept])
    stop, skip = (_folder_batch(tmp_path, bad_images) for bad_images in ("stop", "skip"))
    assert stop.problem.startswith(f"cannot read the image {torn} ({kept} bytes; ") and "data.bad_images=skip" in stop.problem
    assert (skip.samples, skip.skipped, skip.problem) == (1, [str(torn)], None)


def _folder_batch(path: Path, bad_images: str) -> Batch:
    config = DataConfig(name="imagefolder", path=str(path), bad_images=bad_images)
    images = open_dataset(config).train
    return reader_of(config, images, num_classes=1, seed=0, train=True, device=CPU).__getitems__(keys(0, 1))


@pytest.mark.parametrize("label", [3, -1])
def test_a_label_out_of_range_names_its_sample(label):
    batch = reading(Dots(9, labels={5: label})).__getitems__(keys(4, 5))
    assert batch.problem == f"the label of dots/5 is {label}, outside 0..2; mend the label or the number of classes"


def test_images_of_differing_size_are_named_with_what_to_add():
    batch = reading(Dots(9, large={5})).__getitems__(keys(4, 5))
    assert batch.problem.startswith(
        "images of one batch differ in size (C, H, W): dots/4 is (1, 2, 2) and dots/5 is (1, 3, 3); add RandomResizedCrop"
    )


def _crash(image: Tensor) -> Tensor:
    raise RuntimeError("a transform's own mistake")


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
@pytest.mark.parametrize("workers", [0, 1])
def test_a_crash_inside_a_transform_comes_back_with_its_traceback(workers):
    """As a batch, not as an exception: an exception on one rank alone would leave the others waiting."""
    transforms = Transforms(["RandomHorizontalFlip"], field="data.read")
    transforms.steps = [Step("crash", {}, _crash)]
    images = open_dataset(DataConfig(name="digits")).train
    reader = SampleReader(images, transforms, NONE, num_classes=10, seed=0)
    (batch,) = load_batches(reader, sampler_of(Steps(4, 4)), workers=workers, device=CPU)
    assert batch.problem.startswith("reading a batch failed:\nTraceback")
    assert "in _crash" in batch.problem and "RuntimeError: a transform's own mistake" in batch.problem


# ---------------------------------------------------------------------------------------------- processes


@dataclass(frozen=True)
class Pids(Dots):
    def read(self, index: int) -> tuple[Tensor, int]:
        return torch.tensor(list(os.getpid().to_bytes(4, "little")), dtype=torch.uint8).view(1, 2, 2), 0


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_workers_do_read_and_end_when_told():
    batches = iter(load_batches(reading(Pids(8)), sampler_of(Steps(8, 2)), workers=2, device=CPU))
    pids = {int.from_bytes(bytes(next(batches).image[0].flatten().tolist()), "little") for _ in range(4)}
    loader.close(batches)
    assert len(pids) == 2 and os.getpid() not in pids
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)


def test_ending_a_loader_without_workers_does_nothing():
    loader.close(iter(load_batches(reading(Dots(8)), sampler_of(Steps(8, 2)), workers=0, device=CPU)))


class Drawn:
    """Two images of one label each, whose pixels are drawn as they are read."""

    is_random = True

    def __len__(self) -> int:
        return 2

    def name_of(self, index: int) -> str:
        return f"drawn {index}"

    def read(self, index: int):
        return torch.randint(60000, (1, 6, 5), dtype=torch.int32).to(torch.int16), index


@pytest.mark.parametrize("moves", [False, True], ids=["as it is", "moved as one"])
def test_an_image_that_an_epoch_draws_again_is_read_anew(moves):
    config = DataConfig(name="own", augment=["RandomHorizontalFlip"] if moves else [])
    reader = reader_of(config, Drawn(), num_classes=2, seed=0, train=True, device=torch.device("cpu"), moves_as_one=moves)
    assert (reader.moves is not None) == moves
    first, same, again = (reader.__getitems__([Key(0, 0, 1, repeat=repeat)]) for repeat in (0, 0, 1))
    assert first.problem is None and torch.equal(first.image, same.image)
    assert sorted(first.image.flatten().tolist()) != sorted(again.image.flatten().tolist())
