"""How replicas come to agree on the weights: a file per algorithm, rules on tensors that know neither processes nor networks.

    mixing          who hears whom, with what weight, and how fast that makes all agree
    descent         the optimizer of a worker, a server or an outer step, on one tensor
    all_reduce      the mean of the gradients after every batch: synchronous data-parallel training
    periodic        the mean of the weights now and then: local SGD, post-local, hierarchical, SlowMo, DiLoCo
    gossip          means with a few others: D-PSGD, push-sum (SGP, overlapped SGP), AD-PSGD, periodic global averages
    compression     gradients in fewer bytes, and what that leaves out for the next one
    server          parameter servers: synchronous, with backup workers, asynchronous, bounded staleness, DC-ASGD, Hogwild
    serving         the server of a real run: who may read now, and which gradients may be applied

A simulator runs them in virtual time, in one process, from a seed.  Times do not depend on weights, so it first writes the log
of all events and then computes the numbers from it; a log gives the same bits whenever it is replayed.

    workers         how long workers compute, how they are connected, who is slow, dies and comes back
    events          the log, and the queue of what is to come
    sample_account  each sample of each epoch once, whoever dies
    run_times, round_times, pair_times, server_times    when what happens
    peer_weights, server_weights                        what it does to the numbers
    objectives      what is learned: a quadratic, softmax regression, a module
    measures        loss, staleness, consensus distance, bytes, idle time, speed
    simulator       `simulate`, `simulate_times` (a log without numbers), `replay`

Only all_reduce, and what the tests show to be equal to it, computes one device's numbers.  The others give that up for speed,
so they have to be asked for by name.
"""

from widefield.agreement.all_reduce import AllReduce
from widefield.agreement.compression import Compression
from widefield.agreement.descent import Descent
from widefield.agreement.events import EventLog
from widefield.agreement.gossip import Gossip, PairwiseGossip
from widefield.agreement.measures import SimulatedRun
from widefield.agreement.mixing import MixingGraph, contraction, spectral_gap
from widefield.agreement.objectives import Objective, digits, of_module, quadratic, softmax_regression
from widefield.agreement.periodic import (
    PeriodicAveraging,
    SlowMomentum,
    diloco,
    hierarchical,
    local_sgd,
    post_local_sgd,
    slowmo,
)
from widefield.agreement.run_times import AllDiedError
from widefield.agreement.server import DelayCompensation, ParameterServer
from widefield.agreement.simulator import replay, simulate, simulate_times
from widefield.agreement.workers import Connection, Death, Delay, Workers

__all__ = [
    "AllDiedError", "AllReduce", "Compression", "Connection", "Death", "Delay", "DelayCompensation", "Descent", "EventLog",
    "Gossip", "MixingGraph", "Objective", "PairwiseGossip", "ParameterServer", "PeriodicAveraging", "SimulatedRun",
    "SlowMomentum", "Workers", "contraction", "digits", "diloco", "hierarchical", "local_sgd", "of_module", "post_local_sgd",
    "quadratic", "replay", "simulate", "simulate_times", "slowmo", "softmax_regression", "spectral_gap",
]  # fmt: skip
