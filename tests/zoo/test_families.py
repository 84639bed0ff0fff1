"""One model of each of timm's families, through the public door without a trial pass: the first step is exact, or refused."""

from __future__ import annotations

import pytest
import timm
from marks import few
from zoo.families import FAMILIES

from widefield.plans import Plan

pytestmark = pytest.mark.sweep

QUICK = ["resnet", "convnext", "cpubone", "efficientnet", "mambaout", "maxxvit", "vision_transformer", "beit"]
"""What `make test` runs: families whose smallest model is of a few layers, and what was wrong once."""
REFUSED = {("convit", "stream"): "puts new tensors in place of its buffers"}

PLANS = {"space": Plan(space=[2, 1]), "stream": Plan(stream={"tiles": [2, 2]})}


@pytest.mark.parametrize("family", few(FAMILIES, *QUICK))
def test_a_familys_first_step_is_exact_or_refused_in_words(family, tried):
    for how, found in tried(FAMILIES[family], PLANS).items():
        words = REFUSED.get((family, how))
        assert found.kind == ("refused" if words else "exact"), f"{family}, {how}: {found}"
        assert words is None or words in found.text


def test_no_family_is_left_out():
    assert sorted(FAMILIES) == timm.list_modules()
    assert len(REFUSED) <= 2
