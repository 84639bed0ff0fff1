"""Integers only: intervals and how a length is cut into parts.  No tensor, no process."""

from widefield.geometry.interval import Interval, even_cut, natural_cut, parts_of

__all__ = ["Interval", "even_cut", "natural_cut", "parts_of"]
