"""Should the optimizer take this step?  Looks for NaN, Inf and spikes in the loss and in the norm of the whole gradient.

All ranks give the same two numbers, so all come to the same answer, and nothing is sent here.  A score is a robust z-score:
the distance to the median of the last steps, in units of 1.4826 times the median distance to it, which is a standard deviation
where numbers are normal.  Only what is above the median is a spike.  Refused steps say nothing of what is usual.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal

from widefield.comm.mesh import AgreedError
from widefield.config import GuardConfig

TO_NORMAL = 1.4826
"""The standard deviation of a normal distribution, in median distances to its median."""
LEAST_SPREAD = 0.02
"""A share of the median: where losses hardly differ, one that is some percent higher is no spike."""
LEAST_SPREAD_OF_LOGARITHM = 0.1

Kind = Literal["non-finite loss", "non-finite gradient", "loss spike", "gradient spike"]


@dataclass(frozen=True)
class Refusal:
    """A step that the optimizer does not take.

    step: its number, counted from 1.  value: the loss, or the norm of the gradient.  usual, score: the median of the last steps
    and the robust z-score, of a spike.  index: the numbers of the step's images, of all ranks.
    member, after: of modules that learn by turns the one that would have learned, and those that had, in this step.
    """

    kind: Kind
    action: Literal["stop", "skip", "roll_back"]
    step: int
    value: float
    loss: float
    usual: float | None = None
    score: float | None = None
    index: Sequence[int] = ()
    member: str = ""
    after: Sequence[str] = ()

    @property
    def is_finite(self) -> bool:
        return self.kind.endswith("spike")

    def in_words(self) -> str:
        """What was seen: `the loss of step 7 is nan`."""
        what = "loss" if "loss" in self.kind else "norm of the gradient"
        what += f" of the {self.member}'s turn" if self.member else ""
        if not self.is_finite:
            finite = f", though its loss is {self.loss:.6g}" if "gradient" in self.kind else ""
            return f"the {what} of step {self.step} is {self.value}{finite}"
        return (
            f"the {what} of step {self.step} is {self.value:.6g}, a spike: {self.usual:.6g} is usual, and its robust z-score "
            f"is {self.score:.1f}"
        )

    def to_tree(self) -> dict[str, Any]:
        """For the record: the number of the step is that of its batch."""
        tree = asdict(self) | {"index": list(self.index)}
        if not self.member:
            del tree["member"], tree["after"]
        return {"found": tree.pop("kind"), "batch_step": tree.pop("step"), **tree}


class RefusedStepError(AgreedError):
    """The guard ends the run before a step, or a turn of one, on every rank, which leaves the weights as they are."""

    def __init__(self, text: str, *, refusal: Refusal) -> None:
        super().__init__(text)
        self.refusal = refusal


class NonFiniteLossError(RefusedStepError):
    """The loss or the gradient is NaN or infinite."""


class RollBack(Exception):
    """The guard asks, on every rank, to go back to the newest checkpoint.  refusal: None where replicas differ."""

    def __init__(self, text: str, refusal: Refusal | None) -> None:
        super().__init__(text)
        self.refusal = refusal


@dataclass
class Guard:
    """What is usual, and which batches were refused.  The same on every rank."""

    config: GuardConfig = field(default_factory=GuardConfig)
    losses: deque[float] = field(init=False)
    norms: deque[float] = field(init=False)
    """Logarithms of the gradient's norm."""
    refused: list[int] = field(default_factory=list)
    """The steps, counted from 0, whose batches were skipped or rolled back; those that a spike may still count."""
    pass_over: set[int] = field(default_factory=set)
    """The steps, counted from 0, whose batches are not learned from, since the run was rolled back before them."""
    told: list[Refusal] = field(default_factory=list)
    """Skipped steps that nobody has recorded yet."""

    def __post_init__(self) -> None:
        self.losses, self.norms = deque(maxlen=self.config.window), deque(maxlen=self.config.window)

    @property
    def may_skip(self) -> bool:
        return "skip" in (self.config.non_finite, self.config.spike)

    def judge(self, step: int, loss: float, norm: float | None) -> Refusal | None:
        """None where the step may be taken; then its numbers are usual from now on.

        step: counted from 0.  norm: of the whole gradient, unscaled; None where it is not looked at.
        """
        found = self._non_finite(step, loss, norm) or self._spike(step, loss, norm)
        if found is None and self.config.spike != "off":
            self.losses.append(loss)
            if norm is not None:
                self.norms.append(_log(norm))
        return found

    def _non_finite(self, step: int, loss: float, norm: float | None) -> Refusal | None:
        action = self.config.non_finite
        if not math.isfinite(loss):
            return Refusal("non-finite loss", action, step + 1, loss, loss)
        if norm is not None and not math.isfinite(norm):
            return Refusal("non-finite gradient", action, step + 1, norm, loss)
        return None

    def _spike(self, step: int, loss: float, norm: float | None) -> Refusal | None:
        action, config = self.config.spike, self.config
        if action == "off":
            return None
        usual, score = score_of(loss, self.losses, least=config.window // 2)
        if config.loss_score is not None and score > config.loss_score:
            return Refusal("loss spike", action, step + 1, loss, loss, usual, score)
        if norm is None or config.gradient_score is None:
            return None
        usual, score = score_of(_log(norm), self.norms, least=config.window // 2, spread=LEAST_SPREAD_OF_LOGARITHM)
        if score > config.gradient_score:
            return Refusal("gradient spike", action, step + 1, norm, loss, math.exp(usual), score)
        return None

    def count(self, refusal: Refusal) -> None:
        """Count a step that is skipped or rolled back.  RefusedStepError: they are too many."""
        step, window = refusal.step - 1, self.config.window
        self.refused = sorted({step, *(one for one in self.refused if one > step - window)})
        if len(self.refused) > self.config.most:
            raise RefusedStepError(
                f"{refusal.in_words()}, and of the last {window} steps {len(self.refused)} batches are refused, where "
                f"guard.most={self.config.most}; so it is not a batch that is wrong but the run. Look at record.jsonl for the "
                "others; a lower optimizer.lr, optimizer.clip_norm=1 or a longer schedule.warmup are the usual cures",
                refusal=replace(refusal, action="stop"),
            )

    def state(self) -> dict[str, Any]:
        """For a checkpoint."""
        return {"losses": list(self.losses), "norms": list(self.norms), "refused": list(self.refused)}

    def load(self, state: Any) -> None:
        """Load what `state` returned, or nothing, as of older versions.  The batches to pass over stay."""
        numbers = state if isinstance(state, dict) else {}
        self.losses.clear()
        self.norms.clear()
        self.losses.extend(float(one) for one in numbers.get("losses", ()))
        self.norms.extend(float(one) for one in numbers.get("norms", ()))
        self.refused = sorted({*(int(one) for one in numbers.get("refused", ())), *self.pass_over})


def score_of(
    value: float, usual: Sequence[float] | deque[float], *, least: int, spread: float | None = None
) -> tuple[float, float]:
    """(median of `usual`, robust z-score of `value`); a score of 0 where `usual` has fewer than `least` numbers.

    spread: the least that a standard deviation counts as; None: LEAST_SPREAD of the median.

    >>> score_of(9.0, [1.0, 2.0, 3.0], least=3)
    (2.0, 4.721435316336167)
    """
    if len(usual) < max(1, least):
        return math.nan, 0.0
    median = statistics.median(usual)
    deviation = TO_NORMAL * statistics.median(abs(one - median) for one in usual)
    return median, (value - median) / max(deviation, LEAST_SPREAD * abs(median) if spread is None else spread, 1e-12)


def _log(norm: float) -> float:
    return math.log(max(norm, 1e-300))


def refused(refusal: Refusal) -> RefusedStepError:
    """The error with which a refused step ends the run."""
    weights = f"the optimizer did not step and the weights are those of step {refusal.step - 1}"
    if refusal.after:
        weights = f"the {refusal.member} did not learn, and the {' and the '.join(refusal.after)} had in this step"
    text = (
        f"{refusal.in_words()}; {weights}. Look at its images, which {{file}} in the run folder names, and run it again with "
        "widefield replay; a lower optimizer.lr, optimizer.clip_norm=1 or a longer schedule.warmup are the usual cures"
    )
    if refusal.is_finite:
        return RefusedStepError(text.format(file="record.jsonl"), refusal=refusal)
    return NonFiniteLossError(text.format(file="nan.json"), refusal=refusal)
