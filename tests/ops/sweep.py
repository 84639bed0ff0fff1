"""Runs calls of operations on tiles and on the whole, and says where they differ: `python -m ops.sweep --seconds 600`.

Ranks are threads of this process.  What torch refuses of the whole is no call; what tiles refuse in words is no difference.
"""

from __future__ import annotations

import argparse
import random
import time
import warnings
from collections import Counter
from collections.abc import Iterator
from itertools import islice
from typing import Any

import torch
from fuzz.threads import Failed, Mismatch, Ranks, Stuck, installed
from ops.sweep_calls import Call, attempts, operations
from torch import Tensor
from torch.utils._pytree import tree_leaves

from widefield.comm.mesh import Mesh, World, join
from widefield.geometry.interval import even_cut
from widefield.geometry.layout import Cut, layout_of
from widefield.plans import Plan
from widefield.tiled.api import _Tile, whole

TRIES = 40
"""Calls that are made of an operation before it is given up for a legal one."""
CLOSE = {torch.float64: 1e-10, torch.complex128: 1e-10, torch.float32: 1e-4, torch.float16: 2e-2, torch.bfloat16: 1e-1}
UNDEFINED = (
    "empty",
    "new_empty",
    "resize",
    "set_",
    "rrelu",
    "dropout",
    "rand",
    "bernoulli",
    "multinomial",
    "normal",
    "poisson",
    "backward",
)
"""Parts of names of operations that give other numbers each time, or none."""


class Sweep:
    """Two ranks on a grid of two tiles, and what they found, by kind."""

    def __init__(self) -> None:
        self.plan = Plan(space=[2])
        self.ranks, self.meshes = Ranks(2), {}
        self.counts: Counter[str] = Counter()

    def mesh(self, rank: int) -> Mesh:
        if rank not in self.meshes:
            self.meshes[rank] = join(World(rank, 2, rank, 2, launcher="threads"), self.plan)
        return self.meshes[rank]

    def problem_of(self, call: Call, draw: random.Random) -> str | None:
        """What is wrong with a call on tiles; None where nothing is, or where torch does not take it."""
        expected = _ran(call, call.tensors, None)
        if isinstance(expected, Exception):
            self.counts["illegal"] += 1
            return None
        dims = [draw.randrange(t.ndim) if t.ndim and draw.random() < 0.8 else None for t in call.tensors]
        if all(dim is None for dim in dims):
            dims = [t.ndim - 1 if t.ndim else None for t in call.tensors]
        found = self.ranks.run(lambda rank: _ran(call, call.tensors, (self.mesh(rank), dims)))
        found = [one.error if isinstance(one, Failed) else one for one in found]
        kind, text = _verdict(found, expected, max(CLOSE.get(t.dtype, 0.0) for t in call.tensors))
        self.counts[kind] += 1
        return None if text is None else f"{call.name} of {[_like(t) for t in call.tensors]}, cut along {dims}: {text}"


