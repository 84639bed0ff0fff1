"""Which part of an image does a rank read, and is that said in words?"""

from __future__ import annotations

import doctest

import pytest
import torch

from widefield.comm.mesh import Mesh, World
from widefield.geometry.interval import Interval
from widefield.geometry.layout import Grid
from widefield.plans import Plan
from widefield.training import batch_sharding
from widefield.training.batch_sharding import cuts_in_words, window_of


def mesh_of(*sizes: int, rank: int = 0) -> Mesh:
    """Rank `rank` of a grid that nobody has joined; integers are all it is asked for."""
    plan = Plan(space=list(sizes))
    return Mesh(plan, World(rank, plan.ranks), torch.device("cpu"), grid=Grid(sizes, rank))


def test_the_examples_in_the_docstrings_hold():
    result = doctest.testmod(batch_sharding)
    assert result.failed == 0 and result.attempted == 2


@pytest.mark.parametrize(
    ("shape", "sizes", "told"),
    [
        ((9, 8, 7), (2, 1, 3), "images of 9 x 8 x 7 px are cut at plane 5 and columns 3, 5: tiles of up to 5 x 8 x 3 px"),
        ((7,), (2,), "images of 7 px are cut at column 4: tiles of up to 4 px"),
        ((64, 48), (1, 1), "images of 64 x 48 px are one tile each"),
    ],
)
def test_cuts_are_said_for_any_number_of_dims(shape, sizes, told):
    assert cuts_in_words(shape, sizes) == told


def test_the_windows_of_a_copys_ranks_are_the_tiles_that_the_words_name():
    assert cuts_in_words((96, 50), (2, 2)) == "images of 96 x 50 px are cut at row 48 and column 25: tiles of 48 x 25 px"
    windows = [window_of(mesh_of(2, 2, rank=rank))((96, 50)) for rank in range(4)]
    rows, columns = (Interval(0, 48), Interval(48, 96)), (Interval(0, 25), Interval(25, 50))
    assert windows == [(row, column) for row in rows for column in columns]


def test_a_mesh_without_space_reads_whole_images():
    assert window_of(mesh_of()) is None


def test_another_number_of_sizes_than_dims_says_what_to_give():
    with pytest.raises(ValueError, match=r"mesh.space=\[2\] has 1 sizes and images have 2 dims; .* as \[2, 1\]"):
        window_of(mesh_of(2))((96, 80))
