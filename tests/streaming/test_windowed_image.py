"""Does a reader's window come as the module shall see it, and is what does not fit refused with its window?"""

from __future__ import annotations

import numpy as np
import pytest
import torch

from widefield.geometry.interval import Interval
from widefield.streaming.storage.windowed_image import from_reader, keeps_values

SHAPE = (1, 3, 10, 12)
WINDOW = (Interval(0, 1), Interval(0, 3), Interval(4, 7), Interval(0, 12))
PART = (slice(0, 1), slice(0, 3), slice(4, 7), slice(0, 12))
PIXELS = np.random.default_rng(0).integers(0, 256, SHAPE).astype(np.uint8)


def memmapped(folder):
    PIXELS.tofile(folder / "page.raw")
    return np.memmap(folder / "page.raw", np.uint8, "r", shape=SHAPE)


def between_others(folder):
    """Pixels with a byte of something else beside each, so that a float's stride is no number of floats."""
    array = np.zeros(SHAPE, [("pixel", np.float32), ("flag", np.uint8)])
    array["pixel"] = PIXELS
    return array["pixel"]


SOURCES = {
    "memmap": memmapped,
    "backwards": lambda folder: PIXELS[:, :, ::-1].copy()[:, :, ::-1],
    "big endian": lambda folder: PIXELS.astype(">u2"),
    "between others": between_others,
    "channels last": lambda folder: np.ascontiguousarray(PIXELS.transpose(0, 2, 3, 1)).transpose(0, 3, 1, 2),
    "tensor": lambda folder: torch.from_numpy(PIXELS),
    "with history": lambda folder: torch.from_numpy(PIXELS).float().requires_grad_() * 1,
}
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_window_is_the_wholes_pixels_in_the_dtype(tmp_path, source, dtype, device):
    array = SOURCES[source](tmp_path)
    image = from_reader(lambda window: array[window], SHAPE, dtype, device)
    got = image.read(WINDOW)
    assert (got.dtype, got.device.type, got.requires_grad) == (dtype, device, False)
    assert torch.equal(got.cpu(), torch.from_numpy(PIXELS).to(dtype)[PART])


def test_a_reader_looks_like_its_whole_and_asks_with_slices():
    asked = []
    image = from_reader(lambda window: asked.append(window) or PIXELS[window], SHAPE, torch.float64)
    assert (image.shape, image.dtype, image.device) == (torch.Size(SHAPE), torch.float64, torch.device("cpu"))
    assert (image.ndim, image.dim(), image.numel(), image.size(), image.size(-1)) == (4, 4, 360, torch.Size(SHAPE), 12)
    assert repr(image) == "Reader(shape=(1, 3, 10, 12), dtype=torch.float64, device='cpu')"
    image.read(WINDOW)
    assert asked == [PART]


def test_an_empty_window_is_not_asked_for():
    image = from_reader(lambda window: pytest.fail(f"asked for {window}"), SHAPE, torch.int64)
    got = image.read((*WINDOW[:2], Interval(5, 5), Interval(0, 12)))
    assert (tuple(got.shape), got.dtype) == ((1, 3, 0, 12), torch.int64)


@pytest.mark.parametrize("box", [WINDOW[:3], (*WINDOW[:3], Interval(0, 13)), (*WINDOW[:3], Interval(-1, 3))])
def test_a_window_outside_of_the_whole_is_refused(box):
    with pytest.raises(AssertionError, match=r"is not inside of a whole of \(1, 3, 10, 12\) px"):
        from_reader(lambda window: PIXELS[window], SHAPE).read(box)


@pytest.mark.parametrize(
    ("read", "came"),
    [
        (lambda window: PIXELS[window][0], r"\(3, 3, 12\) px"),
        (lambda window: PIXELS[window][..., :1], r"\(1, 3, 3, 1\) px"),
        (lambda window: PIXELS, r"\(1, 3, 10, 12\) px"),
    ],
)
def test_pixels_of_another_size_are_refused_with_the_window_and_both_sizes(read, came):
    words = rf"gave {came} for the window \[0:1, 0:3, 4:7, 0:12\] of a whole of \(1, 3, 10, 12\) px, which has \(1, 3, 3, 12\)"
    with pytest.raises(ValueError, match=words):
        from_reader(read, SHAPE).read(WINDOW)


