"""What is chosen: into how many tiles, what is kept, where; and that no choice changes a number."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
import torch
from marks import few
from streaming.both import differences, image, made, ran
from streaming.planned import (
    Loss,
    Residual,
    UNet,
    chosen,
    graph_of,
    plain_program,
    stack,
    unet,
    unet_with_norms,
    units,
)
from torch import nn
from torchvision.models import resnet50

from widefield.streaming import api
from widefield.streaming import schedule as programs
from widefield.streaming.choice import Choice, bytes_text, grids_of, name_of
from widefield.streaming.cost_model import Estimator, Setting, estimate
from widefield.streaming.schedule import PlanMemo, program_of
from widefield.streaming.search import KeepSearch

MIB = 2**20


def ways_of(graph, tiles, place="device") -> KeepSearch:
    return KeepSearch(PlanMemo(graph, units(graph, tiles)), Estimator(graph, Setting(place=place)))


def segments_of(choice: Choice) -> int:
    return sum(len(stage.segments) for stage in choice.program.stages)


# ---------------------------------------------------------------------------------------------- no number changes


NETS: dict[str, Callable[[], nn.Module]] = {
    "convolutions": lambda: stack(4, 4),
    "U-Net": lambda: UNet(lambda _: nn.Identity(), (4, 6)),
    "U-Net with norms": lambda: UNet(nn.BatchNorm2d, (4, 6)),
    "blocks": lambda: Residual(4, 2),
    "a loss": lambda: Loss(stack(3, 4)),
}


@pytest.mark.parametrize("name", NETS)
@pytest.mark.parametrize("seed", range(3))
def test_whatever_is_kept_or_made_again_the_numbers_are_the_same(name: str, seed: int, monkeypatch):
    """Values picked at random, many more than a choice would take."""
    taken: list[int] = []

    def at_random(graph, *, tiles, read, **_) -> Choice:
        rules, draw = read(tiles), torch.Generator().manual_seed(seed)
        values = [out for unit in rules.units if unit.step for out in unit.outs if out in rules.layouts]
        picks = torch.rand(len(values), generator=draw).tolist()
        cut = {value for value, pick in zip(values, picks, strict=True) if pick < 0.4}
        again = {value for value, pick in zip(values, picks, strict=True) if pick > 0.6}
        taken.append(len(cut) * len(again))
        program = program_of(graph, rules, cut, again)
        return Choice(program, tiles, "device", estimate(program, Setting()))

    monkeypatch.setattr(api, "choose", at_random)
    expected = ran(made(NETS[name]), image(2, 3, 37, 29))
    problems = list(differences(ran(made(NETS[name], tiles=(2, 3)), image(2, 3, 37, 29)), expected))
    assert taken[0] > 0
    assert not problems, "\n".join(problems)


@pytest.mark.parametrize("steps", [0, 100])
def test_turns_worked_out_anew_are_those_that_are_remembered(steps: int, monkeypatch):
    monkeypatch.setattr(programs, "STEPS_MOST", steps)
    program = plain_program(graph_of(stack(2, 4), 1, 3, 40, 40), (3, 3))
    (segment,) = [segment for stage in program.stages for segment in stage.segments]
    first, second = segment.tiles[4], segment.tiles[4]
    assert (first is second) == bool(steps)
    assert first.sources == second.sources and first.kept == second.kept
    assert [step.reads for _, step in first.steps] == [step.reads for _, step in second.steps]
    assert [turn.number for turn in segment.tiles[2:5]] == [2, 3, 4] and len(segment.tiles) == 9


def test_a_chosen_program_gives_the_whole_run():
    """Eight layers of 5 x 5 in tiles of 16 px: uncut, each tile would read most of the image."""

    def deep() -> nn.Module:
        return Loss(nn.Sequential(*(nn.Conv2d(3 if n == 0 else 8, 8, 5, padding=2) for n in range(8))))

    module = made(deep, tiles=(4, 4))
    got, expected = ran(module, image(1, 3, 64, 64)), ran(made(deep), image(1, 3, 64, 64))
    (known,) = module._stream.known.values()
    assert sum(len(stage.segments) for stage in known.program.stages) > 1, "nothing was cut, so nothing is shown"
    assert not list(differences(got, expected))


# ---------------------------------------------------------------------------------------------- what is kept


@pytest.mark.long
def test_a_deep_encoder_is_cut_into_segments():
    """In evaluation ResNet-50 has no sums until its end; its halos of 480 px are as large as the tiles."""
    graph = graph_of(resnet50().eval(), 1, 3, 4096, 4096)
    base, found = estimate(plain_program(graph, (8, 8)), Setting()), chosen(graph, (8, 8))
    assert base.slowdown > 2.5
    assert found.estimate.slowdown < 1.75
    assert segments_of(found) >= 4
    assert found.estimate.together <= base.work


def test_a_unet_without_norms_keeps_little():
    graph = graph_of(UNet(lambda _: nn.Identity(), (16, 32, 64, 128)), 1, 3, 4096, 4096)
    found = chosen(graph, (4, 4))
    assert found.estimate.together <= found.estimate.work
    assert estimate(found.program, Setting(trains=False)).slowdown < 1.12


def test_each_step_along_the_path_saves_time_and_the_other_way_bytes():
    ways = ways_of(graph_of(Loss(stack(8)), 1, 3, 512, 512), (8, 8))
    more = [ways.base, *ways.with_more(None)]
    assert len(more) >= 4
    assert all(b.cost <= 0.995 * a.cost for a, b in zip(more, more[1:], strict=False))
    assert [len(way.cut) for way in more] == list(range(len(more)))
    normed = ways_of(graph_of(Loss(unet_with_norms()), 1, 3, 512, 512), (4, 4))
    less = [normed.base, *normed.with_less()]
    assert len(less) >= 3
    assert all(b.estimate.peak < a.estimate.peak for a, b in zip(less, less[1:], strict=False))
    assert less[-1].cost > less[0].cost


def test_where_there_is_a_choice_the_result_of_a_convolution_is_kept():
    """It has as many bytes as what follows from it pixel by pixel, here a norm and a ReLU, and spares its second run."""
    layers = [layer for n in range(6) for layer in (nn.Conv2d(16 if n else 3, 16, 5, padding=2), nn.BatchNorm2d(16), nn.ReLU())]
    ways = ways_of(graph_of(Loss(nn.Sequential(*layers).eval()), 1, 3, 512, 512), (8, 8)).with_more(None)
    assert len(ways) >= 3
    assert {str(value.maker.op) for value in ways[-1].cut} == {"aten.convolution.default"}


def test_without_a_budget_what_is_kept_beyond_need_is_below_the_work_of_a_turn():
    for make in (lambda: Loss(stack(8)), unet, unet_with_norms, Residual):
        graph = graph_of(make(), 1, 3, 512, 512)
        base, found = estimate(plain_program(graph, (4, 4)), Setting()), chosen(graph, (4, 4)).estimate
        assert found.together <= base.together + base.work
        assert found.cost <= base.cost


def test_a_value_read_through_no_window_is_not_kept():
    pointwise = nn.Sequential(nn.Conv2d(3, 8, 1), nn.ReLU(), nn.Conv2d(8, 8, 1), nn.Sigmoid(), nn.Conv2d(8, 1, 1))
    found = chosen(graph_of(Loss(pointwise), 1, 3, 512, 512), (8, 8))
    assert (segments_of(found), found.estimate.together) == (1, 0)


# ---------------------------------------------------------------------------------------------- a budget


SHARES = (0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0, 1.2, 1.5, 2.0, 4.0)


def stack_and_loss() -> nn.Module:
    return Loss(stack(8))


@pytest.mark.long
@pytest.mark.parametrize(
    "make", few([unet, unet_with_norms, stack_and_loss, Residual], stack_and_loss, then=[unet_with_norms], is_sweep=True)
)
@pytest.mark.parametrize("tiles", [(4, 4), None], ids=["tiles given", "tiles chosen"])
@pytest.mark.parametrize("place", few(["device", "file"], "file", is_sweep=True))
def test_a_larger_budget_never_costs_more_and_none_is_exceeded(make, tiles, place):
    graph = graph_of(make(), 1, 3, 512, 512)
    usual, found = chosen(graph, (4, 4), place=place).estimate.peak, []
    for budget in (round(share * usual) for share in SHARES):
        try:
            choice = chosen(graph, tiles, budget, place)
        except ValueError:
            assert not found, f"{budget} bytes are too few, and less was enough"
            continue
        assert choice.estimate.peak <= budget
        assert choice.place == place
        found.append(choice.estimate.cost)
    assert len(found) >= 4
    assert found == sorted(found, reverse=True)


@pytest.mark.parametrize("budget", [24, 48, 96, 300])
def test_chosen_are_the_fastest_of_the_coarsest_tiles_that_fit_and_those_up_to_twice_as_fine(budget: int):
    graph, costs = graph_of(Loss(stack(8)), 1, 3, 1024, 1024), {}
    for grid in grids_of((1024, 1024)):
        try:
            costs[grid] = chosen(graph, grid, budget * MIB, "device").estimate.cost
        except ValueError:
            assert not costs, f"{grid} is finer and does not fit"
    first = next(iter(costs))
    fine = {grid: cost for grid, cost in costs.items() if max(grid) <= 2 * max(first)}
    assert len(fine) >= 2
    assert chosen(graph, None, budget * MIB, "device").tiles == min(fine, key=fine.__getitem__)


@pytest.mark.long
def test_tiles_are_as_few_as_fit():
    graph = graph_of(Loss(stack()), 1, 3, 1024, 1024)
    tiles = [chosen(graph, None, budget * MIB, "device").tiles[0] for budget in (16, 32, 64, 128, 1024)]
    assert tiles == sorted(tiles, reverse=True)
    assert tiles[0] > 4 and tiles[-1] <= 2


def test_what_does_not_fit_the_device_is_kept_in_a_file():
    """Statistics of the batch want every layer kept: 60 MiB at 256 x 256 px."""
    graph = graph_of(Loss(unet_with_norms()), 1, 3, 256, 256)
    large, small = chosen(graph, (4, 4), 200 * MIB), chosen(graph, (4, 4), 8 * MIB)
    assert (large.place, small.place) == ("device", "file")
    assert small.estimate.together > 8 * MIB >= small.estimate.peak
    with pytest.raises(ValueError, match="nothing fits"):
        chosen(graph, (4, 4), 8 * MIB, "device")


def test_on_a_gpu_the_host_comes_before_a_file():
    graph = graph_of(Loss(unet_with_norms()), 1, 3, 256, 256)
    for value in graph.inputs:
        value.device = torch.device("cuda")
    assert chosen(graph, (4, 4), 8 * MIB).place == "host"


def test_what_is_made_again_takes_less_memory_and_more_time():
    graph = graph_of(Loss(unet_with_norms()), 1, 3, 256, 256)
    free = chosen(graph, (4, 4)).estimate
    tight = chosen(graph, (4, 4), round(0.8 * free.peak), "device")
    assert any("made again rather than kept" in reason for reason in tight.reasons)
    assert tight.estimate.peak <= 0.8 * free.peak
    assert tight.estimate.cost > free.cost


def test_an_image_read_by_windows_leaves_its_bytes_to_the_rest():
    graph = graph_of(Loss(stack()), 1, 3, 1024, 1024)
    with pytest.raises(ValueError, match="a step holds 12 MiB all the time"):
        chosen(graph, None, 10 * MIB)
    assert chosen(graph, None, 10 * MIB, by_windows=[0]).estimate.peak <= 10 * MIB


# ---------------------------------------------------------------------------------------------- tiles


@pytest.mark.parametrize("extents", [(4096, 4096), (100, 300), (33, 2000), (31, 31), (500,), (64, 512, 512), (1,)])
def test_tiles_grow_finer_near_square_and_never_below_32_px(extents):
    grids = list(grids_of(extents))
    assert grids[0] == (1,) * len(extents)
    assert len(set(grids)) == len(grids)
    assert all(a <= b for one, two in zip(grids, grids[1:], strict=False) for a, b in zip(one, two, strict=True))
    for grid in grids:
        sides = [extent / count for extent, count in zip(extents, grid, strict=True)]
        assert all(side >= 32 or count == 1 for side, count in zip(sides, grid, strict=True))
        cut = [side for side, count in zip(sides, grid, strict=True) if count > 1]
        assert not cut or max(cut) <= 2 * min(cut)


def test_tiles_follow_the_extents_that_a_rank_holds():
    graph = graph_of(Loss(stack()), 1, 3, 1024, 256)
    assert chosen(graph, None, 24 * MIB).tiles[0] > chosen(graph, None, 24 * MIB).tiles[1]
    swapped = chosen(graph, None, 24 * MIB, extents=(256, 1024)).tiles
    assert swapped[0] < swapped[1]


# ---------------------------------------------------------------------------------------------- words


def test_the_reasons_say_what_was_chosen():
    found = chosen(graph_of(Loss(stack(16)), 1, 3, 1024, 1024), (8, 8), 512 * MIB)
    first, second, *kept = found.reasons
    e = found.estimate
    assert first == (
        f"8 x 8 tiles of 128 x 128 px: {bytes_text(e.peak)} at most, of which {bytes_text(e.work)} one tile's work, "
        f"{bytes_text(e.together)} kept between {segments_of(found)} segments (on the device), 12 MiB inputs, "
        f"0 KiB outputs and what comes back for them, {bytes_text(e.weights)} weights and their gradients"
    )
    assert second == f"predicted {e.slowdown:.2f} times the time of a run without tiles"
    assert kept and all(re.fullmatch(r"kept so that halos end there: net\.\d+'s convolution \(64 MiB\)", one) for one in kept)


def test_a_value_is_named_by_its_module_and_without_one_by_its_shape():
    (value,) = graph_of(nn.Sequential(nn.Sequential(nn.Conv2d(3, 4, 3))), 1, 3, 40, 30).results
    assert name_of(value) == "0.0's convolution"
    (value,) = graph_of(nn.Conv2d(3, 4, 3), 1, 3, 40, 30).results
    assert name_of(value) == "convolution of 1 x 4 x 38 x 28"


@pytest.mark.parametrize(
    ("size", "text"), [(0, "0 KiB"), (300 * 2**10, "300 KiB"), (1.5 * MIB, "1.5 MiB"), (12 * MIB, "12 MiB"), (2**34, "16 GiB")]
)
def test_bytes_have_two_digits_that_count(size: float, text: str):
    assert bytes_text(size) == text


@pytest.mark.parametrize("make", [lambda: Loss(stack(8)), lambda: Loss(unet_with_norms())])
def test_a_choice_made_twice_is_the_same(make: Callable[[], nn.Module]):
    def told() -> tuple:
        choice = chosen(graph_of(make(), 1, 3, 512, 512), None, 80 * MIB)
        return choice.tiles, choice.place, choice.estimate, choice.reasons, [value.number for value in choice.program.kept]

    torch.manual_seed(0)
    first = told()
    others = [object() for _ in range(10_000)]  # other addresses, by which sets are ordered
    assert told() == first and len(others) == 10_000


# ---------------------------------------------------------------------------------------------- refusals


def test_neither_tiles_nor_memory_says_what_to_give():
    with pytest.raises(
        ValueError, match=r"neither tiles nor a budget of memory is given; say into how many tiles, as \(4, 4\)"
    ):
        chosen(graph_of(stack(1), 1, 3, 40, 40))


def test_a_budget_below_what_is_there_all_the_time_says_what_that_is():
    graph = graph_of(stack(), 1, 3, 512, 512)
    words = (
        r"nothing fits 4\.0 MiB in however many tiles: a step holds \d+ MiB all the time, 3\.0 MiB inputs, \d+ MiB outputs and "
        r"what comes back for them, 47 KiB weights and their gradients\.  Give more memory, read the image by windows"
    )
    with pytest.raises(ValueError, match=words):
        chosen(graph, None, 4 * MIB, "device")


def test_a_budget_that_no_tile_fits_says_what_the_least_is_and_of_what_it_consists():
    graph = graph_of(Loss(stack()), 1, 3, 512, 512)
    words = (
        r"nothing fits 3\.2 MiB: the least that a step takes is [\d.]+ MiB, in 16 x 16 tiles: [\d.]+ .iB one tile's work, "
        r"3\.0 MiB inputs, 0 KiB outputs and what comes back for them, 47 KiB weights and their gradients; \d+ .iB are kept "
    )
    with pytest.raises(ValueError, match=words):
        chosen(graph, None, round(3.2 * MIB))


def test_given_tiles_that_do_not_fit_are_refused():
    graph = graph_of(Loss(stack()), 1, 3, 512, 512)
    assert chosen(graph, None, 10 * MIB).tiles[0] > 2
    with pytest.raises(ValueError, match=r"the least that a step takes is .* MiB, in 2 x 2 tiles"):
        chosen(graph, (2, 2), 10 * MIB)
