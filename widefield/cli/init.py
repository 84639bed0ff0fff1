"""`widefield init`: a first recipe for a folder of images."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from pathlib import Path
from typing import Any

from widefield.cli._arguments import given_text

ORDER = 5
SUMMARY = "write a recipe for a folder of images"
HELP = """\
Look at a folder of images and write a recipe for it, with the reason of every choice as a comment: task,
size of images, model, batch size, length, weights of classes.  Nothing is trained, and no file is
overwritten.

  widefield init photos/
  widefield init scans/ --output recipe.yaml

The folder has class folders (CLASS/image.jpg, also in train/ and val/), images/ and masks/, or one CSV
of images and labels.
"""


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("folder", help="of images")
    parser.add_argument("--output", type=given_text, metavar="FILE", help="where to; FOLDER.yaml, here, if left out")


def run(options: Namespace) -> int:
    from widefield.first_recipe import write_recipe

    path = Path(options.output) if options.output else recipe_of(options.folder)
    print(write_recipe(options.folder, path), end="")
    print(f"written to {path}; train it with: widefield train {path}")
    return 0


def recipe_of(folder: str) -> Path:
    """The file in the current folder that a folder's recipe goes to, as photos.yaml."""
    return Path(f"{Path(folder).resolve().name or 'recipe'}.yaml")


CASES: list[tuple[list[str], dict[str, Any] | str]] = [
    (["photos/"], {"folder": "photos/", "output": None}),
    (["photos/", "--output", "r.yaml"], {"output": "r.yaml"}),
    (["photos/", "--output", ""], "it is empty; give it a value"),
    ([], "the following arguments are required: folder"),
]
