"""Is a step on tensors without data recorded whole, without a trace in this process, and refused in words where it must be?"""

from __future__ import annotations

import gc
import random
from collections import Counter
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from widefield.config import parse_config
from widefield.planner.emulation import CannotEmulate, emulated_step, stand_in_data, values
from widefield.planner.emulation.recording import Recording
from widefield.planner.step_record import StepRecord, WaitEvent
from widefield.private_torch.dtensor import clear_sharding_prop_cache
from widefield.training.given import Given

IMAGE = (3, 32, 32)


def record(*overrides: str, ranks: int = 1, rank: int = 0, batch: int = 4, image=IMAGE, **more) -> StepRecord:
    text = (
        f"model: {{name: resnet, options: {{widths: [8, 16], blocks: 1}}}}\ndata: {{name: digits, batch_size: {batch}}}\n"
        "optimizer: {name: sgd, lr: 0.1, momentum: 0.9}\ntask: {name: classification}\nschedule: {length: 1ep}\n"
    )
    given = more.pop("given", stand_in_data(image, classes=5))
    return emulated_step(parse_config(text, list(overrides)), ranks=ranks, rank=rank, given=given, **more)


def given_model(model: nn.Module) -> Given:
    return Given(model=model, data=stand_in_data(IMAGE, classes=5).data)


# ---------------------------------------------------------------------------------------------- what is recorded


@pytest.mark.long
def test_a_step_is_a_full_batch_whatever_the_data_has():
    few, many = (record(batch=16, given=stand_in_data(IMAGE, classes=5, samples=samples)) for samples in (4, 1000))
    assert few.peak_bytes == many.peak_bytes > 3 * record(batch=4).parts["activations"] and few.samples == 16


def test_the_parts_add_up_to_the_peak_and_the_peak_is_the_largest_point():
    step = record()
    assert sum(step.parts.values()) == step.peak_bytes == max(point.bytes for point in step.memory)
    assert step.parts["weights"] == step.parts["optimizer"] == 4 * sum(p.numel() for p in _resnet().parameters())
    assert step.parts["activations"] > 0 and step.samples == 4


def _resnet() -> nn.Module:
    from widefield.config import ModelConfig
    from widefield.models import build

    return build(ModelConfig(name="resnet", options={"widths": [8, 16], "blocks": 1}), in_channels=3, num_classes=5)


def test_memory_at_the_end_is_that_at_the_beginning_and_the_gradients():
    step = record()
    grown = step.memory[-1].bytes - step.memory[0].bytes
    assert grown == 0  # the gradients of the step before were there when it began


def test_flops_are_those_of_torch_s_counter():
    with FlopCounterMode(display=False) as counter:
        _resnet()(torch.zeros(4, *IMAGE)).sum().backward()
    assert record().flops == counter.get_total_flops()


def test_operations_have_their_phase_and_module():
    step = record()
    convolutions = [event for event in step.operations if event.name == "aten.convolution.default"]
    backwards = [event for event in step.operations if event.name == "aten.convolution_backward.default"]
    assert {event.phase for event in convolutions} == {"forward"} and {event.phase for event in backwards} == {"backward"}
    assert [event.module for event in backwards] == [event.module for event in convolutions[::-1]]
    assert {event.phase for event in step.operations} == {"forward", "loss", "backward", "optimizer"}


def test_every_message_that_is_waited_for_was_sent_before():
    step = record(ranks=2, batch=4)
    numbers: set[int] = set()
    for event in step.events:
        if isinstance(event, WaitEvent):
            assert event.number in numbers
        elif hasattr(event, "kind"):
            numbers.add(event.number)
            assert event.ranks == (0, 1)
    weights = 4 * sum(p.numel() for p in _resnet().parameters())
    assert sum(m.bytes for m in step.messages if m.kind == "all_reduce" and not m.control) >= weights


@pytest.mark.long
@pytest.mark.parametrize(
    "plan", [[], ["mesh.replicate=2"], ["mesh.space=[2,1]"], ["mesh.shard=2", "sharding.zero=3"], ["mesh.channel=2"]]
)
def test_results_made_from_descriptions_are_those_of_torch(plan, monkeypatch):
    """The same step with torch's own fake results throughout."""
    ranks = 2 if plan else 1
    fast = record(*plan, ranks=ranks, rank=ranks - 1)
    monkeypatch.setattr(values.Result, "of", classmethod(lambda *_: None))
    monkeypatch.setattr(values, "_RESULTS", {})
    slow = record(*plan, ranks=ranks, rank=ranks - 1)
    assert fast.peak_bytes == slow.peak_bytes and fast.parts == slow.parts
    assert fast.events == slow.events


