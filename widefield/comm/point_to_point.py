"""Messages from one rank to another, over any backend.

NCCL sends tensors of a GPU and gloo those of the host.  Where ranks share a GPU, gloo also sends between GPUs.  Its collectives
then copy to the host's memory and back; its `send` and `recv` do not: they pass a GPU's address to a socket, which ends the
process (torch 2.14, ProcessGroupGloo).  So such messages are copied here.  The messages of pipeline stages are posted by torch
itself; the stages put them on the `message_device`.
"""

from __future__ import annotations

import datetime
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from widefield.comm.devices import passes_the_host
from widefield.comm.message_tally import note

_EVER = datetime.timedelta(days=365)


def exchange(sends: Mapping[int, Tensor], receives: Mapping[int, Tensor], group: dist.ProcessGroup) -> list[dist.Work]:
    """Start to send each tensor of `sends` to its peer and to receive each of `receives` from its peer.

    sends, receives: contiguous tensors by the peer's rank in the group; unchanged until the works returned were waited for.
    """
    for peer in receives:
        note("receive", group, peer)
    for peer in sends:
        note("send", group, peer)
    posts = [dist.P2POp(dist.irecv, buffer, group=group, group_peer=peer) for peer, buffer in receives.items()]
    posts += [dist.P2POp(dist.isend, message, group=group, group_peer=peer) for peer, message in sends.items()]
    return dist.batch_isend_irecv([_through_host(post) for post in posts])


def send(tensor: Tensor, peer: int, group: dist.ProcessGroup, *, tag: int = 0) -> None:
    """Send a contiguous tensor to rank `peer` of the group, which receives it.  tag: of gloo's messages, which NCCL has not."""
    note("send", group, peer)
    dist.send(tensor.cpu() if passes_the_host(group, tensor.device) else tensor, group_dst=peer, group=group, tag=tag)


def receive_whenever(buffer: Tensor, peer: int, group: dist.ProcessGroup, *, tag: int = 0) -> Tensor:
    """As `receive` of a tensor on the CPU, over gloo, however long the peer takes, if it lives.  tag: as `send`'s.

    A wait that takes longer than the group's timeout would end all connections of this rank, not this one alone.
    """
    note("receive", group, peer)
    work = dist.irecv(buffer, group_src=peer, group=group, tag=tag)
    assert work is not None, "a rank of the group receives"
    work.wait(_EVER)
    return buffer


def receive(buffer: Tensor, peer: int, group: dist.ProcessGroup) -> Tensor:
    """Fill the contiguous `buffer` with what rank `peer` of the group sends, and return it."""
    note("receive", group, peer)
    if not passes_the_host(group, buffer.device):
        dist.recv(buffer, group_src=peer, group=group)
        return buffer
    host = torch.empty_like(buffer, device="cpu")
    dist.recv(host, group_src=peer, group=group)
    return buffer.copy_(host)


def _through_host(post: dist.P2POp) -> dist.P2POp:
    """The same message, copied through the host's memory where the group's backend needs that."""
    if passes_the_host(post.group, post.tensor.device):
        post.op = _isend_from_host if post.op is dist.isend else _irecv_on_host
    return post


def _isend_from_host(
    tensor: Tensor, *, group: dist.ProcessGroup, tag: int = 0, group_dst: int | None = None, group_src: int | None = None
) -> dist.Work | None:
    """`dist.isend`.  `batch_isend_irecv` passes the peer as `group_src` to any function that is not `isend` itself."""
    return dist.isend(tensor.detach().cpu(), group=group, tag=tag, group_dst=group_src if group_dst is None else group_dst)


def _irecv_on_host(tensor: Tensor, *, group: dist.ProcessGroup, tag: int = 0, group_src: int) -> dist.Work:
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
    return _Arrival(dist.irecv(host, group=group, tag=tag, group_src=group_src), host, tensor.detach())


class _Arrival(dist.Work):
    """A receive into the host's memory; `wait` copies it to the GPU's `target`."""

    def __init__(self, work: dist.Work | None, host: Tensor, target: Tensor) -> None:
        super().__init__()
        self._work, self._host, self._target = work, host, target

    def wait(self, *args: Any) -> bool:
        assert self._work is not None, "a rank of the group receives"
        self._work.wait(*args)
        self._target.copy_(self._host, non_blocking=True)  # torch's pinned-memory pool reuses `_host` only after the copy
        return True
