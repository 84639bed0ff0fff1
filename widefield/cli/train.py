"""`widefield train`: train as a recipe says, or resume a run."""

from __future__ import annotations

import os
import sys
from argparse import ArgumentParser, Namespace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from widefield.cli._arguments import add_place, add_trust, count, given_text, number, set_place
from widefield.cli._ranks import world_of
from widefield.cli.init import recipe_of
from widefield.config import RunConfig, json_schema, read_config
from widefield.launchers import is_launched
from widefield.section import to_yaml
from widefield.training.terminal import say

if TYPE_CHECKING:
    from widefield.comm.mesh import World

ORDER = 10
SUMMARY = "train as a recipe says, or go on with a run"
HELP = """\
Train as a recipe says.  Keys of the recipe can be set on the command line, dotted:

  widefield train digits --run runs/first    a recipe that comes with widefield
  widefield train my.yaml optimizer.lr=0.2 schedule.length=5ep seed=3
  widefield train imagefolder data.path=photos model.name=timm/resnet50

A folder in place of a recipe: widefield looks at the images, writes photos.yaml with the reasons of its
choices as comments (widefield init does only that), prints it, and trains.  Where photos.yaml is there
already, it is used as it is:

  widefield train photos/

The same command with the same --run goes on where the run stopped: after Ctrl-C, SIGTERM, a crash or
a kill.  Ctrl-C saves after the step it is in; a second one ends at once.

mesh.auto=true lets the planner choose the plan for this machine (see widefield plan --help); the choice,
its reasons and what it should take are printed and kept in the run folder.

Ranks: one per GPU is started here, or as many as mesh.replicate asks.  Under torchrun, srun, mpirun or
Kubeflow the same command sees its place in the environment and starts nothing:

  torchrun --nproc-per-node 8 -m widefield train my.yaml --run-dir runs/big
  srun --ntasks 16 widefield train my.yaml --run runs/big

(torchrun takes --run for an abbreviation of its own --run-path; --run-dir means the same and passes.)
Without a launcher, type the command once per rank; widefield launch writes jobs for a cluster:

  widefield train my.yaml --run runs/big --rank 0 --world-size 8 --rendezvous host:29500

With --max-restarts the ranks that are started here start again when one fails or is killed, from the newest sound
checkpoint, on the devices that are left; a killed worker of a parameter server starts again by itself, while the
others go on:

  widefield train my.yaml --run runs/long --max-restarts 10

Exit status: 0 complete, 75 asked to stop and to be continued by the same command, 2 an error of yours, others failed.
"""


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument(
        "recipe", nargs="?", help="a YAML file, the name of one that comes with widefield, or a folder of images"
    )
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
    restarts = "start the ranks of this machine again after a failure, so often at most; 0, which is the default: never"
    parser.add_argument("--max-restarts", type=number, default=0, metavar="N", help=restarts)
    least = "after the same failure twice in a row go on with fewer ranks, down to N; without it the run ends then"
    parser.add_argument("--min-ranks", type=count, metavar="N", help=least)
    add_trust(parser)
    add_place(parser)


def run(options: Namespace) -> int:
    set_place(options)
    if options.schema:
        print(json_schema(), end="")
        return 0
    if options.recipe is None:
        raise ValueError("name a recipe or a folder of images, as: widefield train digits")
    if Path(options.recipe).is_dir():
        options.recipe = str(_recipe_for(options.recipe))
    trust = options.trust or options.print_config  # printed, it runs nothing
    config = read_config(options.recipe, options.overrides, run=options.run, trust=trust)
    if options.print_config:
        print(to_yaml(config), end="")
        return 0
    if not is_launched(os.environ):
        text = f"{config.model.name} on {config.data.name}, for {config.schedule.length}: loading torch, the data and the model"
        say(text)
    options.planned = None
    if config.mesh.auto and not is_launched(os.environ):
        config = _planned(config, options)
    world, started = world_of(config, options, lambda: _as_a_rank(options))
    if world is None:
        if started:
            _advise(config, options)
        return started
    from widefield.run import train

    folder = Path(options.run) if options.run else _shared_fresh_folder(world)
    return train(config, folder, world).status


def _recipe_for(folder: str) -> Path:
    """The recipe of a folder of images: the one that is there, or a new one, printed.

    ValueError: several ranks, which would all write it; or a recipe of that name is for other images.
    """
    path = recipe_of(folder)
    if path.is_file():
        named = read_config(path).data.path
        if named is None or Path(folder).resolve() not in (Path(named).resolve(), Path(named).resolve().parent):
            raise ValueError(
                f"the recipe for {folder} would be {path}, which is there and is for {named}; write another one: "
                f"widefield init {folder} --output OTHER.yaml"
            )
        print(f"{path} is there already and is used; delete it to have {folder} looked at again", flush=True)
        return path
    if not is_launched(os.environ):
        say(f"looking at the images in {folder}")
    from widefield.first_recipe import write_recipe
    from widefield.launchers import world_from

    world = world_from(os.environ)
    if world is not None and world.size > 1:
        raise ValueError(f"{world.size} ranks would each write a recipe; write it once before: widefield init {folder}")
    print(write_recipe(folder, path), end="")
    print(f"written to {path}", flush=True)
    return path


def _planned(config: RunConfig, options: Namespace) -> RunConfig:
    """The config with a plan for this machine in place of mesh.auto; ranks get it as overrides, and the same run folder.

    ValueError, NotImplementedError: nothing fits, or the model cannot be planned.
    """
    from widefield.planner.search.automatic import planned_run
    from widefield.planner.search.starting import local_ranks_to_plan

    options.run = options.run or str(_fresh())
    options.planned = _as_a_rank(options)  # ranks of another number plan anew
    found = planned_run(config, Path(options.run), ranks=local_ranks_to_plan(), say=say)
    options.overrides = [*options.overrides, "mesh.auto=false", *found.overrides]
    return found.applied(config)


def _as_a_rank(options: Namespace) -> list[str]:
    """The arguments of the command that every rank runs, all with the same run folder."""
    options.run = options.run or str(_fresh())
    return ["train", options.recipe, *options.overrides, "--run", options.run, *["--trust"] * options.trust]


def _advise(config: RunConfig, options: Namespace) -> None:
    """Where the ranks that were started here ended since one ran out of memory: what would take less, with figures."""
    from widefield.training.out_of_memory import LESS
    from widefield.training.record import read

    try:
        ends = [line for line in read(options.run) if line.get("kind") in ("start", "end")]
        if not ends or ends[-1]["kind"] != "end" or LESS not in str(ends[-1].get("text")):
            return
        from widefield.planner.search.relief import in_words, reliefs

        print(*in_words(*reliefs(config, int(ends[-2]["ranks"]))), sep="\n", file=sys.stderr, flush=True)
    except Exception:  # the run has said what failed: this is extra
        return


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
    (["r.yaml", "--max-restarts", "3", "--min-ranks", "1"], {"max_restarts": 3, "min_ranks": 1}),
    (["r.yaml", "--max-restarts", "-1"], "'-1' is no number; write a whole number, 0 or more"),
    (
        ["r.yaml", "--rank", "1", "--world-size", "4", "--rendezvous", "n0:29500"],
        {"rank": "1", "world_size": "4", "rendezvous": "n0:29500", "local_rank": None, "job": None},
    ),
    (["r.yaml", "--run", ""], "it is empty; give it a value, or leave the option out"),
    (["r.yaml", "--rum", "x"], "not understood: --rum x; see widefield VERB --help"),
]
