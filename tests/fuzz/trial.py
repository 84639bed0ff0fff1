"""One program under one layout: three steps on one device and on ranks, and what differs.

What a program's chaos makes of rounding is no finding: where numbers differ, one device runs again on images that differ in
their last digits, and only what lies far beyond that counts.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

import widefield as wf
from widefield.engine.holding import wholes_on_main
from widefield.engine.mesh import Mesh
from widefield.engine.parallelize import share_states
from widefield.engine.passes import backward_of, without_sync
from widefield.engine.tiled import same_order
from widefield.geometry.interval import even_cut, parts_of

from .errors import TOO_FEW, Finding, Refusal, has_too_few_samples, is_refusal
from .plans import Layout
from .program import Program
from .sizes import as_if_large

STEPS = 3
TOLERANCE = 1e-9
"""Of the largest number of a tensor, in float64."""
COARSE = {"float32": 1e-4, ".float()": 1e-4, "autocast": 5e-2}
"""Words of a program whose numbers are rounded sooner."""
LARGEST = 1e5
"""Gradients of programs that are worth comparing."""
FLAT = 1e-6
"""A standard deviation below it is one of constants: its slope is rounding divided by rounding."""


class Uninteresting(Exception):
    """One device's own numbers say nothing: they explode, or nothing learns."""


@dataclass
class Outcome:
    """What a program gave: numbers by name, in the order in which they came to be."""

    numbers: dict[str, Tensor | None] = field(default_factory=dict)

    def note(self, what: str, values: dict[str, Tensor | None]) -> None:
        self.numbers |= {f"{what}, {name}": None if value is None else value.detach().clone() for name, value in values.items()}


# ---------------------------------------------------------------------------------------------- one device


def energy(output: Tensor) -> Tensor:
    return output.square().sum() * 0.5 + output.sin().sum()


def loss_of(program: Program, outputs: tuple[Tensor, ...], samples: float) -> Tensor:
    """A mean over samples of what is theirs, and what outputs of the whole batch give."""
    each = [energy(out) / samples if own else energy(out) * 0.1 for out, own in zip(outputs, program.per_sample, strict=True)]
    return sum(each[1:], each[0])


def step_of(program: Program, model: Callable, x: Tensor, samples: float, unsent: Callable = nullcontext) -> Tensor:
    """Forwards and backwards, and what belongs to them, of one step; the loss, after its backwards.

    unsent: what passes but the last run in.
    """
    total = torch.zeros((), dtype=torch.float64)
    for left in reversed(range(program.habit.passes)):
        with unsent() if left else nullcontext():
            total = total + _pass_of(program, model, other(x) if left else x, samples)
    return total


def other(x: Tensor) -> Tensor:
    """Images that a step may look at besides."""
    return x.flip(-1) * 0.7


def _pass_of(program: Program, model: Callable, x: Tensor, samples: float) -> Tensor:
    habit = program.habit
    if habit.penalty:
        x = x.detach().requires_grad_()
    outputs = model(x)
    loss = loss_of(program, outputs, samples)
    if habit.penalty:
        (slope,) = torch.autograd.grad(sum((out.sum() for out in outputs), torch.zeros(())), x, create_graph=True)
        loss = loss + slope.square().sum() * 0.1 / samples
    for _ in range(habit.forwards - 1):
        loss = loss + loss_of(program, model(other(x)), samples)
    for left in reversed(range(habit.backwards)):
        loss.backward(retain_graph=left > 0)
    return loss.detach()


@torch.no_grad()
def evaluated(program: Program, model: nn.Module, x: Tensor) -> dict[str, Tensor | None]:
    """What the model gives in between, in eval mode."""
    torch.default_generator.manual_seed(7)
    outputs = model.eval()(x)
    model.train(program.habit.train)
    return {f"evaluated {number}": wf.whole(output) for number, output in enumerate(outputs)}


def train_whole(program: Program, nudge: float = 0.0) -> Outcome:
    """Three steps on one device, on images, and with products of weights, that are off by `nudge` in relation to their size."""
    with Nudged(nudge) if nudge else nullcontext():
        return _trained(program, nudge)


