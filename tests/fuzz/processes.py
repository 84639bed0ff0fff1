"""Ranks that are processes and meet over gloo, for the share of programs that shall see the real exchange."""

from __future__ import annotations

from ..ranks import RankFailed, on_ranks
from .errors import TOO_FEW, Finding, Refusal, Verdict, last_of
from .plans import Layout
from .program import Program
from .trial import Outcome, attempt, compare

SECONDS_MOST = 60.0
"""For one program."""


class Processes:
    def verdict(self, program: Program, layout: Layout, whole: Outcome) -> Verdict:
        try:
            found = on_ranks(layout.plan.ranks, attempt, program, layout, plan=layout.plan, timeout_seconds=SECONDS_MOST)
        except RankFailed as failed:
            if TOO_FEW in str(failed):
                return Refusal(TOO_FEW)
            hangs = "gave no answer" in str(failed).splitlines()[0]
            return Finding("hangs" if hangs else "crashes", str(failed) if hangs else last_of(str(failed)))
        refusals = [answer for answer in found if isinstance(answer, Refusal)]
        if refusals:
            return refusals[0] if len(refusals) == len(found) else Finding("refuses on some ranks", refusals[0].text)
        return compare(program, layout, whole, found)
