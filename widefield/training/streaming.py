"""Tiles in time in a run: the model runs this rank's images, or its tiles in space of them, tile after tile."""

from __future__ import annotations

from torch import nn

from widefield.config import StreamConfig
from widefield.data.loader import Batch
from widefield.parallel.members import members_of
from widefield.streaming.api import Streamed, stream
from widefield.tasks import Task
from widefield.training.example_pass import inputs_of_a_pass
from widefield.training.loop import Learner
from widefield.training.second_stage import stages_named
from widefield.training.turns import members_named


def stream_as(asked: StreamConfig, model: nn.Module, *, compiles: bool) -> None:
    """Make `model` run tile after tile, in place.  ValueError: `compiles`, the whole model is to be compiled too."""
    if compiles:
        raise ValueError(
            "model.compile=true compiles the model as a whole, and with stream it runs tile after tile; set "
            "model.compile=false, and stream.compile=true to compile pointwise operations on a tile"
        )
    stream(model, **asked.model_dump(exclude_defaults=True))


def streamed_of(model: nn.Module, task: Task) -> list[nn.Module]:
    """The parts of a model that see images: its members, but of two stages the first, since the second sees boxes."""
    members = members_of(model)
    return [members[name] for name in stages_named(task)[:1] or members]


def look_ahead(learner: Learner) -> list[str]:
    """The reasons of what the stream chooses for the images of a pass, planned before the first step; [] without a stream.

    NotImplementedError: an operation of the model cannot run tile after tile.
    """
    if learner.mesh.plan.stream is None:
        return []
    reasons = list[str]()
    for name, member in members_of(learner.model).items():
        if not isinstance(member, Streamed):
            continue
        with learner.arithmetic.autocast():
            member._stream.program(member, inputs_of_a_pass(learner, name if name in members_named(learner.task) else ""), {})
        reasons += [f"{name + ': ' if name else ''}stream: {why}" for why in member._stream.reasons]
    return reasons


def check_tiles(asked: StreamConfig | None, batch: Batch) -> None:
    """ValueError: stream.tiles has another number of dims than images have."""
    pixels = batch.image.shape[2:]
    if asked is not None and asked.tiles is not None and len(asked.tiles) != len(pixels):
        raise ValueError(
            f"stream.tiles={asked.tiles} has {len(asked.tiles)} numbers and images have {len(pixels)} dims; "
            f"give one number per dim, as {[4] * len(pixels)}"
        )
