"""What a save copies, and when: so much at once as may change, the rest while training goes on.

A save in the background needs a copy of all that training changes before it is written.  Weights, optimizer state and their
average change in an update only, so a thread copies them during the next forward and backward, and the update waits for it.
That holds unless a model writes to its weights in its forward.  So the first save copies everything at once, and before the
update that follows it is compared with what is there: only if nothing has changed do later saves rely on it.  A write that
autograd's version counters show makes that save fail in any case.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Set
from dataclasses import dataclass, field

import torch
from torch import Tensor

from widefield.private_torch.tensors import version_counter


@dataclass(frozen=True)
class Changes:
    """When tensors change, by the addresses of their memory, see `address_of`.

    steady: not before `Checkpoints.wait_until_copied` was called.
    live: of all tensors that may change at all; others are never changed.
    """

    steady: Set[int] = frozenset()
    live: Set[int] = frozenset()


def address_of(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


@dataclass
class Staging:
    """The tensors of one save on one rank: copies, and those that are still to be copied.

    done_copying: set once no steady tensor is needed any more.
    """

    tensors: dict[str, Tensor]
    steady: dict[str, Tensor] = field(default_factory=dict)
    done_copying: threading.Event = field(default_factory=threading.Event)

    def __post_init__(self) -> None:
        self._versions = {name: version_counter(tensor) for name, tensor in self.steady.items()}
        if not self.steady:
            self.done_copying.set()

    @property
    def sizes(self) -> dict[str, int]:
        """The bytes of every tensor, by name."""
        return {name: tensor.nbytes for name, tensor in (*self.tensors.items(), *self.steady.items())}

    def copy(self, names: Set[str]) -> None:
        """Copy those of the steady tensors that are among `names`, and forget the others.

        RuntimeError: one has changed meanwhile, as autograd counts.
        """
        try:
            self.tensors |= copied({name: tensor for name, tensor in self.steady.items() if name in names})
            changed = [name for name, tensor in self.steady.items() if version_counter(tensor) != self._versions[name]]
            if changed:
                raise RuntimeError(
                    f"{changed[0]} changed while it was copied, in a forward or backward; set checkpoint.background=false"
                )
        finally:
            self.steady = {}
            self.done_copying.set()


class Trust:
    """Whether tensors that should change in updates only do so: known once a save was compared with what it had copied."""

    def __init__(self) -> None:
        self.is_earned: bool | None = None
        """None: nothing was compared yet."""
        self._pairs: list[tuple[str, Tensor, Tensor]] = []

    def look_at(self, steady: Mapping[str, Tensor], copies: Mapping[str, Tensor]) -> None:
        """Have `compare` compare each steady tensor with its copy."""
        self._pairs = [(name, tensor, copies[name]) for name, tensor in steady.items()]

    def compare(self) -> str | None:
        """Compare, if there is anything to compare; the name of a tensor that has changed, or None."""
        if not self._pairs:
            return None
        pairs, self._pairs = self._pairs, []
        changed = next((name for name, tensor, copy in pairs if not torch.equal(tensor, copy)), None)
        self.is_earned = changed is None
        return changed


def copied(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Copies in the CPU's memory with the same strides; those from GPUs are asynchronous until the end."""
    copies = {}
    for name, tensor in tensors.items():
        copy = torch.empty_like(tensor, device="cpu", pin_memory=tensor.is_cuda, memory_format=torch.preserve_format)
        copies[name] = copy.copy_(tensor, non_blocking=tensor.is_cuda)
    for device in {tensor.device for tensor in tensors.values() if tensor.is_cuda}:
        torch.cuda.current_stream(device).synchronize()
    return copies
