"""Tensor parallelism: each rank computes some channels of every large layer and holds the weights of these."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from widefield.capture.fake_parameters import Like
from widefield.capture.interpreter import install_shard, refuse_streams
from widefield.comm.mesh import Mesh
from widefield.parallel.strategies import Case, Choices, Phase
from widefield.plans import Plan
from widefield.quantity import bytes_text
from widefield.sharded_state import register
from widefield.tensor_parallel.collectives import Exchange, Ranks
from widefield.tensor_parallel.runtime import TensorParallelForward
from widefield.tensor_parallel.search import ShardedGraph

AXIS = "channel"
PHASE = Phase.SPLIT
CHECK_ORDER = 20


def is_used(plan: Plan) -> bool:
    """Where ranks share the channels of a layer."""
    return plan.channel > 1


def check_plan(plan: Plan) -> None:
    """NotImplementedError: a stream together with mesh.channel."""
    if plan.channel > 1 and plan.stream is not None:
        raise NotImplementedError(
            f"mesh.channel={plan.channel} runs a model's operations on parts of channels and stream (here {plan.stream}) on "
            "tiles in time, and the two cannot be combined; set stream=null and "
            f"mesh.space=[{plan.channel}, 1] beside mesh.channel, or mesh.channel=1"
        )


def apply(
    model: nn.Module,
    mesh: Mesh,
    *,
    trial_step: Callable[[], Tensor] | None = None,
    sample: Tensor | tuple[Tensor, ...] | None = None,
) -> Choices:
    """Cut `model`'s layers by channels over `mesh.channel_group`; returns what was chosen, and what is gathered or left whole.

    sample: a batch of one rank, or a meta tensor of its shape, or several where the forward takes several; the model is
        captured on its shape, without pixels.
    Every rank of the axis passes the model the same images and gets the same output.  Parameters of cut layers become this
    rank's shard, in place; the shard spec that is registered for each gathers them.
    ValueError: no sample; a streamed model.  NotImplementedError: the operations depend on the values of pixels.
    """
    if sample is None:
        raise ValueError(
            f"mesh.channel={mesh.plan.channel} captures a model on a batch to cut it, and none was given; give parallelize a "
            "sample, as torch.empty(2, 3, 64, 64)"
        )
    refuse_streams(model, f"mesh.channel={mesh.plan.channel}")
    whole = _weight_bytes(model)
    _broadcast_start(model, mesh)
    samples = sample if isinstance(sample, tuple) else (sample,)
    # copies may have a sample more, and must not choose other parts
    shapes = mesh.gather_objects([tuple(one.shape) for one in samples])[0]
    ranks = Ranks(mesh.channel, mesh.plan.channel, mesh.channel_group)
    likes = tuple(Like.of(one, mesh.device, shape) for one, shape in zip(samples, shapes, strict=True))
    override = TensorParallelForward(model, ranks, likes, mesh.device)
    install_shard(model, override)
    exchanges = override.exchanges()
    register(model, {name: ChannelShardSpec(override.shapes[name], exchange) for name, exchange in exchanges.items()})
    return [_in_words(override.initial, mesh.plan.channel, _weight_bytes(model) / max(1, whole)), *override.initial.fallbacks]


@dataclass(frozen=True)
class ChannelShardSpec:
    """The ShardSpec of a weight of which each rank of the axis has some channels.  shape: of the full weight."""

    shape: tuple[int, ...]
    exchange: Exchange

    @property
    def num_shards(self) -> int:
        return self.exchange.ranks.size

    def whole(self, part: Tensor, receiver: int) -> Tensor | None:
        whole = self.exchange.gather(part.detach())
        return whole if self.exchange.ranks.rank == receiver % self.num_shards else None

    def part(self, whole: Tensor) -> Tensor:
        return self.exchange.take_shard(whole)


def _weight_bytes(model: nn.Module) -> int:
    return sum(p.numel() * p.element_size() for p in model.parameters())


@torch.no_grad()
def _broadcast_start(model: nn.Module, mesh: Mesh) -> None:
    """Overwrite weights and buffers by those of rank 0, from which every rank then cuts its shard."""
    if mesh.group is not None:
        for tensor in [*model.parameters(), *model.buffers()]:
            start = tensor.detach().contiguous()
            torch.distributed.broadcast(start, group_src=0, group=mesh.group)
            tensor.copy_(start)


def _in_words(chosen: ShardedGraph, size: int, share: float) -> str:
    counts = Counter(chosen.layers.values())
    kinds = {"outputs": "by their outputs", "inputs": "by their inputs", "groups": "by their groups", "whole": "left whole"}
    kinds_in_words = ", ".join(f"{counts[kind]} {words}" for kind, words in kinds.items() if counts[kind])
    flops = chosen.replicated_flops + chosen.sharded_flops
    replicated = chosen.replicated_flops / flops if flops else 0.0
    return (
        f"channels: {size} ranks share {len(chosen.layers)} layers, {kinds_in_words}; each holds {share:.0%} of the weights, "
        f"replicates {replicated:.0%} of the work, and sends {bytes_text(chosen.sent_bytes)} of activations and gradients "
        "in a pass"
    )


def _net(norm: Callable[[int], nn.Module], width: int = 24) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(2, width, 3, padding=1, bias=False), norm(width), nn.ReLU(), nn.Conv2d(width, width, 3), norm(width),
        nn.SiLU(), nn.Conv2d(width, width, 3, groups=width), nn.ConvTranspose2d(width, 2 * width, 2, 2), nn.GLU(1),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, 3),
    )  # fmt: skip


CASES: list[Case] = [
    Case("batch norm", partial(_net, nn.BatchNorm2d), (5, 2, 9, 8), reason="2 by their outputs, 1 by their inputs, 2 left"),
    Case("group norm", partial(_net, partial(nn.GroupNorm, 6)), (5, 2, 9, 8)),
    Case("a width that does not divide", partial(_net, nn.BatchNorm2d, 25), (5, 2, 9, 8)),
]
