"""The section `agreement` of a recipe: how the copies of the model come to agree on its weights."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from widefield.config.field_types import Positive
from widefield.section import Section

AgreementName = Literal[
    "mean", "adasum", "local_sgd", "post_local_sgd", "hierarchical", "slowmo", "diloco", "gossip", "ad_psgd", "server"
]  # fmt: skip
GraphName = Literal["ring", "complete", "exponential", "one_peer_exponential", "bipartite", "hypercube"]
ServerKind = Literal["synchronous", "asynchronous", "bounded_staleness", "delay_compensated", "hogwild"]
CompressionKind = Literal["fp16", "int8", "topk"]
PERIODIC = ("local_sgd", "post_local_sgd", "hierarchical", "slowmo", "diloco")
"""Those under which copies train by themselves and average their weights now and then."""
_TAKEN_BY: dict[str, tuple[str, ...]] = {
    "period": PERIODIC,
    "start": ("post_local_sgd", "slowmo", "diloco"),
    "groups": ("hierarchical",),
    "outer_rate": ("slowmo", "diloco"),
    "outer_momentum": ("slowmo", "diloco"),
    "keeps_state": PERIODIC,
    "graph": ("gossip",),
    "edges": ("gossip",),
    "global_period": ("gossip",),
    "delay": ("gossip",),
    "servers": ("server",),
    "backup": ("server",),
    "overlap": ("server",),
    "kind": ("server",),
    "bound": ("server",),
    "max_staleness": ("server",),
    "compensation": ("server",),
    "compression": ("server",),
    "compression_share": ("server",),
    "compression_block": ("server",),
}
"""The names that an option is for."""


class AgreementConfig(Section):
    """Written as a section or, without options, as its name alone: `agreement: adasum`."""

    name: AgreementName = "mean"
    """mean: of the gradients, in every step; the only one that gives one device's numbers.  adasum: of the gradients, by
    arXiv:2006.02924; needs a power of two of copies.  The others average weights: local_sgd every `period` steps;
    post_local_sgd every step at first; hierarchical in groups more often; slowmo with momentum over the averages; diloco with
    an outer optimizer (Nesterov) over them; gossip with a few others after every step, and with all never.  ad_psgd: with one
    other before each step, without waiting for anybody's step; the last rank keeps the account of samples.  server: the last
    rank holds the weights, and the others fetch them and push gradients."""
    period: Positive = 8
    """Steps between averages of the weights of all copies."""
    start: Annotated[int, Field(ge=0)] = 0
    """So many steps at first are each followed by an average of all copies."""
    groups: list[list[Positive]] = []
    """Of hierarchical: pairs `[period, copies]`; groups of so many neighbouring copies average every so many steps."""
    outer_rate: Annotated[float, Field(gt=0)] | None = None
    """Learning rate of the step that is made with an average; null: 1 for slowmo, 0.7 for diloco."""
    outer_momentum: Annotated[float, Field(ge=0, lt=1)] | None = None
    """Momentum of that step; null: 0.5 for slowmo, 0.9 for diloco."""
    keeps_state: bool = True
    """Keep the state of each copy's optimizer over an average of all; false begins it anew."""

    graph: GraphName = "one_peer_exponential"
    """Of gossip: whom a copy hears.  ring: its two neighbours.  exponential: those 1, 2, 4, ... places before it;
    one_peer_exponential: one of these by turns.  bipartite: all odd ones hear all even ones.  hypercube: those whose numbers
    differ in one bit.  complete: all."""
    edges: list[list[int]] = []
    """Of gossip, in place of graph: pairs `[sender, hearer]` of copies, one way each, whose mean push-sum finds."""
    global_period: Positive | None = None
    """Of gossip: so many steps after which all average in place of a mix; null: never."""
    delay: Annotated[int, Field(ge=0)] = 0
    """Of gossip: for how many steps a message may be on its way while copies go on; then push-sum counts what is on its way."""
    servers: Positive = 1
    """Of server: how many of the last ranks hold weights and the optimizer's state, each an even part; the first one leads."""
    backup: Annotated[int, Field(ge=0)] = 0
    """Of synchronous: how many workers an update does not wait for (arXiv:1604.00981).  A step's batch is divided among the
    others; a gradient that comes too late is dropped, and its samples are handed out again."""
    kind: ServerKind = "asynchronous"
    """Of server. synchronous: a step with the gradients of all; exact.  asynchronous: an update with each gradient as it comes.
    bounded_staleness: the same, within `bound` or `max_staleness`.  delay_compensated: the same, with gradients corrected for
    what the weights have moved since (arXiv:1609.08326).  hogwild: workers change the weights themselves, in memory that all
    ranks of one machine share, without locks (arXiv:1106.5730); with plain sgd."""
    overlap: bool = False
    """Of server, but synchronous: workers fetch the next weights while they compute a gradient, which are then older by what is
    applied meanwhile."""
    bound: Annotated[int, Field(ge=0)] | None = None
    """Of bounded_staleness: how many updates a worker may be ahead of the slowest one."""
    max_staleness: Annotated[int, Field(ge=0)] | None = None
    """Of bounded_staleness: how many updates may come between the reading of weights and the update with their gradient."""
    compensation: Annotated[float, Field(ge=0)] | None = None
    """Of delay_compensated: its lambda; 0 changes nothing."""
    compression: CompressionKind | None = None
    """Of server: the form in which gradients are pushed; what it leaves out is in the worker's next gradient.  fp16: halves.
    int8: bytes, with a scale for each `compression_block` numbers.  topk: the largest `compression_share` of the numbers."""
    compression_share: Annotated[float, Field(gt=0, le=1)] = 0.01
    """Of topk: the share of the numbers that is pushed."""
    compression_block: Positive = 1024
    """Of int8: how many numbers have one scale."""

    @model_validator(mode="before")
    @classmethod
    def _from_its_name(cls, value: Any) -> Any:
        return {"name": value} if isinstance(value, str) else value

    @model_validator(mode="after")
    def _has_options_of_its_own(self) -> AgreementConfig:
        """ValueError: an option that this way to agree does not have, or groups that are none."""
        for option, names in _TAKEN_BY.items():
            if getattr(self, option) != type(self).model_fields[option].default and self.name not in names:
                raise ValueError(f"{option} is an option of {', '.join(names)}, and the name is {self.name}; leave it out")
        if self.name == "post_local_sgd" and self.start == 0:
            raise ValueError("post_local_sgd without start is local_sgd; set start to the steps that all take together")
        if (self.name == "hierarchical") != bool(self.groups):
            raise ValueError("hierarchical needs groups, as groups=[[2,4]]: four neighbours average every 2 steps")
        if self.edges and self.graph != type(self).model_fields["graph"].default:
            raise ValueError(f"edges and graph={self.graph} both say whom a copy hears; leave one out")
        if self.delay and self.global_period is not None:
            raise ValueError(
                f"global_period={self.global_period} averages what all have and delay={self.delay} leaves some of it on its "
                "way; leave one out"
            )
        bad = [pair for pair in self.edges if len(pair) != 2 or pair[0] == pair[1]]
        if bad:
            raise ValueError(f"edges has {bad[0]}; write [sender, hearer], two copies by their numbers from 0")
        for pair in self.groups:
            if len(pair) != 2 or not (pair[0] < self.period and pair[1] > 1):
                raise ValueError(
                    f"groups has {pair}; write [period, copies], with a period below {self.period}, which is that of all, and "
                    "2 copies or more"
                )
        return self

    @model_validator(mode="after")
    def _has_what_its_kind_of_server_needs(self) -> AgreementConfig:
        """ValueError: options that the kind of server does not have, or lacks."""
        bounds = [name for name in ("bound", "max_staleness") if getattr(self, name) is not None]
        if (self.kind == "bounded_staleness") != (len(bounds) == 1):
            raise ValueError(
                f"kind={self.kind} with {' and '.join(bounds) or 'no bound'}: bounded_staleness takes one of bound and "
                "max_staleness, and the other kinds take none; as kind=bounded_staleness, max_staleness=8"
            )
        if (self.kind == "delay_compensated") != (self.compensation is not None):
            raise ValueError(
                f"kind={self.kind} with compensation={self.compensation}: delay_compensated has one, and the other kinds have "
                "none; as kind=delay_compensated, compensation=0.04"
            )
        if self.overlap and self.kind == "synchronous":
            raise ValueError(
                "overlap with kind=synchronous: the next weights are made of the gradients that are computed, so they cannot "
                "come before; leave overlap out, or set kind=asynchronous"
            )
        if self.kind == "hogwild":
            self._is_alone_with_its_kind()
        if self.backup and self.kind != "synchronous":
            raise ValueError(
                f"backup={self.backup} with kind={self.kind}: only a synchronous update waits for workers; leave backup out, "
                "or set kind=synchronous"
            )
        return self

    def _is_alone_with_its_kind(self) -> None:
        """ValueError: an option of weights that are sent, and Hogwild's are shared."""
        found = [f"servers={self.servers}"] * (self.servers > 1) + ["overlap"] * self.overlap
        found += [] if self.compression is None else [f"compression={self.compression}"]
        if found:
            raise ValueError(
                f"{' and '.join(found)} with kind=hogwild: workers read and change weights in memory that all share, so there "
                "is one copy of them and nothing is sent; leave it out, or set kind=asynchronous"
            )

    @model_validator(mode="after")
    def _has_what_its_compression_needs(self) -> AgreementConfig:
        """ValueError: options of another compression, or a kind of server that has none."""
        for option, kind in (("compression_share", "topk"), ("compression_block", "int8")):
            if getattr(self, option) != type(self).model_fields[option].default and self.compression != kind:
                raise ValueError(
                    f"{option} is an option of compression={kind}, and compression is {self.compression}; leave it out"
                )
        if self.compression is not None and (self.servers > 1 or self.backup):
            other = f"servers={self.servers}" if self.servers > 1 else f"backup={self.backup}"
            raise ValueError(
                f"compression={self.compression} with {other}: a compressed gradient is one of all weights and has what was "
                "left of those before it, so it can be neither cut for several servers nor dropped; leave one out"
            )
        if self.compression is not None and self.kind == "delay_compensated":
            raise ValueError(
                f"compression={self.compression} with kind=delay_compensated: a compressed gradient has what was left of those "
                "before it, which are of other weights, so that its delay cannot be compensated; set kind=asynchronous"
            )
        return self

    @property
    def has_server(self) -> bool:
        """Whether the last ranks compute no gradients, and the others are workers that do not wait for each other."""
        return self.name in ("server", "ad_psgd")

    @property
    def takes_back(self) -> bool:
        """Whether a worker that died may come back, in a process of its own, while the others go on."""
        return self.name == "server" and self.servers == 1 and self.kind != "hogwild"

    @property
    def last_ranks(self) -> str:
        """What the ranks that compute no gradients are, in words."""
        if self.name != "server":
            return f"a rank that keeps their account, {self.name}"
        return f"{'a server' if self.servers == 1 else f'{self.servers} servers'}, {self.kind}"

    def __str__(self) -> str:
        """As `local_sgd every 8 steps`, `gossip on a ring`, `mean`."""
        if self.name == "gossip":
            return f"gossip on {'edges of its own' if self.edges else f'the graph {self.graph}'}"
        return f"{self.name} every {self.period} steps" if self.name in PERIODIC else self.name

    @property
    def steps_apart(self) -> bool:
        """Whether copies take steps of their own, and agree on weights and not on gradients."""
        return self.name in PERIODIC or self.name == "gossip"
