"""`wf.verify`: does it see what is wrong, say it, and leave no trace?"""

from __future__ import annotations

import copy
import subprocess
import sys
import time

import psutil
import pytest
import torch
from ranks import on_ranks
from torch import nn

import widefield as wf
from widefield.comm import halo
from widefield.fallback import Fallback
from widefield.parallel.strategies.channel import CASES
from widefield.plans import Plan
from widefield.tiled.tensor import TiledTensor
from widefield.verification import api, forward
from widefield.verification.forward import compare
from widefield.verification.verdict import Row, Verdict

SHAPE = (2, 3, 19, 14)


class Net(nn.Module):
    """Convolution, norm, convolution: something for every kind of row."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.stem = nn.Conv2d(3, 4, 3, padding=1)
        self.norm = nn.BatchNorm2d(4)
        self.head = nn.Conv2d(4, 2, 5, padding=2)

    def forward(self, image):
        return self.head(self.norm(self.stem(image)).relu())


class Cheats(Net):
    """Reads its tile, and so sees nothing of its neighbours' pixels."""

    def forward(self, image):
        x = self.stem(image)
        mean = (x.local if type(x) is TiledTensor else x).mean((0, 2, 3))
        return self.head(x - mean.detach()[:, None, None])


class Refuses(Net):
    def forward(self, image):
        return torch.linalg.svdvals(super().forward(image))


class Raises(Net):
    def forward(self, image):
        x = super().forward(image)
        if type(x) is TiledTensor:
            raise RuntimeError("tripped on tiles")
        return x


# ---------------------------------------------------------------------------------------------- what it says


@pytest.mark.parametrize("space", [(2,), (3,), (2, 2)], ids=str)
def test_a_model_that_is_exact_is_said_to_be(space):
    verdict = wf.verify(Net(), SHAPE, space=space)
    assert verdict and verdict.ok and verdict.refusal is None
    assert {row.kind for row in verdict.rows} == {"layer", "output", "gradient", "buffer"}
    names = {row.name for row in verdict.rows if row.kind == "gradient"}
    assert names == {"the image", *dict(Net().named_parameters())}
    assert all(row.error < 1e-12 for row in verdict.rows)  # float64, sums of 5e2 pixels


def test_the_table_names_the_largest_error_of_each_kind():
    lines = str(wf.verify(Net(), SHAPE)).splitlines()
    assert [line.split()[:2] for line in lines[:3]] == [["1", "output"], ["7", "gradients"], ["3", "buffers"]]
    assert all("largest error" in line for line in lines[:3])
    assert lines[3:] == ["exact"]


def test_a_model_that_differs_is_said_to_with_its_first_layer_first():
    verdict = wf.verify(Cheats(), SHAPE)
    assert not verdict and not verdict.ok and verdict.refusal is None
    wrong = [row for row in verdict.rows if row.error > verdict.tolerance]
    assert (wrong[0].kind, wrong[0].name) == ("layer", "head (Conv2d) 0")  # the stem before it is right
    text = str(verdict)
    assert text.endswith("NOT EXACT")
    assert text.index("differs: layer head (Conv2d) 0") < text.index("differs: output 0")
    assert "stem (Conv2d)" not in text


def test_a_wrong_halo_pixel_is_seen(monkeypatch):
    """Ranks are forked, so they have the patch."""
    original = halo.assemble
    monkeypatch.setattr(
        halo, "assemble", lambda move, tile, pieces: original(move, tile, [(box, piece + 1e-6) for box, piece in pieces])
    )
    verdict = wf.verify(nn.Sequential(nn.MaxPool2d(3, 1, 1)), SHAPE, train=False)
    assert not verdict.ok and "NOT EXACT" in str(verdict)


class Faint(Cheats):
    def forward(self, image):
        return 1e-12 * super().forward(image)


def test_faint_numbers_that_differ_are_seen():
    """Differences count relative to the largest value, however small that is."""
    verdict = wf.verify(Faint(), SHAPE)
    worst = {kind: max(row.error for row in verdict.rows if row.kind == kind) for kind in ("output", "gradient")}
    assert worst["output"] > 1e-3 and worst["gradient"] > 1e-3


