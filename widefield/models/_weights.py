"""Initial weights from a file: read, renamed, and put into a model that is not parallelized."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping

from torch import Tensor, nn

from widefield.config import ModelConfig
from widefield.models._first_convolution import CONVOLUTIONS, adapted, first_convolution
from widefield.tensor_files import Tensors, read_tensors

AUXILIARY = ("aux",)
"""How the names of auxiliary heads begin, in lower case; a model may be built without them."""
MOST_NAMED = 12
"""The most modules that a sentence about tensors names."""


# ---------------------------------------------------------------------------------------------- renaming


def renamed(tensors: Tensors, rules: Mapping[str, str | None], *, source: str) -> Tensors:
    """The tensors by other names, after each rule in turn: see `model.weights_map`.

    ValueError: a rule that no tensor fits, one whose two sides have unequally many stars, or two tensors of one name.
    """
    names: dict[str, str] = {name: name for name in tensors}
    for old, new in rules.items():
        if new is not None and old.count("*") != new.count("*"):
            raise ValueError(f"model.weights_map: '{old}' and '{new}' have unequally many stars; each stands for the same text")
        changed = {first: _rewritten(now, old, new) for first, now in names.items()}
        if changed == names:
            some = ", ".join(list(tensors)[:3])
            raise ValueError(f"model.weights_map names '{old}' and no tensor of {source} fits; they are called {some}, ...")
        names = {first: now for first, now in changed.items() if now is not None}
    found = {now: tensors[first] for first, now in names.items()}
    if len(found) < len(names):
        twice = next(now for now, count in Counter(names.values()).items() if count > 1)
        raise ValueError(f"model.weights_map gives two tensors of {source} the name '{twice}'; leave one out with null")
    return found


def _rewritten(name: str, old: str, new: str | None) -> str | None:
    if "*" not in old:
        return name if not name.startswith(old) else None if new is None else new + name.removeprefix(old)
    found = re.fullmatch("(.*)".join(map(re.escape, old.split("*"))), name)
    if found is None or new is None:
        return name if found is None else None
    first, *rest = new.split("*")
    return first + "".join(text + after for text, after in zip(found.groups(), rest, strict=True))


# ---------------------------------------------------------------------------------------------- loading


def load_pretrained(tensors: Tensors, model: nn.Module, *, source: str, only: str = "", heads: Collection[str] = ()) -> str:
    """Load a library's own weights into its model of perhaps other channels and classes; returns what was done, in words.

    only: the prefix of the tensors that the weights have; all where "".  heads: prefixes of tensors that may be missing.
    ValueError: more than heads, auxiliary heads and the first convolution differ.
    """
    fitting, left = _sorted_out(tensors, model)
    wanted = [name for name in model.state_dict() if name.startswith(only)]
    missing = [name for name in wanted if name not in fitting and not _may_miss(name, heads) and name not in left]
    odd = [name for name in left if tensors[name].shape[1:] != model.state_dict()[name].shape[1:]]
    if missing or odd:
        name = (missing or odd)[0]
        raise ValueError(
            f"{source} is of another network: it does not fit '{name}' and {len(missing) + len(odd) - 1} more tensors; leave "
            "out what model.options changes, or set model.pretrained=null"
        )
    _put(fitting, model)
    kept = f"; its own start keep {_by_module(left)}, of another number of classes" if left else ""
    return f"model.pretrained: {source}{_adapted_in_words(tensors, fitting)}{kept}"


def load_weights_file(config: ModelConfig, model: nn.Module) -> list[str]:
    """Load `model.weights`, if any, into a model that is not parallelized; returns what was left out, in words.

    ValueError: weights_map or weights_strict without a file; what `read_tensors` and `renamed` refuse; where strict, names
    or shapes that are not the model's, else that no tensor fits.
    """
    if config.weights is None:
        if config.weights_map or not config.weights_strict:
            raise ValueError("model.weights_map and weights_strict are for the file model.weights, which is not set; name one")
        return []
    path = config.weights
    tensors = renamed(read_tensors(path), config.weights_map, source=path)
    wanted = model.state_dict()
    if config.weights_strict:
        load_state(tensors, model, source=path)
        return []
    fitting, left = _sorted_out(tensors, model)
    if not fitting:
        raise ValueError(
            f"none of the {len(tensors)} tensors of {path} fits this model, whose {len(wanted)} are called "
            f"{', '.join(list(wanted)[:3])}, ... and there {', '.join(list(tensors)[:3])}, ...; set model.weights_map, as "
            '{"module.": ""}'
        )
    _put(fitting, model)
    told = [f"model.weights={path}: {len(fitting)} of the model's {len(wanted)} tensors{_adapted_in_words(tensors, fitting)}"]
    shapes_left = [f"{name} ({list(tensors[name].shape)} there, {list(wanted[name].shape)} here)" for name in left]
    reasons = {
        "of another shape": _some(shapes_left),
        "missing there": _by_module(name for name in wanted if name not in tensors),
        "unknown here": _by_module(name for name in tensors if name not in wanted),
    }
    return told + [f"  left out, {why}: {names}" for why, names in reasons.items() if names]


def load_state(tensors: Tensors, model: nn.Module, *, source: str) -> None:
    """Load all of a model's tensors.  ValueError: names or shapes are not the model's."""
    check_names(*({name: list(value.shape) for name, value in some.items()} for some in (tensors, model.state_dict())), source)
    model.load_state_dict(tensors)


def check_names(given: dict[str, list[int]], wanted: dict[str, list[int]], source: str) -> None:
    """ValueError, with the first three differences: names or shapes differ."""
    problems = [
        f"{name} is {given[name]} there and {shape} here"
        for name, shape in wanted.items()
        if name in given and given[name] != shape
    ]
    problems += [f"{name} is missing there" for name in wanted if name not in given]
    problems += [f"{name} is unknown here" for name in given if name not in wanted]
    if problems:
        more = f" and {len(problems) - 3} more differences" if len(problems) > 3 else ""
        raise ValueError(
            f"{source} is of another model: {'; '.join(problems[:3])}{more}; "
            "set model.name and model.options to what it was trained with"
        )


def _sorted_out(tensors: Tensors, model: nn.Module) -> tuple[Tensors, list[str]]:
    """The tensors that fit, that of the first convolution adapted to the image's channels; and those of another shape."""
    wanted = model.state_dict()
    common = {name: tensors[name] for name in wanted if name in tensors}
    fitting = {name: value for name, value in common.items() if value.shape == wanted[name].shape}
    if any(isinstance(module, CONVOLUTIONS) for module in model.modules()):
        name = f"{first_convolution(model)[0]}.weight"
        if name in common and name not in fitting and _differs_in_channels(common[name], wanted[name]):
            fitting[name] = adapted(common[name], wanted[name].shape[1])
    return fitting, [name for name in common if name not in fitting]


