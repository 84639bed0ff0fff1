"""`widefield sample`: images that a run's generator makes of noise."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from pathlib import Path
from typing import Any

from widefield.cli._arguments import add_weights, count, given_text, number
from widefield.cli._ranks import world_of
from widefield.config import read_config
from widefield.config.recipe import PREDICTED, on_mesh_of, refuse_unused
from widefield.quantity import count_of

ORDER = 35
SUMMARY = "let a run's generator make images of noise"
HELP = """\
Let the generator of a run that learned images of noise make some.

  widefield sample runs/0001                                  16 images, to predictions/seed_0 of the run
  widefield sample runs/0001 --number 1000 --seed 3 --output made
  widefield sample runs/0001 --number 1000 --output made mesh.replicate=2       two ranks share the images
  widefield sample runs/0001 --output made 'mesh.space=[2,1]'                   two ranks share each image

Image number n of a seed is the same on any number of ranks, and however many there are.
"""


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("run", metavar="RUN_DIR")
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="what to change in the run's config")
    parser.add_argument("--number", type=count, default=16, metavar="N", help="how many images (16)")
    parser.add_argument("--seed", type=number, default=0, metavar="S", help="of the noise (0)")
    parser.add_argument("--output", type=given_text, metavar="DIR", help="an empty or new folder for the images")
    parser.add_argument("--batch-size", type=count, default=16, metavar="N", help="images per pass (16)")
    add_weights(parser, default="best, where the run has them,")


def run(options: Namespace) -> int:
    from widefield.training.run_folder import existing_folder

    refuse_unused(options.overrides)
    config, keys = existing_folder(options.run) / "config.yaml", on_mesh_of(options.overrides, alone=True)
    read = read_config(config, keys, run=options.run, trust=options.trust, builds=PREDICTED)
    world, started = world_of(read, options, lambda: _as_a_rank(options))
    if world is None:
        return started
    from widefield.prediction.samples import sample_images

    output, names = Path(options.output) if options.output else None, ("number", "seed", "batch_size", "weights", "trust")
    asked = {name: getattr(options, name) for name in names}
    found = sample_images(Path(options.run), options.overrides, world, output=output, **asked)
    if world.rank == 0:
        print(found.weights, f"{count_of(options.number, 'image')} made of noise: {found.output}", sep="\n")
    return 0


def _as_a_rank(options: Namespace) -> list[str]:
    """The arguments of the command that every rank runs."""
    arguments = ["sample", options.run, *options.overrides, *["--trust"] * options.trust]
    names = ("number", "seed", "batch-size", "output", "weights")
    given = {name: getattr(options, name.replace("-", "_")) for name in names}
    return arguments + [f"--{name}={value}" for name, value in given.items() if value is not None]


CASES: list[tuple[list[str], dict[str, Any] | str]] = [
    (["runs/a"], {"run": "runs/a", "number": 16, "seed": 0, "output": None}),
    (
        ["runs/a", "--number", "3", "--seed", "7", "mesh.replicate=2"],
        {"number": 3, "seed": 7, "overrides": ["mesh.replicate=2"]},
    ),
    (["runs/a", "--number", "0"], "'0' is no count; write a whole number, 1 or more"),
    ([], "the following arguments are required: RUN_DIR"),
]
