"""Does what one rank of a copy cannot read leave all its ranks with the same batch, and with the numbers of one rank?"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from command import RECIPES, assert_same, record
from marks import few
from ranks import on_ranks

from widefield.comm.mesh import AgreedError, Mesh, World
from widefield.config import read_config
from widefield.data import BadImageError
from widefield.data.batch import Batch
from widefield.data.formats.page import Pages
from widefield.data.loader import SampleReader
from widefield.data.transforms import Transforms
from widefield.plans import Plan
from widefield.run import train
from widefield.training.agreed import Agreed, dummy_batch_of

NONE = Transforms([], field="data.read")
COPY_OF_TWO = Plan(space=[2, 1])

# ---------------------------------------------------------------------------------------------- one batch


def batch_of(asked: list[int], readable: list[bool], *, mixed: bool = False, side: int = 4, **more: Any) -> Batch:
    """The images that could be read, each full of its number."""
    index = [number for number, could in zip(asked, readable, strict=True) if could]
    image = torch.stack([torch.full((1, side, side), number, dtype=torch.uint8) for number in index or [99]])
    more |= {"skipped": [f"image {number}" for number in asked if number not in index]} if "skipped" not in more else {}
    if mixed:
        pairs = {asked[n]: asked[n ^ 1] for n in range(len(asked))}
        partner = [index.index(pairs[number]) if pairs[number] in index else n for n, number in enumerate(index)]
        draws = torch.tensor(index, dtype=torch.float64)
        more |= {"partner": torch.tensor(partner), "share": draws, "box": draws[:, None].expand(-1, 4)}
    return Batch(image, torch.tensor(index or [99]), torch.tensor(index or [99]), [7 * number for number in index],
                 samples=len(index), asked=asked, readable=readable, **more)  # fmt: skip


SPARE = batch_of([50], [True])


def agreed(mesh: Mesh, of_rank: Callable[[int], Batch]) -> dict[str, Any]:
    found = next(Agreed(iter([of_rank(mesh.rank)]), mesh, dummy_batch=SPARE, name_of=lambda index: f"image {index}"))
    told = {name: getattr(found, name) for name in ("samples", "skipped", "problem", "refused", "seeds")}
    tensors = {name: getattr(found, name) for name in ("index", "target", "partner", "share", "box")}
    same = [float(image.float().mean()) for image in found.image] == [float(number) for number in found.index]
    return told | {name: None if value is None else value.tolist() for name, value in tensors.items()} | {"same": same}


def some_missing(rank: int) -> Batch:
    return batch_of([4, 5, 6, 7], [[True, False, True, True], [True, True, False, True]][rank], mixed=True)


def test_what_one_rank_could_not_read_none_has():
    """Of four images one rank lacks the second and the other the third: the partners of 5 and 6 are left alone."""
    first, second = on_ranks(2, agreed, some_missing, plan=COPY_OF_TWO)
    assert first == second
    assert first["index"] == first["target"] == [4, 7] and first["samples"] == 2 and first["same"]
    assert first["skipped"] == ["image 5", "image 6"] and first["seeds"] == [28, 49]
    assert first["partner"] == [0, 1] and first["share"] == [4.0, 7.0] and first["box"] == [[4.0] * 4, [7.0] * 4]
    assert first["problem"] is None and not first["refused"]


def a_pair_stays(rank: int) -> Batch:
    return batch_of([4, 5, 6, 7], [True, True, rank == 0, True], mixed=True)


def test_a_pair_that_both_ranks_read_stays_one():
    for found in on_ranks(2, agreed, a_pair_stays, plan=COPY_OF_TWO):
        assert found["index"] == [4, 5, 7] and found["partner"] == [1, 0, 2] and found["skipped"] == ["image 6"]


def nothing_left(rank: int) -> Batch:
    return batch_of([4, 5], [rank == 0, rank == 1])


def test_a_batch_that_no_two_ranks_could_read_becomes_a_stand_in():
    for found in on_ranks(2, agreed, nothing_left, plan=COPY_OF_TWO):
        assert found["index"] == [50] and found["samples"] == 0 and found["skipped"] == ["image 4", "image 5"]


def test_a_stand_in_that_one_rank_could_not_read_is_another_and_nobodys_loss():
    """What a rank shows in its place would be another image than its peer's."""
    for found in on_ranks(2, stand_ins, plan=COPY_OF_TWO):
        assert found == ([50], 0, [])


