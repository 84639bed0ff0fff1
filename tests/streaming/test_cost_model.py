"""What a program takes, against arithmetic by hand and against what the allocator gave."""

from __future__ import annotations

import gc
from collections.abc import Callable

import pytest
import torch
from marks import few
from streaming.both import Doing
from streaming.planned import Loss, Residual, UNet, graph_of, plain_program, stack, unet, unet_with_norms, units
from torch import Tensor, nn
from torch.nn import functional as F

from widefield.streaming.api import stream
from widefield.streaming.cost_model import MACHINES, WEIGHT_READS, WHOLE_STEP, Liveness, Setting, estimate
from widefield.streaming.memory_simulator import work_bytes
from widefield.streaming.saved_tensors import SavedTensorCache, SavedTensors
from widefield.streaming.schedule import FusedRegion, TileSchedule, program_of
from widefield.streaming.storage import offload_buffer


def two_convolutions() -> nn.Module:
    return nn.Sequential(nn.Conv2d(1, 2, 3, padding=1, bias=False), nn.Conv2d(2, 3, 3, padding=1, bias=False))


def only_segment(program: TileSchedule) -> FusedRegion:
    (segment,) = [segment for stage in program.stages for segment in stage.segments]
    return segment


# ---------------------------------------------------------------------------------------------- by hand


def test_two_convolutions_take_the_bytes_counted_by_hand():
    """24 x 24 px in 3 x 3 tiles: that in the middle has 8 x 8 px, made of 10 x 10 px, made of 12 x 12 px; four bytes each."""
    graph = graph_of(two_convolutions(), 1, 1, 24, 24)
    program = plain_program(graph, (3, 3))
    middle = only_segment(program).tiles[4]
    image, inner, out, weights = 4 * 144, 4 * 2 * 100, 4 * 3 * 64, (4 * 2 * 9, 4 * 3 * 2 * 9)

    def work(**kwargs) -> int:
        return work_bytes(middle, SavedTensorCache(), set(graph.results), **kwargs)

    first, second = image + inner + inner, inner + out + out  # each: what its kernel copies, and what it makes
    assert work(is_copy=False, goes_back=False) == max(first, second) == 2336
    assert work(is_copy=True, goes_back=False) == 2336, "the window is a copy by then, which the kernel needs no other of"
    back = inner + out + (out + inner + weights[1])  # saved, given; then a copy and the gradients of image and weight
    assert work(is_copy=False, goes_back=True) == back == 3352

    found = estimate(program, Setting(trains=True, fixed=1000))
    outputs = 2 * 4 * 3 * 24 * 24  # it, and its gradient that comes, to which no tile adds
    assert (found.inputs, found.outputs, found.weights, found.fixed) == (4 * 24 * 24, outputs, sum(weights), 1000)
    assert (found.kept, found.grads, found.together) == (0, 0, 0)
    assert found.peak == found.inputs + outputs + sum(weights) + 1000 + found.work
    assert found.rest == found.peak - found.work


def middle_work(module: nn.Module, *, is_copy: bool, wants_grad: bool = False) -> int:
    """Of the tile in the middle of 24 x 24 px, back and forth."""
    graph = graph_of(module, 1, 1, 24, 24, wants_grad=wants_grad)
    middle = only_segment(plain_program(graph, (3, 3))).tiles[4]
    return work_bytes(middle, SavedTensorCache(), set(graph.results), is_copy=is_copy, goes_back=True)


def test_the_gradient_of_a_part_is_put_into_one_of_all_that_was_read():
    """The sigmoid reads 8 x 8 of the 10 x 10 px that the mean of neighbours reads, and goes back last."""

    def does(self: Doing, x: Tensor) -> Tensor:
        return (y := self.a(x)).sigmoid() + F.avg_pool2d(y, 3, 1, 1)

    result, out, grad_of_part, grad_of_all, so_far = 4 * 2 * 64, 4 * 2 * 64, 4 * 2 * 64, 4 * 2 * 100, 4 * 2 * 100
    work = middle_work(Doing(does, a=nn.Conv2d(1, 2, 1, bias=False)), is_copy=False)
    assert work == result + out + so_far + grad_of_part + grad_of_all == 3136


