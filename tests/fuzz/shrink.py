"""Make a finding small: fewer lines, outputs and members, a plainer step, fewer samples and ranks, as long as it is found."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import replace

from widefield.plans import Plan

from .errors import Finding, Verdict, pattern
from .grammar import finished
from .plans import Layout, can_run
from .program import Habit, Program, defined, used

TRIES_MOST = 300


def shrunk(
    program: Program, layout: Layout, found: Finding, verdict_on: Callable[[Program, Layout], Verdict]
) -> tuple[Program, Layout]:
    """The smallest program and layout that gives a finding of the same kind, one step after another."""
    tries, goes_on = 0, True
    while goes_on and tries < TRIES_MOST:
        goes_on = False
        for smaller, laid in _smaller(program, layout):
            tries += 1
            if is_same(found, _verdict(smaller, laid, verdict_on)):
                program, layout, goes_on = _finished(smaller), laid, True
                break
    return program, layout


def is_same(found: Finding, other: Verdict) -> bool:
    if not isinstance(other, Finding) or other.kind != found.kind:
        return False
    return found.kind != "crashes" or pattern(other.text.splitlines()[-1])[:40] == pattern(found.text.splitlines()[-1])[:40]


def _finished(program: Program) -> Program:
    try:
        return finished(program)[0]
    except Exception:
        return program


def _verdict(program: Program, layout: Layout, verdict_on: Callable[[Program, Layout], Verdict]) -> Verdict:
    try:
        program = finished(program)[0]
    except Exception:
        return None
    return verdict_on(program, layout) if can_run(program, layout.plan) else None


def _smaller(program: Program, layout: Layout) -> Iterator[tuple[Program, Layout]]:
    for made in _plainer_steps(program.habit):
        yield replace(program, habit=made), layout
    for laid in _plainer_layouts(layout):
        yield program, laid
    if len(program.outputs) > 1:
        for output in program.outputs:
            yield replace(program, outputs=(output,)).without_what_is_unused(), layout
    values = [name for line in program.lines for name in sorted(defined(line))]
    for name in reversed(values):  # an earlier value as the only output
        if name not in program.outputs:
            yield replace(program, outputs=(name,)).without_what_is_unused(), layout
    for at, line in enumerate(program.lines):
        rest = program.lines[:at] + program.lines[at + 1 :]
        if not defined(line):
            yield replace(program, lines=rest).without_what_is_unused(), layout
        for made in sorted(defined(line)):  # a value that this one is made of in its place
            for other in sorted(used(line)):
                yield _renamed(program, rest, made, other), layout
    if "never" in program.members:
        yield replace(program, members={n: w for n, w in program.members.items() if n != "never"}), layout
    if program.shape[0] > 1:
        yield replace(program, shape=(program.shape[0] - 1, *program.shape[1:])), layout


def _plainer_steps(habit: Habit) -> Iterator[Habit]:
    plain = Habit()
    for name in ("forwards", "backwards", "passes", "evaluates", "channels_last", "penalty", "late", "frozen", "train"):
        if getattr(habit, name) != getattr(plain, name):
            yield replace(habit, **{name: getattr(plain, name)})


def _plainer_layouts(layout: Layout) -> Iterator[Layout]:
    if layout.rehearsed:
        yield replace(layout, rehearsed=False)
    if layout.as_if_large:
        yield replace(layout, as_if_large=False)
    if layout.cuts:
        yield replace(layout, cuts=None)
    plan, cut_evenly = layout.plan, replace(layout, cuts=None, rehearsed=False)
    if plan.stream is not None and len(plan.axes) and plan.ranks > 1:
        yield replace(layout, plan=plan.model_copy(update={"stream": None}), rehearsed=False)
    for axis in ("replicate", "shard", "channel", "stage"):
        if plan.axes[axis] > 1 and plan.ranks > plan.axes[axis]:
            yield replace(layout, plan=plan.model_copy(update={axis: 1}), rehearsed=False)
        if plan.axes[axis] > 2:
            yield replace(layout, plan=plan.model_copy(update={axis: 2}), rehearsed=False)
    if plan.space and plan.ranks > plan.axes["space"]:
        yield replace(cut_evenly, plan=plan.model_copy(update={"space": []}))
    for at, ways in enumerate(plan.space):
        if ways > 1 and (plan.axes["space"] > ways or ways > 2):
            fewer = ways - 1 if plan.axes["space"] == ways else 1
            yield replace(cut_evenly, plan=_with_space(plan, at, fewer))


def _with_space(plan: Plan, at: int, ways: int) -> Plan:
    return plan.model_copy(update={"space": [*plan.space[:at], ways, *plan.space[at + 1 :]]})


def _renamed(program: Program, lines: tuple[str, ...], made: str, other: str) -> Program:
    swap = lambda text: re.sub(rf"\b{made}\b", other, text)  # noqa: E731
    outputs = tuple(swap(name) for name in program.outputs)
    return replace(program, lines=tuple(map(swap, lines)), outputs=outputs).without_what_is_unused()


def as_case(program: Program, layout: Layout, verdict: Finding, seed: int) -> str:
    """The finding as an entry of findings/, above it the class and what was found."""
    told = [f"seed {seed}: {verdict.kind}", *verdict.text.splitlines(), *program.text().rstrip().splitlines()]
    members = ", ".join(f"{name!r}: {words!r}" for name, words in program.members.items())
    more = "" if program.habit == Habit() else f", {program.habit!r}"
    made = f"Program({program.shape}, {{{members}}}, {program.lines!r}, {program.outputs!r}{more})"
    laid = f"Layout(Plan({_words_of(layout.plan)}), {layout.cuts}, {layout.rehearsed}, {layout.as_if_large})"
    return "".join(f"# {line}\n" for line in told) + f"({made}, {laid}),\n"


def _words_of(plan: Plan) -> str:
    return ", ".join(f"{key}={value!r}" for key, value in plan.model_dump(exclude_defaults=True).items())
