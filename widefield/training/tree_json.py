"""Nested dicts of tensors and plain values as one JSON text and named tensors, and back.

Reading JSON cannot run code.  What JSON does not have is a dict of one key that begins with `$`: {"$tensor": ...},
{"$tuple": [...]}, {"$float": bits} for nan and the infinities, and {"$dict": [[key, value], ...]} for a dict with a key that is
no text, or that begins with `$` itself.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from widefield.sharded_state import RemoteTensor, UnreadTensor


def to_json(value: Any, *, name: str = "", taken: Mapping[str, Tensor] | None = None) -> tuple[str, dict[str, Tensor]]:
    """The JSON of `value`, and its tensors by name: `name` and the keys that lead to a tensor, joined by dots.

    taken: names in use elsewhere; a name that is in use gets a `~`.
    A RemoteTensor has a name in the JSON and no tensor here, since another rank has it.
    `from_json` returns dicts as dict, lists as list, tuples (named ones too) as tuple, and every float bit for bit.
    ValueError: a leaf that is no plain tensor, int, float, str, bool or None.
    """
    tensors: dict[str, Tensor] = {}
    text = json.dumps(_encode(value, name, tensors, taken or {}), allow_nan=False)
    return text, tensors


def tensors_in(text: str) -> dict[str, list[int] | None]:
    """The tensors that a JSON text refers to, by name, with the strides of those that are not contiguous, else None."""
    found: dict[str, list[int] | None] = {}

    def note(read: dict[str, Any]) -> dict[str, Any]:
        if "$tensor" in read:
            found[read["$tensor"]["name"]] = read["$tensor"].get("stride")
        return read

    json.loads(text, object_hook=note)
    return found


def from_json(text: str, tensors: Mapping[str, Tensor | UnreadTensor]) -> Any:
    """The value from which `to_json` made the text.  tensors: by name; there may be more than the text refers to."""
    return _decode(json.loads(text), tensors)


def _encode(value: Any, path: str, tensors: dict[str, Tensor], taken: Mapping[str, Tensor]) -> Any:
    if isinstance(value, Tensor):
        return {"$tensor": _name_tensor(value, path, tensors, taken)}
    if isinstance(value, RemoteTensor):
        return {"$tensor": {"name": path} | ({} if value.is_contiguous() else {"stride": list(value.stride)})}
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else {"$float": struct.pack(">d", value).hex()}
    if isinstance(value, (list, tuple)):
        items = [_encode(item, _join(path, index), tensors, taken) for index, item in enumerate(value)]
        return {"$tuple": items} if isinstance(value, tuple) else items
    if isinstance(value, Mapping):
        return _encode_dict(value, path, tensors, taken)
    raise ValueError(
        f"a checkpoint cannot hold {path}, a {type(value).__module__}.{type(value).__qualname__}; "
        "make it a tensor, int, float, str, bool, None, or a list, tuple or dict of those"
    )


def _name_tensor(value: Tensor, path: str, tensors: dict[str, Tensor], taken: Mapping[str, Tensor]) -> dict[str, Any]:
    if type(value) not in (Tensor, torch.nn.Parameter) or value.layout != torch.strided or value.is_meta:
        raise ValueError(
            f"a checkpoint cannot hold {path}, a {type(value).__name__} ({value.layout}, on {value.device}); "
            "give it as a plain, dense tensor that has values"
        )
    while path in tensors or path in taken:
        path += "~"
    tensors[path] = value.detach()
    # Strides (channels_last) are kept: elementwise kernels may round differently with others.
    stride = torch.empty_like(value, device="meta").stride()
    return {"name": path} if value.is_contiguous() else {"name": path, "stride": list(stride)}


def _encode_dict(value: Mapping, path: str, tensors: dict[str, Tensor], taken: Mapping[str, Tensor]) -> dict[str, Any]:
    odd = next((key for key in value if not isinstance(key, (str, int))), None)
    if odd is not None:
        raise ValueError(
            f"a checkpoint cannot hold the key {odd!r} in {path or 'the state'}; use text or whole numbers as keys"
        )
    pairs = [(key, _encode(item, _join(path, key), tensors, taken)) for key, item in value.items()]
    if all(isinstance(key, str) and not key.startswith("$") for key in value):
        return dict(pairs)
    return {"$dict": [list(pair) for pair in pairs]}


def _decode(value: Any, tensors: Mapping[str, Tensor | UnreadTensor]) -> Any:
    if isinstance(value, list):
        return [_decode(item, tensors) for item in value]
    if not isinstance(value, dict):
        return value
    match value:
        case {"$tensor": {"name": name}}:
            return tensors[name]
        case {"$tuple": items}:
            return tuple(_decode(item, tensors) for item in items)
        case {"$float": bits}:
            return struct.unpack(">d", bytes.fromhex(bits))[0]
        case {"$dict": pairs}:
            return {key: _decode(item, tensors) for key, item in pairs}
    return {key: _decode(item, tensors) for key, item in value.items()}


def _join(path: str, key: object) -> str:
    return f"{path}.{key}" if path else str(key)