def test_a_gradient_that_two_share_is_copied_before_more_is_added():
    """The sum hands its gradient, read from what is kept elsewhere, to both: the layer and the convolution of it."""
    parts = {"a": nn.Conv2d(1, 2, 1, bias=False), "b": nn.Conv2d(2, 2, 1, bias=False)}
    skip = Doing(lambda self, x: (y := self.a(x)) + self.b(y), **parts)
    window, first, out, scratch = 4 * 64, 4 * 2 * 64, 4 * 2 * 64, 4 * 2 * 64
    there = window + first + out
    shared, more, both = out, first, first
    assert middle_work(skip, is_copy=True) == there + shared + scratch + more + both == 3328


def test_a_window_whose_gradient_is_wanted_stays_until_the_end_of_its_turn():
    """Nobody saved it: of a ReLU its result is."""
    module = nn.Sequential(nn.ReLU(), nn.Conv2d(1, 2, 1, bias=False))
    window, inner, out, weight = 4 * 64, 4 * 64, 4 * 2 * 64, 4 * 2
    there, scratch = window + inner + out, out
    assert middle_work(module, is_copy=True, wants_grad=True) == there + out + scratch + inner + weight == 2312
    assert middle_work(module, is_copy=True) == 2312 - window - inner, "no gradient of an image is made, nor waits for it"


def test_two_convolutions_take_the_time_counted_by_hand():
    """A tile at an edge makes 9 px of the first layer for 8 of its own and reads 10 of the image; one inside 10 and 12."""
    graph = graph_of(two_convolutions(), 1, 1, 24, 24)
    cpu = MACHINES["cpu"]
    inner, read = (9 + 10 + 9) ** 2, (10 + 12 + 10) ** 2

    def time(read: int, made: int, weight: int, flops: float, steps: float) -> float:
        return 4 * read + 4 * made + steps * (cpu.step_bytes + 4 * weight * WEIGHT_READS) + flops / cpu.flops_per_byte

    tiled = time(read, 2 * inner, 18, 18 * 2 * inner, 9) + time(2 * inner, 3 * 576, 54, 36 * 3 * 576, 9)
    begun = (1 - WHOLE_STEP) * 2 * cpu.step_bytes
    whole = time(576, 2 * 576, 18, 18 * 2 * 576, 1) + time(2 * 576, 3 * 576, 54, 36 * 3 * 576, 1) - begun
    found = estimate(plain_program(graph, (3, 3)), Setting(trains=False))
    assert found.cost == pytest.approx(tiled, rel=1e-12)
    assert found.ideal == pytest.approx(whole, rel=1e-12)


def test_a_backward_counts_the_forward_twice_and_each_gradient_once():
    """The first convolution has no gradient of an image to make, the second has both."""
    cpu = MACHINES["cpu"]
    graph = graph_of(two_convolutions(), 1, 1, 24, 24)
    found = estimate(plain_program(graph, (1, 1)), Setting(trains=True))
    once = [
        4 * (read + made) + 4 * weight * WEIGHT_READS + WHOLE_STEP * cpu.step_bytes + flops * made / cpu.flops_per_byte
        for read, made, weight, flops in ((576, 1152, 18, 18), (1152, 1728, 54, 36))
    ]
    assert found.ideal == pytest.approx(2 * once[0] + 3 * once[1], rel=1e-12)
    assert found.cost == pytest.approx(3 * once[0] + 4 * once[1], rel=1e-12)


