"""BatchNorm with the statistics of the whole batch, however the batch is distributed over ranks.

`SyncBatchNorm.convert(model, group)` converts a model.  The forward sends one message per layer (2C + 3 numbers), the backward
one (2C numbers).  Counts are sent with the sums and stay on the device, so nothing waits for the GPU, and ranks may have
different numbers of samples and tiles of different sizes, also empty ones.  Torch's own SyncBatchNorm refuses CPU tensors, and
reads the counts back in every layer.

A rank that has no samples left runs a dummy batch, see `parallel/inactive.py`; it contributes nothing.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from widefield.comm.mesh import Mesh
from widefield.private_torch.fake_tensors import FunctionalTensor
from widefield.private_torch.modules import BatchNorm, NormBase
from widefield.tiled.batch_statistics import Normalize, Statistics, StatisticsShare, merged, share_of


class _SyncGroup:
    """The process group of a layer.  Deep copies of the layer share it; a pickled layer loses it, and is a BatchNorm then.

    replicas: how many ranks of the group have the same plain input.  number: the layer's number in its model.
    """

    def __init__(self, group: dist.ProcessGroup | None = None, replicas: int = 1, number: int = 0) -> None:
        self.group, self.replicas, self.number = group, replicas, number

    def __deepcopy__(self, memo: dict) -> _SyncGroup:
        return self

    def __reduce__(self) -> tuple:
        return _SyncGroup, ()


class SyncBatchNorm(BatchNorm):
    """BatchNorm for inputs (N, C, *), also empty ones, with the statistics of all ranks of `group`.

    In training the mean, the variance and the running statistics (unbiased by the count over all ranks) are those of the whole
    batch.  In evaluation, and where `group` is None or one rank, it is torch's BatchNorm.
    Statistics are float32, or float64 for float64 inputs, and are merged in float64.  `running_mean` must be equal on all
    ranks, and stays so.
    The gradients of weight and bias are those of this rank's samples, for DDP to average.  For a tiled input, `group` has the
    ranks of all images and of all their tiles, and these gradients are partial.
    ValueError, on every rank: at most one value per channel over all ranks.  On a GPU that check would wait for the device, so
    there the variance is 0 and the output is the bias.
    Gradients may be differentiated once more, not twice (RuntimeError from torch).
    """

    sync: _SyncGroup
    inactive: bool
    """Whether the batch is a dummy, which contributes nothing; unset outside of `parallel/inactive.py`."""

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
        *,
        group: dist.ProcessGroup | None = None,
        alike: int = 1,
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        super().__init__(num_features, eps, momentum, affine, track_running_stats, device=device, dtype=dtype)
        self.sync = _SyncGroup(group, alike)

    @classmethod
    def convert(cls, module: nn.Module, group: dist.ProcessGroup | None, *, alike: int = 1) -> nn.Module:
        """Turn every BatchNorm in `module` into a SyncBatchNorm over `group`, in place; returns `module`.

        alike: how many ranks of the group have the same plain input, namely the ranks that share an image's tiles.
        Layers change their class only, so parameters, buffers, hooks, names and the training flag stay.  A subclass keeps what
        it adds, if it does not define `forward`; timm's BatchNormAct2d is supported.
        NotImplementedError, before anything is changed: a layer has another forward, which would be lost, or is lazy.
        """
        kinds = {layer: _synchronized_class(layer, name) for name, layer in module.named_modules() if _is_batch_norm(layer)}
        for number, (layer, kind) in enumerate(kinds.items(), start=1):
            _swap_class(layer, kind, _SyncGroup(group, alike, number))
        return module

    @classmethod
    def adopt(cls, module: nn.Module) -> None:
        """Turn every nn.SyncBatchNorm of torch in `module`, which supports neither CPU nor tiles, into this class, without a
        group."""
        for layer in module.modules():
            if type(layer).forward is nn.SyncBatchNorm.forward:
                _swap_class(layer, _synchronized_class(layer, ""), _SyncGroup())

    @property
    def group(self) -> dist.ProcessGroup | None:
        return self.sync.group

    def forward(self, input: Tensor) -> Tensor:
        if not self.training or self.group is None or self.group.size() == 1:
            return super().forward(input)
        if isinstance(input, FunctionalTensor):  # a capture: record one operator, which runs on tiles in time
            return self._recorded(input)
        if torch.compiler.is_compiling():
            return torch.compiler.disable(self._over_ranks)(input)
        return self._over_ranks(input)

    def _over_ranks(self, image: Tensor) -> Tensor:
        self._check_input_dim(image)
        assert self.group is not None
        share = share_of(image, self.sync.replicas, self.group, is_inactive=getattr(self, "inactive", False))
        whole = self._statistics_of_the_whole(image, share)
        return Normalize.apply(image, self.weight, self.bias, whole, self.eps, self.group, share)

    def _recorded(self, image: Tensor) -> Tensor:
        self._check_input_dim(image)
        if self.momentum is None and self.track_running_stats:
            raise NotImplementedError("a SyncBatchNorm with momentum=None cannot be streamed; give it a momentum")
        assert self.group is not None
        running = (self.running_mean, self.running_var) if self.track_running_stats else (None, None)
        is_inactive, name = getattr(self, "inactive", False), self.group.group_name
        out, *new = torch.ops.widefield.batch_norm_over(
            image, self.weight, self.bias, *running, self.momentum or 0.0, self.eps, name, self.sync.replicas, is_inactive
        )
        if self.running_mean is not None and self.track_running_stats:
            assert self.running_var is not None and self.num_batches_tracked is not None
            self.num_batches_tracked.add_(1)
            self.running_mean.copy_(new[0])
            self.running_var.copy_(new[1])
        return out

    def _check_input_dim(self, input: Tensor) -> None:
        if input.dim() < 2 or input.size(1) != self.num_features:
            raise ValueError(
                f"SyncBatchNorm({self.num_features}) got an input of shape {tuple(input.shape)}; "
                f"it wants (N, {self.num_features}, ...): samples, then channels"
            )

    @torch.no_grad()
    def _statistics_of_the_whole(self, image: Tensor, share: StatisticsShare) -> Statistics:
        """Merge all ranks' statistics, by one message, and update the running statistics."""
        assert self.group is not None
        whole = merged(image, share, self.running_mean, self.group, number=self.sync.number)
        if self.track_running_stats and self.running_mean is not None:
            self._update_running_statistics(whole)
        return whole

    def _update_running_statistics(self, whole: Statistics) -> None:
        assert self.running_mean is not None and self.running_var is not None and self.num_batches_tracked is not None
        self.num_batches_tracked.add_(1)
        for running, batch in ((self.running_mean, whole.mean), (self.running_var, whole.unbiased)):
            if self.momentum is None:  # a cumulative average; its weight stays on the device
                running.lerp_(batch.to(running.dtype), 1.0 / self.num_batches_tracked.to(running.dtype))
            else:
                running.lerp_(batch.to(running.dtype), self.momentum)


