"""Is a window of an image of 20,000 x 20,000 pixels read within the memory of two windows, in every format that has windows?"""

from __future__ import annotations

import subprocess
import sys
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

SIDE, WINDOW = 20_000, 3_000
"""Of the image, 400 MB of one byte per pixel, and of the window, 9 MB, which begins at FIRST."""
FIRST = 9_100
FIXED_MIB = 24
"""Beside two windows: blocks at its border, what is decoded of them, and what libraries load at a first large read."""
READ = f"""
import sys
import numpy
from widefield.image_files import open_image

def status(key):
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith(key))

image = open_image(sys.argv[1])
assert image.info.size == ({SIDE}, {SIDE}) and image.info.by_window, image.info
assert not image.read((slice(0, 64), slice(0, 64))).any()  # loads the library
before = status("VmRSS")
pixels = image.read((slice({FIRST}, {FIRST + WINDOW}),) * 2)
growth = status("VmHWM") - before
line = numpy.arange({FIRST}, {FIRST + WINDOW}) % 251
for row, found in enumerate(pixels[0], start={FIRST}):
    assert numpy.array_equal(found, (line + row) % 251), row
print(growth >> 10)
"""


def written() -> tuple[slice, slice]:
    """The part of the image that has other pixels than 0: whole blocks of 512 around the window."""
    return (slice(FIRST // 512 * 512, -(-(FIRST + WINDOW) // 512) * 512),) * 2


def pixels(rows: slice, columns: slice) -> np.ndarray:
    line = np.arange(columns.start, columns.stop) % 251
    return ((line[None] + np.arange(rows.start, rows.stop)[:, None]) % 251).astype(np.uint8)


def write_numpy(path: Path) -> None:
    array = np.lib.format.open_memmap(path, mode="w+", dtype=np.uint8, shape=(SIDE, SIDE))
    array[written()] = pixels(*written())


def write_zarr(path: Path) -> None:
    zarr = pytest.importorskip("zarr")
    array = zarr.create_array(str(path), shape=(SIDE, SIDE), chunks=(512, 512), dtype="uint8", fill_value=0)
    array[written()] = pixels(*written())


def write_hdf5(path: Path) -> None:
    with pytest.importorskip("h5py").File(path, "w") as file:
        dataset = file.create_dataset("image", (SIDE, SIDE), "uint8", chunks=(512, 512), compression="gzip")
        dataset[written()] = pixels(*written())


def write_strips(path: Path) -> None:
    """Without compression; the rest of the file is a hole."""
    tifffile = pytest.importorskip("tifffile")
    array = tifffile.memmap(path, shape=(SIDE, SIDE), dtype=np.uint8, photometric="minisblack", rowsperstrip=16)
    array[written()] = pixels(*written())


def write_packed_strips(path: Path) -> None:
    """Strips of 16 rows, each compressed."""

    def strips() -> Iterator[bytes]:
        empty, (rows, columns) = zlib.compress(bytes(16 * SIDE), 1), written()
        for first in range(0, SIDE, 16):
            strip = np.zeros((16, SIDE), dtype=np.uint8)
            if rows.start <= first < rows.stop:
                strip[:, columns] = pixels(slice(first, first + 16), columns)
            yield zlib.compress(strip.tobytes(), 1) if strip.any() else empty

    about = {"shape": (SIDE, SIDE), "dtype": np.uint8, "photometric": "minisblack"}
    pytest.importorskip("tifffile").imwrite(path, strips(), rowsperstrip=16, compression="zlib", **about)


def write_tiles(path: Path) -> None:
    def tiles() -> Iterator[bytes]:
        empty, (rows, columns) = zlib.compress(bytes(512 * 512), 1), written()
        for top in range(0, SIDE, 512):
            for left in range(0, SIDE, 512):
                inside = rows.start <= top < rows.stop and columns.start <= left < columns.stop
                tile = pixels(slice(top, top + 512), slice(left, left + 512)) if inside else None
                yield empty if tile is None else zlib.compress(tile.tobytes(), 1)

    about = {"shape": (SIDE, SIDE), "dtype": np.uint8, "photometric": "minisblack"}
    pytest.importorskip("tifffile").imwrite(path, tiles(), tile=(512, 512), compression="zlib", **about)


def write_geotiff(path: Path) -> None:
    rasterio = pytest.importorskip("rasterio")
    about = {"count": 1, "height": SIDE, "width": SIDE, "dtype": "uint8", "transform": rasterio.Affine(10, 0, 5e5, 0, -10, 4e6)}
    layout = {"tiled": True, "blockxsize": 512, "blockysize": 512, "compress": "deflate", "SPARSE_OK": True}
    with rasterio.open(path, "w", driver="GTiff", **layout, **about) as file:
        file.write(pixels(*written()), 1, window=rasterio.windows.Window.from_slices(*written()))


FILES: dict[str, Callable[[Path], None]] = {
    "a.npy": write_numpy, "a.zarr": write_zarr, "a.h5": write_hdf5, "strips.tif": write_strips,
    "packed_strips.tif": write_packed_strips, "tiles.tif": write_tiles, "geo.tif": write_geotiff,
}  # fmt: skip


@pytest.mark.long
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="the peak of memory is read from /proc")
@pytest.mark.parametrize("name", FILES)
def test_a_window_of_20_000_by_20_000_pixels_takes_the_memory_of_two_windows(tmp_path, name):
    path = tmp_path / name
    FILES[name](path)
    done = subprocess.run([sys.executable, "-c", READ, str(path)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    most = 2 * WINDOW * WINDOW / 2**20 + FIXED_MIB
    assert int(done.stdout) <= most, f"{done.stdout} MiB, more than {most:.0f}"
