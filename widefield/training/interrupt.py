"""Ctrl-C, SIGTERM and the like: the loop finishes its step, saves and stops on all ranks."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from types import FrameType


class StopNow(Exception):
    """The step is given up, since the run was asked to stop; see abandon.py."""


class Interrupt:
    """While open, records the first of SIGNALS; a further SIGINT ends the process.

    tells: print a line at the first signal.
    watch_parent: the end of the parent process counts as a request too.  For ranks of a launcher, not for a run that was
        started from a shell, which may exit.
    A signal that was ignored before stays ignored, as in a background job or under nohup.  Outside of the main thread Python
    allows no handlers, so only the parent is watched there.
    """

    SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)
    """SIGUSR1 is Slurm's warning, and SIGHUP says that the terminal or the connection is closed."""

    def __init__(self, *, watch_parent: bool, tells: bool = False) -> None:
        self.signal: signal.Signals | None = None
        self.raises = False
        """Whether a signal raises StopNow where the main thread is."""
        self._tells = tells
        self._parent = os.getppid() if watch_parent else None
        self._before: dict[signal.Signals, object] = {}

    def __enter__(self) -> Interrupt:
        if threading.current_thread() is threading.main_thread():
            handled = [number for number in self.SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]
            self._before = {number: signal.signal(number, self._remember) for number in handled}
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)  # type: ignore[arg-type]

    @property
    def asked(self) -> bool:
        return self.signal is not None or (self._parent is not None and os.getppid() != self._parent)

    def _remember(self, number: int, frame: FrameType | None) -> None:
        if self.signal is not None and number == signal.SIGINT:
            raise KeyboardInterrupt
        is_first, self.signal = self.signal is None, signal.Signals(number)
        if is_first and self._tells:  # os.write: printing could wait for a lock that this thread has
            text = f"widefield: {self.signal.name}: the run saves after this step, or gives it up if it is long, and stops"
            with contextlib.suppress(OSError):
                os.write(2, f"{text}; a second Ctrl-C ends it at once\n".encode())
        if self.raises:
            self.raises = False
            raise StopNow
