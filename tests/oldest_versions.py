"""Prints the oldest series of each library that pyproject.toml allows, as pip takes them.

    python tests/oldest_versions.py                 what a run needs, and the libraries of image files
    python tests/oldest_versions.py --extra audit   an extra as it stands, with both bounds

torch and torchvision are left out: they are gigabytes, and each has its own oldest Python.
"""

from __future__ import annotations

import re
import sys
import tomllib
from pathlib import Path
from typing import Any

EXTRAS = ("tiff", "geo", "zarr", "medical", "hdf5", "slides", "shapefile")
LEFT_OUT = ("torch", "torchvision")
BOUNDED = re.compile(r"(?P<name>[\w-]+(?:\[[\w,-]+\])?)>=(?P<oldest>[\d.]+),<(?P<below>[\d.]+)")
"""A requirement with both bounds."""


def project() -> dict[str, Any]:
    return tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def oldest() -> list[str]:
    """As `tifffile==2024.8.*`, each library once."""
    extras = project()["optional-dependencies"]
    asked = [*project()["dependencies"], *(line for extra in EXTRAS for line in extras[extra])]
    found = [match for line in asked if (match := BOUNDED.fullmatch(line)) is not None]
    return sorted({f"{match['name']}=={match['oldest']}.*" for match in found if match["name"] not in LEFT_OUT})


def unbounded() -> list[str]:
    """The requirements, of all extras too, that lack a bound; extras of this project are none of their own."""
    asked = [*project()["dependencies"], *(line for lines in project()["optional-dependencies"].values() for line in lines)]
    return [line for line in asked if not line.startswith("widefield[") and BOUNDED.fullmatch(line) is None]


if __name__ == "__main__":
    print("\n".join(project()["optional-dependencies"][sys.argv[2]] if sys.argv[1:2] == ["--extra"] else oldest()))
