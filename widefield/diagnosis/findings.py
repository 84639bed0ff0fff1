"""Which failures do the files of a run tell of?  Rules are data (rules/); here they are applied and put in order.

A cause comes before what follows from it: a rank that lost another, a watchdog's timeout and a launcher's summary are what most
logs end with, and explain nothing.  What can only be inferred, from who waits for whom, is inferred where no cause was found.
"""

from __future__ import annotations

import textwrap
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from widefield.diagnosis.evidence import Evidence, Sighting, read_evidence
from widefield.naming import load_all
from widefield.quantity import count_of

RULES = "widefield.diagnosis.rules"
WIDTH = 116


@dataclass(frozen=True)
class KnownFailure:
    """One failure that the files tell of.

    name: of the rule's file.  kind: cause, inferred, consequence or notice; see rules/.
    seen: the line it is concluded from, as `file:number: text`.  wrong: what is often done, and why it is no cure.
    """

    name: str
    kind: str
    title: str
    seen: str
    cause: str
    remedy: str
    wrong: Mapping[str, str]
    source: str

    def to_tree(self) -> dict[str, Any]:
        return {**self.__dict__, "wrong": dict(self.wrong)}

    def __str__(self) -> str:
        rows = [("seen", self.seen), ("why", self.cause), ("do", self.remedy)]
        rows += [("no cure", f"{cure}: {why}") for cure, why in self.wrong.items()]
        rows.append(("source", self.source))
        return "\n".join([f"{self.kind}: {self.title}", *(_row(*row) for row in rows)])


@dataclass(frozen=True)
class Diagnosis:
    """What the files of a run tell.  failures: causes first, each kind in the order of files and lines."""

    failures: tuple[KnownFailure, ...]
    files: int
    lines: int
    left_out: int = 0
    """Files that were not read, since there were too many or they were too large."""

    @property
    def ok(self) -> bool:
        """Whether nothing was found that stops a run."""
        return all(failure.kind == "notice" for failure in self.failures)

    def __bool__(self) -> bool:
        return self.ok

    def to_tree(self) -> dict[str, Any]:
        """As `--json` prints it."""
        failures = [failure.to_tree() for failure in self.failures]
        return {"ok": self.ok, "files": self.files, "lines": self.lines, "left_out": self.left_out, "failures": failures}

    def __str__(self) -> str:
        head = f"{count_of(self.files, 'file')}, {count_of(self.lines, 'line')}"
        if self.left_out:
            head += f"; {count_of(self.left_out, 'file')} not read, as these are so many or so large: name those that matter"
        if not self.failures:
            return f"{head}: none of the {len(load_all(RULES))} known failures is in there{_ADVICE}"
        has_cause = any(failure.kind in ("cause", "inferred") for failure in self.failures)
        full = [failure for failure in self.failures if not (has_cause and failure.kind == "consequence")]
        follow = [failure for failure in self.failures if failure not in full]
        parts = [head, *map(str, full)]
        if follow:
            lines = [textwrap.fill(f"{one.title} ({one.seen})", WIDTH, initial_indent="  ", subsequent_indent="    ")
                     for one in follow]  # fmt: skip
            parts.append("\n".join(["what follows from it, and needs no cure of its own:", *lines]))
        return "\n\n".join(parts)


_ADVICE = (
    "\nGive the logs of all ranks: torchrun --log-dir DIR --redirects 3 writes one per rank, and the first rank that failed "
    "names the cause.  With NCCL, run once more with NCCL_DEBUG=WARN."
)


def diagnose(*paths: str | Path) -> Diagnosis:
    """What the files of a run tell: its folder, logs of its launcher, tracebacks, its batch script.

    ValueError: a path is not there, or a folder has no file that is called like a log.
    """
    return diagnosis_of(read_evidence(paths))


def diagnosis_of(evidence: Evidence) -> Diagnosis:
    """What the evidence tells."""
    rules = load_all(RULES)
    found = [(rule, seen) for rule in rules if rule.KIND != "inferred" and (seen := sighting(rule, evidence)) is not None]
    strong = [rule for rule, _ in found if rule.KIND == "cause" and not getattr(rule, "IS_WEAK", False)]
    found = [pair for pair in found if not (strong and getattr(pair[0], "IS_WEAK", False))]
    if not any(rule.KIND == "cause" for rule, _ in found):
        inferred = sorted((rule for rule in rules if rule.KIND == "inferred"), key=lambda rule: rule.ORDER)
        hits = ((rule, sighting(rule, evidence)) for rule in inferred)
        found += [(rule, seen) for rule, seen in hits if seen is not None][:1]
    places = {file.name: number for number, file in enumerate(evidence.files)}
    found.sort(key=lambda pair: (KINDS.index(pair[0].KIND), places.get(pair[1].line.file, 0), pair[1].line.number))
    return Diagnosis(tuple(_failure(*pair) for pair in found), len(evidence.files), evidence.lines, evidence.left_out)


KINDS = ("cause", "inferred", "consequence", "notice")


def sighting(rule: ModuleType, evidence: Evidence) -> Sighting | None:
    """Where the evidence shows a rule's failure; None where it does not."""
    find = getattr(rule, "find", None)
    return find(evidence) if find is not None else evidence.first(*rule.PATTERNS)


def _failure(rule: ModuleType, seen: Sighting) -> KnownFailure:
    name = rule.__name__.rpartition(".")[2]
    detail = seen.detail or (_of_rank(seen) if rule.KIND == "cause" else "")
    cause = f"{detail} {rule.CAUSE}".strip()
    return KnownFailure(
        name, rule.KIND, rule.TITLE, str(seen.line), cause, rule.REMEDY, getattr(rule, "WRONG", {}), rule.SOURCE
    )


def _of_rank(seen: Sighting) -> str:
    return "" if seen.rank is None else f"It was rank {seen.rank}."


def _row(name: str, text: str) -> str:
    indent = " " * 11
    filled = textwrap.fill(text, WIDTH, initial_indent=indent, subsequent_indent=indent, break_long_words=False)
    return f"  {name:9s}{filled[11:]}"
