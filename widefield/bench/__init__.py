"""Which plan is fastest for a model on this machine?  `bench` tries plans on the user's own model and data."""

from widefield.bench.compare import BenchRequest, bench

__all__ = ["BenchRequest", "bench"]
