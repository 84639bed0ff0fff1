"""How many floating-point operations does a traced operation take?  Multiplications and additions count one each."""

from __future__ import annotations

import math

import torch

from widefield.capture.decompositions import linear
from widefield.capture.ir import Node

aten = torch.ops.aten


def flops_of(node: Node) -> float:
    """Of a forward of a convolution, a product or attention; 0 for what is cheap beside these."""
    out = next((out for out in node.outs if out is not None), None)
    if out is None:
        return 0.0
    return flops_per_number(node) * math.prod(node.reads[0].shape if is_transposed(node) else out.shape)


def flops_per_number(node: Node) -> float:
    """The same per number of the result; per number of the image, where a convolution is transposed."""
    shapes = [value.shape for value in node.reads]
    if node.op is aten.convolution.default:
        return 2.0 * math.prod(shapes[1][1:])
    if node.op in (linear, aten.mm.default, aten.bmm.default):
        return 2.0 * shapes[0][-1]
    if node.op in (aten.addmm.default, aten.baddbmm.default):
        return 2.0 * shapes[1][-1]
    return 4.0 * shapes[1][-2] if "_scaled_dot_product" in str(node.op) else 0.0


def is_transposed(node: Node) -> bool:
    """Whether it is a transposed convolution."""
    return node.op is aten.convolution.default and bool(node.args[6])
