"""What is said of an error, on the rank that has it and on the others."""

from __future__ import annotations

import queue

import pytest

from widefield.comm.failure import cause_of, in_words


def chained(*errors: BaseException) -> BaseException:
    """The last error, raised from those before it."""
    for cause, error in zip(errors, errors[1:], strict=False):
        error.__cause__ = cause
    return errors[-1]


@pytest.mark.parametrize(
    ("errors", "told"),
    [
        ([KeyError("x"), RuntimeError("no such layer")], "failed: KeyError: 'x'"),
        ([queue.Empty(), RuntimeError("worker 7 exited unexpectedly")], "failed: RuntimeError: worker 7 exited"),
        ([queue.Empty()], "failed: Empty"),
        ([OSError("full"), queue.Empty(), RuntimeError("a worker ended")], "failed: OSError: full"),
    ],
)
def test_the_first_error_that_says_something_is_told(errors, told):
    assert in_words(chained(*errors)).startswith(told)


def test_a_chain_that_is_a_ring_has_an_end():
    first, second = ValueError("one"), ValueError("two")
    first.__cause__, second.__cause__ = second, first
    assert cause_of(first) is second
