"""The tensors of a checkpoint: safetensors files and an index in JSON.  Reading them runs no code.

    tensors_R.safetensors   the full tensors that rank R wrote
    tensors.json            file, dtype and shape of every tensor

Any reader of safetensors opens the files.  Complex numbers are stored as pairs, in a last dim of 2, since the format has no
complex128.
"""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from widefield.sharded_state import UnreadTensor
from widefield.tiled.redistribute import is_dense
from widefield.trust import inside

INDEX = "tensors.json"
_FILE = re.compile(r"tensors_\d+\.safetensors")
_STORED = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.int64: "I64",
    torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint64: "U64", torch.uint32: "U32", torch.uint16: "U16",
    torch.uint8: "U8", torch.bool: "BOOL", torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2",
}  # fmt: skip
_PAIRS = {torch.complex128: torch.float64, torch.complex64: torch.float32}
_DTYPES = {_name: _dtype for _dtype in (*_STORED, *_PAIRS) for _name in [str(_dtype).removeprefix("torch.")]}

Entry = dict[str, Any]
"""`file`, `dtype` and `shape` of a tensor."""


class FormatError(ValueError):
    """A file or index that was not written by this module; the text says why."""


def file_of(rank: int) -> str:
    return f"tensors_{rank}.safetensors"


def check(tensors: Mapping[str, Tensor]) -> None:
    """ValueError: a tensor of a dtype that the files cannot have."""
    for name, tensor in tensors.items():
        if tensor.dtype not in _STORED and tensor.dtype not in _PAIRS:
            raise ValueError(f"a checkpoint cannot hold {name}, a tensor of {tensor.dtype}; give it as {', '.join(_DTYPES)}")


def assign_writers(sizes_of_ranks: Sequence[Mapping[str, int]]) -> list[list[str]]:
    """The names of the tensors that each rank writes: large ones first, each by the rank with the fewest bytes that has it.

    sizes_of_ranks: for each rank, the bytes of its tensors by name.

    >>> assign_writers([{"a": 4, "b": 2, "c": 1}, {"a": 4, "b": 2}])
    [['a', 'c'], ['b']]
    """
    sizes = {name: size for of_rank in sizes_of_ranks for name, size in of_rank.items()}
    loads, names = [0] * len(sizes_of_ranks), [list[str]() for _ in sizes_of_ranks]
    for name in sorted(sizes, key=lambda name: (-sizes[name], name)):
        rank = min((rank for rank, of_rank in enumerate(sizes_of_ranks) if name in of_rank), key=loads.__getitem__)
        loads[rank] += sizes[name]
        names[rank].append(name)
    return names


# ---------------------------------------------------------------------------------------------- writing


def write(folder: Path, rank: int, tensors: Mapping[str, Tensor]) -> dict[str, Entry]:
    """Write a rank's tensors, on the CPU, into its file, if there are any; returns their entries in the index.

    Not by safetensors.torch.save_file, which holds the GIL while it writes, so that training would wait.
    """
    if not tensors:
        return {}
    # Large elements first: then each tensor begins at a multiple of its element size, as readers that map the file require.
    names = sorted(tensors, key=lambda name: (-_plain(tensors[name]).element_size(), name))
    header, at = {}, 0
    for name in names:
        plain = _plain(tensors[name])
        header[name] = {"dtype": _STORED[plain.dtype], "shape": list(plain.shape), "data_offsets": [at, at + plain.nbytes]}
        at += plain.nbytes
    text = json.dumps(header).encode("ascii")
    text += b" " * (-len(text) % 8)
    with (folder / file_of(rank)).open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for name in names:
            file.write(_plain(tensors[name]).contiguous().view(-1).view(torch.uint8).numpy())
    return {
        name: {"file": file_of(rank), "dtype": _dtype_name(tensors[name]), "shape": list(tensors[name].shape)} for name in names
    }


def write_index(folder: Path, entries: Mapping[str, Entry]) -> None:
    (folder / INDEX).write_text(json.dumps(entries, indent=0, sort_keys=True) + "\n", encoding="ascii")


