"""BatchNorm whose statistics are those of the whole batch, however it is shared out over ranks.

`SyncBatchNorm.convert(model, group)` is the one-liner.  Forward sends one message per layer (2C + 3 numbers), backward one
(2C numbers).  The counts travel with the sums and stay on the device, so nothing waits for the GPU and ranks may hold
different numbers of samples, or tiles of different sizes, none too.  torch's own SyncBatchNorm refuses CPU tensors and reads
the counts back per layer.

A rank that has no samples left runs a stand-in, see `ghost.py`; it adds nothing to the whole.
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


class _Held:
    """A process group as a module attribute: copies share it, and a pickle leaves it behind (then the layer stands alone)."""

    def __init__(self, group: dist.ProcessGroup | None = None, alike: int = 1, number: int = 0) -> None:
        self.group, self.alike, self.number = group, alike, number

    def __deepcopy__(self, memo: dict) -> _Held:
        return self

    def __reduce__(self) -> tuple:
        return _Held, ()


class SyncBatchNorm(BatchNorm):
    """BatchNorm for (N, C, *) inputs, N > 0 or not, with the statistics of all ranks of `group`.

    In training the mean, the variance and the running statistics (unbiased with the count over all ranks) are those of the
    whole batch; in evaluation, and where `group` is None or one rank, it is torch's BatchNorm.  Statistics are float32, or
    float64 for float64 inputs; they are merged in float64 about `running_mean`, which must be equal on all ranks (it stays so).
    The gradients of weight and bias are this rank's part: DDP adds them up like any other.  For a tiled input `group` holds
    the ranks of all images and of all their tiles, and a part is times the number of tiles, as the engine's rules give it.
    ValueError, on every rank alike: one value per channel or none over all ranks.  On a GPU that would take waiting for the
    device in every layer, so there the variance is 0 and the output is the bias.
    Second derivatives are refused (RuntimeError from torch).
    """

    held: _Held
    inactive: bool
    """There while its batch is a stand-in, which counts nothing: whether it is."""

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
        self.held = _Held(group, alike)

    @classmethod
    def convert(cls, module: nn.Module, group: dist.ProcessGroup | None, *, alike: int = 1) -> nn.Module:
        """Turn every BatchNorm in `module` into a SyncBatchNorm over `group`, in place; the same module back.

        alike: how many ranks of the group hold the same input where it is plain: those that share an image's tiles.
        Parameters, buffers, hooks, names and the training flag are kept, for the layers stay the objects they were.
        A subclass keeps what it adds as long as it leaves `forward` alone; timm's BatchNormAct2d is known.
        NotImplementedError, before anything is changed: another forward (it would be lost), or a lazy BatchNorm.
        """
        kinds = {layer: _synchronized_kind(layer, name) for name, layer in module.named_modules() if _is_batch_norm(layer)}
        for number, (layer, kind) in enumerate(kinds.items(), start=1):
            _become(layer, kind, _Held(group, alike, number))
        return module

    @classmethod
    def adopt(cls, module: nn.Module) -> None:
        """Turn torch's own nn.SyncBatchNorm, which refuses a CPU's tensors and knows no tiles, into this one, of no group."""
        for layer in module.modules():
            if type(layer).forward is nn.SyncBatchNorm.forward:
                _become(layer, _synchronized_kind(layer, ""), _Held())

    @property
    def group(self) -> dist.ProcessGroup | None:
        return self.held.group

    def forward(self, input: Tensor) -> Tensor:
        if not self.training or self.group is None or self.group.size() == 1:
            return super().forward(input)
        if isinstance(input, FunctionalTensor):  # somebody writes down what it does, to run it on tiles in time
            return self._written_down(input)
        if torch.compiler.is_compiling():
            return torch.compiler.disable(self._over_ranks)(input)
        return self._over_ranks(input)

    def _over_ranks(self, input: Tensor) -> Tensor:
        self._check_input_dim(input)
        assert self.group is not None
        share = share_of(input, self.held.alike, self.group, is_inactive=getattr(self, "inactive", False))
        whole = self._statistics_of_the_whole(input, share)
        return Normalize.apply(input, self.weight, self.bias, whole, self.eps, self.group, share)

    def _written_down(self, input: Tensor) -> Tensor:
        self._check_input_dim(input)
        if self.momentum is None and self.track_running_stats:
            raise NotImplementedError("a SyncBatchNorm with momentum=None cannot be streamed; give it a momentum")
        assert self.group is not None
        running = (self.running_mean, self.running_var) if self.track_running_stats else (None, None)
        is_inactive, name = getattr(self, "inactive", False), self.group.group_name
        out, *new = torch.ops.widefield.batch_norm_over(
            input, self.weight, self.bias, *running, self.momentum or 0.0, self.eps, name, self.held.alike, is_inactive
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
    def _statistics_of_the_whole(self, input: Tensor, share: StatisticsShare) -> Statistics:
        """Merge this rank's statistics with the others' (one message) and move the running ones."""
        assert self.group is not None
        whole = merged(input, share, self.running_mean, self.group, number=self.held.number)
        if self.track_running_stats and self.running_mean is not None:
            self._move_running_statistics(whole)
        return whole

    def _move_running_statistics(self, whole: Statistics) -> None:
        assert self.running_mean is not None and self.running_var is not None and self.num_batches_tracked is not None
        self.num_batches_tracked.add_(1)
        for running, batch in ((self.running_mean, whole.mean), (self.running_var, whole.unbiased)):
            if self.momentum is None:  # a mean over all batches; its weight stays on the device
                running.lerp_(batch.to(running.dtype), 1.0 / self.num_batches_tracked.to(running.dtype))
            else:
                running.lerp_(batch.to(running.dtype), self.momentum)


@torch.library.custom_op("widefield::batch_norm_over", mutates_args=())
def _batch_norm_over(
    image: Tensor, weight: Tensor | None, bias: Tensor | None, running_mean: Tensor | None, running_var: Tensor | None,
    momentum: float, eps: float, group_name: str, alike: int, is_inactive: bool,
) -> list[Tensor]:  # fmt: skip
    """Batch norm in training with the statistics of a process group, as a name for those who follow a module.

    alike: how many ranks of the group hold the same where the image is not cut.  Gives the output and new running statistics.
    """
    raise NotImplementedError(
        f"a synchronized batch norm of {tuple(image.shape)}, which no tile cuts, has no way in a stream; stream the "
        f"part before it"
    )


@_batch_norm_over.register_fake
def _(
    image: Tensor, weight: Tensor | None, bias: Tensor | None, running_mean: Tensor | None, running_var: Tensor | None,
    momentum: float, eps: float, group_name: str, alike: int, is_inactive: bool,
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


def _synchronized_kind(layer: nn.Module, name: str) -> type[SyncBatchNorm]:
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


def _become(layer: nn.Module, kind: type[SyncBatchNorm], held: _Held) -> None:
    layer.__class__ = kind
    assert isinstance(layer, SyncBatchNorm)
    layer.held = held


_ADVICE = "use nn.BatchNorm1d/2d/3d there, or batch_norm=averaged or broadcast, which leave the layer as it is"
_TIMM_ACT = (("timm.layers.norm_act", "BatchNormAct2d"), ("timm.layers.norm_act", "SyncBatchNormAct"))
_MIXED: dict[tuple[type, type], type] = {}


def _mixed(ours: type[SyncBatchNorm], theirs: type) -> type[SyncBatchNorm]:
    """Our forward over their class, so that isinstance and what the subclass adds stay; one class per pair."""
    if (ours, theirs) not in _MIXED:
        names = {"__module__": theirs.__module__, "__doc__": theirs.__doc__}
        _MIXED[ours, theirs] = type(f"Sync{theirs.__name__}", (ours, theirs), names)
    return _MIXED[ours, theirs]


# ---------------------------------------------------------------------------------------------- around training


def average_running_statistics(model: nn.Module, mesh: Mesh) -> None:
    """Replace the running mean and variance of every BatchNorm by their mean over the ranks: one message, once per epoch.

    Cheap and inexact: the mean of the ranks' variances leaves out how far their means lie apart.
    """
    layers = [layer for layer in model.modules() if isinstance(layer, NormBase)]
    running = [each for layer in layers for each in (layer.running_mean, layer.running_var) if each is not None]
    if mesh.size == 1 or not running:
        return
    flat = mesh.mean_(torch.cat([statistic.double() for statistic in running]))
    for statistic, mean in zip(running, flat.split([statistic.numel() for statistic in running]), strict=True):
        statistic.copy_(mean)


def broadcast_buffers(model: nn.Module, mesh: Mesh) -> None:
    """Overwrite every buffer with that of the first rank that has it, before training and checkpoints."""
    mesh.broadcast_all_([buffer.detach() for buffer in model.buffers() if not buffer.is_meta])