class Cancels(Net):
    def forward(self, image):
        return self.norm(100 * self.stem(image))


def test_gradients_that_cancel_to_rounding_do_not_count():
    """A bias before a BatchNorm has no gradient but the rounding of its sum."""
    assert wf.verify(Cancels(), SHAPE)


def test_a_long_list_of_differences_is_cut_short():
    rows = [Row("gradient", f"weight {n}", 1.0) for n in range(25)]
    text = str(Verdict(rows))
    assert text.count("differs:") == 20 and "and 5 more" in text


def test_the_tolerance_is_where_it_says():
    assert Verdict([Row("output", "0", 0.9e-10)]).ok
    assert not Verdict([Row("output", "0", 1.1e-10)]).ok
    assert not Verdict([Row("output", "0", float("inf"))]).ok


def test_what_cannot_run_on_tiles_is_refused_in_the_engines_words():
    verdict = wf.verify(Refuses(), SHAPE)
    assert not verdict.ok and verdict.rows == []
    assert str(verdict).startswith("refused: ") and "svd" in str(verdict)


def test_a_model_that_raises_brings_its_traceback():
    with pytest.raises(RuntimeError, match="(?s)the model failed on ranks:.*tripped on tiles"):
        wf.verify(Raises(), SHAPE)


# ---------------------------------------------------------------------------------------------- tiles in time


class Differs(Net):
    """Followed by a stream, which runs it on tensors without pixels first, it does something else after its stem."""

    def forward(self, image):
        x = self.norm(self.stem(image))
        return self.head(x if type(image) in (torch.Tensor, TiledTensor) else 1.001 * x)


@pytest.mark.parametrize("stream", [(4,), (2, 3)], ids=str)
def test_a_streamed_model_that_is_exact_is_said_to_be(stream):
    verdict = wf.verify(Net(), SHAPE, stream=stream)
    assert verdict and {row.kind for row in verdict.rows} == {"output", "gradient", "buffer"}
    names = {row.name for row in verdict.rows if row.kind == "gradient"}
    assert names == {"the image", *dict(Net().named_parameters())}
    assert all(row.error < 1e-12 for row in verdict.rows)  # float64, sums of 5e2 pixels
    assert str(verdict).endswith("exact") and wf.verify(Net(), SHAPE, stream=stream, train=False)


def test_the_tiles_are_those_asked_for_and_no_rank_is_started(monkeypatch):
    asked = []
    monkeypatch.setattr(forward, "streamed", lambda module, tiles: asked.append(tuple(tiles)) or module)
    monkeypatch.setattr(api, "on_own_ranks", None)
    assert wf.verify(Net(), SHAPE, stream=(2, 3)) and wf.verify(Net(), SHAPE, stream=(4,))
    assert asked == [(2, 3), (4, 1)]


@pytest.mark.parametrize("space", [None, (2,)], ids=["alone", "in space"])
def test_a_streamed_model_that_differs_is_said_to_with_its_first_layer_first(space):
    verdict = wf.verify(Differs(), SHAPE, space=space, stream=(2, 3))
    wrong = [row for row in verdict.rows if row.error > verdict.tolerance]
    assert not verdict and (wrong[0].kind, wrong[0].name) == ("layer", "head (Conv2d) 0")
    assert {row.kind for row in wrong} >= {"layer", "output", "gradient"}
    assert str(verdict).endswith("NOT EXACT") and "norm (BatchNorm2d)" not in str(verdict)


def test_each_rank_of_tiles_in_space_streams_its_tile():
    verdict = wf.verify(Net(), SHAPE, space=(2,), stream=(2, 2))
    assert verdict and {row.kind for row in verdict.rows} == {"output", "gradient", "buffer"}


class Extreme(Net):
    """Its last operation wants all pixels: equal extremes of two tiles share a gradient."""

    def forward(self, image):
        x = super().forward(image)
        return x - x.amax((2, 3), keepdim=True)


