"""Integer arithmetic of pixels: intervals, boxes, windows and layouts.  No tensor, no process."""

from widefield.geometry.interval import Interval, even_cut, natural_cut, parts_of

__all__ = ["Interval", "even_cut", "natural_cut", "parts_of"]
