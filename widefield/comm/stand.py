"""Where a rank stands: what its main thread does, at which line, and in which message."""

from __future__ import annotations

import gc
import itertools
import os
import sys
import sysconfig
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import CodeType, FrameType
from typing import Literal

import torch

Doing = Literal["data", "message", "work"]
"""Waits for data, waits for a message of other ranks, or anything else: computes, sleeps, reads."""
DOINGS: tuple[Doing, ...] = ("data", "message", "work")

TORCH = os.path.dirname(os.path.abspath(torch.__file__))
_PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
_ENGINE = os.path.join(TORCH, "autograd", "graph.py")
"""The innermost Python file during a backward pass in C++, be it at work or waiting."""
_WAITING = (
    os.path.join(TORCH, "distributed"),
    *(os.path.join(_PACKAGE, "comm", name) for name in ("halo.py", "mesh.py", "collectives.py", "point_to_point.py")),
    *(os.path.join(_PACKAGE, "parallel", "strategies", name) for name in ("_reducer.py", "_buckets.py", "_adasum.py")),
    *(os.path.join(_PACKAGE, "tiled", name) for name in ("sync_batch_norm.py", "batch_statistics.py", "rng.py")),
    os.path.join(_PACKAGE, "pipelining", "stage_state.py"),
    os.path.join(_PACKAGE, "tensor_parallel", "collectives.py"),
)  # fmt: skip
"""Files in which the main thread is while it waits for messages."""
_LOADING = (os.path.join(_PACKAGE, "data") + os.sep, os.path.join(TORCH, "utils", "data") + os.sep)
_NEXT_BATCH = (os.path.join(_PACKAGE, "training", "passes.py"), "next")
"""The function in which a step waits for its batches."""
_OUTER = tuple(
    os.path.join(_PACKAGE, name) for name in ("training" + os.sep, "cli" + os.sep, "run.py", "inference.py", "api.py")
)
"""What runs a model: below it in the stack there is no line of the model."""
_OF_MODELS = tuple(os.path.join(_PACKAGE, room) + os.sep for room in ("models", "tasks", "losses"))
_LIBRARY = sysconfig.get_paths()["stdlib"]
_INSTALLED = (os.sep + "site-packages" + os.sep, os.sep + "dist-packages" + os.sep)


@dataclass(frozen=True)
class Stand:
    """A rank's report of itself.

    beat: the number of reports so far; where it stays the same, the process does not run.  step: steps done.
    begun: collectives and messages begun.  place: the line of its main thread.
    waits: whether it waits for a message.  doing: what it does.  idle: for how many seconds nothing has changed.
    taken: for how many seconds it is in the current step.
    message: the message that it began last and that is not done, in words.
    sent, awaited: messages between two ranks, by the other rank, that it has posted so far to send and to receive.
    odd: in what its messages of this step differ from those of the step before; empty where they do not.
    spun: for how many seconds it has run on, longer than it may, and nothing brought its step on; 0 where it has not.
    """

    beat: int
    step: int
    begun: int
    place: str
    waits: bool
    doing: Doing = "work"
    idle: float = 0.0
    taken: float = 0.0
    message: str = ""
    sent: Mapping[str, int] = field(default_factory=dict)
    awaited: Mapping[str, int] = field(default_factory=dict)
    odd: str = ""
    spun: float = 0.0

    def in_words(self, rank: int) -> str:
        """`rank 1 is in all_reduce ... at mesh.py:159 in sum_, called at net.py:3 in forward`."""
        doing = "waits for its data" if self.doing == "data" else f"waits in {self.message}" if self.message else "is"
        return f"rank {rank} {doing} at {self.place}"


