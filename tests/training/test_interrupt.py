"""Does the first signal ask, the second Ctrl-C end, and is everything as before afterwards?"""

import os
import signal
import subprocess
import sys
import threading
import time

import pytest

from widefield.data.loader import _start_worker
from widefield.training.interrupt import Interrupt
from widefield.training.terminal import terminal

pytestmark = pytest.mark.alone


@pytest.fixture(autouse=True)
def handlers_come_back():
    outside = {number: signal.getsignal(number) for number in Interrupt.SIGNALS}
    for number, handler in outside.items():
        if handler is signal.SIG_IGN:  # under nohup, which runs leave as it is
            signal.signal(number, signal.SIG_DFL)
    before = {number: signal.getsignal(number) for number in Interrupt.SIGNALS}
    yield
    assert {number: signal.getsignal(number) for number in Interrupt.SIGNALS} == before
    for number, handler in outside.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP])
def test_the_first_signal_is_a_request_that_says_which(number):
    assert number in Interrupt.SIGNALS
    with Interrupt(watch_parent=False) as interrupt:
        assert not interrupt.asked and interrupt.signal is None
        signal.raise_signal(number)
        assert interrupt.asked and interrupt.signal is number


def test_a_second_ctrl_c_ends_the_process():
    with Interrupt(watch_parent=False):
        signal.raise_signal(signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)


def test_ctrl_c_after_sigterm_ends_the_process_and_sigterm_after_ctrl_c_does_not():
    with Interrupt(watch_parent=False) as interrupt:
        signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGUSR1)
        assert interrupt.asked
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)


def test_handlers_come_back_after_an_error():
    with pytest.raises(KeyError), Interrupt(watch_parent=False):
        raise KeyError


def test_outside_the_main_thread_nothing_is_handled_and_nothing_fails():
    found = []

    def body():
        with Interrupt(watch_parent=False) as interrupt:
            found.append((interrupt.asked, signal.getsignal(signal.SIGTERM)))

    thread = threading.Thread(target=body)
    thread.start()
    thread.join()
    assert found == [(False, signal.getsignal(signal.SIGTERM))]


CHILD = """
import os, sys, time
from widefield.training.interrupt import Interrupt
if os.fork():
    time.sleep(60)
with Interrupt(watch_parent=sys.argv[1] == "watch") as interrupt:
    print("ready", os.getpid(), interrupt.asked, flush=True)
    end = time.monotonic() + float(sys.argv[2])
    while not interrupt.asked and time.monotonic() < end:
        time.sleep(0.01)
    print("asked" if interrupt.asked else "not asked", interrupt.signal, flush=True)
"""


@pytest.mark.parametrize(("watch", "seconds", "told"), [("watch", "30", "asked None"), ("alone", "0.5", "not asked None")])
def test_the_death_of_the_parent_asks_only_where_it_is_watched(watch, seconds, told):
    """The middle process is killed; its child, an orphan now, must notice within 5 s or go on."""
    command = [sys.executable, "-c", CHILD, watch, seconds]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as middle:
        word, pid, asked = middle.stdout.readline().split()
        assert (word, asked) == ("ready", "False")
        middle.kill()
        start = time.monotonic()
        assert middle.stdout.readline().strip() == told and time.monotonic() - start < 5
        assert middle.stdout.read() == "" and int(pid) != os.getpid()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGHUP])
def test_a_signal_that_was_ignored_stays_so(number):
    """A shell makes its background jobs deaf to Ctrl-C, and nohup to a closed terminal; they are not to stop upon it."""
    before = signal.signal(number, signal.SIG_IGN)
    try:
        with Interrupt(watch_parent=False) as interrupt:
            os.kill(os.getpid(), number)
            assert not interrupt.asked and signal.getsignal(number) is signal.SIG_IGN
    finally:
        signal.signal(number, before)


def test_workers_that_load_data_leave_it_to_their_rank_to_stop():
    """A closed terminal, and Ctrl-C, reach them too, and the rank needs them until its step is done."""
    worker = os.fork()
    if worker == 0:
        _start_worker(0)
        os._exit(sum(signal.getsignal(number) is not signal.SIG_IGN for number in Interrupt.SIGNALS))
    assert os.waitstatus_to_exitcode(os.waitpid(worker, 0)[1]) == 0


def test_a_bar_on_a_terminal_that_is_closed_ends_without_an_error(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    near, far = os.openpty()
    with os.fdopen(far, "w") as stream:
        bar = terminal(stream)
        bar.begin(0, 3)
        os.close(near)
        bar.close()