def _trained(program: Program, nudge: float) -> Outcome:
    model, found = program.build(), Outcome()
    freeze(program, model)
    optimizer = optimizer_of(model)
    for step in range(STEPS):
        if step == 1:
            thaw(program, model)
        optimizer.zero_grad()
        x = program.images(step)
        x = (x * (1 + nudge * torch.randn(x.shape, generator=torch.Generator().manual_seed(9), dtype=x.dtype))).requires_grad_()
        torch.default_generator.manual_seed(step)
        loss = step_of(program, model, x, len(x))
        if 0 < abs(loss.item()) < TOLERANCE:
            raise Uninteresting("a loss that is rounding")
        found.note(f"step {step}", {"loss": loss, "image's gradient": x.grad})
        found.note(f"step {step}, gradient", {name: p.grad for name, p in model.named_parameters()})
        optimizer.step()
        if program.habit.evaluates and step == 1:
            found.note(f"step {step}", evaluated(program, model, x))
    found.note("at the end", dict(model.state_dict()))
    return found


class Nudged(TorchFunctionMode):
    """Inside, convolutions, products and resizing are off by `by` in relation to their size, each pixel in its own way.

    Pixels of a constant, as padding makes it, stay equal where images alone are a little off; another kernel rounds each anew.
    """

    def __init__(self, by: float) -> None:
        super().__init__()
        self.by, self.generator = by, torch.Generator().manual_seed(8)

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        found = func(*args, **(kwargs or {}))
        if not _sums(getattr(func, "__name__", ""), (kwargs or {}).get("mode")):
            return found
        noise = torch.randn(found.shape, generator=self.generator, dtype=torch.float64).to(found.dtype)
        return found + found.detach() * (self.by * noise)  # which saves nothing: a checkpoint runs again without it


def _sums(name: str, mode: str | None) -> bool:
    """Whether a function's kernels may add up in another order, or weigh pixels by weights that are rounded otherwise."""
    resamples = name in ("grid_sample", "interpolate") and mode is not None and not mode.startswith("nearest")
    return resamples or re.match("conv|linear|(__)?r?matmul|bmm|einsum", name) is not None


class Careful(TorchFunctionMode):
    """Inside, a program is Uninteresting whose numbers are rounding, or torch's mistake.

    That is the standard deviation of constants, and a norm over samples or pixels of them; the commonest of values, some of
    which differ by rounding alone; resizing with antialiasing to or from a width of one pixel, whose kernels mix up the
    dims; quantiles of values some of which are equal; sampling at places that are no numbers; medians of broadcast images;
    second derivatives of logcumsumexp, which takes the logarithm of its gradient, where that is rounding; circular padding of
    more pixels than its crop has left; and, where a gradient lies in memory in another order than the image, batch norms of
    one sample or of images one pixel high or wide, and all instance norms.
    """

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        name = getattr(func, "__name__", "")
        if name == "grid_sample" and not bool((args[1].detach().abs() < LARGEST).all()):
            raise Uninteresting("torch reads outside of memory for a grid of what is no number")
        if name in ("median", "nanmedian") and 0 in args[0].stride():
            raise Uninteresting("torch's medians of broadcast images are wrong, and other ones each time")
        if name == "pad" and "circular" in ((kwargs or {}).get("mode"), *args[2:3]) and _wraps_too_far(args[0], args[1]):
            raise Uninteresting("torch leaves memory as it is where it crops and then wraps more than is left")
        found = func(*args, **(kwargs or {}))
        if name in ("std", "std_mean"):
            first = found if isinstance(found, Tensor) else found[0]
            if bool((first.detach() < FLAT).any()):
                raise Uninteresting("a standard deviation of constants")
        if name in ("mode", "quantile", "nanquantile") and _has_ties(args[0].detach()):
            raise Uninteresting(
                "values that rounding tells apart, or of which torch's kernel picks one and its operations another"
            )
        if name in ("batch_norm", "instance_norm") and _is_flat(args[0].detach(), 2 if name == "instance_norm" else 1):
            raise Uninteresting("a norm of constants")
        if (name == "instance_norm" or name == "batch_norm" and 1 in found.shape) and found.ndim > 3 and found.requires_grad:
            found.register_hook(partial(_lies_as, args[0].detach()))
        if name == "logcumsumexp" and found.requires_grad:
            found.register_hook(_has_a_logarithm)
        if name == "interpolate" and (kwargs or {}).get("antialias") and 1 in (*args[0].shape[2:], *found.shape[2:]):
            raise Uninteresting("torch mixes up the dims of an image that is one pixel wide")
        return found


def _has_ties(values: Tensor) -> bool:
    return bool((values.double().flatten().sort()[0].diff() < TOLERANCE).any())


