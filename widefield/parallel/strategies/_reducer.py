"""Averages gradients over ranks during each backward, with no assumption about the backward.

A hook on every parameter runs when autograd has added to its gradient.  Gradients are sent in buckets.  A bucket is sent when
all of its parameters have gradients and all earlier buckets are sent, so that every rank sends the same messages in the same
order.  As the backward ends, the remaining buckets are sent, with zeros for parameters without a gradient on this rank.  One
small message counts the ranks that have a gradient of each parameter; where none has, `grad` stays None.

Parameters may be unused on some ranks or in some steps, be frozen and unfrozen.  Models may be in evaluation mode, be called
twice before a backward or module by module, and go through several backwards.  All of `grad` is averaged: gradients that
`paused` backwards added are averaged too, and averaging a mean again leaves it as it is.

The buckets are made once for each set of trained parameters: from trial passes where there are any, else in the first backward,
whose messages all wait for its end.  A parameter that had no gradient there is sent in a bucket of its own when it first has
one, and with the others from then on.
"""

from __future__ import annotations

import weakref
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from widefield.comm.mesh import control_device
from widefield.parallel.strategies._buckets import Bucket, BucketLayout, GradientOrder, expected_order, make_buckets
from widefield.private_torch.autograd import current_autograd_node, queue_callback, will_engine_execute_node
from widefield.private_torch.pytree import tree_leaves
from widefield.tiled.partial_gradient import PartialGradient, full_value_with_grad, manage, part_of_mean, release

LAYOUTS_MOST = 4
"""For how many sets of trained parameters buckets are kept: nets that alternate between freezing and unfreezing have two."""
Hook = Callable[[Any, Any], torch.futures.Future]