@pytest.mark.parametrize("space", [None, (2,)], ids=["alone", "in space"])
def test_what_a_stream_runs_whole_is_named_with_its_bytes_and_no_error(space):
    verdict = wf.verify(Extreme(), SHAPE, space=space, stream=(2, 2))
    (one,) = verdict.fallbacks
    assert verdict.ok and (one.kind, one.module, one.operation, one.bytes) == ("run whole", "", "amax", 8 * 4 * (19 * 14 + 1))
    lines = str(verdict).splitlines()
    assert lines[-3].startswith("run whole: 1 operation, 8 KiB in all, on the whole image at once")
    assert lines[-2].startswith("  the model's amax (8 KiB): its reduction over all pixels") and lines[-1] == "exact"


def test_the_largest_of_what_runs_whole_comes_first_and_all_are_there():
    many = [Fallback("run whole", f"layer{n}", "amax", n, "a reason") for n in range(1, 40)]
    lines = str(Verdict([Row("output", "0", 0.0)], fallbacks=many)).splitlines()
    assert lines[1] == "run whole: 39 operations, 780 bytes in all, on the whole image at once"
    assert [line.split("'")[0].strip() for line in lines[2:-1]] == [f"layer{n}" for n in range(39, 0, -1)]


class Looks(Net):
    def forward(self, image):
        return super().forward(image if image.mean() > 0 else -image)


def test_what_cannot_run_in_turns_is_refused_in_the_engines_words():
    verdict = wf.verify(Looks(), SHAPE, stream=(2, 2))
    assert not verdict.ok and verdict.rows == []
    assert str(verdict).startswith("refused: ") and "Looks cannot be streamed: " in str(verdict)


def test_a_model_that_raises_in_this_process_raises():
    with pytest.raises(ZeroDivisionError):
        wf.verify(Divides(), SHAPE, stream=(2, 2))