def _is_flat(image: Tensor, dims: int) -> bool:
    """Whether some channel, or with 2 dims one of a sample, is one number but for rounding, and not zero."""
    rows = image.flatten(2).flatten(0, 1) if dims == 2 else image.transpose(0, 1).flatten(1)
    return bool(((rows.std(1, correction=0) < FLAT) & (rows.abs().amax(1) > 0)).any()) if rows.numel() else False


def _lies_as(image: Tensor, gradient: Tensor) -> None:
    dims = [dim for dim in range(image.ndim) if image.shape[dim] > 1]
    has_channels_last = gradient.stride(1) == 1 and not gradient.is_contiguous()
    if has_channels_last or not same_order(dims, image.stride(), gradient.stride()):
        raise Uninteresting("torch takes a gradient in one order in memory for one in another")


def _has_a_logarithm(gradient: Tensor) -> None:
    if gradient.requires_grad and bool((gradient.detach().abs() < TOLERANCE).any()):
        raise Uninteresting("a logarithm of rounding, or none of zero")


def _wraps_too_far(image: Tensor, pads: Sequence[int]) -> bool:
    pairs = [(pads[n], pads[n + 1]) for n in range(0, len(pads), 2)]
    left = [extent + min(0, a) + min(0, b) for extent, (a, b) in zip(reversed(image.shape), pairs, strict=False)]
    return any(max(pair) > extent for extent, pair in zip(left, pairs, strict=True))


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)


def freeze(program: Program, model: nn.Module) -> None:
    model.train(program.habit.train)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name.split(".")[0] not in program.habit.frozen)


def thaw(program: Program, model: nn.Module) -> None:
    if program.habit.late:
        for parameter in model.parameters():
            parameter.requires_grad_(True)


# ---------------------------------------------------------------------------------------------- ranks


def train_on(mesh: Mesh, program: Program, layout: Layout) -> Outcome:
    """The same on this rank; what only the main rank has is missing on others."""
    model, found = program.build(), Outcome()
    freeze(program, model)
    part = parts_of(even_cut(program.shape[0], mesh.copies))[mesh.copy]
    mine = slice(part.start, part.stop)
    laid = lambda image: wf.tile(image, mesh, layout.cuts)  # noqa: E731
    rehearse = (
        (lambda: loss_of(program, wf.whole(model(laid(program.images(9)[mine].requires_grad_()))), 1))
        if layout.rehearsed
        else None
    )
    model = wf.parallelize(model, mesh, rehearse=rehearse, sample=program.images(0)[mine].to("meta"))
    optimizer = share_states(optimizer_of(model), mesh)
    samples = program.shape[0] / mesh.copies
    for step in range(STEPS):
        if step == 1:
            thaw(program, model)
        optimizer.zero_grad()
        x = program.images(step)[mine].clone().requires_grad_()
        torch.default_generator.manual_seed(step)
        if mesh.plan.stage > 1:
            images = [laid((other(x) if left else x).detach()) for left in reversed(range(program.habit.passes))]
            loss = _in_stages(program, model, images, samples) / samples
        else:
            loss = step_of(program, model, laid(x), samples, partial(without_sync, model))
            found.note(f"step {step}", {"image's gradient": x.grad})
        found.note(f"step {step}", {"loss": loss})
        if mesh.plan.stage == 1 or mesh.plan.channel > 1:
            wholes = wholes_on_main(model, mesh, {n: p.grad for n, p in model.named_parameters() if p.grad is not None})
            if mesh.is_main:
                found.note(f"step {step}, gradient", {name: wholes.get(name) for name, _ in model.named_parameters()})
        optimizer.step()
        if program.habit.evaluates and step == 1:
            found.note(f"step {step}", evaluated(program, model, laid(x)))
    wholes = wholes_on_main(model, mesh, dict(model.state_dict()))
    if mesh.is_main:
        found.note("at the end", wholes)
    return found


def _in_stages(program: Program, model: nn.Module, images: list[Tensor], samples: float) -> Tensor:
    """The loss of passes over images of which gradients are sent after the last."""
    total = torch.zeros((), dtype=torch.float64)
    for number, x in enumerate(images, 1):
        with nullcontext() if number == len(images) else without_sync(model):
            total = total + backward_of(
                model,
                x,
                torch.zeros(len(x), 1),
                loss_of=lambda outputs, _: loss_of(program, outputs, 1),
                scaled=lambda loss: loss / samples,
            )
    return total


