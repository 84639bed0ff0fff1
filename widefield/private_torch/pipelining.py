"""Parts of torch.distributed.pipelining, which takes long to import: import this file where stages are."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed.pipelining._backward as backward
import torch.distributed.pipelining.schedules as schedules

stage_backward: Callable[..., Any] = backward.stage_backward
"""A stage's whole backward: taken where its two halves would leave weights without their gradients."""


@contextmanager
def messages_of_stages(made: Callable[[Callable[..., Any]], Callable[..., Any]]) -> Iterator[None]:
    """Inside, the schedules post the messages between stages by `made(post)`, where `post(operations, desc)` is torch's own."""
    post = schedules._batch_p2p
    schedules._batch_p2p = made(post)
    try:
        yield
    finally:
        schedules._batch_p2p = post
