"""Which way of laying this model out is fastest on this machine?  `bench` tries them on the user's own model and data."""

from widefield.bench.compare import BenchRequest, bench

__all__ = ["BenchRequest", "bench"]
