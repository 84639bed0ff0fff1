"""Which way of laying this model out is fastest on this machine?  `bench` tries them on the user's own model and data."""

from widefield.bench.compare import Order, bench

__all__ = ["Order", "bench"]
