"""Does every format give any window of any level as the whole has it, in every process, and name what is damaged?"""

from __future__ import annotations

import multiprocessing
import pickle
import shutil
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from image_examples import CASES, FORMATS, pixels_of

from widefield.geometry import Interval
from widefield.image_files import open_image
from widefield.image_files.image_file import ImageFile, ImageFileError
from widefield.naming import load

each_case = pytest.mark.parametrize(("name", "file", "shape", "dtype"), CASES, ids=[f"{case[0]}-{case[1]}" for case in CASES])


@pytest.fixture(scope="module")
def examples(tmp_path_factory) -> dict[str, tuple[Path, np.ndarray]]:
    """By format and file: its path, and the pixels that were written."""
    place, found = tmp_path_factory.mktemp("examples"), {}
    for name, file, shape, dtype in CASES:
        path, pixels = place / name / file, pixels_of(shape, dtype)
        path.parent.mkdir(exist_ok=True)
        load("widefield.image_files.formats", name).write_example(path, pixels)
        found[f"{name}/{file}"] = (path, pixels)
    return found


def random_window(size: tuple[int, ...], random: np.random.Generator) -> tuple[Interval, ...]:
    ends = [sorted(random.integers(0, extent + 1, 2).tolist()) for extent in size]
    return tuple(Interval(start, stop) for start, stop in ends)


def equal(a: np.ndarray, b: np.ndarray) -> bool:
    return a.shape == b.shape and a.dtype == b.dtype and np.array_equal(a, b)


def cut(whole: np.ndarray, window: tuple[Interval, ...]) -> np.ndarray:
    return whole[:, *(slice(one.start, one.stop) for one in window)]


def wrong_windows(image: ImageFile, seed: int, count: int) -> list[str]:
    """Windows, over all levels, that are not the crop of the whole level."""
    random, wrong = np.random.default_rng(seed), []
    for level, about in enumerate(image.info.levels):
        whole = image.read(level=level)
        for _ in range(count):
            window = random_window(about.size, random)
            if not equal(image.read(window, level), cut(whole, window)):
                wrong.append(f"level {level}, {window}")
    return wrong


@each_case
def test_200_windows_of_every_level_are_crops_of_the_whole(examples, name, file, shape, dtype):
    image = open_image(examples[f"{name}/{file}"][0])
    assert image.info.shape == shape and image.info.dtype == dtype, image.info
    assert wrong_windows(image, seed=0, count=200) == []
    image.close()


@each_case
def test_the_whole_is_what_was_written(examples, name, file, shape, dtype):
    path, pixels = examples[f"{name}/{file}"]
    with open_image(path) as image:
        found = image.read()
    exact = not getattr(load("widefield.image_files.formats", name), "LOSSY", ())
    if exact or file not in load("widefield.image_files.formats", name).LOSSY:
        assert equal(found, pixels)
    else:
        assert np.abs(found.astype(int) - pixels.astype(int)).mean() < 8


def _in_process(image: ImageFile, seed: int, count: int) -> list[str]:
    return wrong_windows(image, seed, count)


