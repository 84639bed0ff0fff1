"""Every operation that tiles know, called with unusual arguments: the whole's numbers and gradients, or words."""

from __future__ import annotations

import time
import warnings

import pytest
from fuzz.threads import installed
from ops.sweep import Sweep, problems


@pytest.mark.long
def test_unusual_arguments_give_the_wholes_numbers_or_are_refused_in_words():
    """A call or two of each; `python -m ops.sweep` in tests/ makes more of them."""
    with installed(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's, of calls that are legal and unwise
        sweep = Sweep()
        found = list(problems(sweep, 0, 1, time.monotonic() + 300))
    assert found == [], "\n".join(found)
    assert sweep.counts["equal"] > 500, sweep.counts
