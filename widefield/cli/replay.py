"""`widefield replay`: one step of a run again, and which module first made NaN in it."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from typing import Any

from widefield.cli._arguments import add_trust, count

ORDER = 77
SUMMARY = "run one step of a run again, and see where NaN came from"
HELP = """\
Run one step of a run again, on one rank and without taking it: with the weights of the newest checkpoint before it, the
steps between the two from the data, and the batch that the guard kept, or else the data's.  Prints the loss, the module
whose output was the first that is not finite, the same of gradients, and the norm of each module's gradient.

  widefield replay runs/0001 37
  widefield replay runs/0001 37 --from-checkpoint      without the steps between
  widefield replay runs/0001 37 precision=float64      is it the precision?

The run folder stays as it is.
"""


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("run", metavar="RUN_DIR")
    parser.add_argument("step", type=count, metavar="STEP", help="the number of the step, as in the run's record")
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="what to change in the run's config")
    parser.add_argument("--from-checkpoint", action="store_true", help="give the batch to the checkpoint's own weights")
    parser.add_argument("--most", type=count, default=30, metavar="N", help="modules whose gradients are shown; 30 if left out")
    add_trust(parser)


def run(options: Namespace) -> int:
    from widefield.training.replay import replay_step

    found = replay_step(
        options.run, options.step, options.overrides, from_checkpoint=options.from_checkpoint, trust=options.trust
    )
    print(*found.in_words(most=options.most), sep="\n")
    return 0


CASES: list[tuple[list[str], dict[str, Any] | str]] = [
    (["runs/a", "37"], {"run": "runs/a", "step": 37, "overrides": [], "from_checkpoint": False, "most": 30, "trust": False}),
    (["runs/a", "37", "precision=float64", "--from-checkpoint"], {"from_checkpoint": True, "overrides": ["precision=float64"]}),
    (["runs/a", "0"], "'0' is no count; write a whole number, 1 or more"),
    (["runs/a"], "the following arguments are required: STEP"),
]
