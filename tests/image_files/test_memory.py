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
MOST_MIB = 40
"""Of growth, for a window of 2 MiB in blocks of at most 8 MiB: what libraries load at a first read is in it."""
READ = """
import sys
from widefield.image_files import open_image

def status(key):
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith(key))

image = open_image(sys.argv[1])
before = status("VmRSS")
window = [slice(*map(int, part.split(":"))) for part in sys.argv[2].split(",")]
pixels = image.read(window)
assert (pixels == 1).all() and pixels.size == 8 * 512 * 512, pixels.shape
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


FILES: dict[str, Callable[[Path], None]] = {
    "a.npy": write_numpy,
    "a.nii": write_nifti,
    "a.nii.gz": write_nifti,
    "a.zarr": write_zarr,
    "a.h5": write_hdf5,
    "a.dcm": write_dicom,
}


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="the peak of memory is read from /proc")
@pytest.mark.parametrize("name", FILES)
def test_a_window_of_a_large_file_takes_little_memory(tmp_path, name):
    path = tmp_path / name
    FILES[name](path)
    window = ",".join(f"{part.start}:{part.stop}" for part in WINDOW)
    done = subprocess.run([sys.executable, "-c", READ, str(path), window], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) < MOST_MIB, f"{done.stdout} MiB"
