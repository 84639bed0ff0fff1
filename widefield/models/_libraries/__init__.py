"""Models of other libraries, `LIBRARY/NAME`, one file per library.  Each file defines

- `names()`: the models that the library has;
- `build(name, request)`: the model, for the request's channels and classes, with pretrained weights where it asks for them;
- `CASES`: (name, options, image shape, output shape for 10 classes).

Nothing is downloaded: pretrained weights are read from the library's cache, or refused with how to get them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from widefield.config import ModelConfig


@dataclass(frozen=True)
class Request:
    """What a recipe asks of a model.

    dims: of the images' pixels, where known.  pretrained: whether weights are to be loaded.  reasons: gets what was done, in
    words.
    """

    config: ModelConfig
    in_channels: int
    num_classes: int
    dims: int | None = None
    pretrained: bool = False
    reasons: list[str] = field(default_factory=list)

    @property
    def options(self) -> dict[str, Any]:
        return self.config.options

    @property
    def wanted(self) -> str | None:
        """The name of the pretrained weights; None where the recipe leaves it to the library."""
        return self.config.pretrained if isinstance(self.config.pretrained, str) else None

    @property
    def asked(self) -> str:
        """For errors: the weights that the recipe asks for."""
        return f"model.pretrained={self.wanted or 'true'} of {self.config.name}"

    def refuse(self, options: Mapping[str, str]) -> None:
        """ValueError: the recipe sets one of `options`, for each of which there is a key."""
        for name, instead in options.items():
            if self.options.get(name) not in (None, False):
                raise ValueError(
                    f"model.options.{name} is {self.options[name]!r}, which {self.config.name} gets from elsewhere; {instead}"
                )

    def call(self, make: Callable[..., nn.Module], **sizes: Any) -> nn.Module:
        """The model; the recipe's options win over `sizes`.  ValueError: the constructor does not take them."""
        return called(make, self.config, sizes)


def called(make: Callable[..., nn.Module], config: ModelConfig, sizes: Mapping[str, Any]) -> nn.Module:
    """`make(**sizes, **model.options)`.  ValueError: it does not take them."""
    try:
        return make(**(dict(sizes) | config.options))
    except TypeError as error:
        raise ValueError(f"{config.name} does not take model.options {config.options}: {error}") from None
    except (ArithmeticError, AssertionError, LookupError, RuntimeError, NotImplementedError) as error:
        if not config.options or ":" in config.name:  # for a user's own model the traceback helps more
            raise
        reason = f"{type(error).__name__}: {error}"
        raise ValueError(f"{config.name} cannot be built with model.options {config.options}: {reason}") from None
