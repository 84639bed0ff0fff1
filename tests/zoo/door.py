"""Training through the public door as its users write it: `parallelize` or `stream` and no trial pass, beside one device's.

Ranks are threads of this process (`fuzz.threads`), so that hundreds of models cost no processes and none can hang.
"""

from __future__ import annotations

import copy
import multiprocessing
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from fuzz.errors import is_refusal, last_of
from fuzz.session import Threads
from fuzz.threads import Failed, installed
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from zoo.models import Model

import widefield as wf
from widefield.comm.mesh import Mesh
from widefield.geometry.interval import even_cut, parts_of
from widefield.parallel.passes import backward_of
from widefield.plans import Plan
from widefield.sharded_state import gather_full_on_main, local
from widefield.verification.verdict import TOLERANCE, rows_of

CLASSES = 7
NUDGES = (1e-13, -3e-13)
"""By which pixels and weights of one device are off, in relation to their size, to see what rounding makes of a model."""
CHAOS = 100.0
"""How much larger than what such a nudge does a difference is that rounding does not explain: a layer rounds many times."""
COARSE = 1e-4
"""The tolerance for models that compute a part in float32 whatever they are given."""

Numbers = dict[str, dict[str, Tensor | None]]
"""Of each kind (loss, gradient, buffer) tensors by name."""


@dataclass(frozen=True)
class Found:
    """What became of one model under one plan: exact, refused, differs or crashes, and the words to it."""

    kind: str
    text: str = ""

    def __str__(self) -> str:
        return f"{self.kind}: {self.text}" if self.text else self.kind


@dataclass
class Trial:
    """A model with its images, and what one device made of them; `under` says what a plan does."""

    model: nn.Module
    shape: tuple[int, ...]
    steps: int = 1
    alone: Numbers = field(default_factory=dict)
    tolerance: float = TOLERANCE

    def __post_init__(self) -> None:
        self.model = self.model.double().train()
        with _Precision() as seen:
            self.alone = self._on_one_device(0.0)
        if seen.is_coarse:
            self.tolerance = COARSE

    def _on_one_device(self, nudge: float) -> Numbers:
        model, generator = copy.deepcopy(self.model), _seeded(9)
        with torch.no_grad():
            for tensor in (*(images := self._images()), *model.parameters()):
                tensor.mul_(1 + nudge * torch.randn(tensor.shape, generator=generator, dtype=torch.float64))
        return train(model, model, images, lambda image: image)

    def _images(self) -> list[Tensor]:
        return [torch.randn(self.shape, generator=_seeded(step), dtype=torch.float64) for step in range(self.steps)]

    def streamed(self, tiles: Sequence[int]) -> Found:
        """Tile after tile on this one device."""
        model = copy.deepcopy(self.model)
        try:
            found = train(model, wf.stream(model, tiles=tuple(tiles)), self._images(), lambda image: image)
        except Exception as error:
            return _said([error])
        return self._compared([found])

    def under(self, plan: Plan, threads: Threads) -> Found:
        """On the ranks of a plan."""
        answers = threads.run(plan, self._on_rank)
        failed = [answer.error for answer in answers if isinstance(answer, Failed)]
        return _said(failed, ranks=len(answers)) if failed else self._compared(answers)

    def _on_rank(self, mesh: Mesh) -> Numbers:
        part = parts_of(even_cut(self.shape[0], mesh.copies))[mesh.copy]
        images = [image[part.start : part.stop] for image in self._images()]
        model = copy.deepcopy(self.model)
        laid = wf.parallelize(model, mesh, sample=images[0].to("meta"))
        lay = lambda image: wf.tile(image, mesh) if mesh.grid.sizes else image  # noqa: E731
        found = train(model, laid, images, lay, mesh, first=part.start, samples=self.shape[0])
        _free(model)
        return found

    def _compared(self, ranks: list[Numbers]) -> Found:
        errors = self._errors(ranks)
        largest = max(errors.values())
        if largest <= self.tolerance:
            return Found("exact", "" if largest <= TOLERANCE else f"but for a part in float32, {largest:.0e}")
        chaos = [self._errors([self._on_one_device(nudge)]) for nudge in NUDGES]
        worst = {name: error for name, error in errors.items() if error > self.tolerance + CHAOS * max(c[name] for c in chaos)}
        if not worst:
            return Found("exact", f"but for its rounding, {largest:.0e}")
        first = [f"{name} {error:.1e}" for name, error in worst.items()]
        return Found("differs", f"{len(first)} of {len(errors)}: {', '.join(first[:4])}")

    def _errors(self, ranks: list[Numbers]) -> dict[str, float]:
        """By tensor the largest of any rank."""
        each = [
            {
                f"{kind} {row.name}": row.error
                for kind, numbers in self.alone.items()
                for row in rows_of(kind, rank[kind], numbers)
            }
            for rank in ranks
            if rank
        ]
        return {name: max(errors[name] for errors in each) for name in each[0]}


