"""The best evaluation of a run so far.

It decides what best.safetensors holds, which checkpoints are kept, and when a run ends early.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from widefield.naming import did_you_mean
from widefield.tasks import Task, example_of, values_of
from widefield.tasks._metrics import RecipeMetric

LOSS = "loss"


@dataclass
class Best:
    """The best evaluation so far.  metric: a key of an evaluation's metrics, or `loss`.

    value, step: of the best evaluation; None before the first one whose value is a number.
    since: how many evaluations came after it, or, where there is none, at all.
    """

    metric: str
    higher_is_better: bool
    value: float | None = None
    step: int | None = None
    since: int = 0

    def add(self, value: float, step: int) -> bool:
        """Count an evaluation; returns whether it is the best so far.  Of equal ones the first stays; NaN is never the best."""
        if self.is_beaten_by(value):
            self.value, self.step, self.since = value, step, 0
            return True
        self.since += 1
        return False

    def is_beaten_by(self, value: float) -> bool:
        if math.isnan(value):
            return False
        return self.value is None or (value > self.value if self.higher_is_better else value < self.value)

    def state(self) -> dict[str, Any]:
        """What a checkpoint holds of it."""
        return dict(vars(self))

    def load(self, state: Mapping[str, Any]) -> None:
        """Go on from what `state` gave; where another metric decided then, the count begins anew."""
        if (state.get("metric"), state.get("higher_is_better")) == (self.metric, self.higher_is_better):
            self.value, self.step, self.since = state["value"], state["step"], state["since"]


def value_in(metric: str, evaluation: Any) -> float:
    """The metric's value in an Evaluation."""
    return evaluation.loss if metric == LOSS else evaluation.metrics[metric]


def best_of(chosen: str | None, task: Task, metrics: list[RecipeMetric], *, num_classes: int) -> Best:
    """The Best of a run at its start.  chosen: `checkpoint.best`; None: the task's headline metric.

    ValueError: no evaluation of the run has this metric, or nothing says whether higher is better.
    """
    if chosen is None or chosen == task.headline:
        return Best(task.headline, task.higher_is_better)
    if chosen == LOSS:
        return Best(LOSS, higher_is_better=False)
    name, sign = (chosen[1:], chosen[0]) if chosen[0] in "+-" else (chosen, "")
    own = [
        name for name in values_of(task.metrics(), *example_of(task, num_classes), name="the metrics") if name != "confusion"
    ]
    added = next((metric for metric in metrics if name == metric.name or name.startswith(f"{metric.name}_")), None)
    if name not in own and added is None:
        names = [*own, *(metric.name for metric in metrics), LOSS]
        raise ValueError(
            f"checkpoint.best={chosen} is no metric of this run{did_you_mean(name, names)} Its evaluations have: "
            f"{', '.join(names)}; add it to task.metrics, or name one of these"
        )
    higher = task.higher_is_better if added is None else _says_higher(added)
    if not sign and higher is None:
        raise ValueError(f"checkpoint.best={chosen}: {name} does not say whether higher is better; write +{name} or -{name}")
    return Best(name, sign != "-" if sign else bool(higher))


def _says_higher(metric: RecipeMetric) -> bool | None:
    """Whether a higher value of a metric is better; None where it does not say, as those of cases."""
    return None if metric.make is None else metric.make().higher_is_better
