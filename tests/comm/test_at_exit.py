"""A process ends only when its threads have come to rest."""

from __future__ import annotations

import subprocess
import sys
import threading
import time

from ranks import on_ranks

from widefield.comm.at_exit import LONGEST_SECONDS, settle_before_exit, wait_for_threads
from widefield.comm.mesh import Mesh

ENDS = """
import hashlib, sys, threading, time
{first}
works = threading.Event()

def work():
    data = bytes(2**22)
    works.set()
    while time.thread_time() < 0.3:  # of the processor, however fast or busy that is
        hashlib.sha256(data).hexdigest()  # without the interpreter's lock, as a thread of gloo works
    sys.stdout.write("came to an end")
    sys.stdout.flush()

threading.Thread(target=work, daemon=True).start()
works.wait()
"""


def end_of(first: str) -> str:
    done = subprocess.run([sys.executable, "-c", ENDS.format(first=first)], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_thread_that_works_at_the_end_is_waited_for():
    assert end_of("") == ""
    assert end_of("from widefield.comm.at_exit import settle_before_exit; settle_before_exit()") == "came to an end"


def test_a_thread_that_never_rests_is_waited_for_a_second_at_most():
    stops = threading.Event()

    def spin() -> None:
        while not stops.is_set():
            pass

    thread = threading.Thread(target=spin)
    thread.start()
    began = time.monotonic()
    wait_for_threads()
    took = time.monotonic() - began
    stops.set()
    thread.join()
    assert took >= LONGEST_SECONDS
    wait_for_threads()
    assert time.monotonic() - began < 60


def asked_for(mesh: Mesh) -> int:
    return settle_before_exit.cache_info().currsize


def test_a_mesh_of_several_ranks_asks_for_it_once():
    assert on_ranks(2, asked_for) == [1, 1]
