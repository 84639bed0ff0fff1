"""The data of the first mornings as a person has them: folders of photographs, 16-bit scans with masks, a table of patients."""

from __future__ import annotations

import csv
from pathlib import Path

import numpy as np
from PIL import Image
from sklearn.datasets import load_digits, load_sample_images

from widefield.config import DataConfig
from widefield.data import open_dataset
from widefield.data.image import write_labels


def photos(place: Path, *, size: int = 64, each: int = 40) -> Path:
    """`place/CLASS/NUMBER.jpg`: square pieces of scikit-learn's two photographs, which differ in nothing but what they show."""
    for name, pixels in zip(("china", "flower"), load_sample_images().images, strict=True):
        (place / name).mkdir(parents=True)
        corners = [(y, x) for y in range(0, pixels.shape[0] - size, size) for x in range(0, pixels.shape[1] - size, size)]
        for number, (y, x) in enumerate(corners[:each]):
            Image.fromarray(pixels[y : y + size, x : x + size]).save(place / name / f"{number:02}.jpg", quality=95)
    return place


def scans_with_masks(place: Path, *, size: tuple[int, int] = (96, 80), count: int = 16) -> Path:
    """`place/images/*.png`, grey of 16 bits, of which the lowest are noise, and `place/masks/*.png`, palettes of 11 classes."""
    pages = open_dataset(DataConfig(name="page", options={"size": list(size), "pages": [count, 1], "digit_px": [20, 32]})).train
    (place / "images").mkdir(parents=True)
    (place / "masks").mkdir()
    for number in range(count):
        image, labels = pages.read(number)
        noise = np.random.default_rng(number).integers(0, 256, size, dtype=np.uint16)
        Image.fromarray(image[0].numpy().astype(np.uint16) * 200 + noise).save(place / "images" / f"scan{number:02}.png")
        write_labels(labels, place / "masks" / f"scan{number:02}.png")
    return place


def table_of_patients(place: Path, *, scans: int = 300, patients: int = 40) -> Path:
    """`place/scans.csv` (image, label, patient) and the images beside it: each patient has the scans of one hand, so to say."""
    digits = load_digits()
    (place / "images").mkdir(parents=True)
    with (place / "scans.csv").open("w", newline="") as file:
        table = csv.writer(file)
        table.writerow(["image", "label", "patient"])
        for number in range(scans):
            name = f"images/{number:03}.png"
            Image.fromarray((digits.images[number] * 255 / 16).astype(np.uint8)).resize((16, 16)).save(place / name)
            table.writerow([name, f"digit {digits.target[number]}", f"patient {number * 7 % patients}"])
    return place / "scans.csv"
