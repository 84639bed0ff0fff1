"""Random numbers on tiles: refused where ranks would draw different ones, and in step with what one device draws next."""

from __future__ import annotations

import re

import devices
import pytest
import torch
from devices import on_gpu_too
from ranks import RankFailed, on_ranks
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from widefield.parallel.parallelize import parallelize
from widefield.plans import Plan
from widefield.streaming.api import stream
from widefield.tiled import rng
from widefield.tiled.api import tile, whole
from widefield.tiled.tensor import TiledTensor


@on_gpu_too
@pytest.mark.parametrize("drop", [F.dropout, F.dropout2d], ids=["cut", "uncut"])
def test_ranks_that_would_draw_different_numbers_are_told_to_seed_alike(drop):
    refusals = on_ranks(2, _refusal_of_other_seeds, drop.__name__, plan=Plan(space=[2, 1]))
    assert all("call torch.manual_seed with the same number" in words for words in refusals)


def _refusal_of_other_seeds(mesh, name: str) -> str:
    rng.forget()
    torch.manual_seed(mesh.rank)
    return _said(lambda: getattr(F, name)(tile(torch.ones(1, 2, 8, 6), mesh)))


def _said(call) -> str:
    """The words of a refusal."""
    try:
        call()
    except ValueError as error:
        return str(error)
    return "not refused"


def _drawing(generator=None):
    """A forward that draws three times."""

    def run(image):
        for _ in range(3):
            image = image + torch.empty_like(image).uniform_(generator=generator)
        return image

    return run


def _again(seed: int) -> torch.Generator:
    return torch.Generator(devices.here()).manual_seed(seed)


DIVERGENCES = {
    "one draw more": lambda mesh, own: torch.rand(1) if mesh.rank else None,
    "another seed": lambda mesh, own: torch.manual_seed(mesh.rank),
    "one draw more of their own": lambda mesh, own: torch.rand(1, generator=own) if mesh.rank else None,
    "another seed of their own": lambda mesh, own: own.manual_seed(mesh.rank),
}


@on_gpu_too
@pytest.mark.parametrize("when", ["between two forwards", "within a forward", "before the last draw"])
@pytest.mark.parametrize("what", DIVERGENCES)
def test_a_divergence_is_found_at_the_next_draw_or_forward_on_every_rank(what, when):
    for said in on_ranks(2, _said_of_divergence, what, when, plan=Plan(space=[2, 1])):
        whose = f"{'their torch.Generator' if 'own' in what else 'torch.s generators'} on {devices.CURRENT[-1]}"
        assert re.search(f"draw different random numbers: where they drew last, {whose}(:0)? stood at", said), said


def _said_of_divergence(mesh, what: str, when: str) -> str:
    rng.forget()
    torch.manual_seed(3)
    own, image = _again(1), tile(torch.ones(1, 2, 8, 6), mesh)
    run = _drawing(own if "own" in what else None)
    run(image), run(image)
    diverge = DIVERGENCES[what]
    if when == "between two forwards":
        diverge(mesh, own)
        return _said(lambda: run(image))
    if when == "within a forward":
        return _said(lambda: (run(image), diverge(mesh, own), run(image)))
    first = run(image), diverge(mesh, own)
    last = image + torch.empty_like(image).uniform_(generator=own if "own" in what else None)
    assert len(first) and last.shape == image.shape  # nobody knows yet
    return _said(lambda: F.dropout(tile(torch.ones(1, 2, 4, 6), mesh)))


@on_gpu_too
def test_a_second_generator_that_is_seeded_otherwise_is_found():
    for said in on_ranks(2, _said_of_a_second, plan=Plan(space=[2, 1])):
        assert f"their torch.Generator on {devices.CURRENT[-1]}" in said


def _said_of_a_second(mesh) -> str:
    rng.forget()
    image, one, other = tile(torch.ones(1, 2, 8, 6), mesh), _again(1), _again(mesh.rank)
    _drawing(one)(image)
    return _said(lambda: _drawing(other)(image))


@on_gpu_too
def test_a_rank_that_draws_on_other_tiles_once_more_is_found():
    """The message of its draw meets that of a draw of another shape on the other ranks."""
    for said in on_ranks(2, _said_of_one_more, plan=Plan(space=[2, 1])):
        assert "draw different random numbers" in said


def _said_of_one_more(mesh) -> str:
    rng.forget()
    torch.manual_seed(3)
    image = tile(torch.ones(1, 2, 8, 6), mesh)
    _drawing()(image)
    if mesh.rank:
        torch.empty_like(tile(torch.ones(1, 2, 4, 4), mesh)).uniform_()
    return _said(lambda: (_drawing()(image), _drawing()(image)))


@on_gpu_too
def test_ranks_that_draw_alike_are_never_told_otherwise():
    """With plain draws in between, seeds in between, two generators in turns, recomputed draws, and over several grids."""
    assert all(on_ranks(4, _draws_alike, plan=Plan(space=[2, 2])))