def test_a_convolution_whose_result_is_kept_is_not_run_again():
    """Kept between the layers, the first layer's result is made once, and its halo read instead of made."""
    graph = graph_of(two_convolutions(), 1, 1, 24, 24)
    rules, cpu = units(graph, (3, 3)), MACHINES["cpu"]
    kept = rules.units[0].outs[0]
    found = estimate(program_of(graph, rules, {kept}), Setting(trains=True))
    image, halo = (9 + 10 + 9) ** 2, (9 + 10 + 9) ** 2
    first = 4 * (image + 1152) + 9 * (cpu.step_bytes + 4 * 18 * WEIGHT_READS) + 18 * 1152 / cpu.flops_per_byte
    second = 4 * (2 * halo + 1728) + 9 * (cpu.step_bytes + 4 * 54 * WEIGHT_READS) + 36 * 1728 / cpu.flops_per_byte
    assert found.cost == pytest.approx(2 * first + 4 * second, rel=1e-12)
    assert (found.kept, found.grads, found.together) == (4 * 1152, 4 * 1152, 8 * 1152)


def test_in_a_forward_alone_values_go_when_no_later_stage_reads_them():
    """Before a backward all three stay; halfway back there are three and the gradients of two."""
    four = nn.Sequential(*(nn.Conv2d(1, 1, 3, padding=1) for _ in range(4)))
    graph = graph_of(four, 1, 1, 24, 24)
    rules = units(graph, (3, 3))
    program = program_of(graph, rules, {unit.outs[0] for unit in rules.units[:3]})
    size = 4 * 24 * 24
    forward, step = estimate(program, Setting(trains=False)), estimate(program, Setting(trains=True))
    assert (forward.kept, forward.grads, forward.outputs) == (2 * size, 0, size)
    assert (step.kept, step.grads, step.together) == (3 * size, 2 * size, 5 * size)
    lives = Liveness(program, True)
    assert [kept / size for kept in lives.kept] == [1, 2, 3, 3, 3, 3, 2, 1], "four stages forward, four back"
    assert [grads / size for grads in lives.grads] == [0, 0, 0, 0, 1, 2, 2, 1]
    assert [outputs / size for outputs in lives.outputs] == [0, 0, 0, 1, 2, 2, 2, 2]


def test_the_gradient_of_the_image_is_there_until_the_end():
    graph = graph_of(two_convolutions(), 1, 1, 24, 24, wants_grad=True)
    assert estimate(plain_program(graph, (3, 3)), Setting()).grads == 4 * 24 * 24
    assert estimate(plain_program(graph, (3, 3)), Setting(trains=False)).grads == 0


def test_what_a_reader_gives_is_not_in_memory_and_what_ranks_share_is_divided():
    graph = graph_of(two_convolutions(), 1, 1, 24, 24)
    program = plain_program(graph, (3, 3))
    whole = estimate(program, Setting())
    read = estimate(program, Setting(by_windows=frozenset(graph.inputs)))
    shared = estimate(program, Setting(ranks=2))
    assert (read.inputs, whole.peak - read.peak) == (0, whole.inputs)
    assert (2 * shared.inputs, 2 * shared.outputs, shared.work) == (whole.inputs, whole.outputs, whole.work)


def test_what_is_kept_elsewhere_is_not_on_the_device_and_takes_time():
    graph = graph_of(unet_with_norms(), 1, 3, 64, 64)
    program = plain_program(graph, (2, 2))
    here, there = (estimate(program, Setting(place=place)) for place in ("device", "file"))
    assert here.together == there.together > 0
    assert there.work > here.work, "windows are copies then"
    assert there.peak == there.rest + there.work < here.peak
    assert there.cost > here.cost
    assert estimate(program, Setting(place="host")) == here, "on a CPU the host's memory is the device's"


# ---------------------------------------------------------------------------------------------- laws


