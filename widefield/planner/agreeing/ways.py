"""The ways to agree that are compared: each as a recipe asks for it, or as the simulator alone has it."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from widefield.agreement import (
    AllReduce,
    Descent,
    Gossip,
    MixingGraph,
    PairwiseGossip,
    ParameterServer,
    PeriodicAveraging,
    SlowMomentum,
)
from widefield.agreement.mixing import of_edges
from widefield.agreement.simulator import Algorithm
from widefield.asynchrony.weights import compensation_of, compression_of
from widefield.config.agreement import PERIODIC, AgreementConfig
from widefield.naming import did_you_mean

LEARNING_RATE = 1.0
"""Of all ways, with plain SGD, on the small problem."""
FASTEST_GROUP = 8
"""Workers of a group of `hierarchical` where the recipe names none: the devices of a usual node."""
ELSEWHERE = {
    "adasum": "it combines gradients with the messages of mean, and the simulator has no rule for it; ask for mean",
    "server": "there are several kinds; ask for synchronous, asynchronous, bounded_staleness, delay_compensated or hogwild",
}
"""Names of a recipe that are none here, and why."""


@dataclass(frozen=True)
class AgreementOption:
    """recipe: what a recipe's `agreement` says; None: the simulator alone has it.

    only: what the simulator alone has, of (workers, plain SGD, SGD whose rate is of a step of all workers).
    """

    name: str
    recipe: dict[str, Any] | None
    only: Callable[[int, Descent, Descent], Algorithm] | None = None

    def setting(self, asked: AgreementConfig, workers: int) -> AgreementConfig | None:
        """The recipe's section, with the options of the recipe at hand where that agrees in this way."""
        if self.recipe is None:
            return None
        options = {key: value(workers) if callable(value) else value for key, value in self.recipe.items()}
        found = AgreementConfig(**options)
        return asked if _kind_of(asked) == _kind_of(found) else found

    def recipe_text(self, asked: AgreementConfig, workers: int) -> str | None:
        """As `agreement={name: gossip}`."""
        setting = self.setting(asked, workers)
        if setting is None:
            return None
        options = setting.model_dump(exclude_defaults=True)
        text = ", ".join(f"{key}: {json.dumps(value)}".replace('"', "") for key, value in options.items())
        return f"agreement={{{text or 'name: mean'}}}"

    def algorithm(self, asked: AgreementConfig, workers: int, samples: int) -> Algorithm:
        """As the simulator runs it.  samples: of a step of all workers."""
        plain, shared = Descent(lr=LEARNING_RATE), Descent(lr=LEARNING_RATE, lr_samples=samples)
        setting = self.setting(asked, workers)
        if setting is not None:
            return simulated(setting, plain, shared)
        assert self.only is not None, f"{self.name} is in recipes or in the simulator"
        return self.only(workers, plain, shared)


def _kind_of(asked: AgreementConfig) -> tuple[object, ...]:
    """What two sections of the same way have in common, whatever their other options."""
    return asked.name, asked.kind, asked.bound is not None, asked.delay > 0, asked.compression is not None


def simulated(asked: AgreementConfig, plain: Descent, shared: Descent) -> Algorithm:
    """A recipe's section as the simulator's algorithm.

    plain: the optimizer of a worker, or of a step of all.  shared: the same, for updates with single gradients.
    """
    if asked.name == "mean":
        return AllReduce(plain)
    if asked.name in PERIODIC:
        return _periodic(asked, plain)
    if asked.name == "gossip":
        graph = _of_edges(asked.edges) if asked.edges else asked.graph
        push_sum = bool(asked.edges) or asked.delay > 0
        return Gossip(plain, graph, push_sum=push_sum, delay=asked.delay, global_period=asked.global_period)
    if asked.name == "ad_psgd":
        return PairwiseGossip(plain)
    assert asked.name == "server", f"the simulator has no rule for {asked.name}"
    compression, compensation = compression_of(asked), compensation_of(asked)
    if asked.kind == "synchronous":
        return ParameterServer(plain, "synchronous", compression=compression)
    if asked.kind == "hogwild":
        return ParameterServer(shared, "hogwild")
    return ParameterServer(
        shared, bound=asked.bound, max_staleness=asked.max_staleness, compensation=compensation, compression=compression
    )


