"""A first morning with parts of one's own: a dataset, a network, a loss and a metric, all plain PyTorch and torchmetrics."""

import sys

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F
from torchmetrics import Metric

import widefield as wf


class Scans(torch.utils.data.Dataset):
    """Every `step`-th of scikit-learn's scans, from `start` on: (1, 8, 8) uint8, and the digit."""

    classes = [str(digit) for digit in range(10)]

    def __init__(self, start: int, step: int) -> None:
        digits = load_digits()
        self.images = torch.from_numpy(digits.images * 255 / 16).to(torch.uint8)[start::step, None]
        self.labels = torch.from_numpy(digits.target)[start::step]

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int):
        return self.images[index], self.labels[index]


class Margin(nn.Module):
    """The multi-class hinge loss of each sample."""

    def forward(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return F.multi_margin_loss(output, target, reduction="none")


class Even(Metric):
    """The share of even digits among the answers: its states are sums."""

    def __init__(self) -> None:
        super().__init__()
        self.add_state("even", torch.tensor(0.0), dist_reduce_fx="sum")
        self.add_state("seen", torch.tensor(0.0), dist_reduce_fx="sum")

    def update(self, answers: torch.Tensor, target: torch.Tensor) -> None:
        self.even += (answers.argmax(1) % 2 == 0).sum()
        self.seen += len(target)

    def compute(self) -> torch.Tensor:
        return self.even / self.seen


def build() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten(),
        nn.Linear(128, 10),
    )  # fmt: skip


def main(run: str, *overrides: str) -> None:
    config = {
        "data": {"batch_size": 60},
        "optimizer": {"name": "adamw", "lr": 0.003, "weight_decay": 0.01},
        "schedule": {"length": "6ep", "warmup": "1ep"},
        "task": {"metrics": ["own_parts:Even"]},
        "log": {"tensorboard": False},
    }
    outcome = wf.train(
        config, *overrides, run=run, model=build(), data=(Scans(1, 2), Scans(0, 2)), task="classification", loss=Margin()
    )
    if outcome.evaluation is not None:
        print({name: round(value, 4) for name, value in outcome.evaluation.metrics.items()})


if __name__ == "__main__":
    main(*sys.argv[1:])