@torch.library.custom_op("widefield::batch_norm_over", mutates_args=())
def _batch_norm_over(
    image: Tensor, weight: Tensor | None, bias: Tensor | None, running_mean: Tensor | None, running_var: Tensor | None,
    momentum: float, eps: float, group_name: str, replicas: int, is_inactive: bool,
) -> list[Tensor]:  # fmt: skip
    """Batch norm in training with the statistics of a process group, as one operator for captures.

    replicas: how many ranks of the group have the same plain image.  Returns the output and the new running statistics.
    """
    raise NotImplementedError(
        f"a synchronized batch norm of {tuple(image.shape)} whose dims no tile cuts cannot run in a stream; stream the part "
        "of the model before it"
    )


@_batch_norm_over.register_fake
def _(
    image: Tensor, weight: Tensor | None, bias: Tensor | None, running_mean: Tensor | None, running_var: Tensor | None,
    momentum: float, eps: float, group_name: str, replicas: int, is_inactive: bool,
) -> list[Tensor]:  # fmt: skip
    return [torch.empty_like(image), *(torch.empty_like(t) for t in (running_mean, running_var) if t is not None)]


class _SyncBatchNormAct(SyncBatchNorm):
    """timm's BatchNormAct2d: the normalization, then its `drop` and `act`."""

    drop: nn.Module
    act: nn.Module

    def forward(self, input: Tensor) -> Tensor:
        return self.act(self.drop(super().forward(input)))


