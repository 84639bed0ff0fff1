"""`widefield bench`: plans against each other on this machine."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from pathlib import Path
from typing import Any

from widefield.cli._arguments import add_trust, given_text

ORDER = 60
SUMMARY = "compare plans on this machine"
HELP = """\
Which way of using this machine is fastest for this model, these images and this batch?  Tries plans one
after another, each in processes of its own, from the same weights on the same batches, once with the
recipe's loader and once with a batch held in memory; prints a table and writes bench.json, bench.csv and
report.html.

  widefield bench recipes/digits.yaml
  widefield bench recipes/page.yaml --ranks 2 --steps 5
  widefield bench recipes/digits.yaml --plans 'replicate=2; mesh.replicate=2 gradient.bucket_mib=1'
  widefield bench recipes/imagefolder.yaml data.path=photos --trap

A plan that cannot run is listed with the reason.  Where plans wait for the loader they are not ranked.
--trap runs one plan with few and with many loader workers: what a comparison measures that gives them
unequally.  Exits with 0, with 1 where a plan failed, with 2 where none could run.
"""


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("recipe", help="a YAML file, as recipes/digits.yaml")
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="what to change in the recipe")
    parser.add_argument("--ranks", type=int, metavar="N", help="for plans of several; the GPUs, or cores up to 4, if left out")
    parser.add_argument("--steps", type=int, default=10, metavar="N", help="timed steps of each kind (10)")
    parser.add_argument("--warmup", type=int, default=3, metavar="N", help="steps before, or what the loader has ready (3)")
    parser.add_argument(
        "--plans", type=given_text, metavar="LIST", help="names or overrides with ; between them; all if left out"
    )
    parser.add_argument("--out", type=given_text, metavar="DIR", help="folder to write; a fresh runs/bench-... if left out")
    parser.add_argument("--trap", action="store_true", help="one plan with few and with many loader workers, besides")
    parser.add_argument("--timeline", action="store_true", help="keep a Chrome trace of every rank")
    add_trust(parser)


def run(options: Namespace) -> int:
    from widefield.bench import BenchRequest, bench

    names = ("recipe", "overrides", "ranks", "steps", "warmup", "plans", "trap", "timeline", "trust")
    out = Path(options.out) if options.out else None
    return bench(
        BenchRequest(**{name: getattr(options, name) for name in names}, out=out), lambda text: print(text, flush=True)
    )


CASES: list[tuple[list[str], dict[str, Any] | str]] = [
    (
        ["r.yaml", "--ranks", "2", "--trap", "seed=3"],
        {"recipe": "r.yaml", "ranks": 2, "trap": True, "overrides": ["seed=3"], "steps": 10, "warmup": 3},
    ),
    (["r.yaml", "--plans", "one rank; mesh.replicate=2"], {"plans": "one rank; mesh.replicate=2", "out": None}),
    (["r.yaml", "--steps", "few"], "argument --steps: invalid int value: 'few'"),
    (["r.yaml", "--plans", ""], "it is empty; give it a value"),
]
