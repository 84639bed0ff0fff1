"""`widefield predict`: a run's model on image files."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from pathlib import Path
from typing import Any

from widefield.cli._arguments import add_weights, count
from widefield.refusal import printable

ORDER = 30
SUMMARY = "ask a run's model about image files"
HELP = """\
Ask a run's model about image files.

  widefield predict runs/0001 cat.jpg dog.png
  widefield predict runs/0001 scans/*.tiff --top 5
"""


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("run", metavar="RUN_DIR")
    parser.add_argument("images", nargs="+", metavar="IMAGE")
    parser.add_argument("--top", type=count, default=3, metavar="K", help="how many classes to name (3)")
    add_weights(parser)


def run(options: Namespace) -> int:
    from widefield.inference import predict

    answers = predict(Path(options.run), options.images, top=options.top, weights=options.weights, trust=options.trust)
    for answer in answers:
        shares = (f"{name} {100 * share:.1f} %" for name, share in zip(answer.classes, answer.probabilities, strict=True))
        written = "" if answer.labels is None else f"  -> {answer.labels}"
        print(printable(f"{answer.path}  {'  '.join(shares)}{written}"))
    return 0


CASES: list[tuple[list[str], dict[str, Any] | str]] = [
    (["runs/a", "cat.jpg", "dog.png"], {"run": "runs/a", "images": ["cat.jpg", "dog.png"], "top": 3, "weights": None}),
    (["runs/a", "cat.jpg", "--top", "5", "--trust"], {"top": 5, "trust": True}),
    (["runs/a", "cat.jpg", "--top", "0"], "'0' is no count; write a whole number, 1 or more"),
    (["runs/a"], "the following arguments are required: IMAGE"),
    (["runs/a", "cat.jpg", "--largest", "seed=3"], "not understood: --largest seed=3"),  # it has no overrides
]
