"""Objects that a Python program passes in place of names in a recipe: a model, datasets, a task, a loss.

A config, and so a run folder, has only the class's name, in angle brackets; the record of a run has their sizes and texts.
To resume or evaluate the run, pass them again.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import nn
from torch.nn.parameter import is_lazy

from widefield.comm.mesh import AgreedError, Mesh
from widefield.data import Dataset
from widefield.data.intensity import in_words
from widefield.data.map_style import MapStyle
from widefield.own_code import object_name
from widefield.tasks import Task

MOST_TEXT = 20_000
"""The most characters of an object's text that a record has."""
REPLACED = {
    "model": ("name", "options", "pretrained"),
    "data": ("name", "options", "path", "hold_out"),
    "task": ("name", "options"),
    "loss": ("loss", "loss_options"),
}
"""The keys that an object replaces, first its name, then its options; the other keys still apply."""
SECTIONS = {"loss": "task"}
"""The sections of those keys, where they are not called as the object is."""


@dataclass(frozen=True)
class Given:
    """The passed objects; None where the config names them.  data: opens the dataset, on every rank."""

    model: nn.Module | None = None
    data: Callable[[], Dataset] | None = None
    task: Task | None = None
    callbacks: Sequence[Any] = ()
    """See run_events.py."""
    loss: Any = None
    """A loss of the program's own, see widefield/losses/_own.py."""

    def model_copy(self) -> nn.Module | None:
        """A copy of the model for the run, since `parallelize` changes it.  ValueError: it cannot be copied."""
        try:
            return copy.deepcopy(self.model)
        except Exception as error:
            raise ValueError(
                f"the model {object_name(self.model)} cannot be copied ({type(error).__name__}: {error}), and a run trains a "
                "copy; keep tensors that are no parameters or buffers out of it, or name what makes it: "
                "model.name=package.module:callable"
            ) from None

    def described(self, dataset: Dataset) -> dict[str, Any]:
        """The record's entry for the objects: class, sizes, text."""
        facts: dict[str, Any] = {}
        if self.model is not None:
            parameters = sum(parameter.numel() for parameter in self.model.parameters())
            facts["model"] = {"class": object_name(self.model), "parameters": parameters, "text": _text(self.model)}
        for images in (dataset.train, dataset.evaluate):
            if isinstance(images, MapStyle):
                about = {"class": object_name(images.samples), "samples": len(images), "text": _text(images.samples)}
                facts.setdefault("data", {})[images.split] = about
        if self.task is not None:
            facts["task"] = {"class": object_name(self.task), "text": _text(self.task)}
        if self.loss is not None:
            facts["loss"] = {"class": object_name(self.loss), "text": _text(self.loss)}
        return facts


NOTHING = Given()


def _text(thing: object) -> str:
    return repr(thing)[:MOST_TEXT]


def overrides_for(overrides: Sequence[str], **objects: object) -> list[str]:
    """Overrides that put the names of objects into a config, then the user's own.  objects: by kind; None where not passed.

    ValueError: the user sets a key that an object replaces.
    """
    own: list[str] = []
    for kind, thing in objects.items():
        if thing is None:
            continue
        section, replaced = SECTIONS.get(kind, kind), REPLACED[kind]
        for override in overrides:
            key = override.partition("=")[0].split(".")
            if key[0] == section and (len(key) == 1 or key[1] in replaced):
                raise ValueError(
                    f"{override} and {kind}={object_name(thing)} say two things of {section}; leave one of them out"
                )
        values = {replaced[0]: object_name(thing), replaced[1]: {}}
        own += [f"{section}.{key}={json.dumps(values.get(key))}" for key in replaced]
    return [*own, *overrides]


def check_trainable(model: nn.Module) -> None:
    """ValueError: the model is wrapped in DataParallel or DDP, has lazy parameters, or is entirely in evaluation mode."""
    if isinstance(model, nn.DataParallel | nn.parallel.DistributedDataParallel):
        raise ValueError(
            f"the model is wrapped in {type(model).__name__}; pass the plain module (model.module), which the run parallelizes "
            "itself"
        )
    lazy = next((name for name, parameter in model.named_parameters() if is_lazy(parameter)), None)
    if lazy is not None:
        raise ValueError(f"'{lazy}' of the model is lazy: it has no shape yet; run one image through the model first")
    if not any(module.training for module in model.modules()):
        raise ValueError(
            "the model is in evaluation mode, in which dropout does nothing and running statistics are not updated; call "
            "model.train() first. Parts of it may stay in evaluation mode"
        )


def share_given(given: Given, dataset: Dataset, model: nn.Module, mesh: Mesh) -> None:
    """Check that all ranks were given equal objects, and broadcast the weights of rank 0.  Every rank calls it.

    AgreedError, on every rank: datasets with different sizes, classes or types, or models with different names or shapes.
    """
    if mesh.size == 1:
        return
    if given.data is not None:
        _check_equal(mesh, _facts_of(dataset), "datasets", "open the same data on every rank")
    if given.model is not None:
        tensors = [*model.named_parameters(), *model.named_buffers()]
        _check_equal(
            mesh, {name: f"{tuple(t.shape)} {t.dtype}" for name, t in tensors}, "models", "build the same model on every rank"
        )
        everywhere = replace(mesh, data_group=mesh.group)  # broadcasts over all ranks
        everywhere.broadcast_all_([tensor.detach() for _, tensor in tensors])


def _facts_of(dataset: Dataset) -> dict[str, object]:
    return {
        "images to train on": len(dataset.train),
        "images to evaluate": len(dataset.evaluate),
        "classes": dataset.classes,
        "channels": dataset.channels,
        "dims": dataset.dims,
        "pixels": in_words(dataset.dtype),
        "labels": {"class": "images"}.get(dataset.labels, dataset.labels),
    }


def _check_equal(mesh: Mesh, facts: dict[str, Any], what: str, cure: str) -> None:
    first, *others = mesh.gather_objects(facts)
    for rank, other in enumerate(others, start=1):
        for key in dict.fromkeys([*first, *other]):
            if first.get(key) != other.get(key):
                raise AgreedError(
                    f"ranks were given different {what}: {key}: {_shown(other.get(key))} on rank {rank} and "
                    f"{_shown(first.get(key))} on rank 0; {cure}"
                )


def _shown(value: Any) -> str:
    return "nothing" if value is None else str(value)