@pytest.fixture(scope="module")
def fresh():
    """A process that was not forked, which an image reaches as a pickle."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        yield pool


@each_case
def test_an_image_that_was_read_by_a_parent_is_read_right_by_two_forked_processes(examples, name, file, shape, dtype):
    """At the same time, each with windows of its own, and by the parent too."""
    image = open_image(examples[f"{name}/{file}"][0])
    image.read()
    context = multiprocessing.get_context("fork")
    queue = context.SimpleQueue()
    children = [context.Process(target=_reported, args=(queue, image, seed)) for seed in (1, 2)]
    for child in children:
        child.start()
    assert wrong_windows(image, seed=3, count=20) == []
    found = [queue.get() for _ in children]
    for child in children:
        child.join()
    assert found == [[], []]
    image.close()


def _reported(queue, image: ImageFile, seed: int) -> None:
    try:
        queue.put(wrong_windows(image, seed, 20))
    except BaseException as error:
        queue.put([repr(error)])


@each_case
def test_an_image_travels_to_another_process_as_a_pickle(examples, fresh, name, file, shape, dtype):
    image = open_image(examples[f"{name}/{file}"][0])
    image.read()
    assert fresh.apply(_in_process, (image, 4, 5)) == []
    with pickle.loads(pickle.dumps(image)) as copy:
        assert equal(copy.read(), image.read())
    image.close()


@each_case
def test_threads_share_an_image(examples, name, file, shape, dtype):
    image = open_image(examples[f"{name}/{file}"][0])
    with ThreadPoolExecutor(4) as pool:
        assert [wrong for wrong in pool.map(lambda seed: wrong_windows(image, seed, 10), range(4)) if wrong] == []
    image.close()


@each_case
def test_a_window_that_is_not_inside_is_refused(examples, name, file, shape, dtype):
    image = open_image(examples[f"{name}/{file}"][0])
    size = image.info.size
    outside = (*(Interval(0, extent) for extent in size[:-1]), Interval(0, size[-1] + 1))
    for window in (outside, (Interval(-1, 1), *(Interval(0, extent) for extent in size[1:])), (Interval(0, 1),)):
        with pytest.raises(ValueError, match="is not inside of"):
            image.read(window)
    with pytest.raises(ValueError, match="has levels 0 to"):
        image.read(level=len(image.info.levels))
    image.close()


@each_case
def test_a_damaged_file_is_named_or_read_right(examples, tmp_path, name, file, shape, dtype):
    """Cut short anywhere, bytes changed anywhere: an error with the file's name, or the shape that the header says."""
    path, _ = examples[f"{name}/{file}"]
    random, copy = np.random.default_rng(5), tmp_path / file
    for number in range(24):
        if copy.is_dir():
            shutil.rmtree(copy)
        shutil.copytree(path, copy) if path.is_dir() else shutil.copy(path, copy)
        target = copy
        if copy.is_dir():
            files = sorted(one for one in copy.rglob("*") if one.is_file())
            target = files[int(random.integers(len(files)))]
        _damage(target, random, cut_short=number % 2 == 0)
        try:
            with open_image(copy) as image:
                found = image.read()
                assert found.shape == image.info.shape and found.dtype == image.info.dtype
        except ImageFileError as error:
            assert str(copy) in str(error)


def _damage(path: Path, random: np.random.Generator, *, cut_short: bool) -> None:
    content = bytearray(path.read_bytes())
    if cut_short:
        content = content[: int(random.integers(len(content)))] if content else content
    else:
        for _ in range(8):
            content[int(random.integers(len(content)))] = int(random.integers(256))
    path.write_bytes(content)


LIBRARIES = ("tifffile", "imagecodecs", "rasterio", "zarr", "nibabel", "pydicom", "h5py", "openslide")


@pytest.mark.parametrize("name", [name for name in FORMATS if load("widefield.image_files.formats", name).EXTRA])
def test_a_missing_library_is_named_with_the_extra_that_installs_it(examples, monkeypatch, name):
    """By an error, or by the advice of the image where another format can read it, as Pillow reads some TIFF."""
    module = load("widefield.image_files.formats", name)
    path = examples[f"{name}/{module.CASES[0][0]}"][0]
    for library in LIBRARIES:
        monkeypatch.setitem(sys.modules, library, None)
    try:
        with open_image(path) as image:
            words = image.info.advice
    except ImageFileError as error:
        words = str(error)
        assert str(path) in words
    assert f"pip install 'widefield[{module.EXTRA}]'" in words


def test_a_missing_file_an_empty_one_and_an_unknown_one_are_named(tmp_path):
    empty, text = tmp_path / "empty.npy", tmp_path / "text.tiif"
    empty.write_bytes(b"")
    text.write_text("no image", encoding="utf-8")
    for path, words in ((tmp_path / "none.npy", "No such file"), (empty, "is empty"), (text, "did you mean '.tif'")):
        with pytest.raises(ImageFileError, match=words) as caught:
            open_image(path)
        assert str(path) in str(caught.value)
