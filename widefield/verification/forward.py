"""Does a model give one device's numbers when its images are cut?  Run it whole and on tiles, and compare everything.

Tiles in space: `verify` starts its own gloo ranks on this machine and runs `compare` on them; tests run `compare` on ranks they
have.  Tiles in time need no ranks, so `compare` runs here; with both, each rank streams its tile.
"""

from __future__ import annotations

import copy
import datetime
import multiprocessing
import os
import tempfile
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from multiprocessing.connection import Connection, wait
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from widefield.engine.layout import Grid
from widefield.engine.mesh import Mesh, World, join
from widefield.engine.stream.streamed import stream as streamed
from widefield.engine.tiled import TiledTensor
from widefield.engine.tiling import tile, whole, window
from widefield.plan import Plan, check

TOLERANCE = 1e-10
"""Largest difference, relative to the largest value, that float64 sums in another order explain."""

NOISE = 1e-3
"""Of the largest gradient: what is smaller may be the rounding of sums that cancel, as of a bias before a BatchNorm."""


OWN_RANKS = "verify starts ranks of its own; call it outside of a process group, in a process by itself"
KINDS = ("loss", "output", "gradient", "weight", "buffer")
"""What is compared, beside what layers give."""


@dataclass(frozen=True)
class Row:
    """One compared tensor: `kind` is one of KINDS or layer; `error` is relative to the largest value."""

    kind: str
    name: str
    error: float


@dataclass(frozen=True)
class Verdict:
    """What `verify` found.  `ok`: every tensor agrees.  `refusal`: why the model cannot run on tiles, in words; else None."""

    rows: list[Row] = field(default_factory=list)
    refusal: str | None = None
    tolerance: float = TOLERANCE
    zero_gradients: int = 0
    """Gradients that are zero on one device, as behind branches that begin at zero: there nothing is compared."""
    reasons: list[str] = field(default_factory=list)
    """What a plan's strategies chose, a sentence each."""

    @property
    def ok(self) -> bool:
        return self.refusal is None and all(row.error <= self.tolerance for row in self.rows)

    def __bool__(self) -> bool:
        return self.ok

    def __str__(self) -> str:
        """A table: the largest error of each kind, then the layers that differ, first to last as the model runs them."""
        if self.refusal is not None:
            return f"refused: {self.refusal}"
        lines = [_summary(kind, [row for row in self.rows if row.kind == kind]) for kind in KINDS]
        wrong = [row for row in self.rows if row.error > self.tolerance]
        lines += [f"  differs: {row.kind} {row.name}: {row.error:.1e}" for row in wrong[:20]]
        lines += [f"  and {len(wrong) - 20} more"] * (len(wrong) > 20)
        if self.zero_gradients:
            lines.append(
                f"{self.zero_gradients:5d} of these gradients are zero on one device: give weights values to compare them"
            )
        return "\n".join([*(line for line in lines if line), "exact" if self.ok else "NOT EXACT"])


def _summary(kind: str, rows: list[Row]) -> str:
    if not rows:
        return ""
    worst = max(rows, key=lambda row: row.error)
    plural = {"loss": "losses"}.get(kind, kind + "s")
    return f"{len(rows):5d} {plural if len(rows) > 1 else kind:10s} largest error {worst.error:.1e} ({worst.name})"


