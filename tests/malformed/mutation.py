"""How an input is damaged: bytes anyhow, and trees of values so that they still parse."""

from __future__ import annotations

import copy
import json
import random
from typing import Any

import yaml

ODD: list[Any] = [
    None, True, False, 0, -1, 1, 2**31, 2**63, -(2**70), 1e-320, 1e308, float("inf"), float("-inf"), float("nan"), "", "x", " ",
    "nan", "null", "../../etc/passwd", "/dev/full", "a\x00b", "\ud800", "é" * 300, "x" * 5000, "{}", "[1, 2", "os:system", [],
    {}, [[]], [None], [0, -1], {"": None}, {"a": {"b": {"c": 1}}}, ["x"] * 1000, [1e9] * 3, "2ep", "-3step", "1e400ep", "0GiB",
]  # fmt: skip
"""Values in place of others."""
BYTES = ("cut", "flip", "zeros", "insert", "repeat", "swap", "append", "empty", "random")


def damaged_bytes(content: bytes, draw: random.Random) -> bytes:
    """The bytes with one damage of BYTES."""
    kind, size = draw.choice(BYTES), len(content)
    if kind == "empty" or not size:
        return b""
    if kind == "random":
        return draw.randbytes(draw.randint(1, 4096))
    at, length = draw.randrange(size), draw.randint(1, max(1, min(256, size // 4)))
    if draw.random() < 0.4:
        at = draw.randrange(min(size, 256))  # headers
    changed = bytearray(content)
    if kind == "cut":
        del changed[at:]
    elif kind == "flip":
        for _ in range(draw.randint(1, 8)):
            changed[draw.randrange(max(0, at - 128), min(size, at + 128))] ^= 1 << draw.randrange(8)
    elif kind == "zeros":
        changed[at : at + length] = bytes(len(changed[at : at + length]))
    elif kind == "insert":
        changed[at:at] = draw.randbytes(length)
    elif kind == "repeat":
        changed[at:at] = changed[at : at + length] * draw.randint(1, 20)
    elif kind == "swap":
        other = draw.randrange(size)
        changed[at : at + length], changed[other : other + length] = changed[other : other + length], changed[at : at + length]
    else:
        changed += draw.randbytes(length)
    return bytes(changed)


def damaged_tree(tree: Any, draw: random.Random) -> Any:
    """The tree with one to three nodes replaced, removed, renamed, repeated or nested."""
    tree = copy.deepcopy(tree)
    for _ in range(draw.choice((1, 1, 1, 2, 3))):
        places = list(_places(tree))
        if not places:
            return draw.choice(ODD)
        parent, key = draw.choice(places)
        if _damage(parent, key, draw):
            break  # too deep to be gone through again
    return tree


def _damage(parent: Any, key: Any, draw: random.Random) -> bool:
    """Damage a node; returns whether it is nested deep."""
    kind = draw.choice(("odd", "odd", "odd", "remove", "rename", "deep", "other", "number"))
    if kind == "remove":
        del parent[key]
    elif kind == "rename" and isinstance(parent, dict):
        parent[str(key) + draw.choice(("", "x", "\u200b"))] = parent.pop(key)
    elif kind == "deep":
        value: Any = parent[key]
        depth = draw.choice((1, 3, 2000))
        for _ in range(depth):
            value = [value]
        parent[key] = value
        return depth > 3
    elif kind == "other":
        parent[key] = copy.deepcopy(draw.choice(list(parent.values()) if isinstance(parent, dict) else parent))
    elif kind == "number" and isinstance(parent[key], int | float) and not isinstance(parent[key], bool):
        parent[key] = draw.choice((-parent[key], parent[key] + 1, parent[key] * 10**6, parent[key] / 3, str(parent[key])))
    else:
        parent[key] = copy.deepcopy(draw.choice(ODD))
    return False


def _places(tree: Any) -> Any:
    """(parent, key) of every node below the top."""
    items = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    for key, value in list(items):
        yield tree, key
        yield from _places(value)


def damaged_json(content: bytes, draw: random.Random) -> bytes:
    """JSON that still parses, or, one time in four, bytes that may not."""
    if draw.random() < 0.25:
        return damaged_bytes(content, draw)
    try:
        return json.dumps(damaged_tree(json.loads(content), draw)).encode("utf-8", "surrogatepass")
    except RecursionError:
        return b"[" * 100_000
    except ValueError:  # it is damaged already
        return damaged_bytes(content, draw)


def damaged_yaml(content: bytes, draw: random.Random) -> bytes:
    if draw.random() < 0.25:
        return damaged_bytes(content, draw)
    tree = damaged_tree(yaml.safe_load(content), draw)
    try:
        return json.dumps(tree, ensure_ascii=draw.random() < 0.5).encode("utf-8", "surrogatepass")  # YAML has JSON in it
    except RecursionError:
        return b"[" * 100_000


def damaged_lines(content: bytes, draw: random.Random) -> bytes:
    """Lines of JSON, some of them damaged, repeated, left out or in another order."""
    lines = content.splitlines(keepends=True)
    for _ in range(draw.choice((1, 1, 2, 5))):
        at = draw.randrange(len(lines))
        kind = draw.choice(("damage", "damage", "damage", "repeat", "remove", "move"))
        if kind == "damage":
            lines[at] = damaged_json(lines[at], draw) + b"\n"
        elif kind == "repeat":
            lines.insert(draw.randrange(len(lines)), lines[at])
        elif kind == "move":
            lines.insert(draw.randrange(len(lines)), lines.pop(at))
        elif len(lines) > 1:
            del lines[at]
    return b"".join(lines)