def _plain(tensor: Tensor) -> Tensor:
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def _dtype_name(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


# ---------------------------------------------------------------------------------------------- reading


def files_in(folder: Path) -> set[str]:
    """The files that the index names.  FormatError: it is not an index of this module; OSError: it cannot be read."""
    return {entry["file"] for entry in _index(folder).values()}


def read(folder: Path, strides: Mapping[str, list[int] | None]) -> dict[str, Tensor]:
    """The tensors named by `strides`, in memory of their own.

    strides: for each tensor to read, the strides that it gets; None: contiguous.
    FormatError: the index or a file holds something else than `write` leaves.  OSError: a file cannot be read.
    """
    index, tensors = _index(folder), {}
    missing = next((name for name in strides if name not in index), None)
    if missing is not None:
        raise FormatError(f"{INDEX} has no tensor {missing!r}")
    for file in sorted({index[name]["file"] for name in strides}):
        wanted = {name: stride for name, stride in strides.items() if index[name]["file"] == file}
        try:
            with safe_open(inside(folder, file), framework="pt") as opened:
                for name, stride in wanted.items():
                    tensors[name] = _checked_copy(opened.get_tensor(name), index[name], stride)
        except (SafetensorError, RuntimeError, TypeError) as error:
            raise FormatError(f"{file}: {error}") from None
    return tensors


def unread(folder: Path, strides: Mapping[str, list[int] | None]) -> dict[str, UnreadTensor]:
    """The tensors named by `strides`, each of which is read when it is asked for.  Strides are checked, and not kept.

    FormatError: the index or strides are something else than `write` leaves; a tensor's own file, when it is read.
    """
    index = _index(folder)
    missing = next((name for name in strides if name not in index), None)
    if missing is not None:
        raise FormatError(f"{INDEX} has no tensor {missing!r}")
    for name, stride in strides.items():
        if stride is not None:
            _laid_out(index[name], stride)
    return {
        name: UnreadTensor(tuple(entry["shape"]), _DTYPES[entry["dtype"]], partial(_mapped, folder, name, entry))
        for name, entry in ((name, index[name]) for name in strides)
    }


def _mapped(folder: Path, name: str, entry: Entry) -> Tensor:
    """A stored tensor in memory that is mapped from its file."""
    try:
        with safe_open(inside(folder, entry["file"]), framework="pt") as opened:
            return _checked(opened.get_tensor(name), entry)
    except (SafetensorError, RuntimeError, TypeError) as error:
        raise FormatError(f"{entry['file']}: {error}") from None


def _index(folder: Path) -> dict[str, Entry]:
    try:
        index = json.loads((folder / INDEX).read_text(encoding="ascii"))
    except (ValueError, RecursionError) as error:
        raise FormatError(f"{INDEX} is no JSON ({error})") from None
    if not isinstance(index, dict):
        raise FormatError(f"{INDEX} holds a {type(index).__name__}")
    for name, entry in index.items():
        match entry:
            case {"file": str(file), "dtype": str(dtype), "shape": [*shape]} if len(entry) == 3:
                if _FILE.fullmatch(file) and dtype in _DTYPES and all(type(length) is int and length >= 0 for length in shape):
                    continue
        raise FormatError(f"{INDEX} says of {name!r}: {str(entry)[:100]}")
    return index


def _checked(stored: Tensor, entry: Entry) -> Tensor:
    """A stored tensor with the dtype of the index; FormatError where dtype or shape are others."""
    dtype, shape = _DTYPES[entry["dtype"]], entry["shape"]
    pairs = dtype in _PAIRS
    if stored.dtype != _PAIRS.get(dtype, dtype) or list(stored.shape) != [*shape, *[2] * pairs]:
        raise FormatError(f"a tensor is {list(stored.shape)} of {stored.dtype} there, and {INDEX} says {shape} of {dtype}")
    return torch.view_as_complex(stored) if pairs else stored


def _checked_copy(stored: Tensor, entry: Entry, stride: list[int] | None) -> Tensor:
    """A copy of a stored tensor, with the dtype of the index and the given strides; FormatError where these do not fit."""
    whole = _checked(stored, entry)
    if stride is None:
        return whole.clone(memory_format=torch.contiguous_format)
    return torch.empty_like(_laid_out(entry, stride), device="cpu").copy_(whole)


def _laid_out(entry: Entry, stride: list[int]) -> Tensor:
    """A tensor without memory that has these strides; FormatError where there is none."""
    shape = entry["shape"]
    try:
        layout = torch.empty_strided(shape, stride, dtype=_DTYPES[entry["dtype"]], device="meta")
    except (TypeError, RuntimeError) as error:
        raise FormatError(f"a tensor of {shape} has the strides {str(stride)[:100]!r}: {error}") from None
    if not is_dense(layout):
        raise FormatError(f"a tensor of {shape} cannot lie in memory by {stride}")
    return layout
