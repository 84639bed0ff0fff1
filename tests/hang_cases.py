"""What may hold up a run of two ranks, under each plan: `see(what, plan, folder)` lets it befall rank 1 and tells the end.

For tests/story/test_hangs.py and benchmarks/watch.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path

from command import RECIPES, record
from falling import asking, fall

PAGE = RECIPES / "page.yaml"
SMALL = ["data.options.size=[48, 40]", "data.options.pages=[8, 2]", "data.batch_size=4", "data.evaluate_batch_size=1",
         "model.options={widths: [4, 6]}", "mesh.space=[]", "mesh.replicate=1", "schedule.length=60step", "data.workers=0",
         "schedule.warmup=1step", "log.tensorboard=false", "evaluate.every=100step", "checkpoint.every=100step"]  # fmt: skip
PLANS = {
    "data": ["mesh.replicate=2"],
    "fully_shard": ["mesh.shard=2"],
    "space": ["mesh.space=[2, 1]"],
    "channel": ["mesh.channel=2"],
    "stage": ["mesh.stage=2"],
}
HANG_SECONDS = 3.0
"""log.hang_seconds of the runs."""
CULPRIT = 1


@dataclass(frozen=True)
class HangCase:
    """fault: what befalls rank 1.  words: what is then said of it.  ends: whether the run ends for it.

    status: with which rank 1 then ends; 2 where the user has to change something.
    """

    fault: str
    words: tuple[str, ...]
    ends: bool = True
    status: int = 1


CASES = {
    "missing rank": HangCase(
        "step=4 phase=forward kind=delay seconds=80", ("1 of 2 ranks has not arrived: rank 1 is at widefield/faults/",)
    ),
    "wrong operation": HangCase(
        "step=2 phase=collective kind=wrong_operation", ("rank 1 calls broadcast", "rank 1 is the odd one")
    ),
    "wrong shape": HangCase("step=2 phase=collective kind=wrong_shape", ("do not call the same", "rank 1 is the odd one")),
    "straggler": HangCase("step=2+ phase=forward kind=delay seconds=0.3", ("rank 1 is slow: a step takes it",), ends=False),
    "deadlocked point-to-point": HangCase(
        "step=4 phase=forward kind=deadlock", ("1 of 2 ranks has not arrived: rank 1 ", "receive")
    ),
    "stalled loader": HangCase("step=4 phase=data kind=delay seconds=80", ("has not arrived: rank 1 waits for its data at ",)),
    "out of memory on one rank": HangCase(
        "step=4 phase=forward kind=out_of_memory", ("rank 1 ", "can't allocate memory"), status=2
    ),
}
LATER = {
    "wrong operation, later": HangCase("step=5 phase=collective kind=wrong_operation", ("rank 1",)),
    "wrong shape, later": HangCase("step=5 phase=collective kind=wrong_shape", ("rank 1",)),
    "skipped collective": HangCase("step=4 phase=collective kind=skip", ("rank 1",)),
    "skipped message": HangCase("step=4 phase=halo kind=skip", ("1 of 2 ranks has not arrived: rank 1 ",)),
}
"""What the first steps' comparison does not see."""


@dataclass(frozen=True)
class Seen:
    """seconds: from the fault until the last rank had ended; of a straggler until the run's end.

    named: whether each rank, or of a straggler rank 0, said the words.  statuses: of the ranks.  text: what was said.
    """

    seconds: float
    named: bool
    statuses: tuple[int, ...]
    text: str


def see(what: str, plan: str, folder: Path) -> Seen:
    """Let it happen.  A rank that has not ended after 60 s is killed, with the status -9."""
    case = (CASES | LATER)[what]
    watch = [f"log.hang_seconds={HANG_SECONDS:g}", f"log.stall_seconds={1.2 if not case.ends else 60}"]
    arguments = ["train", PAGE, "--run", folder / "run", *SMALL, *PLANS[plan], *watch]
    if not case.ends:
        arguments.append("schedule.length=12step")
    ended = fall(2, arguments, partial(asking, f"rank={CULPRIT} {case.fault}"), folder=folder / "said", limit_seconds=60)
    came = min((line["time"] for line in record(folder / "run", "fault")), default=0.0)
    said = [_told(one.said, "widefield: " if case.ends else "warning: ") for one in ended]
    named = all(all(word in text for word in case.words) for text in (said if case.ends else said[:1]))
    statuses = tuple(one.status for one in ended)
    return Seen(max(one.time for one in ended) - came, named, statuses, " | ".join(said) if named else ended[0].said[-3000:])


def _told(said: str, start: str) -> str:
    lines = [line for line in said.splitlines() if line.startswith(start)]
    return "\n".join(line for line in lines if not line.startswith("widefield: fault: "))