@pytest.mark.parametrize("make", few([stack, unet, unet_with_norms, Residual], stack, unet))
@pytest.mark.parametrize("trains", [True, False])
def test_a_few_turns_stand_for_all(make: Callable[[], nn.Module], trains: bool):
    program = plain_program(graph_of(make(), 1, 3, 768, 768), (6, 6))
    few, every = (estimate(program, Setting(trains=trains, sampled=sampled)) for sampled in (True, False))
    assert few.cost == pytest.approx(every.cost, rel=0.005)
    assert few.work == pytest.approx(every.work, rel=0.01)


@pytest.mark.parametrize("trains", [True, False])
def test_the_turn_that_stands_for_those_inside_has_the_largest_halo(trains: bool):
    """Tiles of 8 x 8 px below the stem, whose windows reach 12 px around them."""
    program = plain_program(graph_of(Residual(), 1, 3, 192, 192), (6, 6))
    few, every = (estimate(program, Setting(trains=trains, sampled=sampled)) for sampled in (True, False))
    assert few.work == pytest.approx(every.work, rel=0.05), "beside a border it would be a fifth less"


def test_where_turns_are_alike_a_few_are_exactly_all():
    program = plain_program(graph_of(stack(), 1, 3, 192, 192), (6, 6))
    few, every = (estimate(program, Setting(sampled=sampled)) for sampled in (True, False))
    assert len(only_segment(program).samples) == 3, "corners, edges and the middle"
    assert few.cost == pytest.approx(every.cost, rel=1e-12)
    assert few.work == every.work


@pytest.mark.parametrize("make", few([stack, unet, unet_with_norms, Residual], stack, Residual))
@pytest.mark.parametrize("trains", [True, False])
def test_finer_tiles_never_need_more_memory_to_work_in(make: Callable[[], nn.Module], trains: bool):
    graph = graph_of(Loss(make()), 1, 3, 384, 384)
    works = [estimate(plain_program(graph, (n, n)), Setting(trains=trains)).work for n in (2, 3, 4, 6, 8, 12)]
    assert works == sorted(works, reverse=True)
    assert works[-1] < works[0] / 2


@pytest.mark.parametrize("make", [stack, unet, Residual])
def test_finer_tiles_never_take_less_time(make: Callable[[], nn.Module]):
    graph = graph_of(make(), 1, 3, 384, 384)
    times = [estimate(plain_program(graph, (n, n)), Setting()).cost for n in (2, 3, 4, 6, 8, 12)]
    assert times == sorted(times)


def test_a_unet_without_norms_makes_little_of_its_halos_twice():
    """4,096 x 4,096 px in 4 x 4 tiles, the benchmark of tiles in time."""
    graph = graph_of(UNet(lambda _: nn.Identity(), (16, 32, 64, 128)), 1, 3, 4096, 4096)
    found = estimate(plain_program(graph, (4, 4)), Setting(trains=False))
    assert 1.0 < found.slowdown < 1.12


# ---------------------------------------------------------------------------------------------- what autograd saves


def saved_of(module: nn.Module, *shape: int) -> dict[str, SavedTensors]:
    """By operation, in the turn in the middle."""
    program, cache = plain_program(graph_of(module, *shape), (3, 3)), SavedTensorCache()
    turns = [segment.tiles[4] for stage in program.stages for segment in stage.segments]
    pairs = [pair for turn in turns for pair in (*turn.steps, *turn.parts)]
    return {str(unit.node.op).split(".")[1] + (" part" if unit.part else ""): cache.of(unit, step) for unit, step in pairs}


