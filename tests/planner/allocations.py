"""What the CPU allocator gives and takes while some code runs, as torch's profiler tells it.

The count is that of c10's allocator: tensors, and what kernels ask of it, oneDNN's scratch among it.  What libraries take from
the C library themselves, as gloo's buffers, is no part of it.
"""

from __future__ import annotations

import os
from bisect import bisect_left
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import accumulate

from torch.profiler import ProfilerActivity, profile, record_function


@dataclass
class Allocations:
    """times: in ns, ascending.  held: the bytes held after each event, of those allocated since the beginning.

    spans: the beginning and the end of each mark, by its name.
    """

    recorder: profile
    times: list[int] = field(default_factory=list)
    held: list[int] = field(default_factory=list)
    spans: dict[str, tuple[int, int]] = field(default_factory=dict)

    def read(self) -> None:
        """Take the events over from the profiler, which has ended."""
        assert self.recorder.profiler is not None and self.recorder.profiler.kineto_results is not None
        events = self.recorder.profiler.kineto_results.events()
        changes = sorted(((e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]"), key=lambda event: event[0])
        self.times = [time for time, _ in changes]
        self.held = list(accumulate(change for _, change in changes))
        for event in events:
            if event.name().startswith("mark "):
                self.spans[event.name()[5:]] = (event.start_ns(), event.start_ns() + event.duration_ns())

    def before(self, name: str) -> int:
        """The bytes held when a mark begins."""
        first = bisect_left(self.times, self.spans[name][0])
        return self.held[first - 1] if first else 0

    def after(self, name: str) -> int:
        """The bytes held when a mark ends."""
        last = bisect_left(self.times, self.spans[name][1])
        return self.held[last - 1] if last else 0

    def peak(self, name: str) -> int:
        """The largest number of bytes held within a mark."""
        first, last = (bisect_left(self.times, time) for time in self.spans[name])
        return max(self.held[first:last], default=self.before(name)) if first == 0 else max(self.held[first - 1 : last])


@contextmanager
def allocations(*, shapes: bool = False) -> Iterator[Allocations]:
    """Record the block; what it gives is filled in when the block has ended.  shapes: of operations' arguments, too."""
    os.environ.setdefault("KINETO_LOG_LEVEL", "5")  # else the profiler prints its start and its end
    recorder = profile(activities=[ProfilerActivity.CPU], profile_memory=True, record_shapes=shapes, acc_events=True)
    found = Allocations(recorder)
    with recorder:
        yield found
    found.read()


def mark(name: str) -> record_function:
    """A context whose beginning and end `Allocations` knows by the name."""
    return record_function(f"mark {name}")
