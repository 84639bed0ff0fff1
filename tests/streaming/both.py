"""Runs a module whole and tile after tile on the same inputs and compares all that comes of it: `assert_alike(make, image)`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import devices
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map

from widefield.streaming.api import stream
from widefield.verification.verdict import TOLERANCE, rows_of


class Doing(nn.Module):
    """A module whose forward is a function of it and of its inputs."""

    def __init__(self, does: Callable[..., Any], **parts: Any) -> None:
        super().__init__()
        self.does = does
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.does(self, *args, **kwargs)


@dataclass
class Ran:
    """What a module gave.  form: of its outputs, and all that is no tensor in them.  drawn: what is drawn after it."""

    form: Any
    outputs: list[Tensor]
    gradients: dict[str, Tensor | None]
    buffers: dict[str, Tensor]
    drawn: Tensor


def image(*shape: int, seed: int = 7) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


SHAPE = (2, 3, 17, 13)
IMAGE = image(*SHAPE)
conv = partial(nn.Conv2d, 3, 4, 3, padding=1)


def net() -> nn.Module:
    """Convolutions, statistics of the batch, and draws."""
    return nn.Sequential(conv(), nn.BatchNorm2d(4), nn.ReLU(), nn.Dropout(0.3), nn.Conv2d(4, 2, 3, 2))


def made(make: Callable[[], nn.Module], *, tiles: Sequence[int] = ()) -> nn.Module:
    """The same float64 module at each call, streamed where there are tiles."""
    torch.manual_seed(0)
    module = make().double()
    return stream(module, tiles=tiles) if tiles else module


def both(make: Callable[[], nn.Module] = net) -> tuple[nn.Module, nn.Module]:
    """The same module plain, and streamed."""
    return made(make), made(make, tiles=(2, 2))


def gradients(module: nn.Module) -> list[Tensor | None]:
    return [weight.grad for weight in module.parameters()]


def assert_close(got: Any, expected: Any) -> None:
    torch.testing.assert_close(got, expected, rtol=TOLERANCE, atol=TOLERANCE)  # of numbers near 1


def ran(module: nn.Module, *args: Any, times: int = 1, **kwargs: Any) -> Ran:
    """Forward and backward, the same draws and the same gradients of outputs for every module; `times` over."""
    torch.manual_seed(1)
    for _ in range(times):
        own_args, own_kwargs = tree_map(_as_leaf, (args, kwargs))
        result = module(*own_args, **own_kwargs)
        pull([out for out in tensors_of(result) if out.requires_grad])
    leaves, form = tree_flatten(result)
    rest = [None if isinstance(leaf, Tensor) else leaf for leaf in leaves]
    inputs = {f"input {n}": x.grad for n, x in enumerate(tensors_of((own_args, own_kwargs)))}
    slopes = inputs | {name: weight.grad for name, weight in module.named_parameters()}
    return Ran((form, rest), tensors_of(result), slopes, dict(module.named_buffers()), torch.rand(1))


def _as_leaf(given: Any) -> Any:
    if not isinstance(given, Tensor):
        return given
    return given.detach().to(devices.here(), copy=True).requires_grad_(given.is_floating_point())


def tensors_of(value: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]


def pull(outputs: Sequence[Tensor]) -> None:
    """Go back from all outputs, each pixel with a random weight."""
    draw = torch.Generator().manual_seed(2)
    if outputs:
        torch.autograd.backward(outputs, [torch.randn(out.shape, generator=draw).to(out.dtype) for out in outputs])


def assert_alike(
    make: Callable[[], nn.Module], *args: Any, tiles: Sequence[int] = (2, 2), times: int = 1, **kwargs: Any
) -> None:
    """Outputs, gradients, buffers and the generator's state are those of the whole run, in float64."""
    expected = ran(made(make), *args, times=times, **kwargs)
    got = ran(made(make, tiles=tiles), *args, times=times, **kwargs)
    problems = list(differences(got, expected))
    assert not problems, "\n".join(problems)


def differences(got: Ran, expected: Ran) -> Iterator[str]:
    if got.form != expected.form:
        yield f"gives {got.form} and should give {expected.form}"
        return
    for n, (a, b) in enumerate(zip(got.outputs, expected.outputs, strict=True)):
        if _looks(a) != _looks(b):
            yield f"output {n} has {_looks(a)} and should have {_looks(b)}"
    for name, gradient in expected.gradients.items():
        if (got.gradients[name] is None) != (gradient is None):
            yield f"the gradient of {name} is {'missing' if gradient is not None else 'there'} in the stream alone"
    rows = rows_of("output", _named(got.outputs), _named(expected.outputs))
    rows += rows_of("gradient", got.gradients, expected.gradients) + rows_of("buffer", got.buffers, expected.buffers)
    yield from (f"{row.kind} {row.name} is off by {row.error:.1e}" for row in rows if not row.error <= TOLERANCE)
    if not torch.equal(got.drawn, expected.drawn):
        yield "the generator stands elsewhere afterwards"


def _looks(tensor: Tensor) -> dict[str, Any]:
    return {"dtype": tensor.dtype, "requires_grad": tensor.requires_grad, "dims in memory": order_of(tensor)}


def _named(outputs: Sequence[Tensor]) -> dict[str, Tensor]:
    return {str(n): out.detach() for n, out in enumerate(outputs)}


def order_of(tensor: Tensor) -> list[int]:
    """The dims from the outermost in memory to the innermost, without those of one pixel, which lie anywhere."""
    dims = [dim for dim, extent in enumerate(tensor.shape) if extent > 1]
    return sorted(dims, key=lambda dim: (-tensor.stride(dim), dim))
