"""`widefield report`: the page of a run or of a comparison."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from pathlib import Path
from typing import Any

ORDER = 70
SUMMARY = "write a run's report"
HELP = """\
Write (again) the report of a run or of a comparison: one HTML file that needs nothing else.

  widefield report runs/0001
  widefield report runs/bench-0001
"""


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("run", metavar="RUN_DIR")


def run(options: Namespace) -> int:
    from widefield.report import write_bench, write_report
    from widefield.training.run_folder import existing_folder

    if (Path(options.run) / "bench.json").is_file():
        print(write_bench(options.run))
        return 0

    print(write_report(existing_folder(options.run)))
    return 0


CASES: list[tuple[list[str], dict[str, Any] | str]] = [
    (["runs/a"], {"run": "runs/a"}),
    (["runs/a", "runs/b"], "not understood: runs/b; see widefield VERB --help"),
]
