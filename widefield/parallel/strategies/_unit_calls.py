"""Makes FSDP2 exact for models that do not call every unit as a module, the same on all ranks.

FSDP2 gathers a unit's weights where the unit itself is called, and averages the gradients that a rank has.  A model may call
layers of a unit directly (`self.head.norm(x)`, the layers of a list), and use different parameters on each rank.  So:

- a layer that is called outside of its unit gathers the unit, which then stays gathered until its backward is done;
- ranks compare which unit comes next where a sequence of units is new, or branches: else FSDP2 would assemble one weight from
  shards of two units, without an error;
- unused parameters take part with zeros, and their gradient is set back to None where no rank had one;
- weights stay gathered for a gradient that is to be differentiated again; inside of a forward that is refused;
- hooks of parameters are refused: the parameters are shards, which autograd never sees; `backward(inputs=...)` of shards does
  nothing.
"""

from __future__ import annotations

import datetime
import weakref
import zlib
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.utils.weak import WeakIdKeyDictionary

from widefield.comm import collectives
from widefield.comm.mesh import control_device
from widefield.private_torch.autograd import current_graph_task_id, queue_callback
from widefield.private_torch.fake_tensors import is_captured
from widefield.private_torch.modules import backward_hooks_of, parameters_of
from widefield.private_torch.pytree import tree_leaves
from widefield.tiled.partial_gradient import manage, part_of_mean

PATIENCE_SECONDS = 120.0
"""How long to wait for the other ranks: much longer than loading one rank's data may take."""
SENDS_ZEROS = hasattr(FSDPModule, "set_reduce_scatter_unused_params")
"""Whether this torch's FSDP2 can send zeros for parameters that a rank did not use; since 2.15."""


class RanksDiverged(RuntimeError):
    """The ranks that share weights call different units next; raised on all of them."""