def _periodic(asked: AgreementConfig, plain: Descent) -> PeriodicAveraging:
    def given(value: float | None, otherwise: float) -> float:
        return otherwise if value is None else value

    outer: Descent | SlowMomentum | None = None
    if asked.name == "slowmo":
        outer = SlowMomentum(given(asked.outer_rate, 1.0), given(asked.outer_momentum, 0.5))
    elif asked.name == "diloco":
        momentum = given(asked.outer_momentum, 0.9)
        outer = Descent(lr=given(asked.outer_rate, 0.7), momentum=momentum, nesterov=momentum > 0)
    groups = tuple((period, size) for period, size in asked.groups)
    return PeriodicAveraging(plain, asked.period, start=asked.start, groups=groups, outer=outer, keeps_state=asked.keeps_state)


def _of_edges(edges: Sequence[Sequence[int]]) -> Callable[[int], MixingGraph]:
    return lambda workers: of_edges(workers, [(one, other) for one, other in edges], directed=True)


def _server(kind: str, **options: Any) -> dict[str, Any]:
    return {"name": "server", "kind": kind, **options}


def backup_workers(workers: int) -> int:
    """How many a synchronous server does not wait for: one in 16, and one at least."""
    return max(1, workers // 16)


WAYS = {
    way.name: way
    for way in (
        AgreementOption("mean", {"name": "mean"}),
        AgreementOption("local_sgd", {"name": "local_sgd"}),
        AgreementOption("post_local_sgd", {"name": "post_local_sgd", "start": 8}),
        AgreementOption("hierarchical", {"name": "hierarchical", "groups": lambda workers: [[2, min(FASTEST_GROUP, workers)]]}),
        AgreementOption("slowmo", {"name": "slowmo"}),
        AgreementOption("diloco", {"name": "diloco"}),
        AgreementOption("gossip", {"name": "gossip"}),
        AgreementOption("overlapped_gossip", {"name": "gossip", "delay": 1}),
        AgreementOption("ad_psgd", {"name": "ad_psgd"}),
        AgreementOption("synchronous", _server("synchronous")),
        AgreementOption("backup_workers", None,
            lambda workers, plain, shared: ParameterServer(plain, "synchronous", backup=backup_workers(workers))),
        AgreementOption("asynchronous", _server("asynchronous")),
        AgreementOption("compressed", _server("asynchronous", compression="int8")),
        AgreementOption("bounded_staleness", _server("bounded_staleness", bound=4)),
        AgreementOption("max_staleness", _server("bounded_staleness", max_staleness=lambda workers: 2 * workers)),
        AgreementOption("delay_compensated", _server("delay_compensated", compensation=0.04)),
        AgreementOption("hogwild", _server("hogwild")),
    )
}  # fmt: skip
"""All that are compared, in the order of the table."""


def ways_named(name: str) -> list[AgreementOption]:
    """The ways of `all`, or the one of a name.  ValueError: there is none."""
    if name == "all":
        return list(WAYS.values())
    if name in ELSEWHERE:
        raise ValueError(f"--agreement {name}: {ELSEWHERE[name]}")
    if name not in WAYS:
        raise ValueError(
            f"--agreement {name} is no way to agree{did_you_mean(name, ['all', *WAYS])} There are: all, {', '.join(WAYS)}."
        )
    return [WAYS[name]]


def notes_of(ways: Sequence[AgreementOption]) -> list[str]:
    """What the figures of some ways take for granted, a sentence each."""
    return ["hogwild is for workers on one machine, whose memory they share"] * (WAYS["hogwild"] in ways)
