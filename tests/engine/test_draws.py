"""Random numbers on tiles: refused where ranks would draw different ones, and in step with what one device draws next."""

from __future__ import annotations

import pytest
import torch
from ranks import RankFailed, on_ranks
from torch.nn import functional as F

from widefield.engine import draws
from widefield.engine.tiled import TiledTensor
from widefield.engine.tiling import tile, whole
from widefield.plan import Plan


@pytest.mark.parametrize("drop", [F.dropout, F.dropout2d], ids=["cut", "uncut"])
def test_ranks_that_would_draw_different_numbers_are_told_to_seed_alike(drop):
    refusals = on_ranks(2, _refusal_of_other_seeds, drop.__name__, plan=Plan(space=[2, 1]))
    assert all("call torch.manual_seed with the same number" in words for words in refusals)


def _refusal_of_other_seeds(mesh, name: str) -> str:
    draws._CHECKED.clear()
    torch.manual_seed(mesh.rank)
    try:
        getattr(F, name)(tile(torch.ones(1, 2, 8, 6), mesh))
    except ValueError as error:
        return str(error)
    return "not refused"


def test_generators_are_compared_once_and_not_at_every_draw():
    assert on_ranks(2, _messages_of_draws, plan=Plan(space=[2, 1])) == [1] * 2


def _messages_of_draws(mesh) -> int:
    from widefield.engine.halo import TRAFFIC

    draws._CHECKED.clear()
    torch.manual_seed(3)
    TRAFFIC.clear()
    image = tile(torch.ones(1, 2, 8, 6), mesh)
    for _ in range(3):
        image = F.dropout(image, 0.1)
    return TRAFFIC.sum_messages + TRAFFIC.pixel_messages


def test_after_a_draw_on_tiles_the_generator_stands_where_one_device_leaves_it():
    for same in on_ranks(2, _next_number_is_the_same, plan=Plan(space=[2, 1])):
        assert same


def _next_number_is_the_same(mesh) -> bool:
    torch.manual_seed(4)
    F.dropout(torch.ones(1, 2, 9, 6), 0.3)
    expected = torch.rand(3)
    torch.manual_seed(4)
    F.dropout(tile(torch.ones(1, 2, 9, 6), mesh), 0.3)
    return torch.equal(torch.rand(3), expected)


def test_what_a_draw_gives_holds_the_tile_and_not_the_whole():
    assert all(on_ranks(2, _holds_its_tile_alone, plan=Plan(space=[2, 1])))


def _holds_its_tile_alone(mesh) -> bool:
    torch.manual_seed(5)
    image = tile(torch.ones(1, 2, 8, 6), mesh)
    drawn = [torch.rand_like(image), *torch.native_dropout(image, 0.5, True)]
    assert all(type(value) is TiledTensor for value in drawn)
    return all(value.own.untyped_storage().nbytes() == value.own.numel() * value.own.element_size() for value in drawn)


def test_draws_lie_in_memory_as_on_one_device():
    """A channels-last image is drawn pixel by pixel; on tiles, too."""
    assert all(on_ranks(2, _channels_last_draws_are_the_same, plan=Plan(space=[2, 1])))


def _channels_last_draws_are_the_same(mesh) -> bool:
    image = torch.ones(2, 3, 9, 6).contiguous(memory_format=torch.channels_last)
    torch.manual_seed(6)
    expected = F.dropout(image, 0.3)
    torch.manual_seed(6)
    return torch.equal(whole(F.dropout(tile(image, mesh), 0.3)), expected)


def test_a_refusal_of_one_rank_is_not_hidden():
    """The comparison fails on all ranks or none: nobody goes on to draw."""
    with pytest.raises(RankFailed, match="different random numbers"):
        on_ranks(2, _draws_with_other_seeds, plan=Plan(space=[2, 1]))


def _draws_with_other_seeds(mesh) -> None:
    draws._CHECKED.clear()
    torch.manual_seed(mesh.rank)
    F.dropout(tile(torch.ones(1, 2, 8, 6), mesh))


def test_tiles_that_are_too_thin_to_tell_their_order_do_not_draw():
    words = on_ranks(4, _words_of_dropout, (2, 2), [], plan=Plan(space=[2, 2]))
    assert all("too thin to tell the order" in text for text in words), words


def _words_of_dropout(mesh, size, turned) -> str:
    """What a draw says for tiles that lie in channels-last order on the ranks in `turned`."""
    image = tile(torch.ones(2, 3, *size), mesh)
    if mesh.rank in turned:
        image.own = image.own.contiguous(memory_format=torch.channels_last)
    try:
        F.dropout(image)
    except NotImplementedError as error:
        return str(error)
    return "drawn"


@pytest.mark.parametrize("checked", [False, True])
def test_a_compiled_draw_that_cannot_be_exact_says_so(checked):
    words = "compared their generators" if not checked else "as thin as one pixel"
    assert all(words in text for text in on_ranks(2, _words_of_compiled, checked, plan=Plan(space=[2, 1])))


def _words_of_compiled(mesh, checked) -> str:
    draws._CHECKED.clear()
    torch._dynamo.reset()
    image = tile(torch.ones(2, 3, 2, 6), mesh)
    if checked:
        F.dropout(tile(torch.ones(2, 3, 8, 6), mesh))
    try:
        torch.compile(F.dropout, fullgraph=True, backend="aot_eager", dynamic=False)(image)
    except Exception as error:  # torch wraps what its compiler meets
        return str(error)
    return "drawn"