# ---------------------------------------------------------------------------------------------- converting


def _is_batch_norm(layer: nn.Module) -> bool:
    return isinstance(layer, BatchNorm)


def _synchronized_class(layer: nn.Module, name: str) -> type[SyncBatchNorm]:
    """The class that `layer` becomes; NotImplementedError, naming the layer, where its own forward would be lost."""
    kind = type(layer)
    where = f"'{name}' ({kind.__module__}.{kind.__qualname__})" if name else f"{kind.__module__}.{kind.__qualname__}"
    if issubclass(kind, SyncBatchNorm):
        return kind
    if issubclass(kind, nn.modules.lazy.LazyModuleMixin):
        raise NotImplementedError(
            f"{where} is lazy: it does not know its channels yet, so it cannot be synchronized; run the model once before"
        )
    if "forward" in vars(layer):
        raise NotImplementedError(f"{where} has a forward set on the object, which synchronizing would bypass; {_ADVICE}")
    if kind in (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm):
        return SyncBatchNorm
    if (kind.__module__, kind.__name__) in _TIMM_ACT:
        return _mixed(_SyncBatchNormAct, kind)
    if kind.forward in (BatchNorm.forward, nn.SyncBatchNorm.forward):
        return _mixed(SyncBatchNorm, kind)
    raise NotImplementedError(f"{where} has a forward of its own, which synchronizing would drop; {_ADVICE}")


def _swap_class(layer: nn.Module, kind: type[SyncBatchNorm], sync: _SyncGroup) -> None:
    layer.__class__ = kind
    assert isinstance(layer, SyncBatchNorm)
    layer.sync = sync


_ADVICE = "use nn.BatchNorm1d/2d/3d there, or batch_norm=averaged or broadcast, which leave the layer as it is"
_TIMM_ACT = (("timm.layers.norm_act", "BatchNormAct2d"), ("timm.layers.norm_act", "SyncBatchNormAct"))
_MIXED: dict[tuple[type, type], type] = {}


def _mixed(ours: type[SyncBatchNorm], theirs: type) -> type[SyncBatchNorm]:
    """A subclass of both classes with our forward, so that isinstance holds and attributes stay; one class per pair."""
    if (ours, theirs) not in _MIXED:
        names = {"__module__": theirs.__module__, "__doc__": theirs.__doc__}
        _MIXED[ours, theirs] = type(f"Sync{theirs.__name__}", (ours, theirs), names)
    return _MIXED[ours, theirs]


# ---------------------------------------------------------------------------------------------- buffers in training


def average_running_statistics(model: nn.Module, mesh: Mesh) -> None:
    """Replace the running mean and variance of every BatchNorm by their mean over the ranks: one message, once per epoch.

    Cheap and inexact: the mean of the ranks' variances leaves out the variance of their means.
    """
    layers = [layer for layer in model.modules() if isinstance(layer, NormBase)]
    running = [each for layer in layers for each in (layer.running_mean, layer.running_var) if each is not None]
    if mesh.size == 1 or not running:
        return
    flat = mesh.mean_(torch.cat([statistic.double() for statistic in running]))
    for statistic, mean in zip(running, flat.split([statistic.numel() for statistic in running]), strict=True):
        statistic.copy_(mean)


def broadcast_buffers(model: nn.Module, mesh: Mesh) -> None:
    """Overwrite every buffer by that of the first rank that has it; called before training and checkpoints."""
    mesh.broadcast_all_([buffer.detach() for buffer in model.buffers() if not buffer.is_meta])