def _ran(call: Call, tensors: list[Tensor], cut: tuple[Mesh, list[int | None]] | None) -> list[Any] | Exception:
    """Results, and gradients of what can have them; or what was raised."""
    given = [t.detach().clone() for t in tensors]
    if not call.no_grad:
        given = [t.requires_grad_() if t.is_floating_point() or t.is_complex() else t for t in given]
    try:
        torch.manual_seed(0)
        inputs = given if cut is None else [_cut(t, dim, cut[0]) for t, dim in zip(given, cut[1], strict=True)]
        leaves = tree_leaves(call.run(*inputs))
        outs = [leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.requires_grad]
        results = [whole(leaf).detach() if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        if outs:
            weights = [torch.linspace(-1, 1, out.numel()).reshape(out.shape).to(out.dtype) for out in outs]
            grads = torch.autograd.grad([whole(out) for out in outs], given_with_grad(given), weights, allow_unused=True)
            results += [None if g is None else whole(g) for g in grads]
        return results
    except (Stuck, Mismatch, AssertionError):
        raise
    except Exception as error:
        return error


def given_with_grad(given: list[Tensor]) -> list[Tensor]:
    return [tensor for tensor in given if tensor.requires_grad]


def _cut(tensor: Tensor, dim: int | None, mesh: Mesh) -> Tensor:
    if dim is None:
        return tensor
    cuts = [Cut((0,), even_cut(n, 2)) if at == dim else None for at, n in enumerate(tensor.shape)]
    return _Tile.apply(tensor, layout_of(tuple(tensor.shape), tuple(cuts), mesh.grid))


def _verdict(found: list[Any], expected: list[Any], loosest: float) -> tuple[str, str | None]:
    """The kind of what came, and what is wrong with it.  loosest: how close results of the least precise input can be."""
    errors = [one if isinstance(one, BaseException) else None for one in found]
    if any(error is not None for error in errors):
        texts = {f"{type(error).__name__}: {error}" for error in errors}
        if len(texts) > 1:
            return "unlike", f"ranks differ: {sorted(text[:200] for text in texts)}"
        if isinstance(errors[0], (NotImplementedError, ValueError)) and "cannot" not in type(errors[0]).__name__:
            return "refused", None
        return "crash", f"raises {texts.pop()[:300]}"
    for rank, one in enumerate(found):
        text = _difference(one, expected, loosest)
        if text is not None:
            return "different", f"on rank {rank}, {text}"
    return "equal", None


def _difference(got: list[Any], expected: list[Any], loosest: float) -> str | None:
    if len(got) != len(expected):
        return f"{len(got)} results and gradients in place of {len(expected)}"
    for n, (a, b) in enumerate(zip(got, expected, strict=True)):
        if not isinstance(b, Tensor) or not isinstance(a, Tensor):
            there = b if a is None else a
            if a is not b and a != b and not (isinstance(there, Tensor) and not there.any()):
                return f"result {n} is {a} in place of {b}"
            continue
        if a.shape != b.shape or a.dtype != b.dtype:
            return f"result {n} is {_like(a)} in place of {_like(b)}"
        size = b[b.isfinite()].abs().max().item() if b.is_floating_point() and b.isfinite().any() else 1.0
        close = max(loosest, CLOSE.get(b.dtype, 0.0))
        if b.dtype in CLOSE and not torch.allclose(a, b, rtol=close, atol=close * max(1.0, float(size)), equal_nan=True):
            return f"result {n} is {a.flatten()[:6].tolist()} in place of {b.flatten()[:6].tolist()}"
        if b.dtype not in CLOSE and not torch.equal(a, b):
            return f"result {n} differs at {(a != b).sum()} places"
    return None


def _like(tensor: Tensor) -> str:
    return f"{list(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}"


def swept() -> list[Any]:
    """Operations that users call; kernels that torch calls itself trust their arguments, and may end the process."""
    names = [(op, str(op).removeprefix("aten.")) for op in operations()]
    return [
        op
        for op, name in names
        if not (name.startswith(("_", "widefield.", "native_")) or any(part in name for part in UNDEFINED))
    ]


def problems(sweep: Sweep, seed: int, each: int, until: float) -> Iterator[str]:
    """What is wrong with `each` legal calls of every operation."""
    for operation in swept():
        draw, legal = random.Random(seed), 0
        for call in islice(attempts(operation, seed), TRIES):
            before = sweep.counts["illegal"]
            text = sweep.problem_of(call, draw)
            legal += sweep.counts["illegal"] == before
            if text is not None:
                yield text
            if legal >= each or time.monotonic() > until:
                break


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--each", type=int, default=3)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    with installed():
        sweep, until, seed = Sweep(), time.monotonic() + options.seconds, options.seed
        while time.monotonic() < until:
            for text in problems(sweep, seed, options.each, until):
                print(text, flush=True)
            print(f"seed {seed}: {dict(sweep.counts)}", flush=True)
            seed += 1


if __name__ == "__main__":
    main()
