"""The heap is trimmed between tiles, not at each of them, and not where a backward follows."""

from __future__ import annotations

import pytest

from widefield.streaming.storage import heap


@pytest.mark.parametrize("was_kept", [False, True])
@pytest.mark.parametrize(("keeps", "calls"), [(False, 2), (True, 0)])
def test_the_heap_is_trimmed_once_a_second_between_tiles(keeps, calls, was_kept, monkeypatch):
    """Whether the process trained before, and kept its memory, or not."""
    now, called = [100.0], []

    def tiles():
        for number in range(8):
            now[0] += 0.3
            yield number

    heap.return_freed_memory()
    is_kept = was_kept and heap.keep_freed_memory()
    monkeypatch.setattr(heap, "_trim", lambda: called.append)
    monkeypatch.setattr(heap, "_called", 100.0)
    monkeypatch.setattr(heap.time, "monotonic", lambda: now[0])
    assert list(heap.trimmed(tiles(), keeps)) == list(range(8))
    assert len(called) == calls
    assert heap._is_kept is (is_kept and keeps)
    heap.return_freed_memory()


def test_memory_of_the_heap_returns_to_the_system():
    """Where the C library is glibc, its function is found, and says that it did something or nothing."""
    trim = heap._trim()
    assert trim is None or trim(0) in (0, 1)
