"""Whole models of other people under every strategy alone, through the public door: exact, or refused in words.

Tiles in space and in time have files of their own, which look at every layer.
"""

from __future__ import annotations

from functools import partial

import pytest
from fuzz.session import Threads
from fuzz.threads import installed
from zoo.door import Trial
from zoo.models import EVEN, MODELS, Model, _timm

from widefield.plan import Plan

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

pytestmark = pytest.mark.filterwarnings("ignore")  # of the libraries


@pytest.fixture(scope="module")
def threads():
    with installed():
        yield Threads()


@pytest.mark.parametrize("name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.long) for name in ALL])
def test_a_model_is_exact_under_every_strategy_or_refused_in_words(name, threads):
    shape = ALL[name].shape
    trial = Trial(ALL[name].make(), (max(2, shape[0]), *shape[1:]))
    for strategy, plan in PLANS.items():
        found = trial.under(plan, threads)
        if strategy == "stage" and found.kind == "refused":
            assert CHANCE in found.text, str(found)
        else:
            assert found.kind == "exact", f"{name}, {strategy}: {found}"