def attempt(mesh: Mesh, program: Program, layout: Layout) -> Outcome | Refusal:
    """`train_on` for a rank that is a process: a refusal is an answer, any other error ends all ranks."""
    warnings.simplefilter("ignore")
    try:
        with as_if_large(layout.as_if_large):
            return train_on(mesh, program, layout)
    except Exception as error:
        if is_refusal(error):
            return Refusal(str(error))
        if has_too_few_samples(error):
            raise RuntimeError(TOO_FEW) from error
        raise


# ---------------------------------------------------------------------------------------------- what differs


def compare(program: Program, layout: Layout, whole: Outcome, ranks: list[Outcome]) -> Finding | None:
    """What differs first; None where nothing does beyond what rounding makes of this program."""
    copies, tolerance = layout.plan.replicate * layout.plan.shard, tolerance_of(program)
    expected = whole.numbers
    scale = max(
        (float(v.abs().max()) for n, v in expected.items() if v is not None and ("gradient" in n or "loss" in n) and v.numel()),
        default=1.0,
    )
    wrong: list[tuple[str, float, Tensor | None, Tensor | None]] = []
    for rank, found in enumerate(ranks):
        for name, value in found.numbers.items():
            if name.endswith("loss"):
                continue
            wanted = _share(program, layout, name, expected, rank, copies)
            error = _error(value, wanted, 1e-3 * scale if "gradient" in name else 1e-6)
            if ", gradient" in name and (value is None) != (wanted is None):
                error = float("inf")  # an optimizer with momentum or decay takes a step for zeros
            if error > tolerance:
                wrong.append((f"rank {rank}, {name}", error, value, wanted))
    for name in (name for name in expected if name.endswith("loss")):
        mean = torch.stack([found.numbers[name] for found in ranks]).mean()  # type: ignore[misc]
        if (error := _error(mean, expected[name], 1e-6)) > tolerance:
            wrong.insert(0, (name, error, mean, expected[name]))
    missing = [name for name in expected if name not in ranks[0].numbers and "gradient" not in name]
    if missing:
        return Finding("differs", f"rank 0 has no {missing[0]}")
    if not wrong:
        return None
    if _most_of(train_whole(program, 1e-13), whole, scale) * 1e3 > tolerance * 1e-3:
        again = max(_most_of(train_whole(program, nudge), whole, scale) for nudge in (1e-13, -3e-13, 1e-12))
        wrong = [entry for entry in wrong if entry[1] > 1e3 * again]
    if not wrong:
        return None
    name, error, value, wanted = wrong[0]
    return Finding("differs", f"{name}: {_words(value)} where one device has {_words(wanted)} (off by {error:.1e})")


def tolerance_of(program: Program) -> float:
    text = program.text()
    return max([TOLERANCE, *(coarse for word, coarse in COARSE.items() if word in text)])


def _share(program: Program, layout: Layout, name: str, expected: dict, rank: int, copies: int) -> Tensor | None:
    """What a rank should have: of images' gradients its copy's samples, for the mean over copies."""
    value = expected.get(name)
    if value is None or "image's" not in name or copies == 1:
        return value
    copy = rank // (layout.plan.ranks // copies)
    part = parts_of(even_cut(program.shape[0], copies))[copy]
    return value[part.start : part.stop] * copies


def _error(value: Tensor | None, wanted: Tensor | None, floor: float) -> float:
    if value is None or wanted is None:
        some = value if wanted is None else wanted
        return 0.0 if some is None or not some.numel() or float(some.abs().max()) == 0 else float("inf")
    if value.shape != wanted.shape or value.dtype != wanted.dtype:
        return float("inf")
    if not value.numel():
        return 0.0
    apart = (value.double() - wanted.double()).abs().max()
    return float(torch.nan_to_num(apart, nan=float("inf"))) / (float(wanted.double().abs().max()) + floor)


def _most_of(one: Outcome, other: Outcome, scale: float) -> float:
    errors = [
        _error(one.numbers[n], v, 1e-3 * scale if "gradient" in n else 1e-6) for n, v in other.numbers.items() if v is not None
    ]
    return max(errors, default=0.0)


def _words(value: Tensor | None) -> str:
    if value is None:
        return "nothing"
    first = ", ".join(f"{number:.6g}" for number in value.flatten()[:4].tolist())
    return f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)} [{first}...]"