class Divides(Net):
    def forward(self, image):
        return super().forward(image) / (1 // 0)


def test_a_streamed_model_stays_as_it_is_and_so_do_random_states():
    model, state = Net().eval(), torch.random.get_rng_state()
    before, kind = copy.deepcopy(model.state_dict()), type(model)
    assert wf.verify(model, SHAPE, stream=(2, 2)) and torch.equal(torch.random.get_rng_state(), state)
    assert type(model) is kind and not model.training and not model.head._forward_hooks
    assert all(p.grad is None and p.dtype is torch.float32 for p in model.parameters())
    torch.testing.assert_close(dict(model.state_dict()), dict(before), rtol=0, atol=0)


@pytest.mark.long
def test_ranks_can_be_started_by_a_process_whose_first_backward_was_a_streams():
    """To follow a model torch may feign a CUDA device, for which the first backward starts threads that no fork outlives."""
    lines = [
        "import torch, widefield as wf",
        "net = lambda: torch.nn.Conv2d(1, 2, 3)",
        "wf.stream(net(), tiles=(2, 2))(torch.rand(1, 1, 9, 9)).sum().backward()",
        "print(wf.verify(net(), (1, 1, 9, 9)))",
    ]
    told = subprocess.run([sys.executable, "-c", "\n".join(lines)], capture_output=True, text=True, timeout=120)
    assert told.stdout.endswith("\nexact\n"), told.stderr


@pytest.mark.parametrize("sizes", [{"stream": (2, 2, 2)}, {"space": (2, 2, 2)}], ids=str)
def test_more_sizes_than_dims_are_refused(sizes):
    (name,) = sizes
    with pytest.raises(ValueError, match=rf"{name}=\(2, 2, 2\) has 3 sizes and an image of \(3, 19, 14\) has 2 dims to cut"):
        wf.verify(Net(), SHAPE, **sizes)


# ---------------------------------------------------------------------------------------------- how it runs


class CutAt(Net):
    """Fails unless its image's rows are cut where it says."""

    def __init__(self, *bounds: int) -> None:
        super().__init__()
        self.bounds = bounds

    def forward(self, image):
        if type(image) is TiledTensor:
            assert image.tile_layout.cuts[2].bounds == self.bounds, f"cut at {image.tile_layout.cuts[2].bounds}"
        return super().forward(image)


def test_images_are_cut_where_asked():
    assert wf.verify(CutAt(0, 3, 19), SHAPE, cuts=[[0, 3, 19], None])
    assert wf.verify(CutAt(0, 10, 19), SHAPE), "evenly where nothing is asked"
    with pytest.raises(RuntimeError, match="cut at"):
        wf.verify(CutAt(0, 4, 19), SHAPE, cuts=[[0, 3, 19], None])


def test_cuts_that_do_not_fit_are_refused():
    """Before any rank starts."""
    with pytest.raises(ValueError, match=r"\[0, 3, 18\] of dim 2 does not fit"):
        wf.verify(Net(), SHAPE, cuts=[[0, 3, 18], None])


def test_evaluation_runs_forward_alone():
    verdict = wf.verify(Net(), SHAPE, train=False)
    assert verdict and {row.kind for row in verdict.rows} == {"layer", "output", "buffer"}
    assert "gradient" not in str(verdict)


def test_the_model_stays_as_it_is():
    model = Net().eval()
    before = copy.deepcopy(model.state_dict())
    assert wf.verify(model, SHAPE)
    assert not model.training and all(p.grad is None and p.dtype is torch.float32 for p in model.parameters())
    assert not model.head._forward_hooks
    torch.testing.assert_close(dict(model.state_dict()), dict(before), rtol=0, atol=0)


@pytest.mark.parametrize("model", [Net, Raises, Refuses], ids=lambda kind: kind.__name__)
def test_no_process_is_left_behind(model):
    before = set(psutil.Process().children(recursive=True))
    try:
        wf.verify(model(), SHAPE)
    except RuntimeError:
        assert model is Raises
    assert set(psutil.Process().children(recursive=True)) <= before


class Waits(Net):
    def forward(self, image):
        x = super().forward(image)
        if type(x) is TiledTensor:
            time.sleep(60)
        return x


def test_ranks_that_give_no_answer_are_ended_and_it_is_said():
    before, start = set(psutil.Process().children(recursive=True)), time.monotonic()
    with pytest.raises(RuntimeError, match="no answer within 2 s"):
        wf.verify(Waits(), SHAPE, timeout_seconds=2)
    assert time.monotonic() - start < 30 and set(psutil.Process().children(recursive=True)) <= before


def verified_inside(mesh) -> str:
    try:
        wf.verify(Net(), SHAPE)
    except ValueError as error:
        return str(error)
    return "nothing said"


def test_a_process_that_is_a_rank_itself_is_told_to_verify_elsewhere():
    assert all("outside of a process group" in said for said in on_ranks(2, verified_inside))


# ---------------------------------------------------------------------------------------------- compare on a mesh


def compared(mesh) -> tuple[bool, list[str], bool]:
    """Whether a net, and one that cheats, agree; the rows' names."""
    verdict = compare(Net(), SHAPE, mesh)
    return verdict.ok, [row.name for row in verdict.rows], compare(Cheats(), SHAPE, mesh).ok


def test_every_rank_of_a_mesh_gets_the_same_verdict():
    first, second = on_ranks(2, compared, plan=Plan(space=[2, 1]))
    assert first == second and first[0] and not first[2]


def test_weights_of_zeros_get_values_for_the_comparison():
    net = nn.Sequential(nn.Conv2d(1, 2, 3, padding=1), nn.Conv2d(2, 1, 3, padding=1))
    nn.init.zeros_(net[1].weight)
    verdict = wf.verify(net, (1, 1, 8, 8), space=(2,))
    assert verdict.ok and (verdict.zero_gradients, verdict.randomized) == (0, 1), str(verdict)
    assert str(verdict).splitlines()[-2:] == [
        "    1 weight of zeros had random values here, for no gradient to be zero behind it", "exact"
    ]  # fmt: skip
    assert not net[1].weight.any()  # the user's model stays as it is


class OffEverywhere(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Conv2d(1, 2, 3, padding=1), nn.Conv2d(2, 1, 3, padding=1)

    def forward(self, image):
        return self.last(0 * self.first(image))


def test_gradients_that_are_zero_all_the_same_are_not_called_exact():
    verdict = wf.verify(OffEverywhere(), (1, 1, 8, 8), space=(2,))
    assert verdict.ok and verdict.zero_gradients == 4, str(verdict)  # of both convolutions' weights, a bias and the image
    assert str(verdict).splitlines()[-1] == "exact, but for 4 gradients of zero on one device too, of which this shows nothing"


# ---------------------------------------------------------------------------------------------- plans


def normalized() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(2, 6, 3), nn.BatchNorm2d(6), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(6, 3)
    )


def test_a_plan_is_verified_over_steps_of_training():
    verdict = wf.verify(normalized(), (4, 2, 9, 8), plan=Plan(replicate=2))
    assert verdict.ok and {row.kind for row in verdict.rows} == {"loss", "gradient", "weight", "buffer", "output"}
    assert any("share their statistics over 2 ranks" in why for why in verdict.reasons)
    assert str(verdict).endswith("exact")


def test_what_a_plan_leaves_or_brings_whole_is_named_once():
    case = CASES[0]
    verdict = wf.verify(case.build(), case.shape, plan=Plan(channel=2))
    assert {one.module for one in verdict.fallbacks if one.kind == "left whole"} == {"6", "11"}
    assert {one.operation for one in verdict.fallbacks if one.kind == "gathered"} == {"glu"}
    assert not any("left whole: " in reason or reason.startswith("gathered: ") for reason in verdict.reasons)
    assert str(verdict).count("left whole: 2 operations") == 1 and "  6's convolution (2 KiB)" in str(verdict)


def test_a_plan_that_gives_up_exactness_is_seen_to():
    verdict = wf.verify(normalized(), (4, 2, 9, 8), plan=Plan(replicate=2, batch_norm="averaged"))
    assert not verdict.ok and "differs: loss step 0" in str(verdict)


def test_a_plan_that_cannot_be_is_a_refusal_and_further_cuts_are_an_error():
    refused = wf.verify(normalized(), (1, 2, 9, 8), plan=Plan(replicate=2))
    assert "2 copies of the model share a batch of 1 samples" in (refused.refusal or "")
    with pytest.raises(ValueError, match="a plan itself says how images are cut"):
        wf.verify(normalized(), (4, 2, 9, 8), space=(2, 1), plan=Plan(replicate=2))


# ---------------------------------------------------------------------------------------------- what is brought whole


class Middle(nn.Module):
    """The median of all pixels of one image of one channel, which no dim but the cut ones could share out."""

    def forward(self, x):
        asked = wf.whole(x).detach().square().mean()
        return x + asked + x.mean(1, keepdim=True).flatten(2).median(-1).values[..., None, None]


class Medians(Net):
    def __init__(self) -> None:
        super().__init__()
        self.middle = nn.Sequential(nn.Dropout(0.2), Middle())

    def forward(self, image):
        return self.head(self.middle(self.norm(self.stem(image))))


def test_what_tiles_in_space_bring_whole_is_named_and_what_the_model_asks_for_is_not():
    pixels = 40 * 30
    verdict = wf.verify(Medians(), (1, 3, 40, 30))
    drawn, gathered = verdict.fallbacks
    assert verdict.ok and (drawn.kind, drawn.module, drawn.bytes) == ("drawn whole", "middle.0", 4 * pixels * 8)
    assert (gathered.kind, gathered.module, gathered.operation, gathered.bytes) == (
        "gathered",
        "middle.1",
        "median",
        pixels * 8,
    )
    assert "gathered: 1 operation, 9 KiB in all, in full on every rank" in str(verdict)


def test_a_plan_of_tiles_names_them_too_as_bytes_of_a_pass():
    verdict = wf.verify(Medians(), (3, 3, 40, 30), plan=Plan(space=[2, 1]))
    assert verdict.ok and {one.kind for one in verdict.fallbacks} == {"drawn whole"}  # of two images the batch is shared out
    assert verdict.fallbacks[0].bytes == 2 * 4 * 40 * 30 * 8
