"""Shards for tests: tars of named bytes, and class folders with the same images in shards."""

from __future__ import annotations

import io
import tarfile
from collections.abc import Iterable
from pathlib import Path

import numpy as np
from PIL import Image

from widefield.config import DataConfig
from widefield.data import Dataset, open_dataset

Members = Iterable[tuple[str, bytes]]


def png(seed: int, size: tuple[int, int] = (7, 9)) -> bytes:
    pixels = np.random.default_rng(seed).integers(0, 256, (*size, 3), dtype=np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, "PNG")
    return buffer.getvalue()


def tar(path: Path, members: Members, **options) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w", **options) as file:
        for name, content in members:
            about = tarfile.TarInfo(name)
            about.size = len(content)
            file.addfile(about, io.BytesIO(content))
    return path


def samples(keys: Iterable[int], classes: int = 3) -> Members:
    """An image and its class for each key."""
    for key in keys:
        yield f"{key:06}.png", png(key)
        yield f"{key:06}.cls", str(key % classes).encode()


def same_images(place: Path, counts: tuple[int, ...] = (5, 6, 3)) -> tuple[Path, Path]:
    """Class folders, and shards of the same images in the same order: three to train on, of these counts, one to evaluate."""
    folder, shards, seed = place / "folder", place / "shards", 0
    for split, sizes in (("train", counts), ("val", (5,))):
        names = [f"{'ant' if number < sum(sizes) // 2 else 'bee'}/{number:03}" for number in range(sum(sizes))]
        for name in names:
            (folder / split / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / split / f"{name}.png").write_bytes(png(seed))
            seed += 1
        for number, size in enumerate(sizes):
            own, names = names[:size], names[size:]
            content = [
                member
                for name in own
                for member in (
                    (f"{name.replace('/', '_')}.png", (folder / split / f"{name}.png").read_bytes()),
                    (f"{name.replace('/', '_')}.cls", name.partition("/")[0].encode()),
                )
            ]
            tar(shards / f"{split}-{number:04}.tar", content)
    return folder, shards


def opened(path: Path | str | None, **config) -> Dataset:
    return open_dataset(DataConfig(name="webdataset", path=None if path is None else str(path), **config))


def of_folder(path: Path, **config) -> Dataset:
    return open_dataset(DataConfig(name="imagefolder", path=str(path), **config))
