"""Is a window of a mapped array right that is copied in several pieces, however the array lies in its file?"""

import numpy as np
import pytest

from widefield.image_files import open_image
from widefield.image_files.formats import numpy_array
from widefield.image_files.stored_array import dims_by_extents


@pytest.mark.parametrize("shape", [(37, 50), (3, 37, 50), (37, 50, 3), (9, 21, 30), (2, 7, 12, 11)], ids=str)
@pytest.mark.parametrize("order", ["C", "F"])
@pytest.mark.parametrize("piece_bytes", [1, 700, 2**22])
def test_windows_are_crops_of_the_array(tmp_path, monkeypatch, shape, order, piece_bytes):
    monkeypatch.setattr(numpy_array, "PIECE_BYTES", piece_bytes)
    random = np.random.default_rng(0)
    array = np.asarray(random.integers(0, 2**16, shape).astype(">u2"), order=order)
    np.save(tmp_path / "a.npy", array)
    dims = dims_by_extents(shape)
    with open_image(tmp_path / "a.npy") as image:
        for _ in range(30):
            ends = [sorted(random.integers(0, extent + 1, 2).tolist()) for extent in image.info.size]
            window = tuple(slice(start, stop) for start, stop in ends)
            found = image.read(window)
            wanted = np.moveaxis(array if dims.channel is not None else array[None], dims.channel or 0, 0)[:, *window]
            assert found.dtype == np.uint16 and np.array_equal(found, wanted)
