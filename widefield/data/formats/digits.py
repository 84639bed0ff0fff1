"""Handwritten digits that come with scikit-learn: 1,797 scans of 8x8 grey pixels (UCI optdigits, test part).

1,437 train and 360 evaluate; the split is fixed (stratified by class, scikit-learn's `train_test_split` with seed 0).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from widefield.config import DataConfig
from widefield.data import Dataset


@dataclass(frozen=True)
class Digits:
    """images: (N, 1, 8, 8) uint8.  labels: N.  numbers: N, the places in scikit-learn's list."""

    images: Tensor
    labels: list[int]
    numbers: list[int]

    def __len__(self) -> int:
        return len(self.labels)

    def read(self, index: int) -> tuple[Tensor, int]:
        return self.images[index], self.labels[index]

    def name_of(self, index: int) -> str:
        return f"digits/{self.numbers[index]}"


def open_dataset(config: DataConfig) -> Dataset:
    """The digits.  ValueError: data.path or data.hold_out is set; the images and the split are fixed."""
    if config.path is not None or config.hold_out is not None:
        raise ValueError("data.name=digits is built in, with a fixed split; leave data.path and data.hold_out out")
    load_digits, train_test_split = load_libraries()
    digits = load_digits()
    pixels = torch.from_numpy((digits.images * 255 / 16).round()).to(torch.uint8).unsqueeze(1)  # scans have 17 grey levels
    train, held_out = train_test_split(range(len(pixels)), test_size=360, random_state=0, stratify=digits.target)

    def part(numbers: list[int]) -> Digits:
        return Digits(pixels[numbers], [int(digits.target[number]) for number in numbers], numbers)

    return Dataset(
        train=part(train),
        evaluate=part(held_out),
        classes=[str(digit) for digit in range(10)],
        channels=1,
        mean=[0.305],  # of the 1,437 training scans
        std=[0.376],
        in_memory=True,
    )


def load_libraries() -> tuple[Callable, Callable]:
    """What the digits take from scikit-learn, which is imported late, as it takes a second."""
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split

    return load_digits, train_test_split


CASES = [({}, 1437, 360, 10)]
"""(keys of the data config, training images, evaluation images, classes)."""