def verify(
    model: nn.Module,
    shape: Sequence[int],
    *,
    space: Sequence[int] | None = None,
    stream: Sequence[int] = (),
    cuts: Sequence[Sequence[int] | None] | None = None,
    train: bool = True,
    tolerance: float = TOLERANCE,
    plan: Plan | None = None,
    timeout_seconds: float = 600.0,
) -> Verdict:
    """Compare `model` on tiles with `model` on one device: outputs, every gradient, buffers; in float64, on the CPU.

    shape: of a batch of images, e.g. (2, 3, 250, 190); space: tiles in space per image dim, (2,) where `stream` is not given
    either; stream: tiles in time per image dim; cuts as for `tile`.
    train: in training mode, forward and backward; else evaluation mode and forward alone.
    plan: instead, any plan of any strategies, as `Plan(shard=2, channel=2)`: three optimizer steps under it, the batch shared
        out, against three on one device; losses, gradients, weights, buffers and outputs are compared.
    Starts one gloo rank per tile in space on this machine and ends them; the model itself stays as it is.
    Returns a Verdict: true if all agree; print it for the table.
    ValueError: more sizes than image dims, cuts that do not fit, or ranks to be started by a process that is a rank.
    """
    if plan is not None:
        return _verify_plan(model, shape, plan, tolerance, timeout_seconds, others=bool(space or stream or cuts or not train))
    space = space if space is not None else () if stream else (2,)
    sizes, turns = (_sizes(name, given, shape) for name, given in (("space", space), ("stream", stream)))
    body = partial(compare, model, tuple(shape), cuts=cuts, train=train, tolerance=tolerance, stream=turns if stream else ())
    if not space:
        with torch.random.fork_rng(devices=[]):
            return body(mesh=Mesh(Plan(), World(), torch.device("cpu"), grid=Grid(())))
    if dist.is_initialized():
        raise ValueError(OWN_RANKS)
    window(shape, Mesh(Plan(space=sizes), World(), torch.device("cpu"), grid=Grid(tuple(sizes))), cuts)  # refuses a wrong cut
    return _on_own_ranks(Plan(space=sizes), body, timeout_seconds)


def _verify_plan(
    model: nn.Module, shape: Sequence[int], plan: Plan, tolerance: float, timeout_seconds: float, *, others: bool
) -> Verdict:
    from widefield.engine.training_parity import compare_training

    if others:
        raise ValueError(
            "a plan itself says how images are cut, and is verified in training; leave space, stream, cuts and train out"
        )
    if dist.is_initialized():
        raise ValueError(OWN_RANKS)
    try:
        check(plan, ranks=plan.ranks, samples_per_step=shape[0])
    except (ValueError, NotImplementedError) as error:
        return Verdict(refusal=str(error))
    return _on_own_ranks(plan, partial(compare_training, model, tuple(shape), tolerance=tolerance), timeout_seconds)


def _sizes(name: str, given: Sequence[int], shape: Sequence[int]) -> list[int]:
    """A number of tiles for every dim of an image, 1 for the last ones where none is given."""
    dims = len(shape) - 2
    if len(given) > dims:
        raise ValueError(
            f"{name}={tuple(given)} has {len(given)} sizes and an image of {tuple(shape)[1:]} has {dims} dims to cut"
        )
    return [*given] + [1] * (dims - len(given))


def compare(
    model: nn.Module,
    shape: tuple[int, ...],
    mesh: Mesh,
    *,
    stream: Sequence[int] = (),
    cuts: Sequence[Sequence[int] | None] | None = None,
    train: bool = True,
    tolerance: float = TOLERANCE,
) -> Verdict:
    """`verify` on the ranks of `mesh`; every rank calls it with the same model, and gets the same verdict."""
    torch.manual_seed(0)
    image = torch.randn(shape, dtype=torch.float64)
    alone, cut, spare = (copy.deepcopy(model).double().cpu().train(train) for _ in range(3))
    lay = partial(tile, mesh=mesh, cuts=cuts) if mesh.grid.sizes or not stream else None
    expected = _run(alone, image.clone().requires_grad_(train))
    try:
        run = streamed(cut, tiles=stream) if stream else cut
        got = _run(run, image.clone().requires_grad_(train), lay, weights=expected.weights, notes=not stream)
    except NotImplementedError as error:  # raised on every rank alike, before any message
        return Verdict(refusal=str(error))
    rows = [] if stream else rows_of("layer", got.layers, expected.layers)
    rows += rows_of("output", got.outputs, expected.outputs)
    rows += rows_of("gradient", _mean_over(mesh, got.gradients), expected.gradients)
    rows += rows_of("buffer", dict(cut.named_buffers()), dict(alone.named_buffers()))
    worst = _worst(mesh, rows)
    if stream and any(row.error > tolerance for row in worst):
        worst = _worst(mesh, rows_of("layer", _told(spare, image, lay, stream), expected.layers)) + worst
    zeros = sum(gradient is not None and not bool(gradient.any()) for gradient in expected.gradients.values())
    return Verdict(worst, None, tolerance, zeros)


