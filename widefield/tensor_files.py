"""Tensors by name from a file: .safetensors, or .pt and .pth of torch.save.

Of the latter torch reads tensors and plain containers alone (weights_only=True), so that no file runs code.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path

import safetensors.torch
import torch
from torch import Tensor

INSIDE = ("state_dict", "model", "model_state_dict", "net", "weights")
"""Keys under which programs save a model's tensors beside other things."""
Tensors = dict[str, Tensor]


def read_tensors(path: str | Path, *, sha256: str = "") -> Tensors:
    """The tensors of a file by name, on the CPU.  sha256: how its SHA-256 begins.

    ValueError: no such file, a damaged one, another format, or one that has other objects than tensors.
    """
    path = Path(path)
    if not path.is_file():
        raise ValueError(f"there are no weights at {path}; name a .safetensors, .pt or .pth file")
    if sha256 and not _sha256_of(path).startswith(sha256):
        raise ValueError(f"{path} is damaged: its SHA-256 does not begin with {sha256}, as its name says; get it again")
    if path.suffix == ".safetensors":
        try:
            return safetensors.torch.load_file(path)
        except (safetensors.SafetensorError, OSError) as error:
            raise ValueError(f"{path} is no sound .safetensors file ({error}); export it again") from None
    try:
        found = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # the unpickler raises what a damaged file leads it to
        raise ValueError(
            f"{path} cannot be read as tensors ({type(error).__name__}: {str(error).splitlines()[0]}); save the state_dict of "
            "the model alone, or a .safetensors file"
        ) from None
    return _tensors_in(found, path)


def _sha256_of(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _tensors_in(found: object, path: Path) -> Tensors:
    """The tensors of what a file has: a state_dict, or a dict with one under one of the names INSIDE."""
    if isinstance(found, Mapping):
        inner = next((found[key] for key in INSIDE if isinstance(found.get(key), Mapping)), found)
        tensors = {str(name): value for name, value in inner.items() if isinstance(value, Tensor)}
        if tensors:
            return tensors
    keys = f" with {', '.join(map(str, list(found)[:5]))}" if isinstance(found, Mapping) else ""
    raise ValueError(
        f"{path} has a {type(found).__name__}{keys} and no tensors by name; save model.state_dict(), or put it under the key "
        "state_dict"
    )