def stand_ins(mesh: Mesh) -> tuple[list[int], int, list[str]]:
    shown = Batch(
        torch.zeros(1, 1, 9, 9), torch.tensor([8]), torch.tensor([8 + mesh.rank]), asked=[8], readable=[mesh.rank == 0]
    )
    found = next(Agreed(iter([shown]), mesh, dummy_batch=SPARE, name_of=str))
    return found.index.tolist(), found.samples, found.skipped


def a_problem(rank: int) -> Batch:
    nothing = torch.zeros(0)
    return batch_of([4, 5], [True, True]) if rank else Batch(nothing, nothing, nothing, problem="no such disk", asked=[4, 5],
                                                             readable=[False, False])  # fmt: skip


def test_a_problem_of_one_rank_leaves_all_with_the_stand_in():
    first, second = on_ranks(2, agreed, a_problem, plan=COPY_OF_TWO)
    assert (first["problem"], second["problem"]) == ("no such disk", None)
    for found in (first, second):
        assert found["index"] == [50] and found["samples"] == 0 and found["refused"]


def another_size(rank: int) -> Batch:
    return batch_of([4], [True], side=4 + rank)


def test_the_same_image_in_two_sizes_is_a_problem_in_words():
    for rank, found in enumerate(on_ranks(2, agreed, another_size, plan=COPY_OF_TWO)):
        assert f"this rank read images of (1, {4 + rank}, {4 + rank}) (C, H, W) and another rank" in found["problem"]
        assert found["samples"] == 0 and found["refused"]


# ---------------------------------------------------------------------------------------------- the stand-in


class Numbers:
    """Six images; rank r cannot read those in `bad[r]`."""

    def __init__(self, bad: set[int]) -> None:
        self.bad = bad

    def __len__(self) -> int:
        return 6

    def read(self, index: int):
        if index in self.bad:
            raise BadImageError(f"cannot read the image {index}")
        return torch.full((1, 2, 2), index, dtype=torch.uint8), 0

    def name_of(self, index: int) -> str:
        return f"image {index}"


def spare(mesh: Mesh, bad: list[set[int]], bad_images: str) -> int | str:
    reader = SampleReader(Numbers(bad[mesh.rank]), NONE, NONE, 3, 0, bad_images=bad_images)
    try:
        return int(dummy_batch_of(reader, mesh).index[0])
    except AgreedError as error:
        return str(error)


@pytest.mark.parametrize(("bad", "first"), [([{0}, {0}], 1), ([{0, 2}, {1}], 3), ([set(), set(range(5))], 5)])
def test_the_stand_in_is_the_first_image_that_all_can_read(bad, first):
    assert on_ranks(2, spare, bad, "skip", plan=COPY_OF_TWO) == [first, first]


def test_without_an_image_that_all_can_read_or_may_skip_there_is_no_stand_in():
    (told,) = set(on_ranks(2, spare, [{0, 1, 2}, {3, 4, 5}], "skip", plan=COPY_OF_TWO))
    assert told == "none of the 6 images can be read on every rank; the first is image 0"
    (told,) = set(on_ranks(2, spare, [set(), {0}], "stop", plan=COPY_OF_TWO))
    assert told.startswith("rank 1: cannot read the image 0; mend or remove it")


# ---------------------------------------------------------------------------------------------- a run

PAGE = str(RECIPES / "page.yaml")
PAGES = ["data.options.size=[48, 40]", "data.options.pages=[8, 5]", "data.batch_size=4", "data.evaluate_batch_size=2",
         "data.workers=0", "precision=float64", "model.options={widths: [4, 6]}", "mesh.space=[]", "mesh.replicate=1",
         "schedule.length=3ep", "schedule.warmup=1step", "evaluate.every=3ep", "log.tensorboard=false",
         "data.bad_images=skip"]  # fmt: skip