class UnitCalls:
    """Hooks on the units of a model that FSDP2 shards.  units: by name, the model itself under ''.

    group: the ranks that share the weights; used by this object only.
    """

    group: dist.ProcessGroup

    def __init__(self, model: nn.Module, units: dict[str, nn.Module]) -> None:
        self.model, self.units = model, units
        self.shards = dict(model.named_parameters())
        """The sharded parameters; while the model runs, its attributes are the gathered ones."""
        self.is_on = True
        self.used: set[str] = set()
        self._parts = {name: self._parts_of(name) for name in units}
        self._inside = dict.fromkeys(units, 0)
        self._hooked: WeakIdKeyDictionary = WeakIdKeyDictionary()
        self._routes: dict[str, Any] = {}
        self._route: dict[str, Any] = self._routes
        self._backward: _UnitBackward | None = None
        self._keeps_full = False
        if SENDS_ZEROS:
            model.set_reduce_scatter_unused_params(True)  # type: ignore[operator]
        for name, unit in units.items():
            unit.register_forward_pre_hook(partial(self._enters, name), prepend=True)  # before FSDP2 gathers
            unit.register_forward_pre_hook(partial(self._has_entered, name))  # and after
            unit.register_forward_hook(partial(self._leaves, name), always_call=True)
            for part in self._parts[name]:
                if part is not unit and parameters_of(part):
                    part.register_forward_pre_hook(partial(self._is_called, name), prepend=True)

    def _parts_of(self, name: str) -> list[nn.Module]:
        """The modules of a unit, in order, without those of other units inside of it."""
        unit = self.units[name]
        inner = [other for other in self.units.values() if other is not unit and any(other is part for part in unit.modules())]
        others = {part for other in inner for part in other.modules()}
        return [part for part in unit.modules() if part not in others]

    # ------------------------------------------------------------------------------------------ calls

    @torch.compiler.disable
    def _enters(self, name: str, unit: nn.Module, inputs: Any) -> None:
        if not name and not self._inside[name]:
            shards = dict(self.model.named_parameters())
            if all(isinstance(parameter, DTensor) for parameter in shards.values()):  # ZeRO-2 leaves them gathered
                self.shards = shards
            self._refuse_hooks()
            self._route = self._routes.setdefault(f"gradients {torch.is_grad_enabled()}", {})
        if not self._inside[name] and current_graph_task_id() == -1:  # a backward recomputes what its forward called
            self.check_next(name)
        self._inside[name] += 1

    @torch.compiler.disable
    def _has_entered(self, name: str, unit: nn.Module, inputs: Any) -> None:
        self._mark(name)

    @torch.compiler.disable
    def _leaves(self, name: str, unit: nn.Module, inputs: Any, output: Any) -> None:
        self._inside[name] = max(0, self._inside[name] - 1)
        if self._inside[name] or output is None:
            return
        if not name:
            self.check_next("the end")
        for leaf in tree_leaves(output):
            if isinstance(leaf, Tensor) and leaf.requires_grad and leaf.grad_fn is not None:
                leaf.register_hook(partial(self._unit_is_reached, name) if name else self._reached)

    @torch.compiler.disable
    def _is_called(self, name: str, part: nn.Module, inputs: Any) -> None:
        """A layer of a unit is about to run."""
        if self._inside[name] or current_graph_task_id() != -1:  # in a backward, what its forward gathered is still gathered
            return
        if not self._inside[""]:
            if any(is_captured(leaf) for leaf in tree_leaves(inputs)):
                return  # the model is being captured, on fake tensors of full weights
            raise RuntimeError(
                f"{type(part).__qualname__} is called by itself and its weights lie in parts on {self.group.size()} ranks, "
                "which are gathered where the whole model is called; call the model, or set sharding.zero=1"
            )
        unit = self.units[name]
        assert isinstance(unit, FSDPModule)
        if any(
            type(p) is not nn.Parameter for each in self._parts[name] for p in parameters_of(each).values() if p is not None
        ):
            self.check_next(name)
            unit.set_reshard_after_forward(False, recurse=False)  # the end of its own forward may come before other uses
            unit.unshard()
            self._mark(name)

    def check_next(self, name: str) -> None:
        """Check that every rank calls the same unit next; RanksDiverged where not.

        A message is sent only where this unit never came next here, or several have.
        """
        if name not in self._route or len(self._route) > 1:
            self._compare(name)
        self._route = self._route.setdefault(name, {})

    def _compare(self, name: str) -> None:
        size = self.group.size()
        device = control_device(self.group)
        mine = torch.tensor([zlib.crc32(name.encode())], device=device)
        marks = torch.empty(size, dtype=torch.int64, device=device)
        work = collectives.all_gather_single(marks, mine, group=self.group, async_op=True)
        assert work is not None, f"rank {dist.get_rank()} is not in the group of those that share weights"
        what = f"here '{name or type(self.model).__qualname__}' is next"
        advice = (
            "weights in parts can only be gathered by all ranks together; let every rank call the same layers, set "
            "sharding.units so that these are no units of their own, or set sharding.zero=1"
        )
        try:
            work.wait(datetime.timedelta(seconds=PATIENCE_SECONDS))
        except RuntimeError as error:
            raise RanksDiverged(
                f"the {size} ranks that share weights do not call the same layers: {what}, and within {PATIENCE_SECONDS:.0f} s "
                f"not all came here; {advice}"
            ) from error
        if len(set(marks.tolist())) > 1:
            raise RanksDiverged(f"the {size} ranks that share weights do not call the same layers: {what}; {advice}")

    # ------------------------------------------------------------------------------------------ gradients

    def _mark(self, name: str) -> None:
        """Hook the gradients of a unit's gathered weights."""
        prefixes = {module: prefix for prefix, module in self.model.named_modules()} if self._is_new(name) else {}
        for part in self._parts[name] if prefixes else ():
            for key, parameter in parameters_of(part).items():
                if parameter is not None and parameter.requires_grad and parameter not in self._hooked:
                    full = f"{prefixes[part]}.{key}" if prefixes[part] else key
                    manage([parameter])
                    on_gradient = partial(_on_gradient, weakref.ref(self), full)
                    self._hooked[parameter] = parameter.register_post_accumulate_grad_hook(on_gradient)

    def _is_new(self, name: str) -> bool:
        weights = (p for part in self._parts[name] for p in parameters_of(part).values() if p is not None and p.requires_grad)
        return any(parameter not in self._hooked for parameter in weights)

    def on_gradient(self, name: str, parameter: Tensor) -> None:
        if type(parameter.grad) is not Tensor and not torch.is_grad_enabled():
            parameter.grad = part_of_mean(parameter.grad)  # type: ignore[arg-type]
        self.used.add(name)
        self._begin()

    def _unit_is_reached(self, name: str, gradient: Tensor) -> None:
        """A backward has reached a unit.  NotImplementedError: inside of a forward, with a gradient to differentiate again."""
        if self._inside[""] and torch.is_grad_enabled():
            raise NotImplementedError(
                f"the forward takes a gradient through '{name}', a unit whose weights lie in parts, and would differentiate it "
                "again, for which FSDP2 has freed them; set sharding.units so that this layer is no unit of its own and goes "
                "with the model, or set sharding.zero=1"
            )
        self._begin()  # a gradient that a forward computes does not reach the model's output, which calls `_reached`

    def _reached(self, gradient: Tensor) -> None:
        """A backward has reached the model's output."""
        if torch.is_grad_enabled():  # create_graph: the second backward needs the weights, which FSDP2 would have freed
            self.model.set_reshard_after_backward(False)  # type: ignore[operator]
            self._keeps_full = True
        elif self._keeps_full:
            self.model.set_reshard_after_backward(True)  # type: ignore[operator]
            self._keeps_full = False
        self._begin()

    def _refuse_hooks(self) -> None:
        hooked = next((name for name, parameter in self.shards.items() if backward_hooks_of(parameter)), None)
        if hooked is not None:
            raise NotImplementedError(
                f"a hook of the parameter '{hooked}' would never run: weights lie in parts, and autograd meets gathered ones; "
                "register_post_accumulate_grad_hook sees the averaged gradient's part, or set sharding.zero=1"
            )

    def _begin(self) -> None:
        if self.is_on and SENDS_ZEROS and (self._backward is None or not self._backward.is_running):
            self._backward = _UnitBackward(self)

    def ended(self, without: set[str]) -> None:
        """Set gradients to None that were sent though no rank had one.  without: parameters that had none before."""
        self._backward, used, self.used = None, self.used, set()
        trained = [name for name, parameter in self.shards.items() if parameter.requires_grad]
        has = torch.tensor([name in used for name in trained], dtype=torch.int64, device=control_device(self.group))
        dist.all_reduce(has, group=self.group)
        for name, count in zip(trained, has.tolist(), strict=True):
            if not count and name in without:
                self.shards[name].grad = None


def _on_gradient(calls: weakref.ref[UnitCalls], name: str, parameter: Tensor) -> None:
    """(Weak, since hooks of tensors are invisible to the garbage collector: a reference cycle through them is never freed.)"""
    held = calls()
    if held is not None:
        held.on_gradient(name, parameter)


class _UnitBackward:
    """One backward, at whose end ranks compare which parameters had gradients."""

    def __init__(self, calls: UnitCalls) -> None:
        without = {name for name, parameter in calls.shards.items() if parameter.grad is None}
        end = partial(calls.ended, without)
        self._held = weakref.ref(end)
        queue_callback(end)

    @property
    def is_running(self) -> bool:
        return self._held() is not None
