"""Keeps FSDP2 to what is called: weights are gathered for whoever uses them, and ranks agree on what they gather.

FSDP2 gathers a unit's weights where the unit itself is called, and averages the gradients that a rank has.  A model may call
the parts of a unit by themselves (`self.head.norm(x)`, the layers of a list), reach other parameters on each rank, or none.
So:

- a layer that is called outside of its unit gathers the unit, which then stays whole until its backward is done;
- ranks compare which unit is next wherever a pass first goes a way, or the ways part: else one's weights would be put together
  from parts of two units, in silence;
- unused parameters take part with zeros, and their gradient is None again afterwards where no rank had one;
- weights stay whole after a gradient that is to be differentiated again, until that is done; inside of a forward, where a
  unit is called again, it is refused;
- hooks of parameters, which are parts that autograd never meets, are refused; `backward(inputs=...)` of parts does nothing.
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
from widefield.private_torch.fake_tensors import FakeTensor, FunctionalTensor
from widefield.private_torch.modules import backward_hooks_of, parameters_of
from widefield.private_torch.pytree import tree_leaves
from widefield.tiled.partial_gradient import manage, part_of_mean

PATIENCE_SECONDS = 120.0
"""For peers to come to the same place: much longer than one rank's data may take."""
SENDS_ZEROS = hasattr(FSDPModule, "set_reduce_scatter_unused_params")
"""Whether this torch's FSDP2 can send zeros for what a rank did not use; since 2.15."""


class Parted(RuntimeError):
    """The passes of ranks that share weights go to other units; raised on all of them."""


