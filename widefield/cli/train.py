"""`widefield train`: train as a recipe says, or resume a run."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from widefield.cli._arguments import add_trust, given_text
from widefield.cli._ranks import world_of
from widefield.config import json_schema, read_config
from widefield.section import to_yaml

if TYPE_CHECKING:
    from widefield.comm.mesh import World

ORDER = 10
SUMMARY = "train as a recipe says, or go on with a run"
HELP = """\
Train as a recipe says.  Keys of the recipe can be set on the command line, dotted:

  widefield train recipes/digits.yaml --run runs/first
  widefield train digits --run runs/first                  the recipe of that name that comes with widefield
  widefield train recipes/digits.yaml optimizer.lr=0.2 schedule.length=5ep seed=3
  widefield train recipes/imagefolder.yaml data.path=photos model.name=timm/resnet50

The same command with the same --run goes on where the run stopped: after Ctrl-C, SIGTERM, a crash or
a kill.  Ctrl-C saves after the step it is in; a second one ends at once.

Ranks: one per GPU is started here, or as many as mesh.replicate asks.  Under torchrun, srun, mpirun or
Kubeflow the same command sees its place in the environment and starts nothing:

  torchrun --nproc-per-node 8 -m widefield train recipes/imagefolder.yaml data.path=photos --run-dir runs/big
  srun --ntasks 16 widefield train recipes/imagefolder.yaml data.path=photos --run runs/big

(torchrun takes --run for an abbreviation of its own --run-path; --run-dir means the same and passes.)
"""


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("recipe", nargs="?", help="a YAML file, or the name of one that comes with widefield, as digits")
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="what to change in the recipe")
    parser.add_argument(
        "--run",
        "--run-dir",
        dest="run",
        type=given_text,
        metavar="DIR",
        help="run folder; a fresh numbered one under runs/ if left out",
    )
    parser.add_argument("--print-config", action="store_true", help="print the whole config, defaults included, and stop")
    parser.add_argument("--schema", action="store_true", help="print the JSON Schema of recipes, for editors, and stop")
    add_trust(parser)


def run(options: Namespace) -> int:
    if options.schema:
        print(json_schema(), end="")
        return 0
    if options.recipe is None:
        raise ValueError("name a recipe, as: widefield train recipes/digits.yaml")
    trust = options.trust or options.print_config  # printed, it runs nothing
    config = read_config(options.recipe, options.overrides, run=options.run, trust=trust)
    if options.print_config:
        print(to_yaml(config), end="")
        return 0
    world, started = world_of(config, options, lambda: _as_a_rank(options))
    if world is None:
        return started
    from widefield.run import train

    folder = Path(options.run) if options.run else _shared_fresh_folder(world)
    return train(config, folder, world).status


def _as_a_rank(options: Namespace) -> list[str]:
    """The arguments of the command that every rank runs, all with the same run folder."""
    return ["train", options.recipe, *options.overrides, "--run", options.run or str(_fresh()), *["--trust"] * options.trust]


def _fresh() -> Path:
    from widefield.training.run_folder import fresh_folder

    return fresh_folder()


def _shared_fresh_folder(world: World) -> Path:
    """A fresh folder for a single rank.  ValueError: several ranks, which cannot agree on one before they join."""
    if world.size > 1:
        raise ValueError(
            f"{world.size} ranks were started by {world.launcher} without --run, and each would make a folder of its own; "
            "add --run-dir DIR"
        )
    return _fresh()


CASES: list[tuple[list[str], dict[str, Any] | str]] = [
    (["r.yaml", "seed=3", "optimizer.lr=0.2"], {"recipe": "r.yaml", "overrides": ["seed=3", "optimizer.lr=0.2"], "run": None}),
    (["r.yaml", "--run", "runs/a", "seed=3"], {"run": "runs/a", "overrides": ["seed=3"], "trust": False}),
    (["r.yaml", "--run-dir", "runs/a"], {"run": "runs/a"}),  # torchrun takes --run for its own
    (["--schema"], {"schema": True, "recipe": None}),
    (["r.yaml", "--run", ""], "it is empty; give it a value, or leave the option out"),
    (["r.yaml", "--rum", "x"], "not understood: --rum x; see widefield VERB --help"),
]
