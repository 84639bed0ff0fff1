"""Running a streamed module: what training code does with modules gives one device's numbers, or torch's own refusals."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from devices import on_gpu_too
from streaming.both import (
    IMAGE,
    SHAPE,
    Doing,
    assert_alike,
    assert_close,
    both,
    conv,
    differences,
    gradients,
    image,
    made,
    net,
    ran,
)
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from widefield.streaming.api import stream
from widefield.streaming.storage.offload_buffer import OffloadBuffer
from widefield.streaming.storage.windowed_image import from_reader

# ---------------------------------------------------------------------------------------------- draws


def _drop_path(self, x):
    y = self.a(x)
    return x.mean() + y * y.new_empty((len(y), 1, 1, 1)).bernoulli_(0.7).div_(0.7)


def _attention(self, x):
    rows = self.a(x).flatten(2).transpose(1, 2)[:, None]
    return F.scaled_dot_product_attention(rows, rows, rows, dropout_p=0.3)


def _noisy(self, x):
    y = self.a(x) + torch.rand(x.shape[2:], dtype=x.dtype)
    y = y + 0.1 * torch.randn_like(y) * torch.normal(y.sigmoid(), 2.0)
    return y * torch.empty_like(y).uniform_(0.5, 1.5) + torch.randint_like(y, 3)


STOCHASTIC: dict[str, Callable[[], nn.Module]] = {
    "dropout": lambda: nn.Sequential(conv(), nn.Dropout(0.3), nn.Conv2d(4, 4, 3), nn.Dropout(0.5, inplace=True)),
    "dropout of channels": lambda: nn.Sequential(conv(), nn.Dropout2d(0.5), nn.Conv2d(4, 2, 3)),
    "alpha dropout": lambda: nn.Sequential(conv(), nn.AlphaDropout(0.3), nn.FeatureAlphaDropout(0.3)),
    "random slopes": lambda: nn.Sequential(conv(), nn.RReLU(), nn.Conv2d(4, 2, 3), nn.RReLU(inplace=True)),
    "drop path": lambda: Doing(_drop_path, a=conv()),
    "dropout of attention": lambda: Doing(_attention, a=conv()),
    "noise": lambda: Doing(_noisy, a=nn.Conv2d(3, 3, 3, padding=1)),
    "gumbel softmax": lambda: Doing(lambda self, x: F.gumbel_softmax(self.a(x), dim=1), a=conv()),
    "dropout before and after statistics": lambda: nn.Sequential(nn.Dropout(0.2), nn.BatchNorm2d(3), nn.Dropout(0.2), conv()),
}


@on_gpu_too
@pytest.mark.parametrize("tiles", [(2, 2), (3, 5)], ids=str)
@pytest.mark.parametrize("layer", STOCHASTIC)
def test_draws_are_those_of_one_device_and_the_same_in_the_backward(layer, tiles):
    assert_alike(STOCHASTIC[layer], IMAGE, tiles=tiles, times=2)


def test_a_generator_of_its_own_is_left_where_the_whole_run_leaves_it():
    def noisy(self, x):
        return x * torch.rand(x.shape, generator=self.draw, dtype=x.dtype)

    plain, streamed = both(lambda: Doing(noisy))
    plain.draw, streamed.draw = torch.Generator().manual_seed(3), torch.Generator().manual_seed(3)
    for _ in range(2):
        assert torch.equal(streamed(IMAGE), plain(IMAGE))
    assert torch.equal(streamed.draw.get_state(), plain.draw.get_state())


# ---------------------------------------------------------------------------------------------- calls and backwards


@on_gpu_too
def test_gradients_of_two_calls_add_up():
    plain, streamed = both()
    for module in (plain, streamed):
        torch.manual_seed(1)
        for scale in (1, 2):
            module(image(*SHAPE) * scale).pow(2).mean().backward()
    assert_close(gradients(streamed), gradients(plain))


def is_held(tensor: Tensor) -> Callable[[], bool]:
    """Says whether anything refers to the memory of a tensor, which it does not keep itself."""
    storage = StorageWeakRef(tensor.untyped_storage())
    return lambda: not storage.expired()


def test_a_stream_holds_no_result_that_its_backward_does_not_read_and_after_that_nothing():
    """Autograd's graph refers to the stream for as long as the caller has the loss."""
    streamed = made(net, tiles=(2, 2))
    given = IMAGE.clone()
    out = streamed(given)
    loss, holds_input, holds_result = out.sum(), is_held(given), is_held(out)
    del given, out
    assert holds_input() and not holds_result()
    loss.backward()
    assert not holds_input()


