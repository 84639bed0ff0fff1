"""Which window of an image does a rank read, and how does a batch of windows become a TiledTensor?"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise

from torch import Tensor

from widefield.comm.mesh import Mesh
from widefield.data.loader import Batch, Window
from widefield.geometry.interval import Interval, natural_cut
from widefield.tasks import Task, labels_of
from widefield.tiled.api import from_tile, tile, window


def window_of(mesh: Mesh) -> Callable[[tuple[int, ...]], Window] | None:
    """A function from the spatial shape of an image to the window that this rank reads; None where images are not cut.

    The function raises ValueError where the plan has more or fewer space axes than the image has dims.
    """
    if not mesh.grid.sizes:
        return None

    def read(shape: tuple[int, ...]) -> Window:
        if len(mesh.grid.sizes) != len(shape):
            raise ValueError(
                f"mesh.space={list(mesh.grid.sizes)} has {len(mesh.grid.sizes)} sizes and images have {len(shape)} dims; "
                f"give one size per dim, as {[mesh.grid.size, *[1] * (len(shape) - 1)]}"
            )
        return tuple(Interval(part.start, part.stop) for part in window(shape, mesh))

    return read


def cuts_in_words(shape: Sequence[int], sizes: Sequence[int]) -> str:
    """A sentence: where an image of `shape` pixels is cut into `sizes` tiles per dim.

    >>> cuts_in_words((256, 256), (2, 1))
    'images of 256 x 256 px are cut at row 128: tiles of 128 x 256 px'
    >>> cuts_in_words((100, 64), (3, 2))
    'images of 100 x 64 px are cut at rows 34, 68 and column 32: tiles of up to 34 x 32 px'
    """
    cuts = [natural_cut(extent, parts) for extent, parts in zip(shape, sizes, strict=True)]
    names = ("plane", "row", "column")[-len(cuts) :]
    places = [_places(name, cut[1:-1]) for name, cut in zip(names, cuts, strict=True) if len(cut) > 2]
    lengths = [{stop - start for start, stop in pairwise(cut)} for cut in cuts]
    size = ("" if all(len(found) == 1 for found in lengths) else "up to ") + _px(map(max, lengths))
    return f"images of {_px(shape)} are " + (f"cut at {' and '.join(places)}: tiles of {size}" if places else "one tile each")


def _places(name: str, bounds: Sequence[int]) -> str:
    return f"{name}{'s' * (len(bounds) > 1)} {', '.join(map(str, bounds))}"


def _px(extents: Iterable[int]) -> str:
    return " x ".join(map(str, extents)) + " px"


def on_tiles(tensor: Tensor, batch: Batch, mesh: Mesh, *, scale: int = 1) -> Tensor:
    """The TiledTensor whose local tile is `tensor`; `tensor` itself where images are not cut.

    tensor: (B, C, *pixels) images or (B, *pixels) labels, this rank's window of those of `batch`.
    scale: how many pixels of the tensor a pixel of the batch's images is, along each dim; it is cut where these are.
    """
    if batch.whole_shape is None:
        return tensor
    pixels = batch.whole_shape[1:]
    whole = (*tensor.shape[: tensor.ndim - len(pixels)], *(scale * extent for extent in pixels))
    cuts = [[scale * at for at in natural_cut(*pair)] for pair in zip(pixels, mesh.grid.sizes, strict=True)]
    return from_tile(tensor, mesh, whole, cuts)


def inputs_on_tiles(image: Tensor, batch: Batch, mesh: Mesh, task: Task) -> Tensor:
    """What the model is called with: this rank's window of the images, or noise, which every rank has whole, on tiles."""
    return tile(image, mesh) if labels_of(task) == "noise" else on_tiles(image, batch, mesh)