def _draws_alike(mesh) -> bool:
    rng.forget()
    torch.manual_seed(3)
    image, own = tile(torch.ones(1, 2, 8, 6), mesh).requires_grad_(), _again(2)
    for step in range(4):
        torch.rand(5)
        out = F.dropout(_drawing(own)(image), 0.3)
        out = checkpoint(_drawing(), out, use_reentrant=False)
        out.sum().backward()
        if step == 2:
            torch.manual_seed(step), own.manual_seed(step)
    return True


@on_gpu_too
def test_each_draw_is_one_message():
    assert on_ranks(2, _messages_of_draws, plan=Plan(space=[2, 1])) == [(0, 3)] * 2


def _messages_of_draws(mesh) -> tuple[int, int]:
    from widefield.comm.halo import TRAFFIC

    rng.forget()
    torch.manual_seed(3)
    TRAFFIC.clear()
    image = tile(torch.ones(1, 2, 8, 6), mesh)
    for _ in range(3):
        image = F.dropout(image, 0.1)
    return TRAFFIC.sum_messages + TRAFFIC.pixel_messages, TRAFFIC.draw_messages


@on_gpu_too
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


@on_gpu_too
def test_what_a_draw_gives_holds_the_tile_and_not_the_whole():
    assert all(on_ranks(2, _holds_its_tile_alone, plan=Plan(space=[2, 1])))


def _holds_its_tile_alone(mesh) -> bool:
    torch.manual_seed(5)
    image = tile(torch.ones(1, 2, 8, 6), mesh)
    drawn = [torch.rand_like(image), *torch.native_dropout(image, 0.5, True)]
    assert all(type(value) is TiledTensor for value in drawn)
    return all(value.local.untyped_storage().nbytes() == value.local.numel() * value.local.element_size() for value in drawn)


@on_gpu_too
def test_draws_lie_in_memory_as_on_one_device():
    """A channels-last image is drawn pixel by pixel; on tiles, too."""
    assert all(on_ranks(2, _channels_last_draws_are_the_same, plan=Plan(space=[2, 1])))


def _channels_last_draws_are_the_same(mesh) -> bool:
    image = torch.ones(2, 3, 9, 6).contiguous(memory_format=torch.channels_last)
    torch.manual_seed(6)
    expected = F.dropout(image, 0.3)
    torch.manual_seed(6)
    return torch.equal(whole(F.dropout(tile(image, mesh), 0.3)), expected)


@on_gpu_too
@pytest.mark.parametrize("shape", [(2, 6, 9, 7), (2, 6, 3, 4)], ids=str)
def test_a_reshape_keeps_the_order_in_memory_where_one_device_makes_no_copy(shape):
    """Which is the order of the next draw; tiles of (3, 4) px are one pixel thin."""
    torch.manual_seed(0)
    image = torch.randn(shape, dtype=torch.float64)
    torch.manual_seed(1)
    expected = _by_heads(image)
    for found in on_ranks(2, _dropped_by_heads, image, plan=Plan(space=[2, 1])):
        assert torch.equal(found, expected.cpu())


def _by_heads(image):
    """Dropout of an image with channels last whose heads were taken apart, and put side by side again."""
    heads = image.contiguous(memory_format=torch.channels_last).flatten(2).unflatten(1, (3, -1)).transpose(2, 3) * 2
    return F.dropout(heads.transpose(2, 3).reshape(image.shape), 0.5)


def _dropped_by_heads(mesh, image):
    rng.forget()
    torch.manual_seed(1)
    return whole(_by_heads(tile(image, mesh)))


@on_gpu_too
def test_a_refusal_of_one_rank_is_not_hidden():
    """The comparison fails on all ranks or none: nobody goes on to draw."""
    with pytest.raises(RankFailed, match="different random numbers"):
        on_ranks(2, _draws_with_other_seeds, plan=Plan(space=[2, 1]))


def _draws_with_other_seeds(mesh) -> None:
    rng.forget()
    torch.manual_seed(mesh.rank)
    F.dropout(tile(torch.ones(1, 2, 8, 6), mesh))


def _of_one_pixel(mesh):
    """Draws on tiles of 1 x 1 px, whose order in memory the operations before it tell."""
    wrong = []
    for turned in ([0, 1, 2, 3], [0, 3, 1, 2], [0, 2, 1, 3], [1, 0, 2, 3]):
        image = torch.ones(2, 3, 2, 2)
        torch.manual_seed(3)
        expected = F.dropout(image.permute(turned) * 1)
        torch.manual_seed(3)
        wrong += [] if torch.equal(whole(F.dropout(tile(image, mesh).permute(turned) * 1)), expected) else [turned]
    return wrong


