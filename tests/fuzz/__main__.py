"""`python -m tests.fuzz --seed 7 --minutes 10`: draw programs, run each whole and in parallel, print what is found.

Each finding is made as small as it can be, and is printed as an entry of findings/.
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import random
import sys
import time
import warnings

import torch

from ..ranks import end_idle
from .errors import Finding
from .findings import FINDINGS
from .grammar import finished
from .processes import Processes
from .session import Counts, Pool, Threads, again, drawn
from .shrink import as_case, shrunk
from .threads import installed
from .trial import Uninteresting


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--seed", type=int, default=0, help="number of the first program; each has the next")
    parser.add_argument("--minutes", type=float, default=1.0)
    parser.add_argument("--programs", type=int, default=10**9, help="end after so many")
    parser.add_argument("--gloo", type=float, default=0.02, help="the share of programs whose ranks are processes over gloo")
    parser.add_argument("--refusals", type=int, default=10, help="how many of the commonest refusals to show")
    parser.add_argument("--findings", action="store_true", help="run what was found before: all, or --programs from --seed on")
    parser.add_argument("--whole", action="store_true", help="print findings as they were drawn")
    options = parser.parse_args()
    faulthandler.enable()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    counts = Counts()
    with installed(), contextlib.suppress(KeyboardInterrupt):  # which still tells what was found until then
        threads, until = Threads(Processes()), time.monotonic() + 60 * options.minutes
        if options.findings:
            _run_findings(threads, counts, options)
        for seed in () if options.findings else range(options.seed, options.seed + options.programs):
            if time.monotonic() > until:
                break
            _one(threads, seed, counts, options)
    sys.excepthook = sys.__excepthook__  # without a word for each rank that a thread was
    print(counts)
    for text, number in counts.refused.most_common(options.refusals):
        print(f"{number:6} x refused: {text}")
    return 1 if counts.found else 0


def _run_findings(threads: Threads, counts: Counts, options: argparse.Namespace) -> None:
    part = FINDINGS[options.seed : options.seed + options.programs]
    for number, (program, layout) in enumerate(part, options.seed):
        verdict = again(threads, finished(program)[0], layout)
        counts.add(verdict)
        if verdict is not None:
            print(f"finding {number} on {layout}: {verdict}")


def _one(threads: Threads, seed: int, counts: Counts, options: argparse.Namespace) -> None:
    try:
        program, layout, whole = drawn(seed)
    except Uninteresting:
        return
    on_gloo = random.Random(f"gloo {seed}").random() < options.gloo
    end_idle()
    ranks: Pool = Processes() if on_gloo else threads
    try:
        verdict = ranks.verdict(program, layout, whole)
    except Uninteresting:  # told by numbers a little off alone
        return
    counts.add(verdict, on_gloo=on_gloo)
    if not isinstance(verdict, Finding):
        return
    if not options.whole:
        program, layout = shrunk(program, layout, verdict, lambda small, laid: again(ranks, small, laid))
        smaller = again(ranks, program, layout)
        verdict = smaller if isinstance(smaller, Finding) else verdict
    print(as_case(program, layout, verdict, seed), flush=True)


if __name__ == "__main__":
    sys.exit(main())
