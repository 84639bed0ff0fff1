"""State of the optimizer and of random generators as nested dicts of tensors and plain values, and back.

Optimizer state is stored by parameter name, not by number, so that it survives another order of parameter groups.
"""

from __future__ import annotations

import os
import random
from typing import Any

import numpy as np
import torch
from torch import nn

from widefield import sharded_state
from widefield.parallel.strategies._optimizer_shards import steps

Nested = dict[str, Any]


def optimizer_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> Nested:
    """The state as a dict: `parameters`, by name; `groups`, the counters of groups (timm's Lamb has them); `kind`, the class.

    Hyperparameters are left out: they come from the config.  Tensors are this rank's shards.
    """
    names = {parameter: name for name, parameter in model.named_parameters()}
    state = {names[parameter]: dict(values) for parameter, values in optimizer.state.items()}
    known = {"params", "initial_lr", "lr_scale", *optimizer.defaults}
    groups = [{key: value for key, value in group.items() if key not in known} for group in optimizer.param_groups]
    saved = {str(number): group for number, group in enumerate(groups)}
    return {"kind": type(optimizer).__name__, "parameters": state, "groups": saved}


def load_optimizer_state(model: nn.Module, optimizer: torch.optim.Optimizer, state: Nested) -> None:
    """Load what `optimizer_state` returned, with full tensors, also unread ones, of which this rank takes its shards.

    ValueError: the state lacks a part, is of another optimizer class, or of parameters that the model does not have.
    """
    kind, lacks = type(optimizer).__name__, sorted({"kind", "parameters", "groups"} - set(state))
    if lacks:
        raise ValueError(
            f"the checkpoint's state of the optimizer has no '{lacks[0]}'; take the checkpoint from where it was written, or "
            "delete it"
        )
    if state["kind"] != kind:
        raise ValueError(
            f"the checkpoint is of another optimizer, {state['kind']}, and this run asks for {kind}; set optimizer.name back, "
            "or begin a run of its own with another --run folder"
        )
    parameters = dict(model.named_parameters())
    shapes = sharded_state.shapes(model)
    unknown = sorted(set(state["parameters"]) - set(shapes))
    if unknown:
        raise ValueError(f"the checkpoint's optimizer trains {unknown[0]} (and {len(unknown) - 1} more), unknown to this model")
    for name, parameter in parameters.items():
        if name in state["parameters"] and not parameter.is_meta and steps(optimizer, parameter):
            values = state["parameters"][name]
            optimizer.state[parameter] = {
                key: _like(model, name, parameter, value, shapes[name]) for key, value in values.items()
            }
    groups = list(state["groups"].values())
    for number, group in enumerate(optimizer.param_groups):  # all groups count the same steps: the last serves further ones
        group.update({key: _copied(value) for key, value in groups[min(number, len(groups) - 1)].items()})


def _like(model: nn.Module, name: str, parameter: nn.Parameter, value: Any, shape: list[int]) -> Any:
    """A value of the state on its parameter's device; a tensor of the parameter's shape is sharded as the parameter is."""
    if not isinstance(value, torch.Tensor | sharded_state.UnreadTensor):
        return value
    whole = sharded_state.opened(value)
    if list(whole.shape) == shape:
        moved = torch.empty_like(parameter, dtype=whole.dtype)  # keeps the memory format, which the fused kernels want
        sharded_state.local(moved).copy_(sharded_state.local(sharded_state.part(model, name, whole)))
        return moved
    return whole.to(parameter.device, copy=True)


def _copied(value: Any) -> Any:
    """A copy, since optimizers count in place and two groups may get the same tensor."""
    return sharded_state.opened(value).clone() if isinstance(value, torch.Tensor | sharded_state.UnreadTensor) else value


def random_state() -> Nested:
    """The states of Python's, NumPy's and torch's global generators on this rank."""
    version, words, gauss = random.getstate()
    name, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    state: Nested = {
        "python": {"version": version, "words": list(words), "gauss": gauss},
        "numpy": {"name": name, "keys": torch.from_numpy(keys.astype(np.int64)), "rest": [position, has_gauss, cached]},
        "torch": torch.get_rng_state(),
    }
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def load_random_state(state: Nested) -> None:
    """Load what `random_state` returned.  ValueError: it is no state of these generators."""
    try:
        python, numpy = state["python"], state["numpy"]
        random.setstate((python["version"], tuple(python["words"]), python["gauss"]))
        np.random.set_state((numpy["name"], numpy["keys"].numpy().astype(np.uint32), *numpy["rest"]))
        torch.set_rng_state(state["torch"])
        if "cuda" in state and torch.cuda.is_available():
            torch.cuda.set_rng_state(state["cuda"])
    except (LookupError, TypeError, AttributeError, ValueError, OverflowError, RuntimeError) as error:
        raise ValueError(
            f"the checkpoint's random states are none of these generators' ({type(error).__name__}: {error}); take the "
            "checkpoint from where it was written, or delete it"
        ) from None


def seed_everything(seed: int) -> None:
    """Seed Python's, NumPy's and torch's global generators."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def shapes_of(model: nn.Module) -> dict[str, list[int]]:
    """The name and full shape of every parameter and buffer, which a checkpoint must have."""
    return sharded_state.shapes(model)


def only_deterministic_algorithms() -> None:
    """Ask torch, for the whole process, for kernels that give the same bits each time."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # else cuBLAS refuses to be deterministic
    torch.use_deterministic_algorithms(True)
