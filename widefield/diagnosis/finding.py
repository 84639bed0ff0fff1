"""What a check found, and how many of them read: a table, or JSON."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

State = Literal["ok", "warn", "bad", "not here"]
STATES: tuple[State, ...] = ("ok", "warn", "bad", "not here")
Facts = Mapping[str, Any]
"""What one rank has seen, with `rank` and `host`; what else is in it is the check's own."""
WIDTH = 118


@dataclass(frozen=True)
class Finding:
    """state: ok; warn, which slows or may stop a run; bad, which stops it; not here, where there is nothing to check.

    figure: what was seen, with numbers.  remedy: what to do; empty where nothing is.  check: the title of the check.
    """

    state: State
    figure: str
    remedy: str = ""
    check: str = ""


@dataclass(frozen=True)
class Checkup:
    """What the checks found, in their order.  head: on how many ranks and hosts, in words.

    has_met: whether it is of all ranks, and the same on each; else it is of this rank alone.
    """

    head: str
    findings: tuple[Finding, ...]
    has_met: bool = True

    @property
    def ok(self) -> bool:
        """Whether nothing is bad."""
        return all(finding.state != "bad" for finding in self.findings)

    def __bool__(self) -> bool:
        return self.ok

    def __getitem__(self, check: str) -> Finding:
        """The finding of a check by its title.  KeyError: there is none."""
        return {finding.check: finding for finding in self.findings}[check]

    def to_tree(self) -> dict[str, Any]:
        """As `--json` prints it."""
        return {"ok": self.ok, "head": self.head, "findings": [asdict(finding) for finding in self.findings]}

    def __str__(self) -> str:
        width = max((len(finding.check) for finding in self.findings), default=0)
        rows = [row for finding in self.findings for row in _rows(finding, width)]
        return "\n".join([self.head, "", *rows, "", self._end])

    @property
    def _end(self) -> str:
        counts = {state: sum(finding.state == state for finding in self.findings) for state in STATES}
        return ", ".join(f"{count} {state}" for state, count in counts.items() if count)


def _rows(finding: Finding, width: int) -> list[str]:
    """`check  state  figure`, and the remedy below."""
    first, rest = f"{finding.check:{width}s}  {finding.state:8s}  ", " " * (width + 12)
    rows = textwrap.wrap(finding.figure, WIDTH, initial_indent=first, subsequent_indent=rest, break_long_words=False)
    if finding.remedy and finding.state in ("warn", "bad"):
        rows += textwrap.wrap(
            f"-> {finding.remedy}", WIDTH, initial_indent=rest, subsequent_indent=f"{rest}   ", break_long_words=False
        )
    return rows


def by_host(facts: Sequence[Facts]) -> dict[str, Facts]:
    """Each host's first rank's facts: what is the same for all ranks of a host is told once."""
    found: dict[str, Facts] = {}
    for one in facts:
        found.setdefault(one["host"], one)
    return found


def who(facts: Sequence[Facts]) -> str:
    """`n1`, `n1 and n2`, `n1, n2 and 3 more`: the hosts that facts are of."""
    return in_words(list(by_host(facts)))


def in_words(names: Sequence[str], most: int = 3) -> str:
    """`a`, `a and b`, `a, b, c and 4 more`."""
    if len(names) > most + 1:
        return f"{', '.join(names[:most])} and {len(names) - most} more"
    return " and ".join(part for part in (", ".join(names[:-1]), names[-1] if names else "") if part)


def differing(facts: Sequence[Facts], key: str) -> str:
    """`n1: 2.14, n2: 2.15` where hosts differ in a fact; empty where they agree."""
    values = {host: str(one.get(key)) for host, one in by_host(facts).items()}
    if len(set(values.values())) < 2:
        return ""
    seen: dict[str, list[str]] = {}
    for host, value in values.items():
        seen.setdefault(value, []).append(host)
    return "; ".join(f"{in_words(hosts)}: {value}" for value, hosts in seen.items())