def test_the_gradient_that_comes_for_a_result_is_neither_copied_nor_changed():
    """One result is read by a later segment, so more is added to its gradient: to a copy."""
    plain, streamed = both(lambda: Doing(_two_results, a=conv(), b=nn.BatchNorm2d(4), c=nn.Conv2d(4, 2, 3)))
    for module in (plain, streamed):
        outs = module(IMAGE)
        given = [image(*out.shape, seed=seed) for seed, out in enumerate(outs)]
        torch.autograd.backward(outs, given)
        assert all(torch.equal(grad, image(*grad.shape, seed=seed)) for seed, grad in enumerate(given))
    assert_close(gradients(streamed), gradients(plain))

    only = made(conv, tiles=(3, 3))
    out = only(IMAGE)
    with mock.patch.object(OffloadBuffer, "_allocate", side_effect=AssertionError("a buffer is made for the gradient")):
        out.backward(torch.ones_like(out))


def test_forwards_before_a_backward_share_what_fits_on_the_device():
    """The second one's tensors find no room; the backwards give it back, and a forward that is dropped does too."""
    plain, streamed = made(net), stream(made(net), tiles=(2, 2), memory="1MiB", keep="file")
    streamed(IMAGE)
    (program,) = streamed._stream.known.values()
    most = program.room.bytes
    assert most > program.program.kept_bytes > 0
    program.room.bytes = program.program.kept_bytes
    for module in (plain, streamed):
        torch.manual_seed(1)
        first = module(IMAGE)
        assert module is plain or program.room.bytes == first.nbytes, "a result takes no room, being the caller's"
        (first.sum() + module(IMAGE).pow(2).sum()).backward()
    assert_close(gradients(streamed), gradients(plain))
    streamed(IMAGE)
    assert program.room.bytes == program.program.kept_bytes


def _two_results(self, x):
    y = self.a(x)
    return y, self.c(self.b(y))


@on_gpu_too
@pytest.mark.parametrize("make", [net, lambda: nn.Sequential(nn.utils.parametrizations.spectral_norm(conv()), nn.Tanh())])
def test_two_forwards_may_come_before_one_backward(make):
    """The first one's backward knows the buffers and draws of its own forward."""
    plain, streamed = both(make)
    for module in (plain, streamed):
        torch.manual_seed(1)
        first, second = module(image(*SHAPE)), module(image(*SHAPE) * 2)
        (first.pow(2).mean() + second.pow(3).mean()).backward()
    assert_close(gradients(streamed), gradients(plain))
    assert_close(list(streamed.buffers()), list(plain.buffers()))


@on_gpu_too
def test_training_takes_the_same_steps():
    losses = []
    for module in both():
        torch.manual_seed(1)
        optimizer = torch.optim.Adam(module.parameters(), 1e-2)
        for _ in range(4):
            optimizer.zero_grad()
            loss = module(image(*SHAPE)).pow(2).mean()
            loss.backward()
            optimizer.step()
        losses.append(loss)
    assert_close(losses[1], losses[0])


@on_gpu_too
def test_one_of_several_outputs_may_be_pulled_alone():
    def two(self, x):
        y = self.a(x).sigmoid()
        return y, self.c(self.b(y))

    plain, streamed = both(lambda: Doing(two, a=conv(), b=nn.BatchNorm2d(4), c=nn.Conv2d(4, 2, 3)))
    for pulled in (0, 1):
        found = []
        for module in (plain, streamed):
            module.zero_grad()
            module(image(*SHAPE))[pulled].pow(2).mean().backward()
            found.append(gradients(module))
        assert [g is None for g in found[1]] == [g is None for g in found[0]]
        assert_close([g for g in found[1] if g is not None], [g for g in found[0] if g is not None])


@on_gpu_too
def test_a_part_of_a_net_may_be_streamed():
    class Net(nn.Module):
        def __init__(self, tiles: tuple[int, ...]) -> None:
            super().__init__()
            self.stem, body = conv(), nn.Sequential(nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4))
            self.body, self.act = stream(body, tiles=tiles) if tiles else body, nn.ReLU(inplace=True)

        def forward(self, x: Tensor) -> Tensor:
            y = self.stem(x)
            out = self.body(y)
            out += y
            return self.act(out)

    plain, streamed = made(lambda: Net(())), made(lambda: Net((2, 2)))
    assert list(differences(ran(streamed, image(*SHAPE)), ran(plain, image(*SHAPE)))) == []


@on_gpu_too
def test_checkpoint_runs_a_stream_again():
    plain, streamed = both()
    found = []
    for module in (plain, streamed):
        x = image(*SHAPE).clone().requires_grad_()
        torch.manual_seed(1)
        checkpoint(module, x, use_reentrant=False).pow(2).mean().backward()
        found.append([x.grad, *gradients(module)])
    assert_close(found[1], found[0])


@on_gpu_too
@pytest.mark.parametrize("keep", ["device", "host", "file"])
def test_where_values_are_kept_changes_no_number(keep, tmp_path):
    plain = made(net)
    torch.manual_seed(0)
    streamed = stream(net().double(), tiles=(2, 3), keep=keep, folder=tmp_path)
    assert list(differences(ran(streamed, image(*SHAPE), times=2), ran(plain, image(*SHAPE), times=2))) == []
    assert list(tmp_path.iterdir()) == []


