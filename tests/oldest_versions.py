"""Prints the oldest series of each library of images that pyproject.toml allows, as pip takes them."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

EXTRAS = ("tiff", "geo", "zarr", "medical", "hdf5", "slides", "shapefile")


def oldest() -> list[str]:
    """As `tifffile==2024.8.*`, each library once."""
    project = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    asked = [line for extra in EXTRAS for line in project["optional-dependencies"][extra]]
    found = [re.fullmatch(r"([\w-]+)>=([\d.]+)(,.*)?", line) for line in asked]
    return sorted({f"{match[1]}=={match[2]}.*" for match in found if match is not None})


if __name__ == "__main__":
    print("\n".join(oldest()))
