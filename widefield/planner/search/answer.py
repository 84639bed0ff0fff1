"""All that `widefield plan` says of a model on a cluster, as data: the page, the table and --json are made of it alone."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from widefield.planner.search.backwards import Reply
from widefield.planner.search.estimate import PlanEstimate
from widefield.planner.search.pricing import Pricing
from widefield.planner.search.reasons import changes, reasons, verdict
from widefield.planner.search.scaling import ScalePoint, weak_scaling, where_it_stops
from widefield.planner.search.search import SearchResult, search

SHOWN = 8
"""Plans of which everything is kept for the page."""


@dataclass(frozen=True)
class PlanAnswer:
    """The plans of a model on a cluster, the fastest that fits first.

    best: None where none fits, and `verdict` says what is missing.  reasons: why the others lost.  changes: what would change
    the choice.  advice: rules of thumb for the cluster.  answers: to the questions asked backwards.
    """

    model: str
    data: str
    image: tuple[int, ...]
    batch: int
    cluster: Any
    precision: str
    estimates: list[PlanEstimate]
    best: PlanEstimate | None
    verdict: str
    reasons: list[str] = field(default_factory=list)
    changes: list[str] = field(default_factory=list)
    advice: list[str] = field(default_factory=list)
    scaling: list[ScalePoint] = field(default_factory=list)
    stops: str = ""
    answers: list[Reply] = field(default_factory=list)
    emulations: int = 0
    seconds: float = 0.0

    def to_tree(self, *, most: int | None = None) -> dict[str, Any]:
        """As JSON can hold it.  most: plans, the best ones; None: all."""
        cluster = self.cluster
        return {
            "model": self.model, "data": self.data, "image": list(self.image), "batch": self.batch,
            "precision": self.precision,
            "cluster": {
                "text": cluster.text, "nodes": cluster.nodes, "devices_per_node": cluster.devices_per_node,
                "device": cluster.device.name, "memory_bytes": cluster.device.memory_bytes, "ranks": cluster.ranks,
                "inside": cluster.inside.name, "between": cluster.between.name,
            },
            "verdict": self.verdict, "best": None if self.best is None else self.best.to_tree(),
            "plans": [estimate.to_tree() for estimate in self.estimates[:most]],
            "reasons": self.reasons, "changes": self.changes, "advice": self.advice,
            "scaling": [point.to_tree() for point in self.scaling], "stops": self.stops,
            "answers": [answer.to_tree() for answer in self.answers],
            "emulations": self.emulations, "planning_seconds": self.seconds,
        }  # fmt: skip


def answer(
    pricing: Pricing,
    image: Sequence[int],
    *,
    data: str,
    seconds: float,
    questions: Sequence[Callable[[Pricing, SearchResult], Reply]] = (),
    scales: bool = True,
    say: Callable[[str], None] = lambda text: None,
) -> PlanAnswer:
    """Search the plans of a cluster's devices, and answer further questions.

    image: (C, *pixels).  data: what the images are, in words.  seconds: for the search alone.
    ValueError: no plan gives every rank work; all plans are refused for one reason.
    CannotEmulate: the model's operations depend on the values of pixels.
    """
    began = time.monotonic()
    cluster = pricing.cluster
    found = search(pricing, cluster.ranks, tuple(image[1:]), seconds=seconds, say=say)
    best = found.best
    reasons_of_all = {estimate.reason for estimate in found.estimates}
    if found.estimates and len(reasons_of_all) == 1 and "" not in reasons_of_all:
        raise ValueError(reasons_of_all.pop())  # it has nothing to do with the plans
    points = weak_scaling(pricing, best.layout) if best is not None and scales else []
    answers = [question(pricing, found) for question in questions]
    return PlanAnswer(
        pricing.config.model.name, data, tuple(image), pricing.batch, cluster, pricing.config.precision or "float32",
        _in_order(found), best, verdict(found, f"one {cluster.device.name}"), reasons(found), changes(found), cluster.advice(),
        points, where_it_stops(points) if points else "", answers, pricing.tally.emulations, time.monotonic() - began,
    )  # fmt: skip


def _in_order(found: SearchResult) -> list[PlanEstimate]:
    """Those that fit by their time, then those that do not by what is missing, then the refused ones."""
    large = [estimate for estimate in found.estimates if estimate.state == "too large"]
    refused = [estimate for estimate in found.estimates if estimate.state == "refused"]
    return [*found.ranking, *sorted(large, key=lambda e: e.missing_bytes), *refused]
