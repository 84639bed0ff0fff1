"""What a stream runs on the whole image: named with its module and its bytes, and refused where it is to be strict."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from streaming.both import IMAGE, Doing, assert_alike, conv, made
from torch import Tensor, nn

from widefield.fallback import Fallback
from widefield.parallel.parallelize import fallbacks
from widefield.streaming.api import stream

PIXELS = 17 * 13
CHANNEL = 2 * 4 * PIXELS * 8
"""Bytes of two images of four channels in float64."""


class Extreme(nn.Module):
    """Equal extremes in two tiles share one gradient, so no sum over tiles gives it."""

    def forward(self, x: Tensor) -> Tensor:
        return x - x.amax((2, 3), keepdim=True)


class Attention(nn.Module):
    """Pixels look at each other: products of images with images, whose rule is for ranks alone."""

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.flatten(2)
        weights = torch.matmul(tokens.transpose(1, 2), tokens).softmax(-1)
        return torch.matmul(tokens, weights).view(x.shape)


def fallbacks_of(make, image: Tensor = IMAGE, tiles: tuple[int, ...] = (2, 2)) -> list[Fallback]:
    streamed = made(make, tiles=tiles)
    streamed(image)
    return streamed._stream.fallbacks


def inside(part: nn.Module) -> nn.Module:
    """A net with a part at `middle.1` that runs whole."""
    return nn.Sequential(nn.Sequential(conv()), nn.Sequential(nn.ReLU(), part), nn.Conv2d(4, 2, 1))


# ---------------------------------------------------------------------------------------------- what is named


def test_an_operation_that_runs_whole_is_named_with_its_module_and_its_bytes():
    (one,) = fallbacks_of(lambda: inside(Extreme()))
    assert (one.kind, one.module, one.operation, one.count) == ("run whole", "1.1", "amax", 1)
    assert one.bytes == CHANNEL + 2 * 4 * 8  # what it reads, and its extremes
    assert one.why == "its reduction over all pixels cannot be merged from tiles' parts"


def test_what_goes_on_with_what_was_made_whole_is_named_too_until_it_is_summed_up():
    found = fallbacks_of(lambda: inside(Attention()))
    whole = [one for one in found if one.kind == "run whole"]
    assert {one.module for one in found} == {"1.1"}
    scores = [one for one in whole if one.bytes >= 2 * PIXELS * PIXELS * 8]
    assert [one.operation for one in scores] == ["bmm", "_softmax"], found
    assert [one.why for one in scores if one.operation == "_softmax"][0].startswith("it reads what is made whole by 1.1's ")

    def head(self: nn.Module, x: Tensor) -> Tensor:
        return self.b(torch.tanh(self.a(x).amax((2, 3))))

    (one,) = fallbacks_of(lambda: Doing(head, a=conv(), b=nn.Linear(4, 400)))  # what follows has no pixels
    assert (one.module, one.operation) == ("", "amax")


def test_every_whole_tensor_counts_once():
    def twice(self: nn.Module, x: Tensor) -> Tensor:
        y = self.a(x)
        return y.amax((2, 3)) + y.amin((2, 3))

    first, second = fallbacks_of(lambda: Doing(twice, a=conv()))
    assert (first.bytes, second.bytes) == (CHANNEL + 64, 64)


def test_what_no_file_has_a_rule_for_says_so():
    def forward(self: nn.Module, x: Tensor) -> Tensor:
        return torch.linalg.svdvals(self.a(x))

    found = fallbacks_of(lambda: Doing(forward, a=conv()))
    assert {one.why for one in found if not one.why.startswith("it reads what")} == {"no file in ops/ has a rule for it"}


def test_a_rule_that_refuses_is_quoted():
    def forward(self: nn.Module, x: Tensor) -> Tensor:
        return nn.functional.conv2d(x, x[:, :, :3, :3])

    found = fallbacks_of(lambda: Doing(forward))
    assert [one.operation for one in found] == ["convolution"]
    assert found[0].why.startswith("its rule ")


def test_what_runs_in_strips_is_named_apart():
    (one,) = fallbacks_of(lambda: nn.Sequential(conv(), nn.Flatten(2), nn.Softmax(1)))
    assert (one.kind, one.module, one.operation, one.bytes) == ("run in strips", "1", "view", CHANNEL)
    assert_alike(lambda: nn.Sequential(conv(), nn.Flatten(2), nn.Softmax(1)), IMAGE)


@pytest.mark.parametrize("layer", [nn.Dropout(0.3), Doing(lambda self, x: x + torch.randn(x.shape, dtype=x.dtype))], ids=str)
def test_draws_for_the_whole_are_named_and_are_no_operation_that_runs_whole(layer):
    (one,) = fallbacks_of(lambda: nn.Sequential(conv(), layer))
    assert (one.kind, one.module, one.bytes) == ("drawn whole", "1", CHANNEL)
    found = fallbacks_of(lambda: nn.Sequential(conv(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), layer))
    assert [one.kind for one in found] == []  # four numbers a sample


def test_one_tile_and_nets_that_rules_cut_have_nothing_to_tell():
    assert fallbacks_of(lambda: inside(Attention()), tiles=(1, 1)) == []
    plain = lambda: nn.Sequential(conv(), nn.BatchNorm2d(4), nn.ReLU(), nn.MaxPool2d(2), nn.GroupNorm(2, 4))  # noqa: E731
    assert fallbacks_of(plain) == []


def test_a_token_that_stands_for_itself_is_no_image():
    def first(self: nn.Module, x: Tensor) -> Tensor:
        return self.a(x).flatten(2)[:, :, 0]

    assert [one.operation for one in fallbacks_of(lambda: Doing(first, a=conv()))] == ["view"]  # of the image, in strips


def test_the_reasons_name_them_with_a_total():
    streamed = made(lambda: inside(Extreme()), tiles=(2, 2))
    streamed(IMAGE)
    assert "run whole: 1 operation, 14 KiB in all, on the whole image at once" in streamed._stream.reasons
    assert any(reason.startswith("run whole: 1.1's amax (14 KiB): ") for reason in streamed._stream.reasons)


def test_a_streamed_part_of_a_net_has_its_names_in_the_net():
    net = nn.Sequential(nn.Identity(), made(lambda: inside(Extreme()), tiles=(2, 2)))
    assert fallbacks(net) == []
    net(IMAGE)
    (one,) = fallbacks(net)
    assert (one.module, one.operation) == ("1.1.1", "amax")


# ---------------------------------------------------------------------------------------------- strict


def strict(make, **options) -> nn.Module:
    torch.manual_seed(0)
    return stream(make().double(), **({"tiles": (2, 2)} | options), strict=True)


def test_a_strict_stream_refuses_and_says_what_to_do():
    net = strict(lambda: inside(Extreme()))
    with pytest.raises(NotImplementedError) as error:
        net(IMAGE)
    said = str(error.value)
    assert "Sequential would run 1 operation on the whole image, 14 KiB in all, where 2 x 2 tiles are asked for" in said
    assert "1.1's amax (14 KiB): its reduction over all pixels cannot be merged from tiles' parts" in said
    assert "add their rules to ops/, stream the parts before and after them, or set strict=False" in said


def test_a_refusal_names_first_what_a_rule_would_cure():
    with pytest.raises(NotImplementedError) as error:
        strict(lambda: inside(Attention()))(IMAGE)
    said = str(error.value)
    causes = [part for part in said.split("; ") if "it reads what is made whole by" not in part]
    assert said.index("1.1's bmm") < said.index("it reads what is made whole by") and len(causes) >= 1


def test_nothing_has_run_when_a_strict_stream_refuses():
    """Running statistics are as they were, and so is the generator."""
    net = strict(lambda: nn.Sequential(conv(), nn.BatchNorm2d(4), nn.Dropout(0.3), Extreme()))
    before, state = copy.deepcopy(net.state_dict()), torch.random.get_rng_state()
    with pytest.raises(NotImplementedError, match="3's amax"):
        net(IMAGE)
    torch.testing.assert_close(dict(net.state_dict()), dict(before), rtol=0, atol=0)
    assert torch.equal(torch.random.get_rng_state(), state)


def test_a_strict_stream_runs_what_rules_cut_and_draws():
    net = strict(lambda: nn.Sequential(conv(), nn.BatchNorm2d(4), nn.Dropout(0.3), nn.ReLU()))
    plain = made(lambda: nn.Sequential(conv(), nn.BatchNorm2d(4), nn.Dropout(0.3), nn.ReLU()))
    torch.manual_seed(3)
    expected = plain(IMAGE)
    torch.manual_seed(3)
    torch.testing.assert_close(net(IMAGE), expected, rtol=1e-10, atol=1e-10)
    assert [one.kind for one in net._stream.fallbacks] == ["drawn whole"]


@pytest.mark.parametrize(
    "copied", [copy.deepcopy, lambda module: pickle.loads(pickle.dumps(module))], ids=["deepcopy", "pickle"]
)
def test_a_copy_is_as_strict(copied):
    with pytest.raises(NotImplementedError, match="strict=True refuses that"):
        copied(strict(lambda: inside(Extreme())))(IMAGE)


def test_tiles_that_were_chosen_for_memory_are_refused_as_those_that_were_given():
    with pytest.raises(NotImplementedError, match=r"where \d+ x \d+ tiles are asked for, and strict=True refuses"):
        strict(lambda: inside(Extreme()), tiles=None, memory="2MiB")(torch.zeros(1, 3, 128, 128, dtype=torch.float64))
