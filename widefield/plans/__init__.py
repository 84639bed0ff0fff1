"""How a run is laid out over ranks, as data: the Plan and its text, the plan of a config, and what a plan is refused for.

Imports no torch, and what lies above it only by name, where a plan is checked.
"""

from widefield.plans.checks import check
from widefield.plans.from_config import plan_of, ranks_asked_for
from widefield.plans.plan import Plan, from_text, to_text

__all__ = ["Plan", "check", "from_text", "plan_of", "ranks_asked_for", "to_text"]
