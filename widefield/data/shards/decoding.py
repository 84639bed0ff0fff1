"""Images and masks of members.  Common formats are decoded in memory, TIFF and masks from a file that is deleted after."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from PIL import UnidentifiedImageError
from torch import Tensor

from widefield.data import BadImageError
from widefield.data.image import image_of, read_image
from widefield.data.masks import Coding, raw_mask
from widefield.data.pixel_files import pixels_in
from widefield.data.shards.open_shards import StoredMember
from widefield.data.windowed_files import spacing_of_file
from widefield.image_files.opened import forget


def image_in(
    member: StoredMember, channels: int | None = None, dtype: torch.dtype | None = None, *, narrow: bool = False
) -> Tensor:
    """(C, H, W), or (C, D, H, W), exactly as `read_image` reads a file with these bytes.

    BadImageError, with the shard and the member: as there.  ValueError: the shard has changed.
    """
    content = member.read()
    try:
        pixels = pixels_in(content, f".{member.extension.rpartition('.')[2]}")
        if pixels is not None:
            return image_of(pixels, channels, dtype, narrow=narrow)
    except Exception as error:  # on damaged files decoders raise many types
        reason = str(error) or type(error).__name__
        reason = "no image of a known format" if isinstance(error, UnidentifiedImageError) else reason
        raise BadImageError(f"cannot read the image {member} ({len(content)} bytes; {reason})") from None
    with as_file(member, content) as path:
        return read_image(path, channels, dtype, narrow=narrow)


def spacing_in(member: StoredMember) -> tuple[float, ...] | None:
    """The lengths of a pixel along each dim, in mm, where a TIFF tells them.  Reads the member."""
    if not member.extension.endswith(("tif", "tiff")):
        return None
    with as_file(member, member.read()) as path:
        return spacing_of_file(path) or None


def labels_in(member: StoredMember, coding: Coding) -> Tensor:
    """(H, W) class numbers of a mask.  BadImageError, ValueError, with the shard and the member: as of `Coding.labels`."""
    with as_file(member, member.read()) as path:
        return coding.labels(path)


def numbers_in_mask(member: StoredMember) -> set[int]:
    """The stored numbers of a mask."""
    with as_file(member, member.read()) as path:
        return set(torch.from_numpy(raw_mask(path).astype("int64")).unique().tolist())


@contextmanager
def as_file(member: StoredMember, content: bytes) -> Iterator[Path]:
    """Inside, a file of these bytes.  What an error says of it is said of the member.

    ValueError: there is no room for it where temporary files are.
    """
    with tempfile.TemporaryDirectory(prefix="widefield-") as folder:
        path = Path(folder, f"member.{member.extension.rpartition('.')[2]}")
        try:
            path.write_bytes(content)
        except OSError as error:
            raise ValueError(
                f"{member} is read from a temporary file, and {folder} cannot have it ({error.strerror}, {len(content)} "
                "bytes); set TMPDIR to a folder with room"
            ) from None
        try:
            yield path
        except BadImageError as error:
            raise BadImageError(str(error).replace(str(path), str(member))) from None
        except ValueError as error:
            raise ValueError(str(error).replace(str(path), str(member))) from None
        finally:
            forget(path)
