"""Starting ranks again after one has failed: whether, on how many, and what the ranks are told of it.

    the run may have been restarted so often        it ends
    an error of the user's, before any step         it ends: the same error would come again
    the same words at the same step, twice in a row it ends, or goes on with fewer ranks where --min-ranks allows that
    anything else                                   it starts again, on as many ranks as before, if there are devices for them

The ranks hear of it by torchrun's variables, TORCHELASTIC_RESTART_COUNT and TORCHELASTIC_MAX_RESTARTS, whichever of the two
started them again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from widefield.comm.world import MAY_COME_BACK
from widefield.refusal import REFUSED

WHY = "WIDEFIELD_RESTARTED"
"""The environment variable in which ranks that our launcher has started again are told why."""


@dataclass(frozen=True)
class Failure:
    """How a start of a run failed.

    step: the last step in the record; 0 where there is none.  stepped: whether this start made a step.
    words: what the record says of it; "" where the ranks could not write.
    """

    step: int = 0
    stepped: bool = False
    words: str = ""


@dataclass(frozen=True)
class Again:
    """What to start: so many ranks, each with these arguments."""

    ranks: int
    arguments: list[str]


class Restarts:
    """Decides after each failure of a run.

    most: restarts in all.  failure_since: what the run's record says of the start at that time.time().
    starts: for a most of ranks, what to start on that many or fewer; None where nothing fits.
    takes_back: whether a rank that the others go on without is started again by itself.
    """

    def __init__(
        self, most: int, *, failure_since: Callable[[float], Failure], starts: Callable[[int], Again | None],
        takes_back: bool = False,
    ) -> None:  # fmt: skip
        self.takes_back = takes_back
        self.most, self.count, self.single, self.why = most, 0, 0, ""
        """single: ranks that were started again by themselves.  why: the failure before the current start, as a sentence."""
        self.told = ""
        """What was decided last, as a sentence."""
        self._failure_since, self._starts = failure_since, starts
        self._before: tuple[int, str] | None = None

    def after(self, status: int, verdict: str, *, ranks: int, since: float) -> Again | None:
        """What to start after a failure; None: the run ends, and `told` says why.

        status, verdict: of the start that failed, on `ranks` ranks.  since: when it began, by time.time().
        """
        failure = self._failure_since(since)
        this = (failure.step, failure.words or verdict)
        is_same, self._before = this == self._before, this
        if status == REFUSED and not failure.stepped:
            return self._ends("the same error would come again, so the run is not restarted")
        if self.count + self.single >= self.most:
            return self._ends(f"the run was restarted {self.most} times, as --max-restarts allows")
        again = self._starts(ranks - 1 if is_same else ranks)
        if again is None and is_same:
            return self._ends(f"the run failed twice in a row at step {failure.step} in the same words, so it is not restarted")
        if again is None:
            return self._ends("no plan of this recipe fits the devices that are left, so the run is not restarted")
        self.count += 1
        self.why = f"restart {self.count} of {self.most} on {_ranks(again.ranks)}, since {this[1]}"
        self.told = f"restart {self.count} of {self.most}, on {_ranks(again.ranks)}, from the newest sound checkpoint"
        return again

    def one(self, verdict: str) -> bool:
        """Whether a rank that died, in words, is to be started again by itself, and the others go on; `told` says it."""
        if self.count + self.single >= self.most:
            return False
        self.single += 1
        self.told = f"{verdict}; it is started again ({self.count + self.single} of {self.most} restarts), and the others go on"
        return True

    def _ends(self, told: str) -> None:
        self.told = told

    @property
    def environment(self) -> dict[str, str]:
        """What the ranks of the current start are told."""
        numbers = {"TORCHELASTIC_RESTART_COUNT": str(self.count), "TORCHELASTIC_MAX_RESTARTS": str(self.most)}
        return {**numbers, WHY: self.why, **({MAY_COME_BACK: "1"} if self.takes_back else {})}


def restart_in_words(environment: Mapping[str, str]) -> str | None:
    """Why the ranks were started again, for the record; None where they were not."""
    count = _number(environment, "TORCHELASTIC_RESTART_COUNT")
    if not count:
        return None
    return environment.get(WHY) or f"restart {count} of {_number(environment, 'TORCHELASTIC_MAX_RESTARTS')} by torchrun"


def may_change_ranks(environment: Mapping[str, str], *, has_begun: bool) -> bool:
    """Whether a launcher restarts the run, and so may go on with another number of ranks.

    has_begun: whether there are checkpoints.  Without them it is a restart where the launcher has counted one: of a run that
    failed before its first.
    """
    name = "TORCHELASTIC_MAX_RESTARTS" if has_begun else "TORCHELASTIC_RESTART_COUNT"
    return _number(environment, name) > 0


def _number(environment: Mapping[str, str], name: str) -> int:
    text = environment.get(name, "")
    return int(text) if text.isdecimal() else 0


def _ranks(count: int) -> str:
    return f"{count} {'rank' if count == 1 else 'ranks'}"
