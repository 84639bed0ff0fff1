"""Is every image counted once, bit for bit alike on any number of ranks, and is what cannot be counted refused?"""

from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace

import pytest
import torch
from ranks import on_ranks
from torch import Tensor, nn
from torchmetrics import CatMetric, MaxMetric, MetricCollection
from torchmetrics.classification import MulticlassAccuracy, MulticlassConfusionMatrix

from widefield.comm.mesh import AgreedError
from widefield.config import TaskConfig
from widefield.data import BadImageError
from widefield.data.device import Preparation
from widefield.data.loader import Batch, SampleReader, load_batches
from widefield.data.order import EvaluateSampler
from widefield.data.transforms import Transforms
from widefield.parallel.parallelize import parallelize
from widefield.plans import Plan
from widefield.tasks import build
from widefield.tasks.classification import Classification
from widefield.training.arithmetic import arithmetic_of
from widefield.training.evaluate import Evaluation, evaluate

CPU = torch.device("cpu")
CLASSES = 6
NONE = Transforms([], field="data.read")


@dataclass(frozen=True)
class Noise:
    """Noise of 3 x 4 pixels, of random class; some of it cannot be read."""

    count: int
    bad: set[int] = field(default_factory=set)

    def __len__(self) -> int:
        return self.count

    def read(self, index: int) -> tuple[Tensor, int]:
        if index in self.bad:
            raise BadImageError(f"cannot read the image noise/{index}")
        generator = torch.Generator().manual_seed(index)
        image = torch.randint(0, 256, (1, 3, 4), dtype=torch.uint8, generator=generator)
        return image, int(torch.randint(0, CLASSES, (), generator=generator))

    def name_of(self, index: int) -> str:
        return f"noise/{index}"


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(12, CLASSES), nn.Dropout(0.5)).double()


def batches_of(mesh, images: Noise, batch: int, bad_images: str = "stop") -> Iterator[Batch]:
    reader = SampleReader(images, NONE, NONE, CLASSES, 0, bad_images=bad_images)
    sampler = EvaluateSampler(len(images), batch=batch, rank=mesh.rank, ranks=mesh.size)
    return iter(load_batches(reader, sampler, workers=0, device=CPU))


def evaluated(mesh, batches, images: Noise, *, task=None, model=None, **options) -> Evaluation:
    return evaluate(
        model or network(),
        batches,
        task=task or build(TaskConfig(), num_classes=CLASSES),
        prepare=Preparation(CPU, torch.float64, [0.5], [0.25], CLASSES, False, NONE),
        arithmetic=arithmetic_of("float64", CPU),
        mesh=mesh,
        samples=len(images),
        **options,
    )


def whole(mesh, images: Noise, batch: int, bad_images: str = "stop") -> Evaluation:
    return evaluated(mesh, batches_of(mesh, images, batch, bad_images), images)


def one_by_one(images: Noise) -> tuple[list[list[int]], list[float], list[int]]:
    """The reference: confusion, loss of each image, and the images answered wrong, worst first; an image at a time."""
    model, confusion, losses, wrong = network().eval(), [[0] * CLASSES for _ in range(CLASSES)], [], []
    for index in range(len(images)):
        image, target = images.read(index)
        with torch.no_grad():
            logits = model((image.double() / 255 - 0.5)[None] / 0.25)[0]
        losses.append(float(-logits.log_softmax(0)[target]))
        prediction = int(logits.argmax())
        confusion[target][prediction] += 1
        wrong += [index] if prediction != target else []
    return confusion, losses, sorted(wrong, key=lambda index: -losses[index])


# ---------------------------------------------------------------------------------------------- the same on any ranks


@pytest.mark.parametrize("count", [41, 2])
@pytest.mark.parametrize("batch", [1, 7, 64])
@pytest.mark.parametrize("size", [1, 2, 3])
def test_the_counts_are_those_of_one_image_at_a_time(size, batch, count):
    """2 images on 3 ranks: one of the ranks has none and still answers."""
    confusion, losses, wrong = one_by_one(Noise(count))
    for found in on_ranks(size, whole, Noise(count), batch):
        assert found.confusion == confusion
        right = torch.tensor(
            sum(confusion[label][label] for label in range(CLASSES)) / count
        ).item()  # float32, as torchmetrics'
        assert found.metrics["top1"] == 100 * right
        assert (found.images, found.of, found.duplicates, found.skipped) == (count, count, 0, [])
        assert found.loss == pytest.approx(sum(losses) / count, rel=1e-12)
        assert [mistake.index for mistake in found.mistakes] == wrong[:24]
        assert found.sentence == f"{100 * right:.2f} % top-1 on {count}/{count} images"


