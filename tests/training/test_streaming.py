"""A recipe's stream: does every key reach the model, and is what is told before the first step what that step runs?"""

from __future__ import annotations

import pytest
from command import RECIPES
from torch import nn

from widefield.comm.mesh import World, join
from widefield.config import StreamConfig, read_config
from widefield.plans import plan_of
from widefield.streaming.api import Stream, Streamed
from widefield.training.assemble import assemble, learner_of, training_batches
from widefield.training.loop import Learner
from widefield.training.passes import Passes
from widefield.training.streaming import stream_as

SMALL = ["data.options.size=[40, 33]", "data.options.pages=[5, 1]", "data.batch_size=4", "data.workers=0",
         "model.options.widths=[4, 6]", "schedule.length=1step", "schedule.warmup=1step"]  # fmt: skip


def learner(*settings: str) -> tuple[Learner, list[str], Passes]:
    config = read_config(RECIPES / "page_streamed.yaml", [*SMALL, *settings])
    parts = assemble(config, join(World(), plan_of(config, 1)))
    return *learner_of(parts), Passes(training_batches(parts, first=0, last=1), config.gradient.accumulate)


@pytest.mark.parametrize(
    ("asked", "told"),
    [
        (StreamConfig(tiles=[2, 3]), ((2, 3), None, None, False, False)),
        (StreamConfig(tiles=[2, 3], keep="file", compile=True), ((2, 3), None, "file", True, False)),
        (StreamConfig(memory="1.5 GiB", keep="host", strict=True), (None, "1.5 GiB", "host", False, True)),
    ],
    ids=str,
)
def test_every_key_reaches_the_stream(asked, told):
    net = nn.Conv2d(1, 1, 3)
    stream_as(asked, net, compiles=False)
    assert isinstance(net, Streamed)
    made = net._stream
    assert (made.tiles, made.memory, made.keep, made.compiles, made.strict) == told


def test_every_amount_of_memory_that_a_recipe_may_name_is_one_that_a_stream_takes():
    for text in ("6GiB", "1.5 GiB", "800MiB", "70000KiB", "0.01TiB"):
        one, reasons, _ = learner("stream.tiles=null", f"stream.memory={text}")
        assert isinstance(one.model, Streamed) and any(reason.startswith("stream: ") for reason in reasons), text


@pytest.mark.parametrize("settings", [[], ["gradient.accumulate=2"], ["precision=bfloat16"]], ids=str)
def test_what_is_told_before_the_first_step_is_what_that_step_runs(settings, monkeypatch):
    """Else the program would be made twice, and the reasons were another's."""
    made, original = [], Stream._prepared
    monkeypatch.setattr(Stream, "_prepared", lambda self, *args: made.append(args[1][0].shape) or original(self, *args))
    one, reasons, passes = learner(*settings)
    assert len(made) == 1 and [reason for reason in reasons if reason.startswith("stream: ")]
    one.learn(passes.next(), stop=False)
    assert len(made) == 1
