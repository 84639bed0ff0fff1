"""`widefield launch`: write a job for a cluster, and submit it."""

from __future__ import annotations

from argparse import Action, ArgumentParser, BooleanOptionalAction, Namespace
from typing import Any, get_args, get_origin

from widefield.cli._arguments import add_trust, count, given_text
from widefield.cli._help import HelpLayout
from widefield.launchers._job import shell
from widefield.launching import Launched, launchers, prepare, submit
from widefield.section import Section

ORDER = 15
SUMMARY = "train on a cluster: write the job, check it, submit it"
HELP = """\
Train on a cluster.  The recipe and its plan are checked here for the ranks that are asked for; then the
job is written into the run folder, which all machines must share, and submitted:

  widefield launch slurm my.yaml --nodes 4 --gpus 8 --time 12:00:00
  widefield launch kubernetes my.yaml --nodes 4 --gpus 8 --image registry/widefield --dry-run
  widefield launch torchrun my.yaml --hosts a,b --gpus 8

--dry-run prints what would be submitted. widefield launch slurm --help has all options of Slurm.
"""


def add_arguments(parser: ArgumentParser) -> None:
    ways = parser.add_subparsers(metavar="LAUNCHER", required=True, dest="launcher")
    for name, module in launchers().items():
        summary = (module.__doc__ or "").split(":")[0]
        way = ways.add_parser(
            name, prog=f"widefield launch {name}", help=summary, description=module.HELP, formatter_class=HelpLayout
        )
        way.add_argument("recipe", help="a YAML file, or the name of one that comes with widefield")
        way.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="what to change in the recipe")
        way.add_argument(
            "--run",
            "--run-dir",
            dest="run",
            type=given_text,
            metavar="DIR",
            help="run folder; a new one in runs/ if left out",
        )
        way.add_argument("--dry-run", action="store_true", help="check and print all, and submit nothing")
        add_trust(way)
        for option in _options(module.JOB):
            way.add_argument(option.pop("flag"), **option)


def _options(kind: type[Section]) -> list[dict[str, Any]]:
    """The arguments of argparse for the fields of a launcher's options.  What is not given is None, or []."""
    found = []
    for name, field in kind.model_fields.items():
        types = _types(field.annotation)
        metavar, colon, text = (field.description or "").partition(": ")
        option: dict[str, Any] = {"flag": f"--{name.replace('_', '-')}", "default": None}
        if bool in types:
            action: type[Action] | str = BooleanOptionalAction if field.default else "store_true"
            option |= {"action": action, "help": field.description}
        elif get_origin(field.annotation) is list:
            option |= {"action": "append", "type": given_text, "metavar": metavar, "help": text}
        else:
            option |= {"type": count if int in types else given_text, "metavar": metavar, "help": text}
        found.append(option)
    return found


def _types(annotation: Any) -> set[Any]:
    """The types of which a field's value may be, as {int, NoneType} of `Positive | None`."""
    inner = get_args(annotation)
    return {one for part in inner for one in _types(part)} if inner else {annotation}


def run(options: Namespace) -> int:
    kind = launchers()[options.launcher].JOB
    given = {name: getattr(options, name) for name in kind.model_fields if getattr(options, name) is not None}
    found = prepare(
        options.launcher, options.recipe, *options.overrides, run=options.run, trust=options.trust, **given
    )  # fmt: skip
    _show(found, is_dry=options.dry_run)
    if options.dry_run:
        return 0
    done = submit(found, is_new=options.run is None)
    if done.output:
        print(f"submitted: {done.output}")
    return done.status


def _show(found: Launched, *, is_dry: bool) -> None:
    """Print what is submitted; of a dry run, the files too."""
    for path, text in found.job.files.items():
        print(f"# {path}\n{text}" if is_dry else f"{path}")
    print(f"run folder: {found.run}\nplan: {found.plan}", flush=True)
    for note in found.notes:
        print(f"note: {note}", flush=True)
    for host, line in found.job.by_hand:
        print(f"on {host}:\n  {line}")
    commands = [*found.job.submit, *(words for _, words in found.job.on_hosts)]
    if is_dry and commands:
        print("nothing is started; this would start it:", *(f"  {shell(words)}" for words in commands), sep="\n")


CASES: list[tuple[list[str], dict[str, Any] | str]] = [
    (
        ["slurm", "r.yaml", "--nodes", "4", "--gpus", "8", "--time", "12:00:00", "--dry-run", "seed=3"],
        {"launcher": "slurm", "nodes": 4, "gpus": 8, "time": "12:00:00", "dry_run": True, "overrides": ["seed=3"], "run": None},
    ),
    (["slurm", "r.yaml", "--no-requeue", "--array", "seed=1,2"], {"requeue": False, "array": ["seed=1,2"], "overrides": []}),
    (["slurm", "r.yaml"], {"requeue": None, "array": None, "exclusive": None, "dry_run": False}),
    (["slurm", "r.yaml", "--nodes", "0"], "argument --nodes: '0' is no count"),
    (["slurm", "r.yaml", "--partition", ""], "it is empty; give it a value, or leave the option out"),
    (["slurn", "r.yaml"], "invalid choice: 'slurn'"),
]