class UnitCalls:
    """Of a model that FSDP2 holds.  units: its units by name, the model itself under ''.

    group: of the ranks that share the weights, for small messages of its own.
    """

    group: dist.ProcessGroup

    def __init__(self, model: nn.Module, units: dict[str, nn.Module]) -> None:
        self.model, self.units = model, units
        self.shards = dict(model.named_parameters())
        """The parameters as this rank holds them; while the model runs, it holds gathered ones."""
        self.is_on = True
        self.used: set[str] = set()
        self._parts = {name: self._parts_of(name) for name in units}
        self._inside = dict.fromkeys(units, 0)
        self._hooked: WeakIdKeyDictionary = WeakIdKeyDictionary()
        self._ways: dict[str, Any] = {}
        self._at: dict[str, Any] = self._ways
        self._backward: _UnitBackward | None = None
        self._is_kept = False
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
        """The modules of a unit, in order, but for those of other units in it."""
        unit = self.units[name]
        inner = [other for other in self.units.values() if other is not unit and any(other is part for part in unit.modules())]
        others = {part for other in inner for part in other.modules()}
        return [part for part in unit.modules() if part not in others]

    # ------------------------------------------------------------------------------------------ calls

    @torch.compiler.disable
    def _enters(self, name: str, unit: nn.Module, inputs: Any) -> None:
        if not name and not self._inside[name]:
            shards = dict(self.model.named_parameters())
            if all(isinstance(parameter, DTensor) for parameter in shards.values()):  # not between a forward and its backward
                self.shards = shards
            self._refuse_hooks()
            self._at = self._ways.setdefault(f"gradients {torch.is_grad_enabled()}", {})
        if not self._inside[name] and current_graph_task_id() == -1:  # a backward goes where its forward went
            self.goes_to(name)
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
            self.goes_to("the end")
        for leaf in tree_leaves(output):
            if isinstance(leaf, Tensor) and leaf.requires_grad and leaf.grad_fn is not None:
                leaf.register_hook(partial(self._unit_is_reached, name) if name else self._reached)

    @torch.compiler.disable
    def _is_called(self, name: str, part: nn.Module, inputs: Any) -> None:
        """A layer of a unit is about to run."""
        if self._inside[name] or current_graph_task_id() != -1:  # a backward finds whole what its forward did
            return
        if not self._inside[""]:
            if any(isinstance(leaf, (FakeTensor, FunctionalTensor)) for leaf in tree_leaves(inputs)):
                return  # it is followed ahead of its first call, on stand-ins of whole weights
            raise RuntimeError(
                f"{type(part).__qualname__} is called by itself and its weights lie in parts on {self.group.size()} ranks, "
                "which are gathered where the whole model is called; call the model, or set sharding.zero=1"
            )
        unit = self.units[name]
        assert isinstance(unit, FSDPModule)
        if any(
            type(p) is not nn.Parameter for each in self._parts[name] for p in parameters_of(each).values() if p is not None
        ):
            self.goes_to(name)
            unit.set_reshard_after_forward(False, recurse=False)  # its own forward says nothing of who else uses it
            unit.unshard()
            self._mark(name)

    def goes_to(self, name: str) -> None:
        """See that every rank's pass goes to the same unit next; Parted where it does not."""
        if name not in self._at or len(self._at) > 1:
            self._compare(name)
        self._at = self._at.setdefault(name, {})

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
            raise Parted(
                f"the {size} ranks that share weights do not call the same layers: {what}, and within {PATIENCE_SECONDS:.0f} s "
                f"not all came here; {advice}"
            ) from error
        if len(set(marks.tolist())) > 1:
            raise Parted(f"the {size} ranks that share weights do not call the same layers: {what}; {advice}")

    # ------------------------------------------------------------------------------------------ gradients

    def _mark(self, name: str) -> None:
        """Notice the gradients of a unit's whole weights."""
        prefixes = {module: prefix for prefix, module in self.model.named_modules()} if self._is_new(name) else {}
        for part in self._parts[name] if prefixes else ():
            for key, parameter in parameters_of(part).items():
                if parameter is not None and parameter.requires_grad and parameter not in self._hooked:
                    full = f"{prefixes[part]}.{key}" if prefixes[part] else key
                    manage([parameter])
                    came = partial(_came, weakref.ref(self), full)
                    self._hooked[parameter] = parameter.register_post_accumulate_grad_hook(came)

    def _is_new(self, name: str) -> bool:
        weights = (p for part in self._parts[name] for p in parameters_of(part).values() if p is not None and p.requires_grad)
        return any(parameter not in self._hooked for parameter in weights)

    def came(self, name: str, parameter: Tensor) -> None:
        if type(parameter.grad) is not Tensor and not torch.is_grad_enabled():
            parameter.grad = part_of_mean(parameter.grad)  # type: ignore[arg-type]
        self.used.add(name)
        self._begin()

    def _unit_is_reached(self, name: str, gradient: Tensor) -> None:
        """A backward has reached a unit; NotImplementedError in a forward that would differentiate it again."""
        if self._inside[""] and torch.is_grad_enabled():
            raise NotImplementedError(
                f"the forward takes a gradient through '{name}', a unit whose weights lie in parts, and would differentiate it "
                "again, for which FSDP2 has freed them; set sharding.units so that this layer is no unit of its own and goes "
                "with the model, or set sharding.zero=1"
            )
        self._begin()  # a gradient that a forward takes reaches nothing that the model gave

    def _reached(self, gradient: Tensor) -> None:
        """A backward has reached what the model gave."""
        if torch.is_grad_enabled():  # it is to be differentiated again, for which FSDP2 would have freed the weights
            self.model.set_reshard_after_backward(False)  # type: ignore[operator]
            self._is_kept = True
        elif self._is_kept:
            self.model.set_reshard_after_backward(True)  # type: ignore[operator]
            self._is_kept = False
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
        """Gradients that were sent though no rank had one go.  without: parameters that had none before."""
        self._backward, used, self.used = None, self.used, set()
        trained = [name for name, parameter in self.shards.items() if parameter.requires_grad]
        has = torch.tensor([name in used for name in trained], dtype=torch.int64, device=control_device(self.group))
        dist.all_reduce(has, group=self.group)
        for name, count in zip(trained, has.tolist(), strict=True):
            if not count and name in without:
                self.shards[name].grad = None


def _came(calls: weakref.ref[UnitCalls], name: str, parameter: Tensor) -> None:
    """(A hook that held them would be held by the model that they hold, where no garbage collector looks.)"""
    held = calls()
    if held is not None:
        held.came(name, parameter)


class _UnitBackward:
    """A backward at whose end ranks compare what had gradients."""

    def __init__(self, calls: UnitCalls) -> None:
        without = {name for name, parameter in calls.shards.items() if parameter.grad is None}
        end = partial(calls.ended, without)
        self._held = weakref.ref(end)
        queue_callback(end)

    @property
    def is_running(self) -> bool:
        return self._held() is not None