def found_of(model: Model, plans: Mapping[str, Plan]) -> dict[str, Found]:
    """What becomes of a model under each plan, by its name; `stream` without ranks is tile after tile on this one device."""
    warnings.simplefilter("ignore")  # of the libraries
    torch.set_num_threads(1)
    trial, found = Trial(model.make(), (max(2, model.shape[0]), *model.shape[1:])), {}
    with installed():
        threads = Threads()
        for how, plan in plans.items():
            found[how] = trial.streamed(plan.stream.tiles) if plan.stream else trial.under(plan, threads)
    return found


@contextmanager
def apart() -> Iterator[Callable[[Model, Mapping[str, Plan]], dict[str, Found]]]:
    """`found_of` in a process that is replaced after some models: what captures hold is not given back at once."""
    context = multiprocessing.get_context("forkserver")
    with ProcessPoolExecutor(1, mp_context=context, max_tasks_per_child=6) as pool:
        yield lambda model, plans: pool.submit(found_of, model, plans).result()


class _Precision(TorchDispatchMode):
    """Whether some operation inside gives floating-point numbers coarser than float64."""

    is_coarse = False

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        results = func(*args, **(kwargs or {}))
        floats = [leaf for leaf in tree_leaves(results) if isinstance(leaf, Tensor) and leaf.is_floating_point()]
        self.is_coarse = self.is_coarse or any(leaf.dtype != torch.float64 and leaf.numel() > 1 for leaf in floats)
        return results


def train(
    model: nn.Module,
    run: Callable[[Tensor], Any],
    images: list[Tensor],
    lay: Callable[[Tensor], Tensor],
    mesh: Mesh | None = None,
    *,
    first: int = 0,
    samples: int | None = None,
) -> Numbers:
    """SGD steps, one for each batch of images, the first of which is number `first` of `samples`.

    Empty on ranks that have parts alone.  Weights are not compared: they follow from gradients.
    """
    copies = 1 if mesh is None else mesh.copies
    samples = samples or len(images[0])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    found: Numbers = {"loss": {}, "gradient": {}, "buffer": {}}
    for step, image in enumerate(images):
        if step:
            optimizer.step()
        optimizer.zero_grad()
        torch.manual_seed(step)
        labels = (torch.arange(len(image)) + first + step) % CLASSES
        if mesh is not None and mesh.plan.stage > 1:
            loss = backward_of(model, lay(image), labels, loss_of=loss_of, scaled=lambda loss: loss * (copies / samples))
        else:
            loss = loss_of(run(lay(image)), labels)
            (loss * (copies / samples)).backward()
        loss = loss.detach()
        found["loss"][f"of step {step}"] = loss if mesh is None else mesh.sum_(wf.whole(loss)) * copies / mesh.size
        gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
        found["gradient"] |= {f"of step {step}, {name}": grad for name, grad in _wholes(model, mesh, gradients).items()}
    optimizer.zero_grad()
    weights = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    found["buffer"] = _wholes(model, mesh, {name: t for name, t in model.state_dict().items() if name not in weights})
    return found if mesh is None or mesh.is_main or _holds_wholes(mesh) else {}


def loss_of(output: Any, labels: Tensor) -> Tensor:
    """A sum over samples: cross entropy of what classifies images, and something smooth of all other outputs."""
    each = [
        F.cross_entropy(leaf, labels, reduction="sum")
        if leaf.ndim == 2 and leaf.shape[1] == CLASSES
        else (leaf.square() * 0.5 + leaf.sin()).mean(tuple(range(1, leaf.ndim))).sum()
        for leaf in tree_leaves(output)
        if isinstance(leaf, Tensor) and leaf.is_floating_point()
    ]
    return torch.stack(each).sum()


def _holds_wholes(mesh: Mesh) -> bool:
    return mesh.plan.shard * mesh.plan.channel * mesh.plan.stage == 1


def _wholes(model: nn.Module, mesh: Mesh | None, tensors: dict[str, Tensor]) -> dict[str, Tensor | None]:
    held = tensors if mesh is None or _holds_wholes(mesh) else gather_full_on_main(model, mesh, tensors)
    return {name: wf.whole(tensor.detach()).clone() for name, tensor in held.items() if isinstance(tensor, Tensor)}


def _free(model: nn.Module) -> None:
    """Give a model's memory back at once: it lives on in the pictures that captures keep of what they read."""
    for tensor in (*model.parameters(), *model.buffers()):
        local(tensor.detach()).untyped_storage().resize_(0)


def _said(errors: list[BaseException], ranks: int = 1) -> Found:
    """Refused, where every rank refuses in words of widefield's."""
    if len(errors) == ranks and all(is_refusal(error) for error in errors):
        return Found("refused", str(errors[0]))
    first = next((error for error in errors if type(error).__name__ not in ("Stuck", "Mismatch")), errors[0])
    return Found("crashes", last_of("".join(traceback.format_exception(first))))


def _seeded(number: int) -> torch.Generator:
    return torch.Generator().manual_seed(number)