@on_gpu_too
def test_tiles_of_one_pixel_draw_as_their_whole():
    assert on_ranks(4, _of_one_pixel, plan=Plan(space=[2, 2])) == [[]] * 4


@on_gpu_too
def test_tiles_that_are_too_thin_to_tell_their_order_do_not_draw():
    """As where a tile was put into another order by hand: no usual one fits, and one pixel does not tell the rest."""
    words = on_ranks(2, _words_of_a_moved_tile, plan=Plan(space=[2, 1]))
    assert all("too thin to tell the order" in text for text in words), words


def _words_of_a_moved_tile(mesh) -> str:
    image = tile(torch.ones(2, 3, 2, 6), mesh)
    image.local = image.local.transpose(0, 1).contiguous().transpose(0, 1)
    try:
        image.bernoulli_(0.5)
    except NotImplementedError as error:
        return str(error)
    return "drawn"


def _words_of_dropout(mesh, size, turned) -> str:
    """What a draw says for tiles that lie in channels-last order on the ranks in `turned`."""
    image = tile(torch.ones(2, 3, *size), mesh)
    if mesh.rank in turned:
        image.local = image.local.contiguous(memory_format=torch.channels_last)
    try:
        F.dropout(image)
    except NotImplementedError as error:
        return str(error)
    return "drawn"


def test_a_compiled_draw_that_cannot_be_exact_says_so():
    assert all("as thin as one pixel" in text for text in on_ranks(2, _words_of_compiled, plan=Plan(space=[2, 1])))


def _words_of_compiled(mesh) -> str:
    torch._dynamo.reset()
    image = tile(torch.ones(2, 3, 2, 6), mesh)
    try:
        torch.compile(F.dropout, fullgraph=True, backend="aot_eager", dynamic=False)(image)
    except Exception as error:  # torch wraps what its compiler meets
        return str(error)
    return "drawn"


def test_compiled_draws_are_compared_as_they_run():
    for same, said in on_ranks(2, _compiled_and_apart, plan=Plan(space=[2, 1])):
        assert same and "draw different random numbers" in said


def _compiled_and_apart(mesh) -> tuple[bool, str]:
    rng.forget()
    torch._dynamo.reset()
    image = tile(torch.ones(2, 3, 8, 6), mesh)
    compiled = torch.compile(
        lambda image: F.dropout(F.dropout(image, 0.3), 0.2), fullgraph=True, backend="aot_eager", dynamic=False
    )
    torch.manual_seed(3)
    compiled(image)
    torch.manual_seed(3)
    expected = F.dropout(F.dropout(image, 0.3), 0.2)
    torch.manual_seed(3)
    same = torch.equal(whole(compiled(image)), whole(expected))
    torch.rand(mesh.rank + 1)
    return same, _said(lambda: compiled(image))


@on_gpu_too
@pytest.mark.parametrize("plan", [Plan(space=[2, 1]), Plan(channel=2), Plan(channel=2, stage=2, independent=True)], ids=str)
@pytest.mark.parametrize("own", [False, True], ids=["torch's", "their own"])
def test_captured_draws_are_compared_too(plan, own):
    """Streams in space and cut channels draw for the whole on every rank; stages take a seed that is one on all their ranks."""
    if own and plan.stage > 1:
        return  # refused: see what a forward may draw from in stages
    for same, said in on_ranks(plan.ranks, _captured_and_apart, own, plan=plan):
        assert same and "draw different random numbers" in said


class _Noisy(nn.Module):
    def __init__(self, generator) -> None:
        super().__init__()
        self.generator, self.first, self.second = generator, nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 4, 3, padding=1)

    def forward(self, x):
        y = self.first(x)
        return self.second(y + torch.empty_like(y).uniform_(generator=self.generator))


def _captured_and_apart(mesh, own: bool) -> tuple[bool, str]:
    rng.forget()
    torch.manual_seed(3)
    image, generator = torch.randn(2, 3, 12, 10), _again(5) if own else None
    alone = _Noisy(generator)
    model = _Noisy(_again(5) if own else None)
    model.load_state_dict(alone.state_dict())
    model = stream(model, tiles=(2, 2)) if mesh.plan.space else parallelize(model, mesh, sample=image.to("meta"))
    found = []
    with torch.no_grad():
        for net, given in ((alone, image), (model, tile(image, mesh))):
            torch.manual_seed(4)
            found.append([whole(net(given)) for _ in range(2)])
        same = mesh.plan.stage > 1 or all(torch.allclose(*pair, atol=1e-5) for pair in zip(*found, strict=True))
        for _ in range(1 + (mesh.channel if mesh.plan.channel > 1 else mesh.rank)):  # a GPU counts draws, not numbers
            torch.rand(1, generator=model.generator, device="cpu" if mesh.plan.stage > 1 else None)  # whence stages are seeded
        return same, _said(lambda: (model(tile(image, mesh)), model(tile(image, mesh))))
