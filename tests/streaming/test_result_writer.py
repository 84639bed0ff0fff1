"""Is an output that is given away tile by tile the output, and does what is written already not run again?"""

from __future__ import annotations

import math

import pytest
import torch
from ranks import on_ranks
from torch import nn

import widefield as wf
from widefield.plans import Plan
from widefield.streaming.storage.windowed_image import WindowedImage


class Labels(nn.Module):
    """With a mean over the whole image in the middle, so that there is more than one pass, and a small map between."""

    def __init__(self, *, pooled: bool) -> None:
        super().__init__()
        self.pooled = pooled
        self.down = nn.Sequential(nn.Conv2d(3, 6, 3, padding=1), nn.BatchNorm2d(6), nn.ReLU(), nn.Conv2d(6, 6, 3, 2, 1))
        self.up = nn.Sequential(nn.Upsample(scale_factor=2), nn.Conv2d(6, 5, 3, padding=1))

    def forward(self, image):
        seen = self.down(image)
        if self.pooled:
            seen = seen - seen.mean((2, 3), keepdim=True)
        return self.up(seen).argmax(1).to(torch.uint8)


def net_of(*, pooled: bool = False) -> Labels:
    torch.manual_seed(0)
    net = Labels(pooled=pooled).double()
    net.down[1].running_mean.normal_()
    return net.eval()


def image_of(height: int = 52, width: int = 70) -> torch.Tensor:
    return torch.rand(1, 3, height, width, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


@pytest.mark.parametrize("pooled", [False, True])
@pytest.mark.parametrize("by_window", [False, True])
def test_what_is_given_away_is_the_output_and_no_window_comes_twice(pooled, by_window):
    net, image = net_of(pooled=pooled), image_of()
    expected = net(image)
    times, found = torch.zeros_like(expected), torch.zeros_like(expected)

    def write(window, tile):
        times[window] += 1
        found[window] = tile

    given = wf.from_reader(lambda window: image[window], image.shape, torch.float64) if by_window else image
    assert wf.stream_to(write, wf.stream(net, tiles=(3, 4)), given) is None
    assert torch.equal(found, expected) and (times == 1).all()


@pytest.mark.parametrize(("pooled", "reads"), [(False, 8), (True, 12)])
def test_what_an_earlier_run_wrote_is_not_run_again(pooled, reads):
    """Of 3 x 4 tiles the upper eight are there.  The lowest four read the four above; a mean over the image wants all."""
    net, image, asked, written = net_of(pooled=pooled), image_of(), [], []
    lower = torch.zeros(1, *image.shape[2:], dtype=torch.uint8)

    def read(window):
        asked.append(window)
        return image[window]

    def write(window, tile):
        written.append(window)
        lower[window] = tile

    streamed = wf.stream(net, tiles=(3, 4))
    wf.stream_to(lambda window, tile: written.append(window), streamed, image)
    first_of_last_row = sorted({window[1].start for window in written})[2]
    written.clear()
    wf.stream_to(
        write, streamed, wf.from_reader(read, image.shape, torch.float64),
        is_written=lambda window: window[1].start < first_of_last_row,
    )  # fmt: skip
    assert len(written) == 4 and len(asked) == reads
    assert torch.equal(lower[:, first_of_last_row:], net_of(pooled=pooled)(image)[:, first_of_last_row:])


class TwoOutputs(nn.Module):
    def forward(self, image):
        return image + 1, image - 1


class Pooled(nn.Module):
    def forward(self, image):
        return image.mean((2, 3))


class Same(nn.Module):
    def forward(self, image):
        return image


@pytest.mark.parametrize("module", [Pooled, Same, net_of])
@pytest.mark.parametrize("tiles", [(1, 1), (2, 2)])
def test_what_is_not_made_in_tiles_is_given_away_once(module, tiles):
    image, written = image_of(), []
    expected = module()(image)
    found = torch.zeros_like(expected)

    def write(window, tile):
        written.append(window)
        found[window] = tile

    wf.stream_to(write, wf.stream(module(), tiles=tiles), image)
    assert torch.allclose(found, expected, rtol=0, atol=1e-15)
    assert len(written) == (4 if module is net_of and tiles == (2, 2) else 1)


@pytest.mark.parametrize(
    ("module", "words"),
    [
        (lambda: net_of(), "wants a streamed module, not a Labels"),
        (lambda: wf.stream(TwoOutputs(), tiles=(2, 2)), "has 2 outputs"),
        (lambda: wf.stream(net_of().train(), tiles=(2, 2)), "changes its buffers; call eval"),
        (lambda: hooked(wf.stream(net_of(), tiles=(2, 2))), "has forward hooks"),
    ],
)
def test_what_cannot_be_given_away_is_refused(module, words):
    written = []
    with pytest.raises(ValueError, match=words):
        wf.stream_to(lambda *pair: written.append(pair), module(), image_of())
    assert not written


def hooked(module: nn.Module) -> nn.Module:
    module.register_forward_hook(lambda *given: None)
    return module


def test_an_error_of_the_writer_reaches_the_caller_and_the_module_runs_again():
    streamed, image = wf.stream(net_of(), tiles=(2, 2)), image_of()

    def full(window, tile):
        raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="No space left"):
        wf.stream_to(full, streamed, image)
    found = torch.zeros(1, *image.shape[2:], dtype=torch.uint8)
    wf.stream_to(found.__setitem__, streamed, image)
    assert torch.equal(found, net_of()(image))


def _ranks_tile(mesh, pooled: bool) -> tuple[list, list]:
    """Of this rank: (window, tile) that it gives away, and the windows that it read."""
    image, written, asked = image_of(), [], []

    def read(window):
        asked.append(window)
        return image[window]

    given = WindowedImage(read, image.shape, torch.float64, torch.device("cpu"), mesh.grid)
    streamed = wf.stream(net_of(pooled=pooled), tiles=(2, 2))
    wf.stream_to(lambda window, tile: written.append((window, tile)), streamed, given)
    return written, asked


@pytest.mark.parametrize(("space", "pooled"), [((2, 1), False), ((2, 1), True), ((1, 3), False), ((2, 2), True)])
def test_ranks_read_and_give_away_their_own_tiles(space, pooled):
    """Nobody reads a row or column that is further away than the net's window."""
    image = image_of()
    found, times = torch.zeros(1, *image.shape[2:], dtype=torch.uint8), 0 * image[:, 0]
    for written, asked in on_ranks(math.prod(space), _ranks_tile, pooled, plan=Plan(space=list(space))):
        for window, tile in written:
            found[window] = tile
            times[window] += 1
        for dim, at in ((2, 1), (3, 2)):
            own = [window[at] for window, _ in written]
            read = [window[dim] for window in asked]
            assert min(one.start for one in read) >= min(one.start for one in own) - 6
            assert max(one.stop for one in read) <= max(one.stop for one in own) + 6
    assert torch.equal(found, net_of(pooled=pooled)(image)) and (times == 1).all()
