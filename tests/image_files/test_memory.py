"""Does reading a window of a file of 200 MB take memory for that window alone?"""

from __future__ import annotations

import gzip
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

SIZE = (200, 1024, 1024)
"""Of volumes of one byte per voxel."""
WINDOW = (slice(90, 98), slice(200, 712), slice(100, 612))
FLAT_SIZE = (14336, 14336)
"""Of images of one byte per pixel."""
FLAT = (slice(3000, 4024), slice(5000, 7048))
MOST_MIB = 40
"""Of growth, for a window of 2 or 6 MiB in blocks of at most 8 MiB: what libraries load at a first read is in it."""
READ = """
import sys
from widefield.image_files import open_image

def status(key):
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith(key))

image = open_image(sys.argv[1])
before = status("VmRSS")
window = [slice(*map(int, part.split(":"))) for part in sys.argv[2].split(",")]
pixels = image.read(window)
assert (pixels == 1).all() and pixels[0].size == 8 * 512 * 512, pixels.shape
print((status("VmHWM") - before) >> 10)
"""


def write_numpy(path: Path) -> None:
    array = np.lib.format.open_memmap(path, mode="w+", dtype=np.uint8, shape=SIZE)
    array[WINDOW[0]] = 1


def write_nifti(path: Path) -> None:
    nibabel = pytest.importorskip("nibabel")
    header = nibabel.Nifti1Header()
    header.set_data_dtype(np.uint8)
    header.set_data_shape(SIZE[::-1])
    header["vox_offset"] = 352
    header["magic"] = b"n+1\0"
    plane = SIZE[1] * SIZE[2]
    with gzip.open(path, "wb", compresslevel=1) if path.suffix == ".gz" else path.open("wb") as file:
        file.write(header.binaryblock + bytes(4))
        for z in range(SIZE[0]):
            file.write((b"\1" if WINDOW[0].start <= z < WINDOW[0].stop else b"\0") * plane)


def write_zarr(path: Path) -> None:
    zarr = pytest.importorskip("zarr")
    array = zarr.create_array(str(path), shape=SIZE, chunks=(4, 512, 512), dtype="uint8", fill_value=0, compressors=None)
    array[WINDOW[0].start - 2 : WINDOW[0].stop + 2] = 1


def write_hdf5(path: Path) -> None:
    h5py = pytest.importorskip("h5py")
    with h5py.File(path, "w") as file:
        dataset = file.create_dataset("image", SIZE, "uint8", chunks=(4, 512, 512), compression="gzip")
        dataset[WINDOW[0]] = 1


def write_dicom(path: Path) -> None:
    pytest.importorskip("pydicom")
    from widefield.image_files.formats.dicom import write_example

    pixels = np.zeros((1, *SIZE), dtype=np.uint8)
    pixels[0, WINDOW[0]] = 1
    write_example(path, pixels)


def write_pages(path: Path) -> None:
    """One page, and one strip, for each Z."""
    tifffile = pytest.importorskip("tifffile")
    pixels = np.zeros(SIZE, dtype=np.uint8)
    pixels[WINDOW[0]] = 1
    tifffile.imwrite(path, pixels, photometric="minisblack", metadata={"axes": "ZYX"})


def flat(size: tuple[int, int] = FLAT_SIZE) -> np.ndarray:
    pixels = np.zeros(size, dtype=np.uint8)
    pixels[2900:4100] = 1
    return pixels


def write_strip(path: Path) -> None:
    pytest.importorskip("tifffile").imwrite(path, flat())


def write_tiles(path: Path) -> None:
    pytest.importorskip("tifffile").imwrite(path, flat(), tile=(512, 512), compression="zlib", compressionargs={"level": 1})


def write_geotiff(path: Path) -> None:
    rasterio = pytest.importorskip("rasterio")
    about = {"count": 1, "height": FLAT_SIZE[0], "width": FLAT_SIZE[1], "dtype": "uint8"}
    about["transform"] = rasterio.Affine(10, 0, 500_000, 0, -10, 4_600_000)
    with rasterio.open(
        path, "w", driver="GTiff", tiled=True, blockxsize=512, blockysize=512, compress="deflate", **about
    ) as file:
        file.write(flat()[None])


def write_slide(path: Path) -> None:
    pytest.importorskip("openslide")
    colours = np.broadcast_to(flat((8192, 8192))[..., None], (8192, 8192, 3))
    pytest.importorskip("tifffile").imwrite(path, colours, tile=(512, 512), photometric="rgb", metadata=None)


FILES: dict[str, Callable[[Path], None]] = {
    "a.npy": write_numpy,
    "a.nii": write_nifti,
    "a.nii.gz": write_nifti,
    "a.zarr": write_zarr,
    "a.h5": write_hdf5,
    "a.dcm": write_dicom,
    "pages.tif": write_pages,
    "strip.tif": write_strip,
    "tiles.tif": write_tiles,
    "geo.tif": write_geotiff,
    "a.svslide": write_slide,
}
FLAT_FILES = ("strip.tif", "tiles.tif", "geo.tif", "a.svslide")


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="the peak of memory is read from /proc")
@pytest.mark.parametrize("name", FILES)
def test_a_window_of_a_large_file_takes_little_memory(tmp_path, name):
    path = tmp_path / name
    FILES[name](path)
    window = ",".join(f"{part.start}:{part.stop}" for part in (FLAT if name in FLAT_FILES else WINDOW))
    done = subprocess.run([sys.executable, "-c", READ, str(path), window], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) < MOST_MIB, f"{done.stdout} MiB"
