"""The command `widefield`, one file per verb.  Each file defines

- `ORDER`: its place in `widefield --help`, lower is earlier; `SUMMARY`: its line there; `HELP`: what `widefield VERB --help`
  prints before the list of arguments;
- `add_arguments(parser)`: its arguments and options;
- `run(options) -> int`: does it, and returns the exit status.  What imports torch is imported inside, so that help and
  refusals come at once.  An argument `overrides` takes KEY=VALUE, also behind options;
- `CASES`: (arguments behind the verb, the options that they give, or a part of the error message).
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

from widefield.cli._errors import say
from widefield.cli._help import HelpLayout
from widefield.installed import version_of
from widefield.launchers._scratch import remove_own_folder
from widefield.naming import load_all
from widefield.refusal import tell_status

HELP = """\
Train convolutional networks on images of any size, on any number of devices,
with the numbers that one device with endless memory would give.

  widefield train digits                            a first run, in seconds
  widefield train digits mesh.replicate=2           the same numbers on 2 ranks
  widefield train photos/                           looks at a folder of images
  widefield evaluate runs/0001                      every image exactly once
  widefield report runs/0001                        one HTML file
  widefield verify timm/resnet50 --image 3x97x101   is it exact on tiles?
  widefield plan digits --cluster 8xH100            what fits there, and how fast?
  widefield bench digits                            which plan is fastest here?
  widefield doctor                                  what would stop a run here?
  widefield train page 'mesh.space=[2,1]'           half a page on each rank
  widefield train page 'mesh.space=[]' 'stream.tiles=[4,4]'   tile after tile

widefield VERB --help explains each verb.
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit status.

    0, 2 for an error of the user's, 3 where another rank failed, 75 for a run to be continued, else 1.
    """
    options = argparse.Namespace(is_rank=False)
    try:
        options = parse(arguments)
        status = options.verb.run(options)
    except KeyboardInterrupt:
        print("widefield: ended at once; the newest checkpoint stands", file=sys.stderr)
        status = 130
    except Exception as error:
        code = say(error, is_rank=options.is_rank)
        if code is None:
            raise
        status = code
    tell_status(status)
    if options.is_rank:
        # Everything is closed by now.  At a normal exit of Python, gloo's threads abort one process in ten
        # (docs/log.md, 2026-11-21), which a launcher would take for a crash.
        remove_own_folder()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
    return status


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The options of a command line, with `verb` (its module) and `is_rank`.  SystemExit: it is no command.

    arguments: the words behind `widefield`; None: those of this process.
    """
    parser = _parser()
    options, rest = parser.parse_known_args(arguments)
    # argparse gives up on `train RECIPE --run DIR a.b=1`: positionals after an option are left over
    overrides = [word for word in rest if "=" in word and not word.startswith("-")]
    if overrides != rest or (rest and "overrides" not in options):
        parser.error(f"not understood: {' '.join(rest)}; see widefield VERB --help")
    if overrides:
        options.overrides = [*options.overrides, *overrides]
    return options


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("widefield", description=HELP, formatter_class=HelpLayout, usage="widefield VERB ...")
    parser.add_argument("--version", action=_Version, nargs=0, help="print the version and stop")
    verbs = parser.add_subparsers(metavar="VERB", required=True)
    for module in sorted(load_all(__name__), key=lambda module: module.ORDER):
        name = module.__name__.rpartition(".")[2]
        verb = verbs.add_parser(
            name, prog=f"widefield {name}", help=module.SUMMARY, description=module.HELP, formatter_class=HelpLayout
        )
        verb.set_defaults(verb=module, is_rank=False)
        module.add_arguments(verb)
    return parser


class _Version(argparse.Action):
    """Prints the versions of widefield, Python and torch, without loading torch, and ends."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        names = [f"{name} {version_of(name, otherwise='(not installed as a package)')}" for name in ("widefield", "torch")]
        print(f"{names[0]}, Python {sys.version.split()[0]}, {names[1]}")
        parser.exit()
