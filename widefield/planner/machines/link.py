"""A class of connection between two ranks: its latency and bandwidth.  Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

LinkClass = Literal["same device", "nvlink", "pcie", "network", "gloo"]


@dataclass(frozen=True)
class Link:
    """One class of connection between two ranks.

    name: as in the catalogue.  latency_seconds: of an empty message, alpha.
    bytes_per_second: of one rank, in one direction, while every other rank of its node sends as well; 1/beta.
    source: where the figures are from.
    """

    name: str
    kind: LinkClass
    latency_seconds: float
    bytes_per_second: float
    source: str = ""
