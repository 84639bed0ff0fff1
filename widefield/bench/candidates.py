"""The plans that are worth trying on a number of ranks: names, and the overrides of a recipe that they stand for.

Plans that cannot run refuse themselves, so nothing here checks whether a strategy exists or fits the model.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass

from widefield.naming import did_you_mean

PLAIN = (
    "mesh.replicate=1", "mesh.shard=1", "mesh.space=[]", "mesh.channel=1", "mesh.stage=1", "mesh.data_strategy=data",
    "recompute=",
)  # fmt: skip
"""Overrides that reset a recipe's own plan, before those of a candidate."""


@dataclass(frozen=True)
class Candidate:
    """A plan to try: `overrides` of the recipe; without any, one rank with nothing cut.

    threads: of each rank on a CPU, where they differ from those of the other plans.
    """

    name: str
    overrides: tuple[str, ...] = ()
    threads: int | None = None


ONE = Candidate("one rank")


def candidates(ranks: int, *, gpus: int, cores: int) -> list[Candidate]:
    """The candidates for `ranks` ranks, one rank first.

    gpus: of this machine.  cores: how many a single rank could use on a CPU; 1: as many as it has anyway.
    """
    found = [ONE]
    if not gpus and cores > 1:
        found.append(Candidate(f"one rank, {cores} cores", threads=cores))
    found.append(Candidate("recompute", ("recompute={}",)))
    if gpus > 1:
        found.append(Candidate("data_parallel", ("mesh.data_strategy=data_parallel", "batch_norm=broadcast")))
    if ranks == 1:
        return found
    found.append(_of(f"replicate={ranks}"))
    found += [_of(f"shard={ranks}", f"sharding.zero={zero}", name=f"shard={ranks} ZeRO-{zero}") for zero in (1, 2, 3)]
    found.append(_of(f"space=[{ranks},1]"))
    if ranks == 4:
        found.append(_of("space=[2,2]"))
    found += [_of(f"channel={ranks}"), _of(f"stage={ranks}")]
    return [*found, *_mixes(ranks)]


def _mixes(ranks: int) -> list[Candidate]:
    if ranks < 4 or ranks % 2:
        return []
    half = ranks // 2
    return [
        _of(f"replicate={half}", "space=[2,1]"),
        _of(f"replicate={half}", "shard=2", "sharding.zero=3", name=f"replicate={half} x shard=2 ZeRO-3"),
        _of(f"replicate={half}", "channel=2"),
        _of(f"replicate={half}", "stage=2"),
        _of(f"shard={half}", "space=[2,1]", "sharding.zero=3", name=f"shard={half} ZeRO-3 x space=[2,1]"),
    ]


def _of(*settings: str, name: str | None = None) -> Candidate:
    """A candidate of settings as `replicate=2`, `space=[2,1]`, where the section `mesh.` is left out."""
    overrides = tuple(text if "." in text.partition("=")[0] else f"mesh.{text}" for text in settings)
    return Candidate(name or " x ".join(settings), overrides)


def chosen(text: str | None, known: Sequence[Candidate]) -> list[Candidate]:
    """The candidates that `text` asks for, or all known ones; one rank is the first, since the others are compared with it.

    text: names or overrides, separated by `;`, as `replicate=2; mesh.space=[2,1] recompute={}`.
    ValueError: a part is neither.
    """
    if text is None:
        return list(known)
    asked = [_asked(part.strip(), known) for part in text.split(";") if part.strip()]
    return [ONE, *(candidate for candidate in dict.fromkeys(asked) if candidate != ONE)]


def _asked(part: str, known: Sequence[Candidate]) -> Candidate:
    for candidate in known:
        if candidate.name == part:
            return candidate
    words = shlex.split(part)
    if not all("." in word.partition("=")[0] or word.startswith("recompute=") for word in words) or "=" not in part:
        names = [candidate.name for candidate in known]
        raise ValueError(
            f"--plans: {part!r} is no plan{did_you_mean(part, names)} Here are: {'; '.join(names)}. Or write overrides, as "
            "'mesh.replicate=2 gradient.bucket_mib=5'"
        )
    return Candidate(part, tuple(words))