@pytest.mark.parametrize(
    ("given", "wanted"),
    [(np.float64, torch.float32), (np.int64, torch.float32), (np.float32, torch.int64), (np.uint8, torch.bool)],
)
def test_a_dtype_that_would_lose_values_is_refused_with_the_window_and_both(given, wanted):
    image = from_reader(lambda window: PIXELS.astype(given)[window], SHAPE, wanted)
    words = rf"gave torch.{np.dtype(given).name} for the window \[0:1, 0:3, 4:7, 0:12\] .* and {wanted}, which is wanted, lacks"
    with pytest.raises(ValueError, match=words):
        image.read(WINDOW)


@pytest.mark.parametrize(
    ("what", "came"),
    [
        ([1, 2], "a list"),
        (None, "a NoneType"),
        (np.array(["a"]), "a ndarray of <U1"),
        (np.array([""]), "a ndarray of <U"),
        (np.array([None]), "a ndarray of object"),
        (np.ma.masked_equal(PIXELS, 0), "a MaskedArray of uint8"),
    ],
)
def test_what_is_no_array_of_numbers_is_refused(what, came):
    with pytest.raises(ValueError, match=rf"gave {came}.* for the window \[0:1, .* give a torch tensor or a numpy array"):
        from_reader(lambda window: what, SHAPE).read(WINDOW)


def test_a_door_that_is_asked_wrongly_says_what_it_takes():
    with pytest.raises(ValueError, match="read is a ndarray and is to be a function; write lambda window"):
        from_reader(PIXELS, SHAPE)
    with pytest.raises(ValueError, match=r"dtype=<class 'numpy.float32'> is none of torch's; write it as torch.float32"):
        from_reader(lambda window: PIXELS[window], SHAPE, np.float32)
    with pytest.raises(ValueError, match=r"shape=\(1, -3\) has a negative size"):
        from_reader(lambda window: PIXELS[window], (1, -3))


# ---------------------------------------------------------------------------------------------- which dtypes hold which

SMALL = [torch.bool, torch.uint8, torch.int8, torch.int16, torch.uint16, torch.float16, torch.bfloat16]
LARGE = [torch.int32, torch.int64, torch.float32, torch.float64, torch.complex64]


def all_values(dtype: torch.dtype) -> torch.Tensor:
    """Every finite value of a dtype of 8 or 16 bits."""
    if dtype == torch.bool:
        return torch.tensor([False, True])
    bits = torch.arange(256).to(torch.uint8) if dtype.itemsize == 1 else torch.arange(-(1 << 15), 1 << 15).to(torch.int16)
    values = bits.view(dtype)
    return values[values.double().isfinite()]


@pytest.mark.parametrize("given", SMALL, ids=str)
@pytest.mark.parametrize("wanted", SMALL + LARGE, ids=str)
def test_a_dtype_keeps_the_values_that_all_survive_it(given, wanted):
    values = all_values(given)
    survive = torch.equal(values.to(wanted).to(torch.complex128), values.to(torch.complex128))
    assert keeps_values(given, wanted) == survive


@pytest.mark.parametrize(
    ("given", "holders"),
    [
        (torch.int32, {torch.int32, torch.int64, torch.float64}),
        (torch.int64, {torch.int64}),
        (torch.float32, {torch.float32, torch.float64, torch.complex64}),
        (torch.float64, {torch.float64}),
        (torch.complex64, {torch.complex64}),
    ],
)
def test_large_dtypes_are_held_by_those_as_fine_and_as_wide(given, holders):
    assert {wanted for wanted in SMALL + LARGE if keeps_values(given, wanted)} == holders
