"""Messages from one rank to another, whatever carries them.

NCCL sends a GPU's tensors and gloo the host's.  Where gloo carries messages between GPUs, as for ranks that share one, its
collectives copy to the host's memory and back by themselves; its `send` and `recv` do not, but hand a GPU's address to a
socket, which ends the process (torch 2.14, ProcessGroupGloo).  So such messages are copied here.  Only stages of a pipeline,
whose messages torch posts itself, give theirs on the `message_device` instead.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from widefield.comm.devices import passes_the_host


def exchange(sends: Mapping[int, Tensor], receives: Mapping[int, Tensor], group: dist.ProcessGroup) -> list[dist.Work]:
    """Begin to send each tensor of `sends` to its peer and to fill each of `receives` from its own; wait for what this gives.

    Peers are ranks of the group.  The tensors are contiguous, and `sends` stay as they are until the wait.
    """
    posts = [dist.P2POp(dist.irecv, buffer, group=group, group_peer=peer) for peer, buffer in receives.items()]
    posts += [dist.P2POp(dist.isend, message, group=group, group_peer=peer) for peer, message in sends.items()]
    return dist.batch_isend_irecv([_by_host(post) for post in posts])


def send(tensor: Tensor, peer: int, group: dist.ProcessGroup) -> None:
    """Send a contiguous tensor to rank `peer` of the group, which receives it."""
    dist.send(tensor.cpu() if passes_the_host(group, tensor.device) else tensor, group_dst=peer, group=group)


def receive(buffer: Tensor, peer: int, group: dist.ProcessGroup) -> Tensor:
    """Fill `buffer`, which is contiguous, with what rank `peer` of the group sends; the buffer."""
    if not passes_the_host(group, buffer.device):
        dist.recv(buffer, group_src=peer, group=group)
        return buffer
    host = torch.empty_like(buffer, device="cpu")
    dist.recv(host, group_src=peer, group=group)
    return buffer.copy_(host)


def _by_host(post: dist.P2POp) -> dist.P2POp:
    """The same message, which passes the host's memory where the group's messages must."""
    if passes_the_host(post.group, post.tensor.device):
        post.op = _sent if post.op is dist.isend else _received
    return post


def _sent(
    tensor: Tensor, *, group: dist.ProcessGroup, tag: int = 0, group_dst: int | None = None, group_src: int | None = None
) -> dist.Work | None:
    """As `isend`.  torch gives the peer as `group_src` to whatever is not `isend` itself."""
    return dist.isend(tensor.detach().cpu(), group=group, tag=tag, group_dst=group_src if group_dst is None else group_dst)


def _received(tensor: Tensor, *, group: dist.ProcessGroup, tag: int = 0, group_src: int) -> dist.Work:
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
    return _Arrival(dist.irecv(host, group=group, tag=tag, group_src=group_src), host, tensor.detach())


class _Arrival(dist.Work):
    """A message that arrives in the host's memory; `wait` copies it to where it was to come."""

    def __init__(self, work: dist.Work | None, host: Tensor, target: Tensor) -> None:
        super().__init__()
        self._work, self._host, self._target = work, host, target

    def wait(self, *args: Any) -> bool:
        assert self._work is not None, "a rank of the group receives"
        self._work.wait(*args)
        self._target.copy_(self._host, non_blocking=True)  # torch's memory pool keeps the host's copy until this is done
        return True