def test_every_rank_gets_the_same_result_to_the_last_bit():
    results = on_ranks(3, whole, Noise(41), 7)
    first, *others = (asdict(replace(found, seconds=0.0, pictures=[])) for found in results)
    assert others == [first, first]
    pictures = [{piece.index: piece.image.tolist() for piece in found.pictures} for found in results]
    assert pictures[1:] == [pictures[0]] * 2
    assert pictures[0] == {index: Noise(41).read(index)[0].tolist() for index in (one["index"] for one in first["mistakes"])}


def test_the_worst_mistakes_are_listed_worst_first():
    (found,) = on_ranks(1, listed, Noise(41), 3)
    _, losses, wrong = one_by_one(Noise(41))
    assert [mistake.index for mistake in found.mistakes] == wrong[:3]
    for mistake in found.mistakes:
        assert mistake.truth == Noise(41).read(mistake.index)[1] != mistake.prediction
        assert mistake.loss == pytest.approx(losses[mistake.index], rel=1e-12) and 0 < mistake.probability < 1


def listed(mesh, images: Noise, worst: int) -> Evaluation:
    return evaluated(mesh, batches_of(mesh, images, 5), images, worst=worst)


@pytest.mark.parametrize("training", [True, False])
def test_a_model_is_evaluated_without_dropout_and_left_as_it_was(training):
    (found,) = on_ranks(1, left_as_it_was, training)
    assert found == (training, False, True)


def left_as_it_was(mesh, training: bool) -> tuple[bool, bool, bool]:
    model = network().train(training)
    before = [p.clone() for p in model.parameters()]
    evaluated(mesh, batches_of(mesh, Noise(5), 2), Noise(5), model=model)
    same = all(torch.equal(p, q) for p, q in zip(model.parameters(), before, strict=True))
    return model[2].training, any(p.grad is not None for p in model.parameters()), same


# ---------------------------------------------------------------------------------------------- what is counted


def fed_twice(mesh, images: Noise) -> Evaluation:
    """Rank 0 evaluates its first batch once more, and so leaves the tally to find out."""
    own = list(batches_of(mesh, images, 4))
    return evaluated(mesh, own + (own[:1] if mesh.rank == 0 else []), images)


def left_out(mesh, images: Noise) -> Evaluation:
    """The last rank forgets its last batch."""
    own = list(batches_of(mesh, images, 4))
    return evaluated(mesh, own[:-1] if mesh.rank == mesh.size - 1 else own, images)


@pytest.mark.parametrize("size", [1, 2])
def test_duplicates_are_counted_and_not_assumed(size):
    found = on_ranks(size, fed_twice, Noise(20))[0]
    assert (found.images, found.duplicates) == (20, 4) and found.sentence.endswith("on 20/20 images, 4 duplicates")
    assert sum(map(sum, found.confusion)) == 24


@pytest.mark.parametrize("size", [1, 2])
def test_missing_images_are_counted_and_not_assumed(size):
    found = on_ranks(size, left_out, Noise(20))[0]
    missing = 4 if size == 1 else 2
    assert (found.images, found.of) == (20 - missing, 20) and f"on {20 - missing}/20 images" in found.sentence


def test_a_stand_in_counts_for_nothing():
    (found,) = on_ranks(1, with_stand_in, Noise(5))
    assert found.images == 5 and found.duplicates == 0 and sum(map(sum, found.confusion)) == 5


def with_stand_in(mesh, images: Noise) -> Evaluation:
    own = list(batches_of(mesh, images, 2))
    return evaluated(mesh, [*own, replace(own[0], samples=0)], images)


# ---------------------------------------------------------------------------------------------- bad images


@pytest.mark.parametrize("size", [1, 2, 3])
def test_images_left_out_are_named_and_counted_once(size):
    bad = {3, 17, 18, 19}  # of 20 on 3 ranks, all but one of a batch of the last rank
    first = None
    for found in on_ranks(size, whole, Noise(20, bad), 2, "skip"):
        assert sorted(found.skipped) == ["noise/17", "noise/18", "noise/19", "noise/3"]
        assert (found.images, found.of, found.duplicates) == (16, 20, 0)
        assert found.sentence.endswith("on 16/20 images, 4 unreadable left out")
        first = first or found.confusion
        assert found.confusion == first == on_ranks(1, whole, Noise(20, bad), 20, "skip")[0].confusion


def agreed(mesh, images: Noise) -> str:
    with pytest.raises(AgreedError) as caught:
        evaluated(mesh, batches_of(mesh, images, 3), images)
    return str(caught.value)


