"""What each rank read from files of images, from the record: a line per rank."""

from __future__ import annotations

from typing import Any

from widefield.quantity import size_text
from widefield.training.record import Line


def bytes_of_ranks(lines: list[Line]) -> list[str]:
    """`rank 0: 3.2 MiB an epoch, 410 KiB a sample; ...`, since the run began or was resumed; empty where no file was read."""
    starts = [number for number, line in enumerate(lines) if line.get("kind") == "start"]
    newest = [line for line in lines[starts[-1] if starts else 0 :] if line.get("kind") == "read"]
    return [_in_words(rank, told) for rank, told in enumerate(newest[-1]["ranks"])] if newest else []


def _in_words(rank: int, told: dict[str, Any]) -> str:
    epoch, sample = (told["decoded"] / max(told[count], 1e-9) for count in ("epochs", "samples"))
    asked = told["asked"] / max(told["epochs"], 1e-9)
    each = f", {size_text(sample)} a sample" if told["samples"] else ""
    return (
        f"rank {rank}: {size_text(epoch)} an epoch{each}, decoded; {size_text(asked)} an epoch are pixels that were asked for"
    )
