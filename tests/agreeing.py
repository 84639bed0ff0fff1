"""Ways to agree, and random workers, for the tests of the room `agreement`."""

import random
from dataclasses import replace
from typing import Any

from widefield.agreement import (
    AllReduce,
    Connection,
    Death,
    Delay,
    DelayCompensation,
    Descent,
    Gossip,
    PairwiseGossip,
    ParameterServer,
    Workers,
    diloco,
    hierarchical,
    local_sgd,
    post_local_sgd,
    slowmo,
)  # fmt: skip

BATCH = 4
SGD = Descent(0.05)
EACH = Descent(0.05, lr_samples=4 * BATCH)
"""For a push of one worker of 4: the learning rate is that of the batches of all."""

ALGORITHMS: dict[str, Any] = {
    "all_reduce": AllReduce(SGD),
    "local_sgd": local_sgd(4, SGD),
    "post_local_sgd": post_local_sgd(3, 2, SGD),
    "hierarchical": hierarchical(6, ((2, 2),), SGD),
    "slowmo": slowmo(3, SGD, momentum=0.3),
    "slowmo_reset": replace(slowmo(3, Descent(0.02, momentum=0.5), momentum=0.3), keeps_state=False),
    "diloco": diloco(3, Descent(0.01, kind="adamw")),
    "gossip_ring": Gossip(SGD, "ring"),
    "gossip_exponential": Gossip(SGD, "exponential"),
    "gossip_combines_first": Gossip(SGD, "ring", combines_first=True),
    "gossip_global": Gossip(SGD, "ring", global_period=3),
    "push_sum": Gossip(SGD, push_sum=True),
    "push_sum_late": Gossip(SGD, push_sum=True, delay=2),
    "pairwise": PairwiseGossip(SGD),
    "synchronous": ParameterServer(Descent(0.05, momentum=0.5), "synchronous", servers=2),
    "backup": ParameterServer(SGD, "synchronous", backup=1),
    "asynchronous": ParameterServer(EACH, servers=2),
    "bounded": ParameterServer(EACH, bound=1, servers=2),
    "bounded_delay": ParameterServer(EACH, max_staleness=4),
    "compensated": ParameterServer(EACH, compensation=DelayCompensation(0.04)),
    "compensated_adaptive": ParameterServer(EACH, compensation=DelayCompensation(0.04, decay=0.95), servers=3),
    "hogwild": ParameterServer(EACH, "hogwild", servers=3),
}  # fmt: skip
ASYNCHRONOUS = [
    "pairwise", "asynchronous", "bounded", "bounded_delay", "compensated", "compensated_adaptive", "hogwild", "push_sum_late",
]  # fmt: skip
UNEVEN = Workers(4, Delay(1.0, "lognormal", 0.4), connection=Connection(Delay(0.05, "exponential"), 1e4))
"""Four workers whose times differ from batch to batch, with links that matter."""


def random_workers(seed: int, *, count: int | None = None, dying: bool = False) -> Workers:
    """Workers with random speeds and links.  dying: some die, half of them come back, and some of these die again."""
    generator = random.Random(f"workers {seed}")
    count = count or generator.choice([2, 3, 4, 5, 8])
    kind = generator.choice(["constant", "uniform", "exponential", "lognormal"])
    slow = {generator.randrange(count): generator.choice([0.5, 2.0, 5.0])}
    connection = Connection(Delay(generator.choice([0.0, 0.1, 1.0]), "exponential"), generator.choice([1e2, 1e4, float("inf")]))
    deaths = _deaths(generator, count) if dying else ()
    return Workers(count, Delay(1.0, kind, 0.5), slow=slow, connection=connection, deaths=deaths)


def _deaths(generator: random.Random, count: int) -> tuple[Death, ...]:
    deaths = []
    for worker in generator.sample(range(count), generator.randint(1, count - 1)):
        at = generator.uniform(0, 12)
        back = generator.choice([None, at + generator.uniform(0, 5)])
        deaths.append(Death(worker, at, back))
        if back is not None and generator.random() < 0.5:
            deaths.append(Death(worker, back + generator.uniform(0, 3)))
    return tuple(deaths)
