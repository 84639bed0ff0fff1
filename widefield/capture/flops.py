"""The FLOPs of a traced operation: multiplications and additions count one each."""

from __future__ import annotations

import math

import torch

from widefield.capture.decompositions import linear
from widefield.capture.ir import Node

aten = torch.ops.aten


def flops_of(node: Node) -> float:
    """FLOPs of a forward of a convolution, a matrix product or attention; 0 for all other operations."""
    out = next((out for out in node.outs if out is not None), None)
    if out is None:
        return 0.0
    return flops_per_number(node) * math.prod(node.reads[0].shape if is_transposed(node) else out.shape)


def flops_per_number(node: Node) -> float:
    """FLOPs per number of the result, or of a transposed convolution, per number of its image."""
    shapes = [value.shape for value in node.reads]
    if node.op is aten.convolution.default:
        return 2.0 * math.prod(shapes[1][1:])
    if node.op in (linear, aten.mm.default, aten.bmm.default):
        return 2.0 * shapes[0][-1]
    if node.op in (aten.addmm.default, aten.baddbmm.default):
        return 2.0 * shapes[1][-1]
    return 4.0 * shapes[1][-2] if "_scaled_dot_product" in str(node.op) else 0.0


def is_transposed(node: Node) -> bool:
    """Whether the operation is a transposed convolution."""
    return node.op is aten.convolution.default and bool(node.args[6])
