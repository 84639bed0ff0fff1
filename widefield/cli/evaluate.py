"""`widefield evaluate`: a run's weights on every image of its evaluation split."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from pathlib import Path
from typing import Any

from widefield.cli._arguments import add_place, add_weights, set_place
from widefield.cli._ranks import world_of
from widefield.config import read_config
from widefield.config.recipe import EVALUATED, refuse_unused

ORDER = 20
SUMMARY = "evaluate a run's weights exactly"
HELP = """\
Evaluate a run's weights on its evaluation split: every image exactly once, on any number of ranks.  Prints the scores of every
class, and writes them to evaluated.json and evaluated.csv in the run folder.

  widefield evaluate runs/0001
  widefield evaluate runs/0001 mesh.replicate=2 data.evaluate_batch_size=512
  widefield evaluate runs/0001 data.path=other_photos
  widefield evaluate runs/0001 --weights best
  widefield evaluate runs/mine model.name=my_package.nets:build      the run's own model, named by you

A run folder's config.yaml may not name code of its own, for the folder may be anybody's; --trust lets it.
"""


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("run", metavar="RUN_DIR")
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="what to change in the run's config")
    add_weights(parser, default="last")
    add_place(parser)


def run(options: Namespace) -> int:
    set_place(options)
    from widefield.training.run_folder import existing_folder

    config = read_config(
        existing_folder(options.run) / "config.yaml", options.overrides, run=options.run, trust=options.trust, builds=EVALUATED
    )
    refuse_unused(options.overrides)
    further = ["--weights", options.weights] * bool(options.weights) + ["--trust"] * options.trust
    world, started = world_of(config, options, lambda: ["evaluate", options.run, *options.overrides, *further])
    if world is None:
        return started
    from widefield.inference import evaluate_run

    folder, overrides = Path(options.run), options.overrides
    evaluation = evaluate_run(folder, overrides, world, weights=options.weights, trust=options.trust)
    if world.rank == 0:
        from widefield.training.evaluation_files import write_scores
        from widefield.training.scores import table_in_words

        print(*table_in_words(evaluation), f"written to {write_scores(folder, evaluation)}", sep="\n")
        print(f"{evaluation.sentence}  loss {evaluation.loss:.4g}")
    return 0


CASES: list[tuple[list[str], dict[str, Any] | str]] = [
    (["runs/a", "mesh.replicate=2"], {"run": "runs/a", "overrides": ["mesh.replicate=2"], "weights": None, "trust": False}),
    (["runs/a", "--weights", "w.safetensors", "seed=3"], {"weights": "w.safetensors", "overrides": ["seed=3"]}),
    (["runs/a", "--weights", " "], "it is empty; give it a value"),
    ([], "the following arguments are required: RUN_DIR"),
]
