"""`widefield doctor`: what would stop a run here; what stopped one, from its logs."""

from __future__ import annotations

import json
import os
from argparse import ArgumentParser, ArgumentTypeError, Namespace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from widefield.cli._arguments import add_trust, count, given_text
from widefield.refusal import printable

if TYPE_CHECKING:
    from widefield.config import RunConfig
    from widefield.diagnosis.finding import Checkup
    from widefield.diagnosis.findings import Diagnosis

ORDER = 58
SUMMARY = "what would stop a run here, and what stopped one"
HELP = """\
Before a run: looks at versions, CUDA, NCCL and driver, GPUs, links, host names, ports, clocks, shared
memory, limits, disk and the run folder, measures messages, and compares a small net on all ranks with
one.  Prints a table: check, state (ok, warn, bad, not here), figure, and what to do.

  widefield doctor
  widefield doctor my.yaml mesh.replicate=4 --run runs/big
  widefield doctor my.yaml --cluster 2x8xH100-80G

Start it as the run will be started, and it looks at every host, compares them, and lets them call each
other.  Rank 0 prints:

  srun widefield doctor my.yaml --run runs/big
  torchrun --nproc-per-node 8 -m -- widefield doctor my.yaml --run-dir runs/big

After a run: reads its folder, or logs of torchrun, Slurm and NCCL, tracebacks and batch scripts, and says
what went wrong, from which line it concludes that, what to do, and which usual cures are none:

  widefield doctor runs/0007
  widefield doctor slurm-4711.out job.sh

--json prints the same as data.  Exits with 0 where nothing is bad, with 1 where something is.
"""


def add_arguments(parser: ArgumentParser) -> None:
    text = "before a run a recipe, with KEY=VALUE to change it; after a run its folder, or its logs"
    parser.add_argument("what", nargs="*", metavar="WHAT", help=text)
    parser.add_argument("--cluster", type=given_text, metavar="MACHINES", help="that should be here, as 2x8xH100-80G")
    parser.add_argument(
        "--run", "--run-dir", dest="run", type=given_text, metavar="DIR", help="where the run is to be written (runs)"
    )
    parser.add_argument(
        "--ranks", type=count, metavar="N", help="to start here, without a launcher; one per GPU, or 2, if left out"
    )
    parser.add_argument("--seconds", type=_seconds, default=60.0, metavar="N", help="until all ranks must have met (60)")
    parser.add_argument("--json", action="store_true", help="print it as JSON, and nothing else")
    add_trust(parser)
    parser.set_defaults(overrides=[])


def run(options: Namespace) -> int:
    named = [word for word in options.what if "=" not in word or Path(word).exists()]
    overrides = [*(word for word in options.what if word not in named), *options.overrides]
    if named and not _is_recipe(named[0]):
        return _after(named, overrides, options)
    if len(named) > 1:
        raise ValueError(f"{' '.join(named)} are {len(named)} names; before a run name one recipe, after it its logs")
    return _before(named[0] if named else None, overrides, options)


def _is_recipe(name: str) -> bool:
    """Whether it is no folder and no log: a YAML file, or the name of a packaged recipe."""
    path = Path(name)
    return not path.is_dir() and (path.suffix in (".yaml", ".yml") or not path.exists())


def _after(named: list[str], overrides: list[str], options: Namespace) -> int:
    from widefield.diagnosis.findings import diagnose

    if overrides or options.cluster or options.ranks:
        raise ValueError(
            "after a run its folder or its logs are all that is looked at; leave KEY=VALUE, --cluster and --ranks out"
        )
    return _show(diagnose(*named), options)


def _before(recipe: str | None, overrides: list[str], options: Namespace) -> int:
    from widefield.config import read_config
    from widefield.launchers import world_from

    if recipe is None and overrides:
        raise ValueError(f"{overrides[0]} changes a recipe, and none is named; write widefield doctor RECIPE {overrides[0]}")
    config = None if recipe is None else read_config(recipe, overrides, run=options.run, trust=options.trust)
    world = world_from(os.environ)
    if world is None and (ranks := _ranks_here(config, options)) > 1:
        return _started(ranks, recipe, overrides, options)
    from widefield.comm.mesh import World
    from widefield.diagnosis.checkup import CheckupRequest, check_up

    options.is_rank = world is not None and world.size > 1
    world = world or World()
    found = check_up(
        CheckupRequest(recipe, config, options.cluster, None if options.run is None else Path(options.run)),
        world,
        seconds=options.seconds,
    )
    if world.rank != 0 and found.has_met:
        return 0 if found.ok else 1
    return _show(found, options) if world.rank == 0 or world.local_rank == 0 else 1


def _ranks_here(config: RunConfig | None, options: Namespace) -> int:
    """How many ranks to start: as told, as the recipe's mesh asks, one per GPU, or two on the CPU."""
    import torch

    from widefield.comm.devices import ranks_per_gpu
    from widefield.launchers.local import local_ranks
    from widefield.plans import ranks_asked_for, ranks_of_a_replica

    gpus = torch.cuda.device_count()
    if options.ranks is not None:
        return options.ranks
    if config is None:
        return gpus or 2
    return local_ranks(ranks_asked_for(config), gpus, ranks_per_gpu(), replica=ranks_of_a_replica(config))[0]


def _started(ranks: int, recipe: str | None, overrides: list[str], options: Namespace) -> int:
    """The status of so many ranks, started here, which do the same."""
    from widefield.launchers.local import start

    words = ["doctor", *([recipe] if recipe else []), *overrides, "--seconds", str(options.seconds)]
    for name in ("cluster", "run"):
        value = getattr(options, name)
        words += [f"--{name}", value] if value is not None else []
    return start(ranks, [*words, *["--json"] * options.json, *["--trust"] * options.trust])


def _show(found: Checkup | Diagnosis, options: Namespace) -> int:
    print(json.dumps(found.to_tree(), indent=1) if options.json else printable(str(found)), flush=True)
    return 0 if found.ok else 1


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds <= 3600:
        raise ArgumentTypeError(f"{text!r} is no time to wait; write seconds, above 0 and up to 3600")
    return seconds


CASES: list[tuple[list[str], dict[str, Any] | str]] = [
    ([], {"what": [], "cluster": None, "json": False, "seconds": 60.0, "ranks": None}),
    (["r.yaml", "seed=3", "--run-dir", "runs/a", "--json"], {"what": ["r.yaml", "seed=3"], "run": "runs/a", "json": True}),
    (["r.yaml", "--cluster", "2x8xH100", "seed=3"], {"what": ["r.yaml"], "overrides": ["seed=3"], "cluster": "2x8xH100"}),
    (["runs/0007", "slurm-1.out"], {"what": ["runs/0007", "slurm-1.out"]}),
    (["--ranks", "none"], "'none' is no count; write a whole number, 1 or more"),
    (["--seconds", "0"], "'0' is no time to wait; write seconds, above 0 and up to 3600"),
]