def doing_of(frame: FrameType | None, thread: int | None = None) -> Doing:
    """What a thread does.  thread: its number in the system, to tell a backward that waits from one at work."""
    if frame is None:
        return "work"
    inner = _inner(frame)
    if _is_in(inner, _WAITING):  # also while ranks agree on which images of a batch all could read
        return "message"
    if any((one.f_code.co_filename, one.f_code.co_name) == _NEXT_BATCH or _is_in(one, _LOADING) for one in _frames(frame)):
        return "data"
    waits = inner.f_code.co_filename == _ENGINE and thread is not None and _sleeps(thread)
    return "message" if waits else "work"


def is_waiting(frame: FrameType | None) -> bool:
    """Whether a thread is where ranks wait for messages, be it the engine of a backward pass that computes."""
    if frame is None:
        return False
    inner = _inner(frame)
    return _is_in(inner, _WAITING) or inner.f_code.co_filename == _ENGINE


def place_of(frame: FrameType | None) -> str:
    """`models/net.py:12 in forward`: the innermost line of a thread outside of torch and of Python's own library.

    Where that is widefield's, the line of the model, the task or the user from which it was called follows.
    """
    if frame is None:
        return "an unknown place"
    frames = [one for one in _frames(frame) if not _is_in(one, (TORCH,)) and not _is_of_python(one)] or [frame]
    text = line_in_words(frames[0].f_code, frames[0].f_lineno)
    inside = itertools.takewhile(lambda one: not _is_in(one, _OUTER), frames)
    caller = next((one for one in inside if not _is_in(one, (_PACKAGE + os.sep,)) or _is_in(one, _OF_MODELS)), None)
    in_backward = any(one.f_code.co_filename == _ENGINE for one in _frames(frame))
    if caller is not None and caller is not frames[0]:
        text += f", called at {line_in_words(caller.f_code, caller.f_lineno)}"
    return f"{text}, in a backward pass" if in_backward else text


def line_in_words(code: CodeType, line: int) -> str:
    """`models/net.py:12 in forward`; files of the package as `widefield/comm/mesh.py`."""
    file = code.co_filename
    if file.startswith(_PACKAGE + os.sep):
        file = os.path.relpath(file, os.path.dirname(_PACKAGE))
    else:
        file = min(os.path.relpath(file), file, key=len)
    return f"{file}:{line} in {code.co_name}"


def track_of(frame: FrameType | None) -> int:
    """A number that changes when a thread goes on, in Python: of the instructions of all its frames."""
    return hash(tuple((id(one.f_code), one.f_lasti) for one in _frames(frame))) if frame is not None else 0


def frames_of_threads() -> dict[int, FrameType]:
    """The innermost frame of each thread, by the thread's `ident`."""
    with _without_collection():
        return sys._current_frames()


def _frames(frame: FrameType | None) -> list[FrameType]:
    """A frame and its callers, the innermost first."""
    found: list[FrameType] = []
    with _without_collection():
        while frame is not None:
            found.append(frame)
            frame = frame.f_back
    return found


@contextmanager
def _without_collection() -> Iterator[None]:
    """Inside, no garbage is collected, where reading another thread's frame could begin that.

    Before Python 3.12 a frame is made an object as it is read, and to allocate one may collect garbage, whose finalizers may
    let the other thread go on.  When that has left the frame meanwhile, the object is of memory that is something else by then.
    """
    if sys.version_info >= (3, 12) or not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def _inner(frame: FrameType) -> FrameType:
    """The innermost frame that is not of Python's own library, as the wait of a lock is."""
    return next((one for one in _frames(frame) if not _is_of_python(one)), frame)


def _is_in(frame: FrameType, places: tuple[str, ...]) -> bool:
    return frame.f_code.co_filename.startswith(places)


def _is_of_python(frame: FrameType) -> bool:
    file = frame.f_code.co_filename
    return file.startswith((_LIBRARY, "<frozen")) and not any(place in file for place in _INSTALLED)


def _sleeps(thread: int) -> bool:
    """Whether a thread of this process sleeps, as the kernel says; False where nobody knows."""
    try:
        text = Path(f"/proc/self/task/{thread}/stat").read_text()
    except OSError:
        return False
    return text.rpartition(")")[2].split()[0] == "S"