def test_what_is_known_of_results_depends_on_the_default_dtype():
    found = []
    for dtype in (torch.float32, torch.float64):
        before = torch.get_default_dtype()
        torch.set_default_dtype(dtype)
        try:
            with values.emulated(Recording(0, 1)):
                found.append(torch.ones(100_000).dtype)
        finally:
            torch.set_default_dtype(before)
    assert found == [torch.float32, torch.float64]


class NeedsNoNumbers(nn.Module):
    """Keeps the sum of its weight as it was made, and draws small numbers to decide its width."""

    def __init__(self):
        super().__init__()
        self.width = int(torch.empty(64).uniform_().argmax())
        self.layer = nn.Linear(3 * 32 * 32, 5)
        self.total = self.layer.weight.detach().abs().sum().item()

    def forward(self, x):
        MADE.append((self.width, self.total))
        return self.layer(x.flatten(1))


MADE: list[tuple[int, float]] = []


def test_a_model_is_built_without_drawing_its_large_weights():
    MADE.clear()
    for _ in range(2):
        torch.manual_seed(5)
        record(f"model.name={__name__}:NeedsNoNumbers", "model.options={}")
    assert {total for _, total in MADE} == {0.0} and len({width for width, _ in MADE}) == 1 and MADE[0][0]
    assert NeedsNoNumbers().total > 1


def test_an_image_twice_as_high_takes_twice_the_activations():
    small, large = record(on_cpu=False), record(on_cpu=False, image=(3, 64, 32))
    one, two = (sum(e.bytes_written for e in step.operations if e.phase == "forward") for step in (small, large))
    assert 1.9 < two / one <= 2.0


@pytest.mark.long
def test_ranks_of_tiles_hold_what_their_tiles_have():
    wide = {"on_cpu": False, "batch": 1, "image": (3, 256, 64)}
    whole = record(**wide)
    tiles = [record("mesh.space=[2,1]", ranks=2, rank=rank, **wide) for rank in (0, 1)]
    written = [sum(e.bytes_written for e in step.operations if e.phase == "forward") for step in (whole, *tiles)]
    assert written[1] < 0.75 * written[0] and abs(written[1] - written[2]) < 0.1 * written[1]


@pytest.mark.long
def test_ranks_compare_generators_before_a_draw_on_tiles():
    def sent(layer: nn.Module) -> list:
        net = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), layer, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 5))
        step = record("mesh.space=[2,1]", ranks=2, on_cpu=False, given=given_model(net))
        return [(message.kind, message.bytes) for message in step.messages]

    drawing, plain = sent(nn.Dropout(0.5)), sent(nn.Identity())
    assert drawing.count(("all_gather", 8)) == 1 and ("all_gather", 8) not in plain


def test_copies_of_a_model_that_draws_share_its_batch():
    """One device draws for all samples, so each copy draws for all and keeps its own: see SharedForward."""

    def drawn(layer: nn.Module) -> list[tuple[int, ...]]:
        net = nn.Sequential(nn.Conv2d(3, 4, 3), layer, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 5))
        step = record("mesh.replicate=2", ranks=2, on_cpu=False, given=given_model(net))
        return [event.signature[1][0][1] for event in step.operations if "bernoulli" in event.name]

    assert drawn(nn.Dropout(0.5)) == [(4, 4, 30, 30)] and drawn(nn.Identity()) == []


def test_attention_that_drops_nothing_does_not_draw():
    """Torch's tag says that its kernels draw, and a rank that draws asks the others how many samples they have."""

    class Attends(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return nn.functional.scaled_dot_product_attention(x, x, x)

    def sent(layer: nn.Module) -> Counter:
        net = nn.Sequential(nn.Conv2d(3, 4, 3), layer, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 5))
        step = record("mesh.replicate=2", ranks=2, on_cpu=False, given=given_model(net))
        return Counter((message.kind, message.bytes) for message in step.messages)

    asked = ("all_gather", 24)
    assert asked not in sent(Attends()) and sent(nn.Dropout(0.5))[asked] == 1


