"""Do ranks send what the halo arithmetic says and no more?  Whole U-Nets and ResNets, forward and backward, by the byte.

The arithmetic is written again here, row by row in sets: it knows nothing of the engine's windows, layouts or rules.  Each
tensor is cut in the middle of an even number of rows, so who owns a row needs no rule either.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import pytest
import torch
from marks import few
from ranks import on_ranks
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from zoo.models import MODELS

import widefield as wf
from widefield.comm.halo import TRAFFIC, Traffic
from widefield.plans import Plan
from widefield.tiled.partial_gradient import manage

PAGE, VOLUME = (1, 3, 256, 192), (1, 1, 64, 32, 24)
SIZES = {
    **dict.fromkeys(["widefield/unet batch", "widefield/unet group", "smp/Unet", "smp/UnetPlusPlus"], PAGE),
    **dict.fromkeys(["monai/UNet 2-D", "monai/BasicUNet 2-D", "monai/DynUNet 2-D", "monai/AttentionUnet"], PAGE),
    **dict.fromkeys(["monai/UNet 3-D", "monai/DynUNet 3-D"], VOLUME),
    **dict.fromkeys(["timm/resnet18", "timm/resnet50", "timm/resnext26ts", "torchvision/resnet18", "widefield/resnet"], PAGE),
}
"""Sizes whose rows halve evenly down to the deepest layer, where a tile has 4 rows or more."""


# ---------------------------------------------------------------------------------------------- which rows are read


def read_by_window(output: int, rows: int, size: int, stride: int, padding: int, dilation: int) -> set[int]:
    """Rows of an image of `rows` that a window reads for its output row."""
    start = output * stride - padding
    return {row for row in range(start, start + dilation * size, dilation) if 0 <= row < rows}


def read_by_resize(output: int, rows: int, outputs: int, linear: bool, corners: bool) -> set[int]:
    """Rows of an image of `rows` that a resize to `outputs` rows reads for one of them."""
    if not linear:
        return {output * rows // outputs}
    at = output * (rows - 1) / (outputs - 1) if corners else max(0.0, (output + 0.5) * rows / outputs - 0.5)
    return {math.floor(at), min(math.ceil(at), rows - 1)}


def convolution_reads(rows: int, outputs: int, size: int, stride, padding, dilation, transposed: bool) -> list[set[int]]:
    """For each output row the image rows that it reads; windows of a transposed convolution lie on its output."""
    window = (size, stride[0], padding[0], dilation[0])
    if not transposed:
        return [read_by_window(output, rows, *window) for output in range(outputs)]
    written = [read_by_window(row, outputs, *window) for row in range(rows)]
    return [{row for row in range(rows) if output in written[row]} for output in range(outputs)]


def pool_reads(rows: int, outputs: int, size, stride=(), padding=(0,), dilation=(1,), *_) -> list[set[int]]:
    window = (size[0], (stride or size)[0], padding[0], dilation[0])
    return [read_by_window(output, rows, *window) for output in range(outputs)]


def sent_forward(reads: list[set[int]], rows: int) -> list[int]:
    """Rows of the image that outputs on the other side read: those that rank 0 has, and rank 1."""
    above, below = reads[: len(reads) // 2], reads[len(reads) // 2 :]
    return [
        len({row for read in below for row in read if row < rows // 2}),
        len({row for read in above for row in read if row >= rows // 2}),
    ]


def sent_backward(reads: list[set[int]], rows: int) -> list[int]:
    """Output rows that read an image row on the other side: those that rank 0 has, and rank 1."""
    above, below = reads[: len(reads) // 2], reads[len(reads) // 2 :]
    return [
        sum(any(row >= rows // 2 for row in read) for read in above),
        sum(any(row < rows // 2 for row in read) for read in below),
    ]


# ---------------------------------------------------------------------------------------------- a plain model, watched


class Arithmetic(TorchDispatchMode):
    """Watches a plain model run and adds up what each operation would send between two tiles.

    sent: bytes that rank 0 and rank 1 send.  statistics: of each normalization and global pool, how many means it takes.
    pixels: bytes of all activations and gradients that are computed.
    """

    def __init__(self) -> None:
        super().__init__()
        self.sent: list[int] = [0, 0]
        self.statistics: list[int] = []
        self.pixels = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        made = [value for value in tree_leaves(out) if isinstance(value, Tensor)]
        self.pixels += sum(t.numel() * t.element_size() for t in made if t.ndim > 3)
        name = func.overloadpacket.__name__
        if name in RESIZES:
            self.resize(name, out, *args)
        elif name in WATCHED:
            WATCHED[name](self, out, *args)
        else:
            assert not any(part in name for part in WINDOWED), f"the arithmetic of {name} is not written here"
        return out

    def send(self, rows: list[int], tensor: Tensor, element_bytes: int | None = None) -> None:
        """Count `rows` of a tensor, by the rank that sends them."""
        assert tensor.shape[2] % 2 == 0, f"{tuple(tensor.shape)} has no middle"
        of_row = tensor.numel() // tensor.shape[2] * (element_bytes or tensor.element_size())
        self.sent = [sent + count * of_row for sent, count in zip(self.sent, rows, strict=True)]

    # What each operation gave, and its arguments.

    def convolution(self, out, image, weight, bias, stride, padding, dilation, transposed, *_) -> None:
        rows = image.shape[2]
        if rows > 1:
            reads = convolution_reads(rows, out.shape[2], weight.shape[2], stride, padding, dilation, transposed)
            self.send(sent_forward(reads, rows), image)

    def convolution_backward(self, _, grad, image, weight, bias, stride, padding, dilation, transposed, *rest) -> None:
        rows, (image_wanted, *_others) = image.shape[2], rest[2]
        if rows > 1 and image_wanted:  # else the weight's gradient meets the halo that the forward fetched
            reads = convolution_reads(rows, grad.shape[2], weight.shape[2], stride, padding, dilation, transposed)
            self.send(sent_backward(reads, rows), grad)

    def max_pool(self, out, image, *window) -> None:
        self.send(sent_forward(pool_reads(image.shape[2], out[0].shape[2], *window), image.shape[2]), image)

    def max_pool_backward(self, _, grad, image, *window) -> None:
        """Beside each gradient goes the place of its maximum, an int64."""
        reads = pool_reads(image.shape[2], grad.shape[2], *window)
        self.send(sent_backward(reads, image.shape[2]), grad, grad.element_size() + 8)

    def avg_pool(self, out, image, size, stride=(), padding=(0,), *_) -> None:
        self.send(sent_forward(pool_reads(image.shape[2], out.shape[2], size, stride, padding), image.shape[2]), image)

    def avg_pool_backward(self, _, grad, image, size, stride=(), padding=(0,), *__) -> None:
        self.send(sent_backward(pool_reads(image.shape[2], grad.shape[2], size, stride, padding), image.shape[2]), grad)

    def resize(self, name: str, out, source, size, *rest) -> None:
        forward, linear = "backward" not in name, "linear" in name
        rows = source.shape[2] if forward else rest[0][2]
        corners = linear and rest[0 if forward else 1]
        reads = [read_by_resize(output, rows, size[0], linear, corners) for output in range(size[0])]
        self.send((sent_forward if forward else sent_backward)(reads, rows), source)

    def batch_norm(self, _, image, *__) -> None:
        self.statistics.append(image.shape[1])

    def group_norm(self, out, *_) -> None:
        self.statistics.append(out[1].numel())

    def group_norm_backward(self, _, grad, *__) -> None:
        self.statistics.append(grad.shape[0] * grad.shape[1])

    def mean(self, out, image, *_) -> None:
        self.statistics.append(out.numel())

    def padding(self, _, *arguments) -> None:
        """MONAI pads by nothing where sizes fit."""
        assert not any(arguments[-1]), f"the arithmetic of padding by {arguments[-1]} is not written here"


RESIZES = {
    f"upsample_{kind}{backward}"
    for kind in ("nearest2d", "nearest3d", "bilinear2d", "trilinear3d")
    for backward in ("", "_backward")
}
WATCHED = {
    "convolution": Arithmetic.convolution, "convolution_backward": Arithmetic.convolution_backward,
    **{f"max_pool{dims}d_with_indices": Arithmetic.max_pool for dims in (2, 3)},
    **{f"max_pool{dims}d_with_indices_backward": Arithmetic.max_pool_backward for dims in (2, 3)},
    "avg_pool2d": Arithmetic.avg_pool, "avg_pool2d_backward": Arithmetic.avg_pool_backward,
    "native_batch_norm": Arithmetic.batch_norm, "native_batch_norm_backward": Arithmetic.batch_norm,
    "native_group_norm": Arithmetic.group_norm, "native_group_norm_backward": Arithmetic.group_norm_backward,
    "replication_pad2d": Arithmetic.padding, "replication_pad2d_backward": Arithmetic.padding, "mean": Arithmetic.mean,
}  # fmt: skip
WINDOWED = ("conv", "pool", "upsample", "norm", "pad", "fold")


# ---------------------------------------------------------------------------------------------- and on tiles


def one_step(net: nn.Module, image: Tensor) -> None:
    sum(output.square().mean() for output in tree_leaves(net(image))).backward()


@dataclass(frozen=True)
class Step:
    """One training step in float32: what two tiles should send by the arithmetic, and what this rank did send."""

    sent_bytes: int
    statistics: list[int]
    pixels_bytes: int
    traffic: Traffic


def a_step(mesh, name: str, gathered: bool) -> Step:
    """gathered: on the way, one activation is also made whole on every rank."""
    net, image = MODELS[name].make().train(), torch.randn(SIZES[name])
    with Arithmetic() as should:
        one_step(net, image)
    if gathered:
        conv = next(module for module in net.modules() if isinstance(module, nn.Conv2d))
        conv.register_forward_hook(lambda module, inputs, output: wf.tile(wf.whole(output), mesh))
    manage(net.parameters())  # as those that average gradients do, which is no part of what tiles send
    TRAFFIC.clear()
    one_step(net, wf.tile(image, mesh))
    return Step(should.sent[mesh.rank], should.statistics, should.pixels, replace(TRAFFIC))


def steps(name: str, gathered: bool = False) -> list[Step]:
    return on_ranks(2, a_step, name, gathered, plan=Plan(space=[2] + [1] * (len(SIZES[name]) - 3)))


@pytest.mark.parametrize("name", few(SIZES, "widefield/unet batch", "monai/UNet 3-D"))
def test_a_step_sends_the_halo_and_no_more(name):
    for step in steps(name):
        assert step.traffic.pixel_bytes == step.sent_bytes
        assert 0 < step.sent_bytes < step.pixels_bytes / 100
        # A tile of the deepest layer has 4 rows and gets 1 more; a gathered tensor would come to a half.
        assert step.traffic.largest_share <= 1 / 5
        # Two float64 sums and a count at most; gradients of weights are nowhere among them.
        assert 0 < step.traffic.sum_bytes <= sum(8 * (2 * numbers + 1) for numbers in step.statistics)


def test_a_gathered_activation_is_seen():
    for step in steps("widefield/resnet", gathered=True):
        assert step.traffic.pixel_bytes > step.sent_bytes and step.traffic.largest_share == 1 / 2


@pytest.mark.parametrize(
    ("reads", "rows", "forward", "backward"),
    [
        (convolution_reads(8, 8, 3, [1], [1], [1], False), 8, [1, 1], [1, 1]),
        (convolution_reads(8, 4, 7, [2], [3], [1], False), 8, [3, 2], [1, 2]),  # rows 1..7 for output 2, -1..5 for output 1
        (convolution_reads(8, 4, 1, [2], [0], [1], False), 8, [0, 0], [0, 0]),
        (convolution_reads(4, 8, 2, [2], [0], [1], True), 4, [0, 0], [0, 0]),
        (convolution_reads(4, 8, 3, [2], [1], [1], True), 4, [0, 1], [1, 0]),  # output 3 = 2 * 2 - 1 reads row 2
        (pool_reads(8, 4, [3], [2], [1]), 8, [1, 0], [0, 1]),  # rows 3..5 for output 2, 1..3 for output 1
        ([read_by_resize(o, 4, 8, linear=True, corners=False) for o in range(8)], 4, [1, 1], [1, 1]),
        ([read_by_resize(o, 4, 8, linear=False, corners=False) for o in range(8)], 4, [0, 0], [0, 0]),
    ],
)
def test_the_arithmetic_by_hand(reads, rows, forward, backward):
    assert sent_forward(reads, rows) == forward
    assert sent_backward(reads, rows) == backward