def _differs_in_channels(there: Tensor, here: Tensor) -> bool:
    return there.ndim == here.ndim and there.shape[:1] + there.shape[2:] == here.shape[:1] + here.shape[2:]


def _put(tensors: Tensors, model: nn.Module) -> None:
    model.load_state_dict(model.state_dict() | tensors)


def _may_miss(name: str, heads: Collection[str]) -> bool:
    return name.endswith("num_batches_tracked") or name.startswith(tuple(heads)) or name.lower().startswith(AUXILIARY)


# ---------------------------------------------------------------------------------------------- words


def _adapted_in_words(tensors: Tensors, fitting: Tensors) -> str:
    changed = [name for name, value in fitting.items() if value.shape != tensors[name].shape]
    return "".join(
        f"; {name} of {tensors[name].shape[1]} channels is "
        + ("summed to 1" if fitting[name].shape[1] == 1 else f"repeated to {fitting[name].shape[1]}")
        for name in changed
    )


def _by_module(names: Iterable[str]) -> str:
    """Names of tensors by the module that has them, as `fc (2)`."""
    counts: dict[str, int] = {}
    for name in names:
        owner = name.rpartition(".")[0] or name
        counts[owner] = counts.get(owner, 0) + 1
    return _some([f"{owner} ({count})" for owner, count in counts.items()])


def _some(names: list[str]) -> str:
    return ", ".join(names[:MOST_NAMED]) + (f" and {len(names) - MOST_NAMED} more" if len(names) > MOST_NAMED else "")
