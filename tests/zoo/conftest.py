"""What the sweeps over other people's models share."""

from __future__ import annotations

import pytest
from zoo.door import apart


@pytest.fixture(scope="module")
def tried():
    """Runs a model under plans; see `zoo.door.apart`."""
    with apart() as run:
        yield run
