"""The tile rule of a traced operation, applied to arguments with given layouts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from widefield.capture.decompositions import OWN_RULES
from widefield.capture.ir import Node
from widefield.geometry.layout import Layout
from widefield.rules import RULES, Description, Meta


@dataclass(frozen=True)
class Refused:
    """A rule's refusal, with its text."""

    why: str


def rule_of(node: Node) -> Callable | None:
    """The rule of an operation, or None.  A backward operation in a graph has none: autograd differentiates the graph."""
    if node.op in OWN_RULES:
        return OWN_RULES[node.op]
    return RULES.get(node.op) if "_backward" not in str(node.op) else None


def description_of(node: Node, layouts: Sequence[Layout | None]) -> Description | Refused:
    """The rule's description if the tensor arguments, in order, have these layouts; None for a plain tensor."""
    metas = (
        Meta(value.shape, value.dtype, layout, number)
        for number, (value, layout) in enumerate(zip(node.reads, layouts, strict=True))
    )
    args, kwargs = node.filled(metas)
    rule = rule_of(node)
    assert rule is not None, f"{node.op} has no rule"
    try:
        return rule(*args, **kwargs)
    except NotImplementedError as error:
        return Refused(str(error))
