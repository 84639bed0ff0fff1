"""Is what a rank does told by where its main thread is, in files that are there?"""

from __future__ import annotations

import gc
import sys
import threading
from pathlib import Path

from widefield.comm import stand
from widefield.comm.stand import doing_of, frames_of_threads, track_of
from widefield.training.passes import Passes


def test_a_rank_in_the_iterator_of_its_batches_waits_for_data():
    def batches():
        yield doing_of(sys._getframe())

    assert Passes(batches(), 1).next() == ["data"] and doing_of(sys._getframe()) == "work"


def test_the_files_in_which_ranks_wait_are_there():
    files = [Path(name) for name in (*stand._WAITING, *stand._LOADING, stand._NEXT_BATCH[0])]
    assert len(files) > 10 and [str(file) for file in files if not file.exists()] == []


def test_nothing_is_collected_while_the_frames_of_another_thread_are_read():
    """Before Python 3.12 the garbage's finalizers could let that thread leave the frame that is just read."""
    frame, collected = sys._getframe(), []

    class Frame:
        """Like this function's, and tells whether garbage may be collected when its caller is asked for."""

        f_code, f_lasti = frame.f_code, frame.f_lasti

        @property
        def f_back(self):
            collected.append(gc.isenabled())

    assert gc.isenabled()
    track_of(Frame())
    assert collected == [sys.version_info >= (3, 12)] and gc.isenabled()
    assert frames_of_threads()[threading.get_ident()].f_code.co_name == "frames_of_threads"
    gc.disable()
    track_of(Frame())
    assert not gc.isenabled()
    gc.enable()
