"""Is what a rank does told by where its main thread is, in files that are there?"""

from __future__ import annotations

import sys
from pathlib import Path

from widefield.comm import stand
from widefield.comm.stand import doing_of
from widefield.training.passes import Passes


def test_a_rank_in_the_iterator_of_its_batches_waits_for_data():
    def batches():
        yield doing_of(sys._getframe())

    assert Passes(batches(), 1).next() == ["data"] and doing_of(sys._getframe()) == "work"


def test_the_files_in_which_ranks_wait_are_there():
    files = [Path(name) for name in (*stand._WAITING, *stand._LOADING, stand._NEXT_BATCH[0])]
    assert len(files) > 10 and [str(file) for file in files if not file.exists()] == []
