"""How a run is parallelized, as data: the Plan and its text, the plan of a config, and the check of a plan.

Imports no torch, except for checking a plan, which loads the strategies by name.
"""

from widefield.plans.automatic import check_automatic
from widefield.plans.checks import check
from widefield.plans.from_config import plan_of, ranks_asked_for, ranks_of_a_replica
from widefield.plans.plan import Plan, from_text, to_text
from widefield.plans.refit import refit

__all__ = [
    "Plan",
    "check",
    "check_automatic",
    "from_text",
    "plan_of",
    "ranks_asked_for",
    "ranks_of_a_replica",
    "refit",
    "to_text",
]
