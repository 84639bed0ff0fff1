"""Which plan is chosen, of steps made by hand: what fits is known, and so is the fastest."""

from __future__ import annotations

import itertools
import json
import math
import re
import time
from dataclasses import replace

import pytest
from made_records import MIB, MadeModel, made_pricing

from widefield.config import parse_config
from widefield.planner.search.answer import answer
from widefield.planner.search.backwards import cheapest, fewest_devices, largest_batch, largest_image
from widefield.planner.search.bounds import least_bytes, model_bytes
from widefield.planner.search.layouts import RunLayout, layout_of, layouts, with_less_memory
from widefield.planner.search.reasons import changes, reasons, verdict
from widefield.planner.search.scaling import cluster_with, weak_scaling, where_it_stops
from widefield.planner.search.search import search
from widefield.planner.search.worlds import at_true_size, classes_of, small_world
from widefield.planner.step_record import MessageEvent
from widefield.plans import plan_of, ranks_asked_for
from widefield.section import to_yaml

GIB = 1024 * MIB
PIXELS = (512, 512)


@pytest.mark.parametrize("ranks", [1, 2, 6, 8, 64])
@pytest.mark.parametrize("pixels", [(512, 480), (128, 128, 96)])
def test_every_layout_has_exactly_the_ranks_and_reads_back_from_its_overrides(ranks, pixels):
    found = layouts(ranks, pixels=pixels, batch=64)
    assert len(set(found)) == len(found) > 0
    for layout in found[:: 1 + len(found) // 30]:
        config = parse_config("model: {name: resnet}\ndata: {name: digits}", layout.overrides())
        assert layout.ranks == ranks == ranks_asked_for(config) == plan_of(config, ranks).ranks
        assert layout_of(config, ranks) == layout and str(plan_of(config, ranks)) == str(layout)
        assert layout.config(config) == parse_config(to_yaml(config)) == config
    streamed = RunLayout(2, stream=(2,) * len(pixels))
    read = parse_config("model: {name: resnet}\ndata: {name: digits}", streamed.overrides())
    assert layout_of(read, 2) == streamed and streamed.config(read) == read


def test_no_copy_is_without_a_sample_and_no_tile_too_thin():
    found = layouts(64, pixels=(64, 64), batch=4)
    assert found and all(layout.copies <= 4 for layout in found)
    assert all(64 // size >= 8 for layout in found for size in layout.space)
    assert {layout.copies for layout in layouts(8, pixels=(64, 64), batch=8, accumulate=4)} == {1, 2}


def test_tiles_are_as_square_as_can_be_or_along_the_first_dim():
    cuts = {layout.space for layout in layouts(16, pixels=(512, 512), batch=16) if layout.tiles == 16}
    assert cuts == {(4, 4), (16, 1)}
    assert {layout.space for layout in layouts(8, pixels=(64,) * 3, batch=8) if layout.tiles == 8} == {(2, 2, 2), (8, 1, 1)}


def test_less_memory_is_recompute_and_then_ever_more_tiles_in_time_where_strategies_allow_it():
    def next_ones(layout):
        return [str(one) for one in with_less_memory(layout, 2)]

    assert next_ones(RunLayout(2)) == ["replicate=2, recompute", "replicate=2, streamed in 2 x 2 tiles"]
    assert next_ones(RunLayout(2, stream=(2, 2))) == ["replicate=2, streamed in 4 x 4 tiles"]
    assert next_ones(RunLayout(channel=2)) == []
    assert next_ones(RunLayout(stage=2)) == []


# ---------------------------------------------------------------------------------------------- worlds


def test_a_world_of_many_copies_is_emulated_as_two_with_as_many_samples_each():
    layout = RunLayout(replicate=4096, space=(2, 2))
    world = small_world(layout, batch=10_000)
    assert (world.small.ranks, world.batch, world.samples) == (8, 6, 10_000)  # the first copies have 3 samples
    assert small_world(RunLayout(2), 5).batch == 5


def test_groups_of_both_replicas_get_all_of_them_and_others_stay():
    layout = RunLayout(replicate=5, space=(2, 1))
    world = small_world(layout, batch=10)
    record = MadeModel().step(made_pricing(MadeModel(), "8xH100", batch=4).config, ranks=1)
    groups = [(0, 1), (0, 2), (1, 3), (0, 1, 2, 3)]
    events = [MessageEvent("all_reduce", 1, group, "backward", "", n) for n, group in enumerate(groups)]
    events.append(MessageEvent("send", 1, (0, 1), "forward", "", 9, peer=1))
    grown = at_true_size(replace(record, events=events), world)
    assert [event.ranks for event in grown.events] == [
        (0, 1), (0, 2, 4, 6, 8), (1, 3, 5, 7, 9), tuple(range(10)), (0, 1)
    ]  # fmt: skip
    assert (grown.ranks, grown.samples) == (10, 10)


def test_the_classes_of_ranks_are_every_rank_of_one_kind_counted_once():
    layouts_of = [
        RunLayout(4),
        RunLayout(2, space=(4, 3)),
        RunLayout(1, 2, 3, (2, 2), 1, 3),
        RunLayout(space=(3, 3, 4), channel=2),
    ]
    for layout in layouts_of:
        assert sum(one.ranks for one in classes_of(layout)) == layout.ranks
    inside, corner = classes_of(RunLayout(2, space=(4, 3)))
    assert (inside.rank, inside.role, corner.rank, corner.role) == (1 * 3 + 1, "interior tile", 0, "corner tile")
    assert [one.role for one in classes_of(RunLayout(stage=3))] == [f"stage {n} of 3" for n in (1, 2, 3)]
    assert [one.rank for one in classes_of(RunLayout(space=(2, 1), channel=2, stage=2))] == [0, 1]


# ---------------------------------------------------------------------------------------------- the search


def test_no_bound_is_above_what_the_step_really_holds():
    model = MadeModel()
    pricing = made_pricing(model, "16xH100", batch=16)
    known = model_bytes(model.step(pricing.with_batch(1).config, ranks=1))
    for layout in layouts(16, pixels=PIXELS, batch=16):
        for one in [layout, *with_less_memory(layout, 2)]:
            if pricing.estimate(one).state == "refused":
                continue
            assert least_bytes(one, known, 16) <= pricing.record(one).peak_bytes, one


def test_the_fastest_of_all_layouts_that_fit_is_found():
    """Compared with an estimate of every single layout."""
    model = MadeModel(weights=400 * MIB, activations=30 * GIB)
    pricing = made_pricing(model, "8xA100-40G", batch=16)
    found = search(pricing, 8, PIXELS)
    tried = pricing.tally.emulations
    plain = layouts(8, pixels=PIXELS, batch=16)
    further = [less for layout in plain for less in with_less_memory(layout, 2)]
    every = [pricing.estimate(layout) for layout in [*plain, *further]]
    best = min(estimate.seconds for estimate in every if estimate.state == "fits")
    assert found.best is not None and found.best.seconds == pytest.approx(best, rel=0.02)
    assert 0 < tried < pricing.tally.emulations


def test_where_all_fits_copies_alone_win_and_the_recipes_own_plan_is_tried():
    pricing = made_pricing(MadeModel(), "4xH100", batch=8, overrides=("mesh.space=[1,4]",))
    found = search(pricing, 4, PIXELS)
    assert str(found.best.layout) == "replicate=4"
    assert RunLayout(space=(1, 4)) in [estimate.layout for estimate in found.estimates]
    assert found.best.efficiency == pytest.approx(1.0, abs=0.1)


def test_ranks_sum_their_memory_and_every_estimate_is_explained():
    found = search(made_pricing(MadeModel(activations=30 * GIB), "8xA100-40G", batch=16), 8, PIXELS)
    for estimate in (estimate for estimate in found.estimates if estimate.memory):
        assert sum(estimate.fullest.parts.values()) == estimate.fullest.peak_memory_bytes <= estimate.peak_memory_bytes
        assert (estimate.state == "fits") == (estimate.missing_bytes == 0)
    text = "\n".join(reasons(found))
    assert "does not fit" in text and "of which activations" in text


def test_with_more_memory_the_plan_that_is_named_wins():
    """What would change the choice is tried: with that much more memory, that plan is chosen."""
    model = MadeModel(weights=50 * MIB, activations=41 * GIB)
    pricing = made_pricing(model, "2xA100-40G", batch=2)
    found = search(pricing, 2, PIXELS)
    (first, *_) = changes(found)
    faster = [e for e in found.estimates if e.state == "too large" and e.seconds < found.best.seconds]
    named = min(faster, key=lambda estimate: estimate.missing_bytes)
    assert first.startswith("with ") and f"more per device, {named.name} wins" in first
    device = replace(pricing.cluster.device, memory_bytes=pricing.cluster.device.memory_bytes + named.missing_bytes)
    again = search(replace(pricing, cluster=replace(pricing.cluster, device=device)), 2, PIXELS)
    assert again.best.seconds <= named.seconds < found.best.seconds
    assert replace(pricing, cluster=replace(pricing.cluster, device=device)).estimate(named.layout).state == "fits"


def test_a_model_that_fits_in_no_plan_gets_the_nearest_and_what_is_missing():
    model = MadeModel(weights=600 * GIB, activations=GIB)
    found = search(made_pricing(model, "2xA100-40G", batch=2), 2, PIXELS)
    assert found.best is None and found.left_out
    text = verdict(found, "one A100-40G")
    assert re.match(r"no plan fits 2 devices with \d+ GiB each\. The nearest is ", text)
    assert "per device are missing" in text and "Weights and states fill it" in text


def test_activations_of_one_image_that_fit_nowhere_ask_for_more_devices():
    found = search(made_pricing(MadeModel(activations=30_000 * GIB), "1xA100-40G", batch=1), 1, PIXELS)
    assert "Activations of one image fill it" in verdict(found, "one A100-40G")


def test_a_refusal_is_told_once_in_the_strategys_words():
    model = MadeModel(refused=("channel", "attention cannot be cut by channels; set mesh.channel=1"))
    found = search(made_pricing(model, "4xH100", batch=8), 4, PIXELS)
    told = [text for text in reasons(found) if "attention cannot be cut" in text]
    assert len(told) == 1 and "cannot run: attention cannot be cut by channels; set mesh.channel=1" in told[0]


def test_a_batch_smaller_than_what_any_plan_needs_is_refused():
    pricing = made_pricing(MadeModel(), "64xH100", batch=1)
    with pytest.raises(ValueError, match=r"no plan gives each of 61 ranks work: the batch has 1 samples .* 8 x 8 pixels"):
        search(replace(pricing, cluster=replace(pricing.cluster, devices_per_node=1)), 61, (8, 8))


def test_a_large_cluster_is_searched_in_time():
    started = time.monotonic()
    found = search(made_pricing(MadeModel(activations=200 * GIB), "128x8xH100", batch=1024), 1024, (512, 512, 512), seconds=20)
    assert found.best is not None and time.monotonic() - started < 30


# ---------------------------------------------------------------------------------------------- further questions


def test_scaling_prices_16384_devices_without_their_processes():
    pricing = made_pricing(MadeModel(), "128x8xH100", batch=8192)
    points = weak_scaling(pricing, RunLayout(1024))
    assert [point.devices for point in points] == [1, 8, 64, 512, 1024, 16384]
    assert all(point.samples == 8 * point.devices for point in points) and points[0].efficiency == 1.0
    assert all(a.efficiency >= b.efficiency for a, b in itertools.pairwise(points))
    assert pricing.tally.emulations <= 2
    assert "16,384" in where_it_stops(points) or "at" in where_it_stops(points)


def test_sizes_that_a_plan_cannot_have_are_left_out():
    pricing = made_pricing(MadeModel(), "2x8xH100", batch=64)
    assert [point.devices for point in weak_scaling(pricing, RunLayout(4, space=(2, 2)))] == [8, 16, 64, 512, 1024, 16384]
    with pytest.raises(ValueError, match="12 devices do not fill nodes of 8; use a multiple of 8, or at most 8"):
        cluster_with(pricing.cluster, 12)


def test_the_largest_batch_fits_and_one_more_sample_per_copy_does_not():
    pricing = made_pricing(MadeModel(activations=3 * GIB), "2xA100-40G", batch=2)
    found = search(pricing, 2, PIXELS)
    got = largest_batch(pricing, found)
    copies = got.estimate.layout.copies
    assert got.estimate.state == "fits"
    more = int(1.03 * got.value / copies + 1) * copies
    assert pricing.with_batch(more).estimate(got.estimate.layout).state == "too large"


def test_the_largest_image_fits_and_a_larger_one_does_not():
    def of_pixels(pixels):
        area = math.prod(pixels) / math.prod(PIXELS)
        return made_pricing(MadeModel(activations=int(GIB * area), flops=1e12 * area), "2xA100-40G", batch=2)

    found = search(of_pixels(PIXELS), 2, PIXELS)
    got = largest_image(of_pixels, PIXELS, found)
    assert got.estimate.state == "fits" and got.value[0] == got.value[1] and got.value[0] % 32 == 0
    side = int(1.04 * got.value[0] / 32 + 1) * 32
    assert of_pixels((side, side)).estimate(got.estimate.layout).state == "too large"


def test_the_fewest_devices_and_the_cheapest():
    pricing = made_pricing(MadeModel(weights=20 * GIB, activations=GIB), "4xA100-40G", batch=4)
    fewest = fewest_devices(pricing, PIXELS)
    smaller = cluster_with(pricing.cluster, fewest.value // 2)
    assert fewest.value == 2 and search(replace(pricing, cluster=smaller), 1, PIXELS).best is None
    price = cheapest(pricing, PIXELS, 2.0)
    dollars = 1e6 * 2.0 / 3600 * price.estimate.layout.ranks / price.estimate.images_per_second
    assert price.value == pytest.approx(dollars) and "dollars per million images" in price.text
    nothing = fewest_devices(made_pricing(MadeModel(weights=2000 * GIB), "2xA100-40G", batch=2), PIXELS)
    assert nothing.value is None and "no plan fits 2 devices" in nothing.text


def test_an_answer_is_data_that_json_holds():
    pricing = made_pricing(MadeModel(activations=30 * GIB), "8xA100-40G", batch=16)
    found = answer(pricing, (3, *PIXELS), data="made", seconds=10, questions=[largest_batch])
    tree = json.loads(json.dumps(found.to_tree()))
    assert tree["best"]["name"] == found.best.name == tree["plans"][0]["name"]
    assert tree["best"]["peak_memory_bytes"] > 0 and tree["answers"][0]["question"] == "largest batch"
    assert tree["cluster"]["ranks"] == 8 and tree["scaling"]


def test_the_recipe_s_own_layout_is_tried_however_short_the_search():
    pricing = made_pricing(MadeModel(activations=2 * GIB), "8xA100-40G", batch=16)
    own = RunLayout(replicate=4, space=(2, 1))
    own_pricing = replace(pricing, config=own.config(pricing.config))
    found = search(own_pricing, 8, PIXELS, seconds=-1)
    assert [one.layout for one in found.estimates] == [RunLayout(replicate=8), own] and found.untried > 0
    assert len(search(own_pricing, 8, PIXELS, seconds=-1, own=False).estimates) == 1


def test_a_search_that_ends_by_the_clock_says_what_it_has_not_looked_at():
    found = search(made_pricing(MadeModel(activations=2 * GIB), "8xA100-40G", batch=16), 8, PIXELS, seconds=-1)
    assert len(found.estimates) == 1 and found.untried > 0
    assert re.search(r"the time for the search was over with \d+ layouts waiting.*--seconds gives it more", reasons(found)[-1])
