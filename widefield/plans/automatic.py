"""What a recipe with mesh.auto=true must leave to the planner."""

from __future__ import annotations

from widefield.config.run import RunConfig


def check_automatic(config: RunConfig) -> None:
    """ValueError: the recipe sets something that mesh.auto=true chooses, or leaves open what it chooses for."""
    if config.data.batch_if_known is None:
        raise ValueError(
            "mesh.auto=true chooses a plan for a batch and data.batch_size=auto a batch for a plan; set "
            "data.batch_size to a number"
        )
    own = [name for name in ("recompute", "stream") if getattr(config, name) is not None]
    if own:
        raise ValueError(
            f"mesh.auto=true chooses recompute and stream too, and the recipe sets {' and '.join(own)}; leave that out, or set "
            "mesh.auto=false"
        )
