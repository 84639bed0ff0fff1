"""Small nets for replicas."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn

from widefield.comm.requests import Message


class Plain(nn.Module):
    """Without normalization, so that copies that agree in every step are data-parallel training."""

    def __init__(self, in_channels: int = 1, num_classes: int = 10) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(in_channels, 4, 3, padding=1), nn.Conv2d(4, 5, 3, stride=2)
        self.head = nn.Linear(5, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.second(self.first(x).tanh()).tanh()
        return self.head(x.mean((2, 3)))


class Branches(nn.Module):
    """One branch never runs, one only where the first image is bright; a weight is frozen."""

    def __init__(self, in_channels: int = 1, num_classes: int = 10) -> None:
        super().__init__()
        self.stem, self.norm = nn.Conv2d(in_channels, 4, 3, padding=1, bias=False), nn.BatchNorm2d(4)
        self.side, self.never, self.head = nn.Conv2d(4, 4, 1), nn.Conv2d(4, 4, 1), nn.Linear(4, num_classes)
        self.scale = nn.Parameter(torch.ones(4, 1, 1), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        is_bright = float(x[0].mean()) > 0
        x = self.norm(self.stem(x)).tanh() * self.scale
        x = x + self.side(x).tanh() if is_bright else x
        return self.head(x.mean((2, 3)))


class KilledInPush(Plain):
    """Rank 0 is killed in its third push, when one further server has its part, and another and the first have not."""

    def __init__(self, in_channels: int = 1, num_classes: int = 10) -> None:
        super().__init__(in_channels, num_classes)
        if os.environ.get("RANK") == "0":
            from widefield.asynchrony.server_links import ServerLinks

            real, pushes = ServerLinks._bring, [0]

            def bring(links: ServerLinks, message: Message) -> Message:
                pushes[0] += 1
                if pushes[0] < 3:
                    return real(links, message)
                links._bringing = links._bringing[:1]
                links._parts = links._parts[:2]
                real(links, message)
                os.kill(os.getpid(), signal.SIGKILL)
                raise AssertionError("it was killed")

            ServerLinks._bring = bring

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            time.sleep(0.02)
        return super().forward(x)


class Slow(Plain):
    """Each pass in training takes 20 ms longer."""

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            time.sleep(0.02)
        return super().forward(x)


class WaitsForReturn(Slow):
    """From a worker's eighth pass on each takes most of a second, until one that came back has begun a pass.

    $TEST_RETURN is the file that says so.
    """

    passes = 0

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.passes += 1
            returned = Path(os.environ["TEST_RETURN"])
            if os.environ.get("WIDEFIELD_CAME_BACK"):
                returned.touch()
            if self.passes >= 8 and not returned.exists():
                time.sleep(0.7)
        return super().forward(x)


class CountSamples(torch.autograd.Function):
    """Adds nothing to `x`; the gradient of `counts` is 1, whatever that of `x` is."""

    @staticmethod
    def forward(ctx, x: Tensor, counts: Tensor) -> Tensor:
        ctx.numel = counts.numel()
        return x.clone()

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, Tensor]:
        return gradient, torch.ones(ctx.numel, dtype=gradient.dtype)


class Counting(Plain):
    """Each update takes its rate from a number of this rank's, whatever the weights are.

    So these numbers say which updates the weights have had.  Others have no gradient here, so that no two ranks write one.
    """

    def __init__(self, in_channels: int = 1, num_classes: int = 10) -> None:
        super().__init__(in_channels, num_classes)
        self.counts = nn.ParameterList(torch.zeros(1) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            time.sleep(0.02)
        x = super().forward(x)
        return CountSamples.apply(x, self.counts[dist.get_rank()]) if self.training else x


class KilledAfterUpdate(Counting):
    """Rank 0 is killed after its third update of shared weights, before it writes that it has ended, or tells of it.

    WIDEFIELD_TEST_KILLED=begun: before it writes.  ended: after.
    """

    def __init__(self, in_channels: int = 1, num_classes: int = 10) -> None:
        super().__init__(in_channels, num_classes)
        if os.environ.get("RANK") == "0":
            from widefield.asynchrony.shared_memory import Cell

            real, ends = Cell.end, [0]

            def end(cell: Cell) -> None:
                ends[0] += 1
                if ends[0] < 3 or os.environ["WIDEFIELD_TEST_KILLED"] == "ended":
                    real(cell)
                if ends[0] == 3:
                    os.kill(os.getpid(), signal.SIGKILL)

            Cell.end = end