def _worst(mesh: Mesh, rows: list[Row]) -> list[Row]:
    """Of each row that with the largest error over all ranks."""
    return [max(same, key=lambda row: row.error) for same in zip(*mesh.gather_objects(rows), strict=True)]


@dataclass
class _Ran:
    outputs: dict[str, Tensor]
    gradients: dict[str, Tensor | None]
    layers: dict[str, Tensor]
    weights: list[Tensor]


def _run(
    model: nn.Module,
    image: Tensor,
    cut: Callable[[Tensor], Tensor] | None = None,
    weights: list[Tensor] | None = None,
    *,
    notes: bool = True,
) -> _Ran:
    """Forward, and backward of the outputs weighted by fixed random numbers.  notes: what each layer gives, too."""
    layers: dict[str, Tensor] = {}
    torch.manual_seed(1)
    with _noting(model, layers) if notes else nullcontext(), torch.set_grad_enabled(model.training):
        output = model(image if cut is None else cut(image))
    tensors = [t for t in tree_leaves(output) if isinstance(t, Tensor)]
    outputs = {str(n): whole(t).detach() for n, t in enumerate(tensors)}
    pulled = [t for t in tensors if t.requires_grad]
    generator = torch.Generator().manual_seed(2)
    if weights is None:
        weights = [torch.randn(t.shape, generator=generator, dtype=t.dtype) for t in pulled]
    if pulled:
        torch.autograd.backward(pulled, [_like(w, t) for w, t in zip(weights, pulled, strict=True)])
    gradients: dict[str, Tensor | None] = {name: p.grad for name, p in model.named_parameters() if p.requires_grad}
    return _Ran(outputs, gradients | {"the image": image.grad}, layers, weights)


