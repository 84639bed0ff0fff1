"""Which submodule is running?  Found on Python's stack, so that the module needs no hooks."""

from __future__ import annotations

import sys
import types

from torch import nn

from widefield.private_torch.modules import call_impl_of

_CALL = call_impl_of(nn.Module).__code__


class ModulePaths:
    """The submodules of a module by name."""

    def __init__(self, module: nn.Module) -> None:
        self._names = {id(part): name for name, part in module.named_modules()}

    def running(self) -> str:
        """The qualified name of the innermost submodule that is being called; "" for the module's own forward.

        Cost: it visits each frame of the stack, about 10 us.
        """
        return self.running_or_none() or ""

    def running_or_none(self) -> str | None:
        """`running`; None outside of the module's forward."""
        frame: types.FrameType | None = sys._getframe(1)
        while frame is not None:
            if frame.f_code is _CALL:
                name = self._names.get(id(frame.f_locals["self"]))
                if name is not None:
                    return name
            frame = frame.f_back
        return None
