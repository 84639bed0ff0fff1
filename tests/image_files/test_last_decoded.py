"""Which decoded blocks are kept, and how many of them."""

from __future__ import annotations

import gc

import numpy as np
import pytest

from widefield.image_files import last_decoded as module
from widefield.image_files.last_decoded import OpenBlocks, last_decoded


@pytest.fixture
def kept(monkeypatch):
    """Room for 300 bytes, and nothing in it."""
    monkeypatch.setattr(module, "KEPT_BYTES", 300)
    gc.collect()
    module._kept.clear()
    yield module._kept
    module._kept.clear()


def block(size: int):
    return lambda: np.zeros(size, np.uint8)


def never():
    raise AssertionError("it was decoded again")


@pytest.mark.long
def test_a_file_keeps_the_block_that_it_decoded_last(kept):
    owner = OpenBlocks()
    first = last_decoded(owner, 1, block(100))
    assert last_decoded(owner, 1, never) is first
    last_decoded(owner, 2, block(100))
    with pytest.raises(AssertionError, match="decoded again"):
        last_decoded(owner, 1, never)
    assert list(kept) == []  # a block that fails leaves none


def test_all_files_together_keep_no_more_than_the_bound_and_the_newest(kept):
    owners = [OpenBlocks() for _ in range(5)]
    for owner in owners[:4]:
        last_decoded(owner, 0, block(100))
    last_decoded(owners[0], 0, never)  # which makes it the newest but one
    last_decoded(owners[4], 0, block(1000))
    assert [owner in kept for owner in owners] == [True, False, True, True, True]
    last_decoded(owners[1], 0, block(10))
    assert list(kept) == [owners[1]]


def test_blocks_go_with_the_handle_that_owns_them(kept):
    owner = OpenBlocks()
    last_decoded(owner, 0, block(100))
    assert len(kept) == 1
    del owner
    gc.collect()
    assert len(kept) == 0
