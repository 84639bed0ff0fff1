"""Is a file opened once for many windows, anew when it has changed, and are old ones closed and locks free after a fork?"""

from __future__ import annotations

import multiprocessing
import os
import threading

import numpy as np

from widefield.image_files import opened, opened_image


def saved(path, value: int):
    np.save(path, np.full((5, 6), value, np.uint8))
    return path


def test_a_file_is_opened_once_until_it_changes(tmp_path):
    path = saved(tmp_path / "a.npy", 1)
    image = opened_image(path)
    assert opened_image(path) is image and image.read().max() == 1
    saved(path, 2)
    os.utime(path, ns=(1, 1))
    assert opened_image(path).read().max() == 2


def test_no_more_than_some_are_open_and_one_that_was_closed_reads_on(tmp_path, monkeypatch):
    monkeypatch.setattr(opened, "MOST_OPEN", 3)
    images = []
    for number in range(8):
        images.append(opened_image(saved(tmp_path / f"{number}.npy", number)))
        images[-1].read()
    assert [bool(image._handles) for image in images] == [False] * 5 + [True] * 3 and len(opened._open) == 3
    assert [image.read().max() for image in images] == list(range(8))


def test_locks_that_another_thread_holds_are_free_after_a_fork(tmp_path):
    path = saved(tmp_path / "a.npy", 7)
    image, release, held = opened_image(path), threading.Event(), threading.Event()

    def hold():
        with image._lock, opened._lock:
            held.set()
            release.wait(60)

    holder = threading.Thread(target=hold)
    holder.start()
    held.wait(60)
    context = multiprocessing.get_context("fork")
    queue = context.SimpleQueue()
    child = context.Process(target=lambda: queue.put(int(opened_image(path).read().max()) + int(image.read().max())))
    child.start()
    child.join(20)
    release.set()
    holder.join()
    alive = child.is_alive()
    child.kill()
    assert not alive and queue.get() == 14