BAD: dict[int, set[tuple[str, int]]] = {0: {("train", 5), ("evaluate", 4)}, 1: {("train", 0), ("train", 3), ("evaluate", 1)}}
"""What the first rank of a copy cannot read, and what the second."""
LAYOUTS = {
    "rows": (2, ["mesh.space=[2,1]"]),
    "stages": (2, ["mesh.stage=2"]),
    "channels": (2, ["mesh.channel=2"]),
    "copies of rows": (4, ["mesh.space=[2,1]", "mesh.replicate=2"]),
    "rows that share weights": (4, ["mesh.space=[2,1]", "mesh.shard=2"]),
}


@contextmanager
def unreadable(bad: set[tuple[str, int]]) -> Iterator[None]:
    """Inside, these pages cannot be read in this process."""
    read = Pages.read_window

    def failing(self: Pages, index: int, window: Any) -> Any:
        if (self.split, index) in bad:
            raise BadImageError(f"cannot read the image {self.name_of(index)} (Input/output error)")
        return read(self, index, window)

    Pages.read_window = failing  # type: ignore[method-assign]
    try:
        yield
    finally:
        Pages.read_window = read  # type: ignore[method-assign]


def go(mesh: Mesh, folder: Path, settings: list[str], bad: Mapping[int, set[tuple[str, int]]] = BAD) -> str:
    with unreadable(bad.get(mesh.rank % 2, set())):
        try:
            return train(read_config(PAGE, settings), folder, mesh.world).reason
        except AgreedError as error:
            return str(error)


@pytest.fixture(scope="module")
def alone(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("alone") / "run"
    with unreadable(set().union(*BAD.values())):
        assert train(read_config(PAGE, PAGES), folder, World()).reason == "complete"
    return folder


@pytest.mark.long
@pytest.mark.parametrize("name", few(LAYOUTS, "stages", "channels"))
def test_images_that_one_rank_cannot_read_are_left_out_on_all_as_on_one_rank(alone, tmp_path, name):
    size, mesh = LAYOUTS[name]
    assert on_ranks(size, go, tmp_path / "run", [*PAGES, *mesh], timeout_seconds=60) == ["complete"] * size
    assert_same(tmp_path / "run", alone)
    for kind in ("warning", "evaluation"):
        told = [[line.get("text"), line.get("skipped")] for line in record(alone, kind)]
        assert told and [[line.get("text"), line.get("skipped")] for line in record(tmp_path / "run", kind)] == told


@pytest.mark.parametrize(
    ("bad", "layout"),
    few(
        [(("train", 3), "rows"), (("evaluate", 1), "copies of rows"), (("evaluate", 4), "stages")],
        (("train", 3), "rows"),
    ),
)
def test_an_image_that_one_rank_cannot_read_stops_all_in_words(tmp_path, bad, layout):
    """Before, the ranks of a copy ran passes of other sizes, or waited 600 s for one that did not come."""
    size, mesh = LAYOUTS[layout]
    settings = [*PAGES, *mesh, "data.bad_images=stop"]
    (told,) = set(on_ranks(size, go, tmp_path / "run", settings, {1: {bad}}, timeout_seconds=60))
    assert told.startswith(f"rank 1: cannot read the image page/{bad[0]}/{bad[1]} (Input/output error); mend or remove it")


def test_copies_that_evaluate_stop_soon_when_one_has_a_problem(tmp_path):
    """Copy 1 cannot read its first image; copy 0, which says nothing to it until its end, has a thousand."""
    settings = [*PAGES, "mesh.replicate=2", "data.bad_images=stop", "data.options.pages=[8, 4000]", "evaluate.every=2step",
                "data.evaluate_batch_size=1", "schedule.length=2step"]  # fmt: skip
    (told,) = set(on_ranks(2, slow_evaluation, tmp_path / "run", settings, {1: {("evaluate", 2000)}}, timeout_seconds=40))
    assert "rank 1: cannot read the image page/evaluate/2000" in told


def slow_evaluation(mesh: Mesh, folder: Path, settings: list[str], bad: Mapping[int, set[tuple[str, int]]]) -> str:
    """2,000 images on each rank, 0.1 s each."""
    import time

    read = Pages.read

    def slow(self: Pages, index: int) -> Any:
        time.sleep(0.1 if self.split == "evaluate" else 0)
        return read(self, index)

    Pages.read = slow  # type: ignore[method-assign]
    try:
        return go(mesh, folder, settings, bad)
    finally:
        Pages.read = read  # type: ignore[method-assign]
