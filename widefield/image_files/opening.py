"""Which format is a file of, and open it.

A format is a file in formats/ with these names:

    NAME        as people call it
    SUFFIXES    in small letters, with the dot; ".ome.tif" is two
    EXTRA       the extra of this package that installs its libraries; "" where they are always there
    claims(path, start)     whether a file or folder is of it; start: its first 512 bytes, b"" for a folder
    PRIORITY    of two formats that claim a file, the higher one has it
    open_image(path) -> ImageFile, and CASES
    HAS_NAMES   True where `file#/name` names one of several images in a file; the path comes with the name
"""

from __future__ import annotations

import importlib.util
from functools import cache
from pathlib import Path
from types import ModuleType

from widefield.image_files.image_file import ImageFile, ImageFileError, file_and_name
from widefield.naming import constants_in, did_you_mean, load, names_in

FORMATS, LABEL_FILES = f"{__package__}.formats", f"{__package__}.label_files"


def open_image(path: str | Path) -> ImageFile:
    """The image in a file, or in a folder that is one, by the format that its first bytes and its name say.

    path: of a format whose files hold several images, `scan.h5#/raw/left` is one of them.
    ImageFileError: there is no such file, no format has it, a library is missing (named with the extra that installs it), or
    the file is damaged.
    """
    path = Path(path)
    file, name = file_and_name(path)
    try:
        module = format_of(file)
    except OSError as error:
        raise ImageFileError(f"cannot open {path} ({error.strerror or error}); mend the path") from None
    if name and not getattr(module, "HAS_NAMES", False):
        raise ImageFileError(f"{file} is {module.NAME}, whose files hold one image; leave #{name} out")
    try:
        return module.open_image(path)
    except ImageFileError:
        raise
    except ModuleNotFoundError as error:
        if not module.EXTRA or (error.name or "").startswith("widefield"):
            raise
        raise ImageFileError(
            f"{path} is {module.NAME}, which {error.name} reads; pip install 'widefield[{module.EXTRA}]'"
        ) from None
    except Exception as error:  # on damaged files libraries raise many types
        size = f"{file.stat().st_size} bytes; " if file.is_file() else ""
        raise ImageFileError(f"cannot read {path} as {module.NAME} ({size}{str(error) or type(error).__name__})") from None


def label_format_of(image: ImageFile) -> ModuleType:
    """The format in which labels of an image are written: its own where there is a file for it.

    Otherwise NIfTI for a volume with a place in the world, and TIFF, or NumPy's where their libraries are not installed.
    """
    own = _format_name(image)
    if own not in names_in(LABEL_FILES):
        is_volume = len(image.info.size) == 3
        wanted, library = ("nifti", "nibabel") if is_volume and image.info.affine else ("tiff", "tifffile")
        own = "numpy_array" if importlib.util.find_spec(library) is None or is_volume and wanted == "tiff" else wanted
    return load(LABEL_FILES, own)


def has_placed_labels(image: ImageFile) -> bool:
    """Whether its format has files of labels that know their place or their spacing, as GeoTIFF, OME-Zarr and NIfTI have."""
    return _format_name(image) in names_in(LABEL_FILES) and _format_name(image) not in ("tiff", "numpy_array")


def _format_name(image: ImageFile) -> str:
    return type(image).__module__.rpartition(".")[2]


def is_image_file(path: Path) -> bool:
    """Whether a format has this file or folder, or the file of `file#/name`, by its name alone."""
    text = str(path).lower()
    return any(name.endswith(suffix) for name in (text, text.partition("#/")[0]) for suffix in suffixes())


def is_series(path: Path) -> bool:
    """Whether a folder holds the slices of a DICOM series, by its first files; its name says nothing."""
    if not path.is_dir() or is_image_file(path):
        return False
    try:
        return bool(_module("dicom").claims(path, b""))
    except OSError:
        return False


def stem_of(path: Path) -> str:
    """The name without the suffix of a format, of several the longest.

    >>> stem_of(Path("scan.nii.gz")), stem_of(Path("a.b"))
    ('scan', 'a')
    """
    name = path.name
    found = max((suffix for suffix in suffixes() if name.lower().endswith(suffix)), key=len, default=path.suffix)
    return name[: len(name) - len(found)] or name


@cache
def suffixes() -> list[str]:
    """Those of all formats, without importing their files."""
    found = constants_in(FORMATS, ("SUFFIXES",))
    return sorted({suffix for constants in found.values() for suffix in constants["SUFFIXES"]})


def format_of(path: Path) -> ModuleType:
    """The module of the format.  OSError: the file cannot be opened.  ImageFileError: no format has it."""
    start = b""
    if not path.is_dir():
        with path.open("rb") as file:
            start = file.read(512)
        if not start:
            raise ImageFileError(f"{path} is empty; copy it again")
    claiming = [module for module in map(_module, names_in(FORMATS)) if module.claims(path, start)]
    if not claiming:
        what = "folder" if path.is_dir() else "file"
        suffix = path.suffix.lower()
        raise ImageFileError(
            f"{path} is a {what} of no format that is known here{did_you_mean(suffix, suffixes()) if suffix else '.'} "
            f"Known are {', '.join(suffixes())}"
        )
    return max(claiming, key=lambda module: module.PRIORITY)


def _module(name: str) -> ModuleType:
    return load(FORMATS, name)
