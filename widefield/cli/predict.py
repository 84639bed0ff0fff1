"""`widefield predict`: a run's model on image files."""

from __future__ import annotations

import os
import re
import sys
from argparse import ArgumentParser, Namespace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from widefield.cli._arguments import add_weights, count, given_text, sizes
from widefield.cli._ranks import world_of
from widefield.config import RunConfig, read_config
from widefield.config.recipe import PREDICTED, on_mesh_of, refuse_unused
from widefield.quantity import count_of
from widefield.refusal import printable

if TYPE_CHECKING:
    from widefield.prediction.answers import Answer
    from widefield.prediction.session import Predicted

ORDER = 30
SUMMARY = "ask a run's model about image files"
HELP = """\
Ask a run's model about image files: files, folders with all that is below them, patterns, lists.

  widefield predict runs/0001 cat.jpg dog.png
  widefield predict runs/0001 photos/ --output answers --top 5
  widefield predict runs/0001 'scans/**/*.tif' @more.txt --output answers
  widefield predict runs/0001 scans/ --output answers mesh.replicate=2       two ranks share the images
  widefield predict runs/0001 scans/ --output answers 'mesh.space=[2,1]'     two ranks share each image
  widefield predict runs/0001 scans/ --output answers mesh.shard=2           two ranks share images and weights

With --output, answers are in predictions.csv and predictions.json there, and where every pixel has a
class there is a label image per image, with a palette; --overlays, --probabilities and --outlines write
more.  Large images, and those with a place in the world, are read and written by window.
Without it, classes are printed, and label images go to the folder predictions of the run.

The same command goes on where it was stopped.  A file that cannot be read is left out and named at the
end; the exit status is 1 then.
"""


def add_arguments(parser: ArgumentParser) -> None:
    parser.set_defaults(overrides=[])
    parser.add_argument("run", metavar="RUN_DIR")
    parser.add_argument("inputs", nargs="+", metavar="INPUT", help="a file, folder, pattern or @list; or KEY=VALUE of a recipe")
    parser.add_argument("--output", type=given_text, metavar="DIR", help="folder for the answers")
    parser.add_argument("--top", type=count, default=3, metavar="K", help="how many classes to name (3)")
    parser.add_argument("--batch-size", type=count, default=1, metavar="N", help="images of one size per pass (1)")
    flips = "answer with the mean over mirror images: left and right; of labels of pixels also up and down"
    parser.add_argument("--flips", action="store_true", help=flips)
    likely = "write the classes' probabilities of every pixel, as .npy of float16 or as .png of 16 bits; of images by window in"
    likely += " their format, as float32 or 16 bits"
    parser.add_argument("--probabilities", nargs="?", const="npy", choices=("npy", "png"), help=likely)
    parser.add_argument("--overlays", action="store_true", help="write each image with the classes' colours over it")
    parser.add_argument("--outlines", action="store_true", help="write the outlines of the labels as GeoJSON")
    sliding = "blend overlapping windows of so many pixels, as 512 or 64x128x128, for networks trained on patches"
    parser.add_argument("--sliding", type=sizes, metavar="SIZE", help=sliding)
    overlap = "the share of a window of --sliding that the next one covers too (0.5)"
    parser.add_argument("--overlap", type=float, default=0.5, metavar="SHARE", help=overlap)
    compare = "with --sliding: say at how many pixels labels are others than the whole image's"
    parser.add_argument("--compare", action="store_true", help=compare)
    parser.add_argument("--overwrite", action="store_true", help="replace the answers of an earlier command in DIR")
    add_weights(parser, default="best, where the run has them,")


def run(options: Namespace) -> int:
    from widefield.training.run_folder import existing_folder

    keys = [word for word in options.inputs if _is_key(word)] + options.overrides
    words = [word for word in options.inputs if not _is_key(word)]
    if not words:
        raise ValueError("name files, folders, patterns in quotes, or a list as @list.txt, behind the run folder")
    refuse_unused(keys)
    config = existing_folder(options.run) / "config.yaml"
    on_ranks = on_mesh_of(keys, alone=True)
    read = read_config(config, on_ranks, run=options.run, trust=options.trust, builds=PREDICTED)
    world, started = world_of(read, options, lambda: _as_a_rank(options, words, keys))
    if world is None:
        return started
    from widefield.prediction.session import Wishes, predict_files

    names = ("top", "batch_size", "flips", "probabilities", "overlays", "overwrite", "outlines", "overlap", "compare")
    sliding = tuple(options.sliding) if options.sliding else None
    wishes = Wishes(**{name: getattr(options, name) for name in names}, sliding=sliding)
    output, chosen = Path(options.output) if options.output else None, {"weights": options.weights, "trust": options.trust}
    found = predict_files(Path(options.run), words, keys, world, output=output, wishes=wishes, **chosen)
    if world.rank == 0:
        _print(found, lists=options.output is None)
    return 1 if found.lefts and world.rank == 0 else 0  # one rank says it for all