def test_what_dtensor_tries_for_new_operations_is_no_part_of_a_step():
    """It makes tensors of whole weights without data to learn shapes, once in a process."""
    sharded = "mesh.shard=2", "mesh.replicate=1", "model.options.widths=[64, 64]"
    clear_sharding_prop_cache()
    new, known = (record(*sharded, ranks=2, on_cpu=False) for _ in range(2))
    assert [event.name for event in new.operations] == [event.name for event in known.operations] != []
    assert new.peak_bytes == known.peak_bytes


@pytest.mark.long
def test_an_uneven_batch_gives_ranks_their_own_samples():
    sizes = [record(ranks=2, rank=rank, batch=5, on_cpu=False).parts["inputs"] for rank in (0, 1)]
    assert sizes[0] > sizes[1]


# ---------------------------------------------------------------------------------------------- no trace of it


def test_generators_and_process_groups_are_as_before():
    torch.manual_seed(3), random.seed(3), np.random.seed(3)
    states = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()
    resize = torch.UntypedStorage.resize_
    record(ranks=2)
    assert torch.equal(states[0], torch.get_rng_state()) and states[1] == random.getstate()
    assert states[2] == np.random.get_state()[1].tolist()
    assert not dist.is_initialized() and torch.UntypedStorage.resize_ is resize and not gc.get_freeze_count()
    assert type(torch.ones(2) + 1) is torch.Tensor


def test_what_the_caller_keeps_from_the_garbage_collector_stays_so():
    gc.freeze()
    try:
        record()
        assert gc.get_freeze_count()
    finally:
        gc.unfreeze()


def test_a_refused_plan_leaves_no_trace_either():
    with pytest.raises(ValueError, match="needs 3 ranks"):
        record("mesh.replicate=3", ranks=2)
    with pytest.raises(CannotEmulate):
        record(ranks=2, given=given_model(AsksForNumbers()))
    assert not dist.is_initialized() and type(torch.ones(2) + 1) is torch.Tensor


# ---------------------------------------------------------------------------------------------- refusals


class AsksForNumbers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(3, 5)

    def forward(self, image):
        features = image.mean((2, 3))
        return self.head(features * 2 if features.sum().item() > 0 else features)


class PicksPixels(AsksForNumbers):
    def forward(self, image):
        return self.head(image.mean((2, 3))) + image[image > 0].sum()


class AsksForTruth(AsksForNumbers):
    def forward(self, image):
        features = image.mean((2, 3))
        return self.head(features * 2 if (features > 0).any() else features)


class Compares(AsksForNumbers):
    def forward(self, image):
        features = image.mean((2, 3))
        return self.head(features * 2 if torch.equal(features, features + 1) else features)


@pytest.mark.parametrize(
    "model", [AsksForNumbers(), PicksPixels(), AsksForTruth(), Compares()], ids=["item", "mask", "truth", "equal"]
)
def test_a_step_that_asks_for_numbers_is_refused(model):
    with pytest.raises(CannotEmulate, match="asks for numbers .* measure this model with `widefield bench`"):
        record(given=given_model(model))


def test_a_process_with_a_default_group_is_refused(monkeypatch):
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    with pytest.raises(RuntimeError, match="torch.distributed is initialized in this process; plan before it is"):
        record()


@pytest.mark.parametrize(
    "given, problem",
    [
        (SimpleNamespace(image=(3, 8), classes=2, samples=4), "the image 3x8 is none; give channels and pixels"),
        (SimpleNamespace(image=(3, 0, 8), classes=2, samples=4), "the image 3x0x8 is none"),
        (SimpleNamespace(image=(3, 8, 8), classes=0, samples=4), "0 classes and 4 images are too few"),
        (SimpleNamespace(image=(3, 8, 8), classes=2, samples=0), "2 classes and 0 images are too few"),
    ],
)
def test_data_that_cannot_be_is_refused(given, problem):
    with pytest.raises(ValueError, match=problem):
        stand_in_data(given.image, classes=given.classes, samples=given.samples)


def test_a_compiled_model_is_planned_uncompiled_and_says_so():
    assert record("model.compile=true", on_cpu=False).assumed == [
        "model.compile=true is planned as false: what a compiler fuses is not known"
    ]