def test_what_autograd_holds_of_each_operation_is_what_torch_says():
    layers = (nn.Conv2d(3, 4, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Sigmoid(), nn.Conv2d(4, 4, 1), nn.GELU())
    found = saved_of(nn.Sequential(*layers), 1, 3, 48, 48)
    assert found["relu"] == SavedTensors(frozenset(), frozenset({0}))
    assert found["sigmoid"] == SavedTensors(frozenset(), frozenset({0}))
    assert found["gelu"] == SavedTensors(frozenset({0}), frozenset())
    assert found["convolution"] == SavedTensors(frozenset({0, 1}), frozenset())  # the second: image and weight, not the bias
    pooled = found["max_pool2d_with_indices"]
    assert pooled.reads == {0}
    assert pooled.more == pytest.approx(2 / 3), "indices of eight bytes beside four, which nobody asked for"


def test_sums_pass_gradients_on_and_views_take_no_memory():
    class Sum(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(3, 3, 1)

        def forward(self, x):
            y = self.conv(x)
            return (y + y.sigmoid()).permute(0, 1, 3, 2).exp()

    found = saved_of(Sum(), 1, 3, 24, 24)
    assert found["add"] == SavedTensors(frozenset(), frozenset(), passes=frozenset({0, 1}))
    assert found["permute"].shows == ((0, 0),)


def test_a_padded_copy_at_the_edge_counts_and_there_is_none_inside():
    program = plain_program(graph_of(stack(2, 8), 1, 3, 48, 48), (3, 3))
    cache, turns = SavedTensorCache(), only_segment(program).tiles
    inside, corner = ([cache.of(unit, step) for unit, step in turns[n].steps if "conv" in str(unit.node.op)] for n in (4, 0))
    assert [saved.copies for saved in inside] == [0, 0]
    assert [saved.copies for saved in corner] == pytest.approx([(3 * 19**2) / (8 * 17**2), 18**2 / 16**2])
    assert [saved.more for saved in corner] == [saved.copies for saved in corner], "autograd holds it, too"


def test_a_kernel_that_needs_pixels_is_taken_to_hold_everything():
    program = plain_program(graph_of(stack(1), 1, 3, 48, 48), (3, 3))
    unit, step = only_segment(program).tiles[4].steps[1]

    def needs_pixels(tensors):
        raise RuntimeError("no such kernel for the meta device")

    broken = type(step)(step.reads, step.outs, needs_pixels)
    assert SavedTensorCache().of(unit, broken) == SavedTensors(frozenset({0}), frozenset({0}))


# ---------------------------------------------------------------------------------------------- against the allocator


def peak_of(step: Callable[[], object]) -> int:
    """Most bytes that the CPU's allocator held above where the step began."""
    step()
    gc.collect()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        step()
    held, peak = 0, 0
    events = [event for event in profile.profiler.kineto_results.events() if event.name() == "[memory]"]
    for event in sorted(events, key=lambda event: event.start_ns()):
        held += event.nbytes()
        peak = max(peak, held)
    return peak


NETS: dict[str, Callable[[], nn.Module]] = {
    "convolutions": stack,
    "convolutions and a loss": lambda: Loss(stack()),
    "U-Net": unet,
    "U-Net with norms over the batch": unet_with_norms,
    "U-Net with norms in evaluation": lambda: unet_with_norms().eval(),
    "blocks with norms over channels": lambda: Residual(24),
}


@pytest.mark.parametrize("name", few(NETS, *[name for name in NETS if not name.startswith("U-Net with")]))
@pytest.mark.parametrize("trains", few([True, False], True), ids=["training", "forward alone"])
def test_the_peak_is_what_the_allocator_gives(name: str, trains: bool, monkeypatch):
    """Within a quarter, and never below 0.85 of it: kernels take memory of their own."""
    monkeypatch.setattr(offload_buffer, "HOST_BYTES", 1 << 60)  # so that all of it comes from there
    torch.manual_seed(0)
    module, image = stream(NETS[name](), tiles=(3, 3)), torch.randn(1, 3, 192, 192)

    def step() -> None:
        with torch.set_grad_enabled(trains):
            out = module(image)
        if trains:
            out.backward(torch.ones_like(out))

    measured = peak_of(step)
    (made,) = module._stream.known.values()
    found = estimate(made.program, Setting(trains=trains))
    assert 0.85 <= (found.peak - found.inputs) / measured <= 1.25