def _is_key(word: str) -> bool:
    """Whether a word is KEY=VALUE of a recipe, and not the name of a file."""
    match = re.match(r"([a-z_]+)(\.[a-z_0-9]+)*=", word)
    return match is not None and match[1] in RunConfig.model_fields and not os.path.exists(word)


def _as_a_rank(options: Namespace, words: list[str], keys: list[str]) -> list[str]:
    """The arguments of the command that every rank runs."""
    arguments = ["predict", options.run, *words, *keys, "--top", str(options.top), "--batch-size", str(options.batch_size)]
    arguments += [
        f"--{name}" for name in ("flips", "overlays", "outlines", "compare", "overwrite", "trust") if getattr(options, name)
    ]
    if options.sliding:
        arguments += ["--sliding", "x".join(map(str, options.sliding)), f"--overlap={options.overlap}"]
    for name in ("output", "weights", "probabilities"):
        arguments += [f"--{name}={getattr(options, name)}"] if getattr(options, name) else []
    return arguments


def _print(found: Predicted, *, lists: bool) -> None:
    print(found.weights, file=sys.stderr)
    for answer in found.answers if lists else ():
        print(printable(_line(answer)))
    if found.output is not None:
        before = f", {found.earlier:,} of them by an earlier command" if found.earlier else ""
        print(printable(f"{len(found.answers):,} answered{before}: {found.output / 'predictions.csv'}"))
    cropped = sum(1 for answer in found.answers if answer.left_out)
    if cropped:
        print(_without_answer(cropped, found.ignore), file=sys.stderr)
    if found.lefts:
        sys.stdout.flush()
        lines = "".join(f"\n  {left.path}: {left.reason}" for left in found.lefts)
        print(printable(f"widefield: {len(found.lefts):,} left out:{lines}"), file=sys.stderr)


def _without_answer(number: int, label: int | None) -> str:
    stored = ", which a PNG has as 255" if label is not None and label < 0 else ""
    why = "nodata, or left out by data.read_evaluate"
    return f"some pixels of {count_of(number, 'image')} have no answer ({why}); their label is {label}{stored}"


def _line(answer: Answer) -> str:
    if answer.values is not None:
        return f"{answer.path}  " + "  ".join(
            f"{name} {value:.6g}" for name, value in zip(answer.classes, answer.values, strict=True)
        )
    shares = (f"{name} {100 * share:.1f} %" for name, share in zip(answer.classes, answer.probabilities, strict=True))
    apart = "" if answer.apart is None else f"  {100 * answer.apart['share']:.3f} % are others than the whole image's"
    written = "" if answer.labels is None else f"  -> {answer.labels}"
    return f"{answer.path}  {'  '.join(shares)}{apart}{written}"


CASES: list[tuple[list[str], dict[str, Any] | str]] = [
    (["runs/a", "cat.jpg", "dog.png"], {"run": "runs/a", "inputs": ["cat.jpg", "dog.png"], "top": 3, "weights": None}),
    (["runs/a", "cat.jpg", "--top", "5", "--trust"], {"top": 5, "trust": True}),
    (["runs/a", "photos", "--output", "answers", "mesh.replicate=2"], {"output": "answers", "overrides": ["mesh.replicate=2"]}),
    (["runs/a", "photos", "--probabilities", "--overlays"], {"probabilities": "npy", "overlays": True, "batch_size": 1}),
    (
        ["runs/a", "scan.nii", "--sliding", "64x128x128", "--compare"],
        {"sliding": [64, 128, 128], "overlap": 0.5, "compare": True},
    ),
    (["runs/a", "cat.jpg", "--top", "0"], "'0' is no count; write a whole number, 1 or more"),
    (["runs/a"], "the following arguments are required: INPUT"),
    (["runs/a", "cat.jpg", "--largest", "seed=3"], "not understood: --largest seed=3"),
]
