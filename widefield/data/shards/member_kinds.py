"""Which members are images, and which are masks, by their extensions."""

from __future__ import annotations

from widefield.data.windowed_files import PLAIN

MASK_WORDS = ("mask", "masks", "seg", "segmentation", "label", "labels", "annotation", "gt")
"""First words of the extensions of masks, as in seg.png."""


def is_picture(extension: str) -> bool:
    """
    >>> is_picture("jpg"), is_picture("mask.png"), is_picture("cls")
    (True, True, False)
    """
    return f".{extension.rpartition('.')[2]}" in PLAIN


def is_mask(extension: str) -> bool:
    """
    >>> is_mask("mask.png"), is_mask("png"), is_mask("label.json")
    (True, False, False)
    """
    return is_picture(extension) and "." in extension and extension.partition(".")[0] in MASK_WORDS


def is_image(extension: str) -> bool:
    return is_picture(extension) and not is_mask(extension)
