"""Which module of a model is the first to make a number that is not finite, forward and backward?

A module whose inputs are finite and whose output is not has made it; of modules inside each other the innermost is named, so
that a module is named for operations of its own forward only where its parts are innocent.  Backward the same holds of
gradients, whose inputs are those of the module's output.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn

from widefield.private_torch.pytree import tree_leaves

MOST_NAMES = 5


@dataclass(frozen=True)
class Fault:
    """module: its name; "" for the model itself, "the images" and "the loss" for what is no module.  kind: its class.

    rows: the names of the images whose numbers are not finite, where they can be told apart.
    """

    module: str
    kind: str
    what: str
    rows: tuple[str, ...] = ()

    def in_words(self) -> str:
        name = f"{self.module or 'the model itself'}{f' ({self.kind})' if self.kind else ''}"
        more = f" and {len(self.rows) - MOST_NAMES} more" if len(self.rows) > MOST_NAMES else ""
        rows = f", of {', '.join(self.rows[:MOST_NAMES])}{more}" if self.rows else ""
        return f"{name} {self.what}{rows}"


class NonFiniteWatch:
    """While open, looks at every module's inputs, outputs and their gradients.  images: the names of a batch's rows."""

    def __init__(self, model: nn.Module, images: Sequence[str]) -> None:
        self.forward: Fault | None = None
        """The first module whose output is not finite."""
        self._model, self._images = model, list(images)
        self._handles: list[Any] = []
        self._outputs: dict[str, bool] = {}
        """Of each module, whether the gradient of its output was finite."""
        self._made: list[str] = []
        """Modules of whose inputs the gradient is not finite, though that of their outputs is, in the order of the backward."""
        self._kinds = {name: type(module).__name__ for name, module in model.named_modules()}

    def __enter__(self) -> NonFiniteWatch:
        for name, module in self._model.named_modules():
            before, after = self._watch_inputs(name), self._watch_outputs(name)
            self._handles.append(module.register_forward_pre_hook(before, with_kwargs=True))
            self._handles.append(module.register_forward_hook(after, with_kwargs=True))
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for handle in self._handles:
            handle.remove()

    def backward(self) -> Fault | None:
        """The first module in the backward that made a gradient that is not finite; call it after the backward."""
        modules = self._model.named_modules()
        odd = [name for name, module in modules if _any_odd(p.grad for p in module.parameters(recurse=False))]
        from_inputs = [name for name in self._made if not any(self._is_inside(other, name) for other in self._made)]
        own = [name for name in odd if self._outputs.get(name)]
        if from_inputs or own:
            name = (from_inputs or own)[0]
            return Fault(name, self._kinds[name], "is the first that makes a gradient that is not finite")
        got = [name for name, is_finite in self._outputs.items() if not is_finite]
        if got and not self._outputs.get("", False):
            return Fault("the loss", "", "has a gradient that is not finite")
        if got:  # made between the modules of one that got a finite gradient
            around = [name for name, is_finite in self._outputs.items() if is_finite and self._is_inside(got[0], name)]
            name = max(around, key=len)
            return Fault(name, self._kinds[name], "is the first that makes a gradient that is not finite")
        return Fault(odd[0], self._kinds[odd[0]], "has a gradient that is not finite") if odd else None

    @staticmethod
    def _is_inside(inner: str, outer: str) -> bool:
        return inner != outer and (outer == "" or inner.startswith(f"{outer}."))

    def _watch_inputs(self, name: str) -> Callable[..., None]:
        def hook(module: nn.Module, inputs: Any, options: Any) -> None:
            for tensor in _tensors((inputs, options)):
                if name == "" and self.forward is None and not _is_finite(tensor):
                    self.forward = Fault("the images", "", "have numbers that are not finite", self._rows(tensor))
                if tensor.requires_grad:
                    tensor.register_hook(lambda grad: self._note_input(name, grad))

        return hook

    def _watch_outputs(self, name: str) -> Callable[..., None]:
        def hook(module: nn.Module, inputs: Any, options: Any, output: Any) -> None:
            for tensor in _tensors(output):
                if self.forward is None and not _is_finite(tensor):
                    what = "is the first whose output is not finite"
                    self.forward = Fault(name, self._kinds[name], what, self._rows(tensor))
                if tensor.requires_grad:
                    tensor.register_hook(lambda grad: self._note_output(name, grad))

        return hook

    def _note_output(self, name: str, grad: Tensor) -> None:
        self._outputs[name] = self._outputs.get(name, True) and _is_finite(grad)

    def _note_input(self, name: str, grad: Tensor) -> None:
        if not _is_finite(grad) and self._outputs.get(name, False) and name not in self._made:
            self._made.append(name)

    def _rows(self, tensor: Tensor) -> tuple[str, ...]:
        """The names of the images in whose rows something is not finite; () where rows are no images, or all are odd."""
        if tensor.ndim < 2 or len(tensor) != len(self._images):
            return ()
        odd = (~torch.isfinite(tensor.detach())).flatten(1).any(1).tolist()
        return (
            () if all(odd) and len(odd) > 1 else tuple(name for name, is_odd in zip(self._images, odd, strict=True) if is_odd)
        )


def _tensors(values: Any) -> Iterator[Tensor]:
    return (leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor) and leaf.is_floating_point())


def _is_finite(tensor: Tensor) -> bool:
    return bool(torch.isfinite(tensor.detach()).all())


def _any_odd(gradients: Any) -> bool:
    return any(grad is not None and not _is_finite(grad) for grad in gradients)