@pytest.mark.parametrize("size", [1, 2, 3])
def test_an_image_that_one_rank_cannot_read_stops_all_of_them_in_the_same_words(size):
    told = on_ranks(size, agreed, Noise(20, {19}))
    assert len(set(told)) == 1 and "cannot read the image noise/19; mend or remove it" in told[0]
    assert told[0].startswith(f"rank {size - 1}: ") == (size > 1)


def no_image(mesh, images: Noise) -> str:
    with pytest.raises(AgreedError) as caught:
        evaluated(mesh, batches_of(mesh, images, 3, "skip"), images)
    return str(caught.value)


@pytest.mark.parametrize("size", [1, 2])
def test_a_split_without_one_readable_image_stops_all_ranks(size):
    told = on_ranks(size, no_image, Noise(4, {0, 1, 2, 3}))
    assert len(set(told)) == 1 and "none of the 4 images can be read" in told[0]


# ---------------------------------------------------------------------------------------------- metrics


class Odd(Classification):
    """A task whose metric is not a sum over images."""

    kind: str

    def __init__(self, kind: str) -> None:
        super().__init__(CLASSES)
        object.__setattr__(self, "kind", kind)

    def metrics(self) -> MetricCollection:
        kinds = {
            "max": MaxMetric,
            "cat": CatMetric,
            "mean over classes": lambda: MulticlassAccuracy(CLASSES, multidim_average="samplewise", validate_args=False),
        }
        return MetricCollection({"odd": kinds[self.kind]()}, compute_groups=False)


def odd(mesh, kind: str) -> str:
    task, images = Odd(kind), Noise(6)
    with pytest.raises(NotImplementedError) as caught:
        evaluated(mesh, [], images, task=task)
    return str(caught.value)


@pytest.mark.parametrize(("kind", "state"), [("max", "max_value"), ("cat", "value"), ("mean over classes", "tp")])
def test_a_metric_whose_state_is_no_sum_is_refused_on_every_rank(kind, state):
    for told in on_ranks(2, odd, kind):
        assert told.startswith(f"the state '{state}' of ") and "does not add up over ranks (its reduction is " in told
        assert told.endswith("use a metric whose states are sums")


class Plain(Classification):
    """A task whose metrics are as torchmetrics builds them, so that they would add themselves up over ranks."""

    def metrics(self) -> MetricCollection:
        return MetricCollection({"top1": MulticlassAccuracy(CLASSES), "confusion": MulticlassConfusionMatrix(CLASSES)})


def plain(mesh, images: Noise) -> Evaluation:
    return evaluated(mesh, batches_of(mesh, images, 4), images, task=Plain(CLASSES))


@pytest.mark.parametrize("size", [1, 2])
def test_sums_over_ranks_are_taken_once(size):
    for found in on_ranks(size, plain, Noise(20)):
        assert found.confusion == one_by_one(Noise(20))[0]


# ---------------------------------------------------------------------------------------------- weights in parts


def together(mesh, images: Noise, bad_images: str = "stop") -> Evaluation:
    """Weights lie in parts, so that a pass takes all ranks, and ranks have different numbers of batches of their own."""
    reader = SampleReader(images, NONE, NONE, CLASSES, 0, bad_images=bad_images)
    sampler = EvaluateSampler(len(images), batch=2, rank=mesh.rank, ranks=mesh.size, even=True)
    batches = iter(load_batches(reader, sampler, workers=0, device=CPU))
    return evaluated(mesh, batches, images, model=parallelize(network(), mesh), together=True)


@pytest.mark.parametrize("count", [1, 2, 5, 9, 13])
def test_weights_in_parts_count_as_one_rank_when_some_run_out_of_images(count):
    (alone,) = on_ranks(1, whole, Noise(count), 2)
    for found in on_ranks(3, together, Noise(count), plan=Plan(shard=3)):
        assert (found.confusion, found.metrics, found.images, found.duplicates) == (
            alone.confusion, alone.metrics, count, 0)  # fmt: skip
        assert found.loss == pytest.approx(alone.loss, rel=1e-12)


def together_refused(mesh, images: Noise) -> str:
    with pytest.raises(AgreedError) as said:
        together(mesh, images)
    return str(said.value)


@pytest.mark.parametrize("bad", [0, 7])
def test_an_image_that_cannot_be_read_stops_all_ranks_whose_weights_lie_in_parts(bad):
    for said in on_ranks(3, together_refused, Noise(9, {bad}), plan=Plan(shard=3)):
        assert f"cannot read the image noise/{bad}" in said


def test_skipped_images_leave_every_rank_with_as_many_passes():
    for found in on_ranks(3, together, Noise(9, {3, 4, 5}), "skip", plan=Plan(shard=3)):
        assert found.images == 6 and sorted(found.skipped) == ["noise/3", "noise/4", "noise/5"]
