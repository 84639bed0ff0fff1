"""Models of several modules that learn by turns, as a generator and a discriminator.  Each is parallelized by itself.

Such a model is a module that has the others, by name.  It is not parallelized itself; its own forward calls one of them.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from weakref import WeakKeyDictionary, WeakSet

from torch import nn

_MEMBERS: WeakKeyDictionary[nn.Module, dict[str, nn.Module]] = WeakKeyDictionary()


_UNDIVIDED: WeakSet[nn.Module] = WeakSet()


def set_members(model: nn.Module, members: Mapping[str, nn.Module], *, undivided: Collection[str] = ()) -> None:
    """Say that `model` consists of these modules, which are parallelized each by itself.

    undivided: those of which every rank of a channel axis has all, since no capture can hold what they are called with.
    ValueError: a parameter of the model is in none of them, or in two, which would learn in both turns.
    """
    owners: dict[int, list[str]] = {}
    for name, member in members.items():
        for parameter in member.parameters():
            owners.setdefault(id(parameter), []).append(name)
    for name, parameter in model.named_parameters():
        found = owners.get(id(parameter), [])
        if len(found) != 1:
            where = f"in {' and '.join(found)}" if found else f"in none of {', '.join(members)}"
            raise ValueError(f"the parameter '{name}' is {where}; each parameter learns in the turns of one module")
    _MEMBERS[model] = dict(members)
    _UNDIVIDED.update(members[name] for name in undivided)


def is_undivided(member: nn.Module) -> bool:
    """Whether no rank has only a part of this member, see `set_members`."""
    return member in _UNDIVIDED


def members_of(model: nn.Module) -> dict[str, nn.Module]:
    """The modules that are parallelized, by name: those of `set_members`, or {"": model}."""
    return _MEMBERS.get(model, {"": model})
