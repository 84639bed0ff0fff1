"""Parts of torch.distributed.pipelining, which takes long to import: import this file where stages are."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.distributed.pipelining._backward as backward

stage_backward: Callable[..., Any] = backward.stage_backward
"""A stage's whole backward: taken where its two halves would leave weights without their gradients."""
