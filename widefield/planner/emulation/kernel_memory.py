"""How many bytes does a kernel of the CPU hold for itself while it runs, beside its arguments and results?

A convolution reorders its images into blocks of channels, a batch normalization's backward keeps an image: such memory never
shows as a tensor, yet decides peaks.  Asked are, in this order:

1. a formula, where the kernel's source has an easy one (`kernel_formulas.py`);
2. the kernel itself: it runs once on zeros of the same shapes, strides and types, and the allocator's events are read.  Each
   signature runs once in a process, in a few milliseconds, on as many threads as the plan's ranks have;
3. for a convolution too large to run here, the same at two smaller images, from which a straight line is drawn: the blocks grow
   with the pixels, what is kept per thread does not.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from widefield.planner.emulation.kernel_formulas import blocked_bytes, formula_bytes
from widefield.planner.emulation.signature import signature_of
from widefield.private_torch.autograd import profiler_enabled
from widefield.private_torch.dispatcher import disable_current_modes
from widefield.private_torch.pytree import tree_leaves, tree_map

RUN_BYTES = 64 * 2**20
"""The arguments and results of a kernel that is run here to learn what it allocates; larger ones are extrapolated."""
RUN_FLOPS = 1e10
"""Of a convolution that is run here, about a quarter of a second on one core."""
_FEW = 20480
"""Up to so many numbers, not counting the last dim, an image alone goes to a kernel for small ones (ConvParams::use_mkldnn)."""
_RUN_FROM = ("aten", "fsdp")
"""Namespaces of operators without effects other than on their arguments."""
_CONVOLUTIONS = {"aten.convolution.default": 0, "aten.convolution_backward.default": 1}
"""The place of the image among the arguments."""
_MEASURED: dict[Hashable, int | None] = {}


def transient_bytes(
    func_name: str, args: Sequence[Any], kwargs: Mapping[str, Any], outs: Any, *, threads: int | None = None
) -> int | None:
    """The peak of the CPU allocator's bytes during one operation, less what it leaves behind; None: not known.

    func_name: with its overload, as `aten.convolution.default`.  args, kwargs, outs: its arguments and results, whose tensors
    need no data.  threads: those of a rank's process, by default of this one.
    """
    tensors = [leaf for leaf in tree_leaves((args, dict(kwargs), outs)) if isinstance(leaf, Tensor)]
    if any(tensor.device.type != "cpu" for tensor in tensors):
        return None
    func = _function_of(func_name)
    threads = torch.get_num_threads() if threads is None else threads
    known = formula_bytes(func_name, func, args, kwargs, threads)
    if known is not None:
        return known
    if func is None or func_name.partition(".")[0] not in _RUN_FROM:
        return None
    key = threads, torch.are_deterministic_algorithms_enabled(), repr(signature_of(func_name, args, kwargs))
    if key not in _MEASURED:
        size = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
        _MEASURED[key] = _found(func_name, func, args, kwargs, size=size, threads=threads)
    return _MEASURED[key]


def _function_of(name: str) -> Callable | None:
    found: Any = torch.ops
    for part in name.split("."):
        found = getattr(found, part, None)
    return found


def _found(name: str, func: Callable, args: Sequence[Any], kwargs: Mapping[str, Any], *, size: int, threads: int) -> int | None:
    if name in _CONVOLUTIONS:
        return _convolution_bytes(func, _CONVOLUTIONS[name], list(args), threads=threads)
    return measured_bytes(func, args, kwargs, threads=threads) if size <= RUN_BYTES else None


# ---------------------------------------------------------------------------------------------- run and read


def measured_bytes(func: Callable, args: Sequence[Any], kwargs: Mapping[str, Any], *, threads: int) -> int | None:
    """Run `func` on zeros like its arguments; the allocator's peak less what is left.  None: it does not run on zeros."""
    if profiler_enabled():
        return None  # a profiler within another is an error of torch
    with disable_current_modes(), torch.no_grad(), torch.random.fork_rng(devices=[]), _threads(threads):
        real_args, real_kwargs = tree_map(_zeros_like, (tuple(args), dict(kwargs)))
        try:
            with _recorder() as recorder:
                results = func(*real_args, **real_kwargs)
        except (RuntimeError, IndexError, TypeError):
            return None
        changes = memory_changes(recorder)
    del results
    return _peak(changes) - sum(changes)


def _zeros_like(leaf: Any) -> Any:
    if not isinstance(leaf, Tensor):
        return leaf
    return torch.empty_strided(leaf.shape, leaf.stride(), dtype=leaf.dtype).zero_()


@contextmanager
def _threads(number: int) -> Iterator[None]:
    before = torch.get_num_threads()
    if number != before:
        torch.set_num_threads(number)
    try:
        yield
    finally:
        if number != before:
            torch.set_num_threads(before)


