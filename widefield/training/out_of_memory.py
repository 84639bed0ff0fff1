"""A rank that finds no memory ends the run on all ranks, with what would take less."""

from __future__ import annotations

import torch

from widefield.comm.failure import PeerFailedError, cause_of, in_words
from widefield.config import RunConfig
from widefield.plans import Plan
from widefield.quantity import count_of

_SAID = ("out of memory", "allocate memory", "ALLOC_FAILED", "OutOfMemoryError", "MemoryError")
"""In the texts of errors of CUDA, of cuDNN and cuBLAS, and of torch's allocator on a CPU."""
LESS = "What takes less memory"
"""In the text of a run that ended so, by which the process that started the ranks knows it."""


class FullMemoryError(ValueError):
    """A rank ran out of memory; the text says what would take less."""


def is_full(error: BaseException) -> bool:
    """Whether an error says that this rank's memory, or its device's, is full."""
    cause = cause_of(error)
    if isinstance(cause, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(cause, RuntimeError) and not isinstance(cause, PeerFailedError) and _says_full(str(cause))


def was_full(error: BaseException) -> bool:
    """Whether another rank failed since its memory is full."""
    return isinstance(error, PeerFailedError) and _says_full(str(error))


def _says_full(text: str) -> bool:
    return any(words in text for words in _SAID)


def full_memory_error(
    error: BaseException, *, rank: int, step: int, config: RunConfig, plan: Plan, dims: int
) -> FullMemoryError:
    """In place of an error for which `is_full` holds.  step: that runs, counted from 1.  dims: of pixels of an image."""
    why = in_words(error).removeprefix("failed: ")
    return FullMemoryError(f"rank {rank} ran out of memory in step {step}: {why}. {advice(config, plan, dims=dims)}")


def advice(config: RunConfig, plan: Plan, *, dims: int) -> str:
    """What takes less memory than this recipe, in a sentence; planner/search/relief.py has the figures."""
    return f"{LESS}: {'; '.join(words for _, words in changes(config, plan, dims=dims))}"


def changes(config: RunConfig, plan: Plan, *, dims: int) -> list[tuple[tuple[str, ...], str]]:
    """(overrides, words) of what can be changed, those that cost least first.  dims: of pixels, 3 of a volume."""
    found: list[tuple[tuple[str, ...], str]] = []
    batch = config.data.batch_if_known
    accumulate = 2 * config.gradient.accumulate
    if batch is not None and batch // (plan.replicate * plan.shard) >= accumulate:
        each = batch // (plan.replicate * plan.shard * accumulate)
        found.append(((f"gradient.accumulate={accumulate}",), f"accumulate: passes of {count_of(each, 'sample')}"))
    if config.recompute is None:
        found.append((("recompute={}",), "recompute: activations are computed again in the backward"))
    cut = _cut(plan, dims)
    if cut:
        found.append((cut, "cut: each image lies on several ranks"))
    if config.stream is None:
        found.append(((f"stream.tiles={_shards([2] * dims)}",), "stream: images run tile after tile"))
    return [(overrides, f"{' '.join(overrides)} ({words})") for overrides, words in found]


def _cut(plan: Plan, dims: int) -> tuple[str, ...]:
    """The same ranks with each image on more of them; of one rank, two."""
    if plan.space or plan.shard * plan.channel * plan.stage > 1:
        return ()
    space = f"mesh.space={_shards([2, *[1] * (dims - 1)])}"
    if plan.replicate == 1:
        return (space, "mesh.replicate=1")
    return (f"mesh.replicate={plan.replicate // 2}", space) if plan.replicate % 2 == 0 else ()


def _shards(of_dims: list[int]) -> str:
    return f"[{','.join(map(str, of_dims))}]"
