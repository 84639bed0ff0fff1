"""Small real image folders: pieces of the two photographs that ship inside scikit-learn."""

from __future__ import annotations

from pathlib import Path

from PIL import Image
from sklearn.datasets import load_sample_images


def photo_folder(place: Path, *, size: int, train: int = 12, val: int = 6, suffix: str = ".png") -> Path:
    """`place/train/{china,flower}/*` and `place/val/...`: square pieces of `size` pixels of the two photographs."""
    pictures = load_sample_images()
    for name, pixels in zip(("china", "flower"), pictures.images, strict=True):
        pieces = [
            pixels[top : top + size, left : left + size]
            for top in range(0, pixels.shape[0] - size, size)
            for left in range(0, pixels.shape[1] - size, size)
        ]
        step = len(pieces) // (train + val)
        for number, piece in enumerate(pieces[:: max(1, step)][: train + val]):
            folder = place / ("train" if number < train else "val") / name
            folder.mkdir(parents=True, exist_ok=True)
            Image.fromarray(piece).save(folder / f"{number}{suffix}")
    return place
