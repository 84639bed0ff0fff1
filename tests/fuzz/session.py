"""Run programs under layouts on ranks that stay, as threads of this process."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from widefield.comm.mesh import Mesh, World, join
from widefield.plans import Plan

from .errors import Finding, Refusal, Verdict, pattern, verdict_of_errors
from .grammar import draw_program
from .plans import Layout, draw_layout
from .program import Program
from .sizes import as_if_large
from .threads import Failed, Ranks
from .trial import Outcome, compare, train_on, train_whole

NOT_FOR_THREADS = "No backend type associated with device type"
"""What torch says where a DTensor is to be gathered, which only real groups can."""
MESHES_MOST = 60
"""Plans of which a pool of threads keeps meshes."""


class Pool(Protocol):
    """Ranks that run programs."""

    def verdict(self, program: Program, layout: Layout, whole: Outcome) -> Verdict: ...


@dataclass
class Threads:
    """Pools of ranks by size, and their meshes by plan.  Use it inside of `threads.installed()`.

    others: ranks for what threads cannot do.
    """

    others: Pool | None = None
    pools: dict[int, Ranks] = field(default_factory=dict)
    meshes: dict[tuple[str, int], Mesh] = field(default_factory=dict)

    def run(self, plan: Plan, body: Callable[[Mesh], Any]) -> list[Any]:
        """`body(mesh)` on the plan's ranks; what each returns, or a Failed."""
        if len(self.meshes) > MESHES_MOST:
            self.pools, self.meshes = {}, {}
        if plan.ranks not in self.pools:
            self.pools[plan.ranks] = Ranks(plan.ranks)
        key = plan.model_dump_json()

        def on_rank(rank: int) -> Any:
            if (key, rank) not in self.meshes:
                self.meshes[key, rank] = join(World(rank, plan.ranks, rank, plan.ranks, launcher="threads"), plan)
            return body(self.meshes[key, rank])

        found = self.pools[plan.ranks].run(on_rank)
        if any(isinstance(answer, Failed) for answer in found):  # what was under way between ranks is lost
            self.meshes = {name: mesh for name, mesh in self.meshes.items() if name[0] != key}
        return found

    def verdict(self, program: Program, layout: Layout, whole: Outcome) -> Verdict:
        with as_if_large(layout.as_if_large):
            found = self.run(layout.plan, lambda mesh: train_on(mesh, program, layout))
        problem = verdict_of_errors([(f.error, f.text) if isinstance(f, Failed) else None for f in found])
        if self.others is not None and isinstance(problem, Finding) and NOT_FOR_THREADS in problem.text:
            return self.others.verdict(program, layout, whole)
        if problem is not None:
            return problem
        return compare(program, layout, whole, found)


@dataclass
class Counts:
    programs: int = 0
    on_gloo: int = 0
    exact: int = 0
    refused: Counter = field(default_factory=Counter)
    found: Counter = field(default_factory=Counter)

    def add(self, verdict: Verdict, *, on_gloo: bool = False) -> None:
        self.programs += 1
        self.on_gloo += on_gloo
        if verdict is None:
            self.exact += 1
        elif isinstance(verdict, Refusal):
            self.refused[pattern(verdict.text)] += 1
        else:
            self.found[verdict.kind] += 1

    def __str__(self) -> str:
        kinds = ", ".join(f"{number} {kind}" for kind, number in self.found.most_common()) or "no finding"
        refused, programs = sum(self.refused.values()), f"{self.programs} programs ({self.on_gloo} on gloo)"
        return f"{programs}: {self.exact} exact, {refused} refused in words, {kinds}"


def drawn(seed: int) -> tuple[Program, Layout, Outcome]:
    program, whole = draw_program(seed)
    return program, draw_layout(random.Random(f"layout {seed}"), program), whole


def again(ranks: Pool, program: Program, layout: Layout) -> Verdict:
    """The verdict on a program that may be none any more: None then, too."""
    torch.default_generator.manual_seed(0)
    try:
        whole = train_whole(program)
    except Exception:
        return None
    return ranks.verdict(program, layout, whole)