class _Telling(nn.Module):
    """What every layer of a model gives, by name: of a stream, which runs no layer as such, it can be had only as outputs."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, image: Tensor) -> dict[str, Tensor]:
        layers: dict[str, Tensor] = {}
        with _noting(self.model, layers):
            self.model(image)
        return layers


def _told(model: nn.Module, image: Tensor, cut: Callable[[Tensor], Tensor] | None, stream: Sequence[int]) -> dict[str, Tensor]:
    """What the layers of a streamed model give, from a forward that is run to learn it."""
    torch.manual_seed(1)
    with torch.no_grad():
        layers = streamed(_Telling(model), tiles=stream)(image if cut is None else cut(image))
    return {name: whole(tensor) for name, tensor in layers.items()}


@contextmanager
def _noting(model: nn.Module, layers: dict[str, Tensor]) -> Iterator[None]:
    """Inside, what each layer of `model` gives is written into `layers`."""
    with ExitStack() as stack:
        for name, module in model.named_modules():
            stack.callback(module.register_forward_hook(partial(_note, layers, name)).remove)
        yield


def _note(layers: dict[str, Tensor], name: str, module: nn.Module, inputs: Any, output: Any) -> None:
    for number, tensor in enumerate(t for t in tree_leaves(output) if isinstance(t, Tensor)):
        layers[f"{name or 'the model'} ({type(module).__name__}) {number}"] = whole(tensor.detach()).clone()


def _like(weight: Tensor, tensor: Tensor) -> Tensor:
    """A gradient laid out as the tensor it is for."""
    from widefield.engine.tiling import _Tile

    return _Tile.apply(weight, tensor.laid) if type(tensor) is TiledTensor else weight


def _mean_over(mesh: Mesh, gradients: dict[str, Tensor | None]) -> dict[str, Tensor | None]:
    """Weights' gradients as DDP would leave them; the image's is whole on every rank."""
    means: dict[str, Tensor | None] = {}
    for name, gradient in gradients.items():
        if gradient is not None:
            gradient = whole(gradient)
            if name != "the image":
                gradient = mesh.sum_(gradient.clone()) / mesh.size
        means[name] = gradient
    return means


def rows_of(kind: str, got: dict, expected: dict) -> list[Row]:
    """A row for each tensor that one of the two has; an unused weight has no gradient on either side."""
    pairs = {name: (got.get(name), expected.get(name)) for name in expected | got}
    largest = max((_size(tensor) for tensor in expected.values() if tensor is not None), default=0.0)
    floor = min(1.0, NOISE * largest)
    return [Row(kind, name, _error(*pair, floor)) for name, pair in pairs.items() if any(one is not None for one in pair)]


def _size(tensor: Tensor) -> float:
    return float(tensor.abs().max()) if tensor.is_floating_point() and tensor.numel() else 0.0


def _error(got: Tensor | None, expected: Tensor | None, floor: float) -> float:
    """The largest difference relative to the largest value, or to `floor` where that is more.

    Infinite where shapes differ or one is missing (unless the other is all zero).
    """
    if got is None or expected is None:
        other = expected if got is None else got
        return 0.0 if other is None or not other.any() else float("inf")
    if got.shape != expected.shape:
        return float("inf")
    if not got.is_floating_point():
        return 0.0 if torch.equal(got, expected) else float("inf")
    size, difference = max(floor, _size(expected)), _size(got - expected)
    if difference == 0.0:
        return 0.0
    return difference / size if difference == difference and 0.0 < size < float("inf") else float("inf")


# ---------------------------------------------------------------------------------------------- own ranks


def _on_own_ranks(plan: Plan, body: Callable[..., Verdict], timeout_seconds: float) -> Verdict:
    """Fork a gloo rank per tile, so that any model travels as it is; the first rank's verdict."""
    context = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory(prefix="widefield_verify_") as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of forking beside threads: the child uses none of them
        ranks = []
        for rank in range(plan.ranks):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(rank, plan, f"file://{folder}/store", body, theirs), daemon=True)
            process.start()
            theirs.close()
            ranks.append((process, ours))
        try:
            return _first_answer(ranks, timeout_seconds)
        finally:
            for process, _ in ranks:
                process.kill()
                process.join()


def _first_answer(ranks: list, timeout_seconds: float) -> Verdict:
    """Rank 0's verdict, or the first failure."""
    pipes: list[Connection] = [pipe for _, pipe in ranks]
    while pipes:
        ready = wait(pipes, timeout_seconds)
        if not ready:
            raise RuntimeError(f"the ranks gave no answer within {timeout_seconds:.0f} s; try a smaller image")
        for pipe in ready:
            try:
                ok, answer = pipe.recv()  # type: ignore[union-attr]
            except EOFError:
                ok, answer = False, "a rank ended without an answer (killed, perhaps for memory)"
            if not ok:
                raise RuntimeError(f"the model failed on ranks:\n{answer}")
            if pipe is ranks[0][1]:
                return answer
            pipes.remove(pipe)  # type: ignore[arg-type]
    raise RuntimeError("no rank answered")


def _serve(rank: int, plan: Plan, store: str, body: Callable[..., Verdict], pipe: Connection) -> None:
    try:
        torch.set_num_threads(1)
        if os.path.exists("/sys/class/net/lo"):
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
        if plan.ranks > 1:
            wait_for = datetime.timedelta(minutes=10)
            dist.init_process_group("gloo", init_method=store, rank=rank, world_size=plan.ranks, timeout=wait_for)
        world = World(rank, plan.ranks, rank, plan.ranks, launcher="verify")
        pipe.send((True, body(mesh=join(world, plan))))
    except BaseException:
        pipe.send((False, traceback.format_exc()))
    finally:
        os._exit(0)