@contextmanager
def _recorder() -> Iterator[profile]:
    recorder = profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True)
    with _without_stderr():
        recorder.start()
    try:
        yield recorder
    finally:
        with _without_stderr():
            recorder.stop()


@contextmanager
def _without_stderr() -> Iterator[None]:
    """The profiler prints its start and its end, unless an environment variable was set before torch was loaded."""
    kept, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nowhere, 2)
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nowhere)


def memory_changes(recorder: profile) -> list[int]:
    """The bytes of each allocation, and negative of each free, in the order of time."""
    assert recorder.profiler is not None and recorder.profiler.kineto_results is not None, "the profiler has not run"
    events = recorder.profiler.kineto_results.events()
    found = [(event.start_ns(), event.nbytes()) for event in events if event.name() == "[memory]"]
    return [change for _, change in sorted(found, key=lambda event: event[0])]


def _peak(changes: Sequence[int]) -> int:
    held = peak = 0
    for change in changes:
        held += change
        peak = max(peak, held)
    return peak


# ---------------------------------------------------------------------------------------------- large convolutions


def _convolution_bytes(func: Callable, place: int, args: list[Any], *, threads: int) -> int | None:
    """Of a convolution or its backward, run at its own size or drawn through two smaller ones.

    place: of the image among the arguments; its weight follows, and of a backward the gradient of its result comes first.
    """
    image, weight = args[place : place + 2]
    sizes = _smaller_sizes(tuple(image.shape), tuple(weight.shape), args, place)
    found = []
    for size in sizes:
        smaller = _with_pixels(args, place, size)
        found.append((math.prod(size), measured_bytes(func, smaller, {}, threads=threads)))
    if len(found) == 1:
        return found[0][1]
    (large, more), (small, less) = found
    if more is None or less is None or large == small:
        return more
    line = round(more + max(0.0, (more - less) / (large - small)) * (math.prod(image.shape[2:]) - large))
    blocks = [blocked_bytes(_with_pixels(args, place, size), place) for size in (tuple(image.shape[2:]), sizes[0])]
    return max(line, blocks[0]) if blocks[1] <= more else line  # a peak bends upwards where another moment becomes it


def _smaller_sizes(image: tuple[int, ...], weight: tuple[int, ...], args: list[Any], place: int) -> list[tuple[int, ...]]:
    """The image's own size in pixels, where that may be run; else the largest two that may, by halves."""
    pixels = list(image[2:])
    if _may_run(image, weight, pixels):
        return [tuple(pixels)]
    stride, dilation = args[place + 3], args[place + 5]
    least = [max(8, 2 * (kernel - 1) * d + 1) * s for kernel, s, d in zip(weight[2:], stride, dilation, strict=True)]
    found: list[tuple[int, ...]] = []
    while len(found) < 2:
        longest = max(range(len(pixels)), key=lambda dim: pixels[dim] / least[dim])
        if pixels[longest] // 2 < least[longest]:
            return found or [tuple(pixels)]
        pixels[longest] = -(-pixels[longest] // 2)
        if image[0] == 1 and math.prod([image[1], *pixels][:3]) <= _FEW:
            return found or [tuple(image[2:])]
        if _may_run(image, weight, pixels):
            found.append(tuple(pixels))
    return found


def _may_run(image: tuple[int, ...], weight: tuple[int, ...], pixels: list[int]) -> bool:
    held = 4 * image[0] * math.prod(pixels) * (image[1] + max(weight[:2]))
    return held <= RUN_BYTES and 2.0 * image[0] * math.prod(pixels) * math.prod(weight) <= RUN_FLOPS


def _with_pixels(args: list[Any], place: int, pixels: tuple[int, ...]) -> list[Any]:
    """The arguments with an image of `pixels` in the same layout, and the gradient that its result then has."""
    image, weight = args[place : place + 2]
    if tuple(image.shape[2:]) == pixels:
        return args
    smaller = _resized(image, pixels)
    new = [*args]
    new[place] = smaller
    if place:  # of a backward
        rest = args[4:10]
        with disable_current_modes(), torch.device("meta"):
            on_meta = partial(torch.empty, dtype=image.dtype)
            result = torch.ops.aten.convolution.default(on_meta(smaller.shape), on_meta(weight.shape), None, *rest[:6])
        new[0] = _resized(args[0], tuple(result.shape[2:]))
    return new


def _resized(image: Tensor, pixels: tuple[int, ...]) -> Tensor:
    """A tensor without data of `pixels`, laid out as `image`."""
    shape = (*image.shape[:2], *pixels)
    order = sorted(range(image.ndim), key=lambda dim: (image.stride(dim), image.ndim - dim))
    strides, step = [0] * image.ndim, 1
    for dim in order:
        strides[dim] = step
        step *= shape[dim]
    with disable_current_modes():
        return torch.empty_strided(shape, strides, dtype=image.dtype, device="meta")
