"""Whole models of other people under every strategy alone, through the public door: exact, or refused in words.

Tiles in space and in time have files of their own, which look at every layer.
"""

from __future__ import annotations

from functools import partial

import pytest
from marks import few
from zoo.models import EVEN, MODELS, Model, _timm

from widefield.plans import Plan

pytestmark = pytest.mark.sweep

ALL = MODELS | {"timm/caformer_s18": Model(partial(_timm, "caformer_s18"), EVEN)}
PLANS = {
    "replicate": Plan(replicate=2),
    "shard": Plan(shard=2),
    "channel": Plan(channel=2),
    "stage": Plan(stage=2),
}
QUICK = ["DCGAN discriminator", "pix2pixHD discriminator", "timm/vit_tiny"]
"""What `make test` runs: small ones, one of which gives a nest of tensors."""
CHANCE = "the model draws random numbers, as dropout does, and with mesh.stage=2 every stage draws for itself"


@pytest.mark.parametrize("name", few(ALL, *QUICK))
def test_a_model_is_exact_under_every_strategy_or_refused_in_words(name, tried):
    for strategy, found in tried(ALL[name], PLANS).items():
        if strategy == "stage" and found.kind == "refused":
            assert CHANCE in found.text, str(found)
        else:
            assert found.kind == "exact", f"{name}, {strategy}: {found}"
