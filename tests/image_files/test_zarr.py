"""What the metadata of Zarr and OME-Zarr say, and chunks that are missing, cut short or named otherwise."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from widefield.geometry import Interval
from widefield.image_files import open_image
from widefield.image_files.image_file import ImageFileError
from widefield.image_files.info import Level

zarr = pytest.importorskip("zarr")
PIXELS = np.arange(1, 1 + 24 * 36, dtype=np.uint16).reshape(24, 36)


def write_array(path: Path, pixels: np.ndarray = PIXELS, version: int = 3, **options) -> Path:
    options = {"chunks": (8,) * pixels.ndim, "fill_value": 0, **options}
    array = zarr.create_array(str(path), shape=pixels.shape, dtype=pixels.dtype, zarr_format=version, **options)
    array[...] = pixels
    return path


def write_ome(path: Path, arrays: list[np.ndarray], axes: list, scales: list, /, **more) -> Path:
    """An OME-Zarr 0.4; scales: of each level, on each dim, or None for none."""
    datasets = []
    for level, (array, scale) in enumerate(zip(arrays, scales, strict=True)):
        write_array(path / str(level), array, version=2)
        transforms = [] if scale is None else [{"type": "scale", "scale": scale}]
        datasets.append({"path": str(level), "coordinateTransformations": transforms})
    (path / ".zgroup").write_text('{"zarr_format": 2}')
    image = {"version": "0.4", "axes": axes, "datasets": datasets, **more}
    (path / ".zattrs").write_text(json.dumps({"multiscales": [image]}))
    return path


def axes_of(names: str, units: dict[str, str] | None = None) -> list[dict]:
    return [{"name": name, "unit": (units or {}).get(name, "")} for name in names]


@pytest.mark.parametrize("names", ["yx", "xy", "tczyx", "zxtcy"])
def test_axes_are_known_by_their_names_in_any_order(tmp_path, names):
    stored = PIXELS if names.index("y") < names.index("x") else PIXELS.T
    stored = stored.reshape(
        [stored.shape[("xy" if stored is not PIXELS else "yx").index(n)] if n in "yx" else 1 for n in names]
    )
    path = write_ome(tmp_path / "a.zarr", [stored], axes_of(names), [[1.0] * len(names)])
    with open_image(path) as image:
        assert image.info.axes == "YX" and np.array_equal(image.read(), PIXELS[None])


def test_an_image_over_time_is_refused(tmp_path):
    path = write_ome(tmp_path / "a.zarr", [np.stack([PIXELS] * 5)], axes_of("tyx"), [[1.0] * 3])
    with pytest.raises(
        ImageFileError, match=r"of the dims t, y, x, t has 5; only c, z, y and x may have more than 1"
    ) as caught:
        open_image(path)
    assert str(path) in str(caught.value)


def test_levels_have_the_scale_of_the_metadata(tmp_path):
    """24 pixels are 5 of 5 pixels each, the last in part: the scale is 5, and not 24 / 5."""
    scales = [[0.5, 0.25], [2.5, 1.25]]
    path = write_ome(tmp_path / "a.zarr", [PIXELS, PIXELS[::5, ::5]], axes_of("yx"), scales)
    with open_image(path) as image:
        assert image.info.levels[1] == Level((5, 8), (8, 8), (5.0, 5.0)) and image.info.spacing == (0.5, 0.25)
        assert image.info.advice == ""


def test_a_scale_that_does_not_fit_the_sizes_gives_way_to_them_and_is_named(tmp_path):
    path = write_ome(tmp_path / "a.zarr", [PIXELS, PIXELS[::2, ::2]], axes_of("yx"), [[0.5, 0.5], [0.5, 0.5]])
    with open_image(path) as image:
        assert image.info.levels[1].scale == (2.0, 2.0) and image.info.spacing == (0.5, 0.5)
        assert "the scale of level 1 (1 x 1) does not fit its size" in image.info.advice


def test_without_scales_the_sizes_say_them_and_there_is_no_spacing(tmp_path):
    path = write_ome(tmp_path / "a.zarr", [PIXELS, PIXELS[::2, ::2]], list("yx"), [None, None], version="0.3")
    with open_image(path) as image:
        assert image.info.levels[1].scale == (2.0, 2.0) and image.info.spacing == () and image.info.unit == ""


def test_spacing_is_in_one_unit_and_the_scale_of_all_levels_counts(tmp_path):
    units = {"z": "nanometer", "y": "micrometer", "x": "micrometer"}
    shared = [{"type": "scale", "scale": [1.0, 2.0, 2.0]}, {"type": "translation", "translation": [5.0, 5.0, 5.0]}]
    stack = np.stack([PIXELS] * 2)
    path = write_ome(
        tmp_path / "a.zarr", [stack], axes_of("zyx", units), [[500.0, 0.1, 0.1]], coordinateTransformations=shared
    )  # fmt: skip
    with open_image(path) as image:
        assert image.info.axes == "ZYX" and image.info.unit == "um" and image.info.spacing == pytest.approx((0.5, 0.2, 0.2))


def test_dims_always_are_t_c_z_y_x_in_version_0_1(tmp_path):
    path = write_ome(tmp_path / "a.zarr", [PIXELS[None, None, None]], [], [None], version="0.1")
    with open_image(path) as image:
        assert np.array_equal(image.read(), PIXELS[None])


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"axes": [], "version": "0.6"}, r"\(version 0.6\) have no axes"),
        ({"coordinateTransformations": [{"type": "rotation"}]}, "is none of 0.5"),
        ({"coordinateTransformations": [{"type": "scale", "scale": [1.0]}]}, "is to be of 2 positive numbers"),
        ({"datasets": [{"path": "../0"}]}, "are not inside of it"),
    ],
)
def test_metadata_that_say_what_is_not_read_are_refused(tmp_path, more, words):
    path = write_ome(tmp_path / "a.zarr", [PIXELS], axes_of("yx"), [[1.0, 1.0]], **more)
    with pytest.raises(ImageFileError, match=words):
        open_image(path)


def test_levels_of_several_dtypes_are_refused(tmp_path):
    path = write_ome(tmp_path / "a.zarr", [PIXELS, PIXELS[::2, ::2].astype(np.uint8)], axes_of("yx"), [[1.0] * 2, [2.0] * 2])
    with pytest.raises(ImageFileError, match="its level 1 has uint8 of shape .12, 18., the first uint16"):
        open_image(path)


# ---------------------------------------------------------------------------------------------- arrays and groups


def test_an_array_has_the_dims_that_it_names(tmp_path):
    stored = np.stack([PIXELS] * 6, axis=-1)
    with open_image(write_array(tmp_path / "v3.zarr", stored, dimension_names=("x", "y", "c"))) as image:
        assert image.info.axes == "YX" and image.info.shape == (6, 36, 24) and np.array_equal(image.read()[2], PIXELS.T)
    path = write_array(tmp_path / "v2.zarr", stored, version=2)
    (path / ".zattrs").write_text('{"_ARRAY_DIMENSIONS": ["y", "x", "c"]}')
    with open_image(path) as image:
        assert image.info.shape == (6, 24, 36)


def test_a_group_of_one_array_is_the_array_and_one_of_two_names_them(tmp_path):
    zarr.create_group(str(tmp_path / "g.zarr"))
    write_array(tmp_path / "g.zarr" / "first")
    with open_image(tmp_path / "g.zarr") as image:
        assert np.array_equal(image.read(), PIXELS[None])
    write_array(tmp_path / "g.zarr" / "second")
    with pytest.raises(ImageFileError, match="a group of 2 images, and not of one; open one of its members: first, second"):
        open_image(tmp_path / "g.zarr")
    with open_image(tmp_path / "g.zarr" / "second") as image:
        assert image.info.shape == (1, 24, 36)


def test_a_folder_by_the_name_of_zarr_without_metadata_is_named(tmp_path):
    (tmp_path / "a.zarr").mkdir()
    with pytest.raises(ImageFileError, match="has none of zarr.json, .zarray, .zgroup, .zattrs; was the folder copied"):
        open_image(tmp_path / "a.zarr")


def test_opening_sets_few_threads_in_the_process_that_reads(tmp_path):
    open_image(write_array(tmp_path / "a.zarr")).close()
    assert zarr.config.get("threading.max_workers") == 2 and zarr.config.get("async.concurrency") == 4


# ---------------------------------------------------------------------------------------------- chunks


def chunk_at(path: Path, row: int, column: int) -> Path:
    return path / (f"{row}.{column}" if (path / ".zarray").is_file() else f"c/{row}/{column}")


@pytest.mark.parametrize("version", [2, 3])
def test_missing_chunks_are_counted_and_read_as_the_fill_value(tmp_path, version):
    path = write_array(tmp_path / "a.zarr", version=version, fill_value=9)
    chunk_at(path, 0, 0).unlink()
    chunk_at(path, 2, 4).unlink()
    with open_image(path) as image:
        assert "2 of 15 chunks at full resolution have no file and read as 9" in image.info.advice
        assert (image.read((slice(0, 8), slice(0, 8))) == 9).all()


def test_missing_shards_are_counted(tmp_path):
    path = write_array(tmp_path / "a.zarr", shards=(16, 16))
    chunk_at(path, 1, 1).unlink()
    with open_image(path) as image:
        assert "1 of 6 shards" in image.info.advice


def test_a_missing_chunk_without_a_fill_value_is_an_error_where_it_is_read(tmp_path):
    path = write_array(tmp_path / "a.zarr", version=2, fill_value=None)
    chunk_at(path, 1, 1).unlink()
    with open_image(path) as image:
        assert np.array_equal(image.read((slice(0, 8), slice(0, 36))), PIXELS[None, :8])
        with pytest.raises(ImageFileError, match="its chunk 1.1 has no file, and no fill value stands for it") as caught:
            image.read((Interval(7, 9), Interval(15, 20)))
    assert str(path) in str(caught.value)


def test_chunks_named_with_the_other_separator_are_not_read_as_empty(tmp_path):
    """Trap 31: an OME-Zarr of version 0.1, say, whose chunks lie in folders and whose metadata say nothing of it."""
    path = write_array(tmp_path / "a.zarr", version=2)
    for chunk in [one for one in path.iterdir() if one.name[0] != "."]:
        row, column = chunk.name.split(".")
        (path / "folders" / row).mkdir(parents=True, exist_ok=True)
        shutil.move(chunk, path / "folders" / row / column)
    for row in (path / "folders").iterdir():
        shutil.move(row, path / row.name)
    (path / "folders").rmdir()
    with pytest.raises(ImageFileError, match=r"its 15 chunks are to be named like 0.0, but the files are named like \d/\d"):
        open_image(path)


def codecs() -> dict[str, dict]:
    from zarr.codecs import BloscCodec, GzipCodec, ZstdCodec

    return {
        "raw": {"compressors": None},
        "zstd": {"compressors": ZstdCodec()},
        "gzip": {"compressors": GzipCodec()},
        "blosc": {"compressors": BloscCodec(cname="lz4")},
        "sharded": {"shards": (16, 16)},
        "raw-sharded": {"shards": (16, 16), "compressors": None},
        "v2": {"version": 2},
        "v2-raw": {"version": 2, "compressors": None},
    }


@pytest.mark.parametrize("kind", ["raw", "zstd", "gzip", "blosc", "sharded", "raw-sharded", "v2", "v2-raw"])
@pytest.mark.parametrize("part", [0.0, 0.3, 0.9])
def test_a_chunk_that_is_cut_short_is_an_error_with_the_name(tmp_path, kind, part):
    path = write_array(tmp_path / "a.zarr", **codecs()[kind])
    chunk = chunk_at(path, 1, 1)
    content = chunk.read_bytes()
    chunk.write_bytes(content[: int(part * len(content))])
    with open_image(path) as image:
        with pytest.raises(ImageFileError) as caught:
            image.read()
        assert str(path) in str(caught.value)


def test_an_array_in_huge_chunks_is_not_read_by_window(tmp_path):
    path = tmp_path / "a.zarr"
    zarr.create_array(str(path), shape=(9000, 9000), chunks=(9000, 9000), dtype="uint8")
    info = open_image(path).info
    assert not info.by_window and "one chunk holds 77 MiB" in info.advice
