"""Which cases are long because a quicker one of the same test is in `make test`?  Those that tests/slow_cases.txt lists.

    PYTEST_ADDOPTS="--durations=0 --durations-min=0.005" make test > log; python tests/slow_cases.py log

adds what the log shows to the list.  The quickest case of a test is never listed: what takes long by itself is marked `long` in
its file, where a reader sees it.
"""

from __future__ import annotations

import re
import sys
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable
from pathlib import Path

LIST = Path(__file__).with_suffix(".txt")
SECONDS = 1.0
"""From which a case is slow."""


def slow_cases() -> set[str]:
    return {line for line in LIST.read_text(encoding="utf-8").splitlines() if line and not line.startswith("#")}


def chosen(seconds: dict[str, float]) -> set[str]:
    """The slow cases of each test, but for its quickest.  seconds: by the name of a case."""
    by_test: dict[str, list[str]] = defaultdict(list)
    for name in seconds:
        by_test[name.partition("[")[0]].append(name)
    quickest = {min(names, key=lambda name: (seconds[name], name)) for names in by_test.values()}
    return {name for name, took in seconds.items() if took >= SECONDS and name not in quickest}


def seconds_of(lines: Iterable[str]) -> dict[str, float]:
    """By case, from a log of pytest with `--durations=0`; without its fixtures, which the next case would make."""
    found: Counter[str] = Counter()
    for line in lines:
        if match := re.match(r"\s*([\d.]+)s call\s+(\S.*)$", line):
            found[match[2].strip()] += float(match[1])  # type: ignore[assignment]
    return dict(found)


def unknown(listed: Collection[str], collected: Collection[str]) -> list[str]:
    """Listed cases that no test has any more."""
    return sorted(set(listed) - set(collected))


def without_quick_case(listed: Collection[str], quick: Collection[str]) -> list[str]:
    """Tests with listed cases and none that is quick."""
    return sorted({name.partition("[")[0] for name in listed} - {name.partition("[")[0] for name in quick})


def main(logs: list[str]) -> None:
    seconds: dict[str, float] = {}
    for log in logs:
        seconds |= seconds_of(Path(log).read_text(encoding="utf-8", errors="replace").splitlines())
    head = [line for line in LIST.read_text(encoding="utf-8").splitlines() if line.startswith("#")]
    LIST.write_text("\n".join([*head, *sorted(slow_cases() | chosen(seconds))]) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