class Reducer:
    """Averages the gradients of a model's parameters over `group`, until `close`.

    bucket_bytes: the most that a bucket has.
    gradient_order: from trial passes, the same on every rank; None where there were none.
    hook, state: a communication hook as of DDP, in place of the mean; it gets gradients that are not divided by the ranks.
    """

    group: dist.ProcessGroup

    def __init__(
        self,
        model: nn.Module,
        *,
        bucket_bytes: int,
        gradient_order: GradientOrder | None = None,
        hook: Hook | None = None,
        state: Any = None,
    ) -> None:
        parameters = {name: p for name, p in model.named_parameters() if not p.is_meta}
        self.names, self._parameters = list(parameters), [weakref.ref(p) for p in parameters.values()]
        self.bucket_bytes, self.gradient_order, self.hook, self.state = bucket_bytes, gradient_order, hook, state
        self.is_on, self.optimizer_steps = True, 0
        self._layouts: dict[bytes, BucketLayout] = {}
        self._backward: _BackwardPass | None = None
        self._last_message: tuple[Any, Tensor] | None = None
        """A message that nobody waited for; its memory must live until it has arrived."""
        manage(parameters.values())
        self._handles = [
            handle for number, p in enumerate(parameters.values()) if _may_learn(p) for handle in self._hooked(number, p)
        ]
        self.model = weakref.ref(model)
        _ALIVE.add(self)
        _watch_steps()

    def _hooked(self, number: int, parameter: Tensor) -> list[Any]:
        wants = parameter.requires_grad
        parameter.requires_grad_(True)  # torch takes hooks of no other, and it may be unfrozen later
        handles = [
            parameter.register_hook(self._on_gradient),
            parameter.register_post_accumulate_grad_hook(partial(self._on_accumulated, number)),
        ]
        parameter.requires_grad_(wants)
        return handles

    def close(self) -> None:
        """Remove all hooks from the parameters."""
        for handle in self._handles:
            handle.remove()
        if self._handles:
            release(self.parameters)
        self._handles = []
        _ALIVE.discard(self)
        _watch_steps()

    @property
    def parameters(self) -> list[Tensor]:
        """In the model's order; an empty tensor for a parameter that was freed, since the model has another one now."""
        found = [parameter() for parameter in self._parameters]
        return [torch.empty(0) if parameter is None else parameter for parameter in found]

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Inside, backward adds to this rank's gradients and sends nothing."""
        was, self.is_on = self.is_on, False
        try:
            yield
        finally:
            self.is_on = was

    # ------------------------------------------------------------------------------------------ hooks

    def _on_gradient(self, gradient: Tensor | None) -> Tensor | None:
        """Average what torch.autograd.grad returns for a parameter; the gradients of a backward are averaged later."""
        try:
            will_engine_execute_node(current_autograd_node())
            return None
        except RuntimeError:  # torch raises it where a leaf's gradient is returned and not added to its `grad`
            return None if gradient is None else self._captured(gradient)

    def _captured(self, gradient: Tensor) -> Tensor:
        value = full_value_with_grad(gradient) if type(gradient) is PartialGradient else gradient
        return _Mean.apply(value, self.group) if self.is_on else value

    def _on_accumulated(self, number: int, parameter: Tensor) -> None:
        gradient = parameter.grad
        assert gradient is not None, "autograd has added to it"
        if gradient.layout != torch.strided:
            raise NotImplementedError(
                f"the gradient of '{self.names[number]}' is {gradient.layout}, which is not averaged over ranks; make the "
                "layer with sparse=False"
            )
        if type(gradient) is not Tensor and not torch.is_grad_enabled():
            parameter.grad = part_of_mean(gradient)
        backward = self.begin()
        if backward is not None:
            backward.accumulated(number)

    def begin(self) -> _BackwardPass | None:
        """The current backward, with a callback queued for its end; None inside `paused`."""
        if not self.is_on:
            return None
        if self._backward is None or not self._backward.is_running:
            self._compare()
            self._backward = _BackwardPass(self)
        return self._backward

    def _will_accumulate(self) -> bool:
        """Whether the current backward adds to gradients of this model."""
        edges = (torch.autograd.graph.get_gradient_edge(p).node for p in self.parameters if p.requires_grad)
        try:
            return any(will_engine_execute_node(node) for node in edges)
        except RuntimeError:  # torch.autograd.grad
            return False

    def after_forward(self, model: nn.Module, output: Any) -> None:
        """Register the backward at the model's output, since checkpoint(use_reentrant=True) runs further ones inside of it."""
        for leaf in tree_leaves(output) if torch.is_grad_enabled() else ():
            if isinstance(leaf, Tensor) and leaf.requires_grad and leaf.grad_fn is not None:
                leaf.register_hook(self._on_output)

    def _on_output(self, gradient: Tensor) -> None:
        if self.is_on and self._will_accumulate():
            self.begin()

    # ------------------------------------------------------------------------------------------ layouts

    def _key(self) -> bytes:
        return bytes(parameter.requires_grad for parameter in self.parameters)

    def layout(self) -> BucketLayout | None:
        """The buckets for the parameters trained now; None where the first backward has yet to show the order."""
        found = self._layouts.get(self._key())
        if found is None and (self.gradient_order is not None or self.hook is not None):
            found = self.make_layout(self.gradient_order)
        return found

    def make_layout(self, order: GradientOrder | None) -> BucketLayout:
        """Make and cache the buckets for the parameters trained now; `order` is the same on every rank."""
        parameters = self.parameters
        trained = [number for number, parameter in enumerate(parameters) if parameter.requires_grad]
        fixed = order is None or self.hook is not None  # a hook has state per bucket, so these must not change
        numbers, late = (trained[::-1], []) if fixed else expected_order(order, trained)  # type: ignore[arg-type]
        is_static = fixed or order.is_static  # type: ignore[union-attr]
        made = make_buckets([(n, parameters[n]) for n in numbers], late, self.bucket_bytes, is_static=is_static)
        self._layouts[self._key()] = made
        while len(self._layouts) > LAYOUTS_MOST:
            del self._layouts[next(iter(self._layouts))]
        return made

    # ------------------------------------------------------------------------------------------ comparing ranks

    def _compare(self) -> None:
        """Before a backward: check in one small message that ranks train the same parameters and are at the same step.

        RuntimeError, on every rank, where they differ.
        """
        mine = [zlib.crc32(self._key()) % 2**20, self.optimizer_steps % 2**20]
        sums = torch.tensor([*mine, *(value * value for value in mine)], dtype=torch.int64, device=control_device(self.group))
        dist.all_reduce(sums, group=self.group)
        trained, steps, trained_squared, steps_squared = sums.tolist()
        size = self.group.size()
        if size * trained_squared != trained * trained:  # by Cauchy-Schwarz, equal only where all values are equal
            raise RuntimeError(
                f"the {size} ranks that average gradients do not train the same parameters: requires_grad differs between "
                "them; freeze and unfreeze parameters on every rank alike"
            )
        if size * steps_squared != steps * steps:
            raise RuntimeError(
                f"the {size} ranks that average gradients have made unequally many optimizer steps, this one "
                f"{self.optimizer_steps} and all together {steps}: on some rank a step went by without a backward, and its "
                "next one met another step's gradients; run backward on every rank in every step, of a loss times 0 where a "
                "rank has nothing to learn from"
            )

    def has(self) -> Tensor:
        """For each parameter 1 where it has a gradient on this rank, else 0; an int64 tensor to be summed over ranks."""
        has = [parameter.grad is not None for parameter in self.parameters]
        return torch.tensor(has, dtype=torch.int64, device=control_device(self.group))

    def keep_message(self, work: Any, message: Tensor) -> None:
        self._last_message = work, message

    def ended(self) -> None:
        self._backward = None


