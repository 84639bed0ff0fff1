"""One model of each of timm's families, through the public door without a trial pass: the first step is exact, or refused."""

from __future__ import annotations

import pytest
import timm
from fuzz.session import Threads
from fuzz.threads import installed
from zoo.door import Found, Trial
from zoo.families import FAMILIES

from widefield.plan import Plan

QUICK = ["resnet", "convnext", "cpubone", "efficientnet", "mambaout", "maxxvit", "vision_transformer", "beit"]
"""What `make test` runs: families whose smallest model is of a few layers, and what was wrong once."""
REFUSED = {("convit", "stream"): "puts new tensors in place of its buffers"}

pytestmark = pytest.mark.filterwarnings("ignore")  # of the libraries


@pytest.fixture(scope="module")
def threads():
    with installed():
        yield Threads()


def check(found: Found, family: str, how: str) -> None:
    if (family, how) in REFUSED:
        assert found.kind == "refused" and REFUSED[family, how] in found.text, str(found)
    else:
        assert found.kind == "exact", f"{family}, {how}: {found}"


@pytest.mark.parametrize("family", [name if name in QUICK else pytest.param(name, marks=pytest.mark.long) for name in FAMILIES])
def test_a_familys_first_step_is_exact_or_refused_in_words(family, threads):
    trial = Trial(FAMILIES[family].make(), FAMILIES[family].shape)
    check(trial.under(Plan(space=[2, 1]), threads), family, "space")
    check(trial.streamed((2, 2)), family, "stream")


def test_no_family_is_left_out():
    assert sorted(FAMILIES) == timm.list_modules()
    assert len(REFUSED) <= 2
