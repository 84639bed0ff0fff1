"""A small network whose steps, and a disk whose saves, take as long as files in a folder say; runs name it as their model.

The numbers of a run do not depend on it, so that runs can be disturbed at a chosen moment and compared with one that was not.
Beside a run's recipe it is found as `paced`.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from torch import nn

from widefield.models import resnet
from widefield.training import manifest

STEP, SAVE = "step_seconds", "save_seconds"
"""Files of the folder: how long a training step, and a rank's part of a save, take more than they would."""


def build(in_channels: int, num_classes: int, *, control: str) -> nn.Module:
    """control: the folder with the files; where one is missing, nothing takes longer."""
    place = Path(control)
    net = resnet.build(in_channels, num_classes, widths=[8, 16], blocks=1, dropout=0.2)
    net.register_forward_pre_hook(lambda module, _: _wait(place / STEP) if module.training else None)
    manifest.sync = _slowed(manifest.sync, place / SAVE)
    return net


def _slowed(sync: Callable[[Path], None], file: Path) -> Callable[[Path], None]:
    """fsync that takes longer for one of the files that each rank writes."""

    def slow_sync(path: Path) -> None:
        if path.name.startswith("own_"):
            _wait(file)
        sync(path)

    return slow_sync


def _wait(file: Path) -> None:
    if file.is_file():
        time.sleep(float(file.read_text()))