def _may_learn(parameter: Tensor) -> bool:
    return parameter.is_floating_point() or parameter.is_complex()


_ALIVE: weakref.WeakSet[Reducer] = weakref.WeakSet()


def _count_step(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    """Count an optimizer's step for its models.  RuntimeError: it steps a parameter whose gradient is not averaged."""
    if not _ALIVE:
        return
    moved = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    for reducer in list(_ALIVE):
        model, known = reducer.model(), {id(parameter) for parameter in reducer.parameters}
        others = moved - known
        for name, parameter in model.named_parameters() if model is not None and others else ():
            if id(parameter) in others and not parameter.is_meta:
                raise RuntimeError(
                    f"the parameter '{name}' came after the model was parallelized, so its gradient is not averaged over "
                    "ranks; call widefield.parallelize(model, mesh) again once its parameters are there"
                )
        reducer.optimizer_steps += not known.isdisjoint(moved)


def _watch_steps() -> None:
    """Hook the steps of all optimizers while there are reducers; a freed one does not unhook, which may be during a step."""
    if _ALIVE and not _STEP_HOOKS:
        _STEP_HOOKS.append(register_optimizer_step_pre_hook(_count_step))
    while not _ALIVE and _STEP_HOOKS:
        _STEP_HOOKS.pop().remove()


_STEP_HOOKS: list[RemovableHandle] = []


# ---------------------------------------------------------------------------------------------- one backward


class _BackwardPass:
    """One backward: which gradients were accumulated, and which buckets are sent."""

    def __init__(self, reducer: Reducer) -> None:
        self.reducer, self.layout = reducer, reducer.layout()
        self.order: list[int] = []
        self.known: set[int] = set()
        self.is_static, self.has_history, self.sent = True, False, 0
        for bucket in self.layout.buckets if self.layout is not None else ():
            bucket.begin()
        end = self._end  # only autograd keeps it alive, until the backward has ended or failed
        self._held = weakref.ref(end)
        queue_callback(end)

    @property
    def is_running(self) -> bool:
        return self._held() is not None

    def accumulated(self, number: int) -> None:
        """Called when autograd has added to a parameter's gradient."""
        self.has_history = self.has_history or torch.is_grad_enabled()
        layout, is_new = self.layout, number not in self.known
        bucket = None if layout is None else layout.where.get(number)
        if bucket is not None and bucket.number < self.sent:
            raise RuntimeError(
                f"the gradient of '{self.reducer.names[number]}' came once more after it was sent: its parameter is used in "
                "more than one place with checkpoint(use_reentrant=True), and was not in trial passes; take "
                "use_reentrant=False, or call widefield.parallelize(model, mesh) again"
            )
        self.is_static = self.is_static and is_new
        if not is_new:
            return
        self.known.add(number)
        self.order.append(number)
        if bucket is not None and layout is not None:
            bucket.waiting -= 1
            if layout.is_static and not self.has_history:
                self._send(layout.buckets, only_complete=True)

    @torch.no_grad()
    def _send(self, buckets: Sequence[Bucket], *, only_complete: bool) -> None:
        """Send the remaining buckets in order; with `only_complete` up to the first that still waits for gradients."""
        reducer = self.reducer
        while self.sent < len(buckets) and not (only_complete and buckets[self.sent].waiting):
            bucket = buckets[self.sent]
            self.sent += 1
            bucket.fill(1.0 if reducer.hook is not None else 1.0 / reducer.group.size())
            if reducer.hook is not None:
                bucket.work = reducer.hook(reducer.state if reducer.state is not None else reducer.group, bucket)
                bucket.finish()  # a hook may send more when its first message is done, from another thread: wait for it here
            else:
                bucket.work = dist.all_reduce(bucket.buffer(), group=reducer.group, async_op=True)

    def _end(self) -> None:
        """Called by autograd as the backward ends: send the remaining buckets and wait for all."""
        self.reducer.ended()
        if self.has_history:
            self._average_with_history()
            return
        with torch.no_grad():
            is_new = self.layout is None
            layout = self._layout_from_ranks() if self.layout is None else self.layout
            has = self.reducer.has()
            self._send(layout.buckets, only_complete=False)
            work = dist.all_reduce(has, group=self.reducer.group, async_op=True)
            is_missing = [layout_bucket.take() for layout_bucket in layout.buckets]
            if not (is_new or layout.late or any(is_missing)):
                self.reducer.keep_message(work, has)
                return
            work.wait()
            self._fill_missing(layout, has.tolist())

    def _fill_missing(self, layout: BucketLayout, counts: list[int]) -> None:
        """Give a parameter without a gradient on this rank the averaged one where another rank has a gradient.

        Late parameters that some rank has a gradient of are sent now, and get buckets from the next backward on.
        """
        for bucket in layout.buckets:
            bucket.fill_missing(counts)
        late = [number for number in layout.late if counts[number]]
        if not late:
            return
        parameters = self.reducer.parameters
        extra = make_buckets([(n, parameters[n]) for n in late], [], self.reducer.bucket_bytes)
        self.sent = 0
        self._send(extra.buckets, only_complete=False)
        for bucket in extra.buckets:
            bucket.take()
            bucket.fill_missing(counts)
        order = [number for bucket in layout.buckets for number in bucket.members]
        self.reducer.make_layout(GradientOrder((*order, *late), (*order, *layout.late), layout.is_static))

    def _layout_from_ranks(self) -> BucketLayout:
        """Buckets in the order of this backward on all ranks; RuntimeError, on every rank: they train different parameters."""
        reducer = self.reducer
        trained = tuple(n for n, parameter in enumerate(reducer.parameters) if parameter.requires_grad)
        mine = (GradientOrder(tuple(self.order), trained, self.is_static), reducer.names)
        of_ranks: list[Any] = [None] * reducer.group.size()
        dist.all_gather_object(of_ranks, mine, group=reducer.group)
        if any((order.trained, names) != (trained, reducer.names) for order, names in of_ranks):
            raise RuntimeError(
                f"the {len(of_ranks)} ranks that average gradients do not train the same parameters, "
                f"{', '.join(str(len(order.trained)) for order, _ in of_ranks)} of them; build and freeze the model on every "
                "rank alike"
            )
        return reducer.make_layout(GradientOrder.merge([order for order, _ in of_ranks]))

    def _average_with_history(self) -> None:
        """After backward(create_graph=True): average each gradient in a message of its own, differentiably."""
        reducer = self.reducer
        has = reducer.has()
        dist.all_reduce(has, group=reducer.group)
        with torch.enable_grad():
            for parameter, count in zip(reducer.parameters, has.tolist(), strict=True):
                if count:
                    gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
                    value = full_value_with_grad(gradient) if type(gradient) is PartialGradient else gradient
                    parameter.grad = _Mean.apply(value, reducer.group)


class _Mean(torch.autograd.Function):
    """The mean over the ranks of a group; its backward is the same mean."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        mean = part_of_mean(value).detach().clone(memory_format=torch.contiguous_format)
        dist.all_reduce(mean, group=group)
        return mean.div_(group.size())

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return _Mean.apply(gradient, ctx.group), None