# ---------------------------------------------------------------------------------------------- no gradient, no work


class _Calls(TorchDispatchMode):
    """What torch computes: every operation with the tensors it gives and those it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.backwards: list[tuple[tuple[int, ...], list[bool]]] = []
        """Of convolutions: the weight's shape, and whether the image's, the weight's and the bias' gradient was asked for."""
        self.largest = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        out = func(*args, **kwargs or {})
        if func is torch.ops.aten.convolution_backward.default:
            self.backwards.append((tuple(args[2].shape), args[10]))
        given = out if isinstance(out, (tuple, list)) else [out]
        made = [tensor for tensor in given if type(tensor) is Tensor]  # those that are followed have no pixels
        self.largest = max([self.largest, *(tensor.numel() for tensor in made if not tensor._is_view())])
        return out


def test_frozen_weights_get_no_gradient_and_no_work():
    def make():
        module = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 5, 3), nn.ReLU(), nn.Conv2d(5, 2, 3))
        module[0].requires_grad_(False), module[2].weight.requires_grad_(False)
        return module

    plain, streamed = both(make)
    plain(IMAGE).sum().backward()
    with _Calls() as calls:
        streamed(IMAGE).sum().backward()
    assert [g is None for g in gradients(streamed)] == [True, True, True, False, False, False]
    assert_close(gradients(streamed)[3:], gradients(plain)[3:])
    asked = dict(calls.backwards)
    assert asked == {(5, 4, 3, 3): [False, False, True], (2, 5, 3, 3): [True, True, True]}


def test_an_image_without_gradient_gets_no_work():
    streamed = made(lambda: nn.Sequential(conv(), nn.ReLU()), tiles=(2, 2))
    with _Calls() as calls:
        streamed(IMAGE).sum().backward()
    assert IMAGE.grad is None
    assert len(calls.backwards) >= 4 and all(mask == [False, True, True] for _, mask in calls.backwards)


def test_without_weights_that_want_any_there_is_no_gradient():
    streamed = made(net, tiles=(2, 2)).requires_grad_(False)
    assert not streamed(IMAGE).requires_grad
    assert streamed(IMAGE.clone().requires_grad_()).requires_grad


def test_a_loss_inside_leaves_no_output_per_pixel():
    """5 classes of 2 images of 64 x 48 px are 30,720 numbers; a tile and its halo have a sixth of them."""

    def loss(self, x, target):
        return F.cross_entropy(self.b(self.a(x).relu()), target)

    def make():
        return Doing(loss, a=nn.Conv2d(1, 3, 3, padding=1), b=nn.Conv2d(3, 5, 3, padding=1))

    x, target = image(2, 1, 64, 48), torch.arange(2 * 64 * 48).view(2, 64, 48) % 5
    plain, streamed = made(make), made(make, tiles=(3, 3))
    expected = plain(x, target)
    expected.backward()
    with _Calls() as calls:
        got = streamed(x, target)
        got.backward()
    assert_close([got, *gradients(streamed)], [expected, *gradients(plain)])
    assert calls.largest < 2 * 64 * 48 * 5 / 4


# ---------------------------------------------------------------------------------------------- inputs


def test_a_reader_gives_what_its_tensor_gives():
    pixels = (IMAGE * 40 + 128).byte()

    def make():
        return Doing(lambda self, x: self.a(x.double() / 255), a=nn.Sequential(conv(), nn.BatchNorm2d(4), nn.Conv2d(4, 2, 3)))

    windows = []

    def read(window):
        windows.append([part.stop - part.start for part in window[2:]])
        return pixels[window]

    plain, streamed = both(make)
    got = ran(streamed, from_reader(read, pixels.shape, torch.uint8))
    expected = ran(plain, pixels)
    del expected.gradients["input 0"]
    assert list(differences(got, expected)) == []
    assert len(windows) >= 4 and all(rows < 17 and columns < 13 for rows, columns in windows)


def test_an_image_that_is_read_by_windows_may_be_run_in_one_tile():
    """widefield.stream chooses one tile where a budget of memory has room for the whole image."""
    plain, streamed = made(conv), made(conv, tiles=(1, 1))
    windows = from_reader(lambda window: IMAGE[window], SHAPE, torch.float64)
    expected = ran(plain, IMAGE)
    del expected.gradients["input 0"]
    assert list(differences(ran(streamed, windows), expected)) == []


@pytest.mark.parametrize("kind", ["channels_last", "contiguous_format"])
def test_outputs_lie_in_memory_as_the_whole_run_has_them(kind):
    order = {"memory_format": getattr(torch, kind)}
    plain, streamed = both(lambda: nn.Sequential(conv(), nn.BatchNorm2d(4), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(4, 2, 3)))
    x = IMAGE.contiguous(**order)
    assert streamed(x).stride() == plain(x).stride()
    plain.to(**order), streamed.to(**order)
    assert streamed(x).stride() == plain(x).stride()
    assert streamed(x).is_contiguous(**order)
