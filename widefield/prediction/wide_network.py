"""A run's network, and what it says of each pixel, as one tensor: what a stream gives away tile after tile."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn


class Answering(nn.Module):
    """From an image (B, C, *pixels) to class numbers (B, *pixels), so that no output of several channels exists as a whole.

    dtype: of the numbers.  mirrors: dims that are flipped, per pass of the network; of several passes, the probabilities' mean
    counts, as of an image that is predicted as a whole.
    probabilities: give (B, K + 1, *pixels) of float32: the K classes' probabilities, and the number, exactly.
    """

    def __init__(
        self,
        network: nn.Module,
        answers: Callable[[Tensor], Tensor],
        dtype: str,
        mirrors: Sequence[tuple[int, ...]] = ((),),
        *,
        probabilities: bool = False,
    ) -> None:
        super().__init__()
        self.network, self._answers, self._dtype = network, answers, getattr(torch, dtype)
        self._mirrors, self._probabilities = tuple(mirrors), probabilities

    def forward(self, image: Tensor) -> Tensor:
        if len(self._mirrors) == 1 and not self._probabilities:
            return self._answers(self._output(image, ())).to(self._dtype)
        total = None
        for dims in self._mirrors:
            output = self._output(image, dims)
            likely = output.softmax(1)
            total = likely if total is None else total + likely
        assert total is not None
        mean = total / len(self._mirrors)
        numbers = mean.argmax(1) if len(self._mirrors) > 1 else self._answers(output)
        if not self._probabilities:
            return numbers.to(self._dtype)
        return torch.cat([mean.to(torch.float32), numbers.to(torch.float32).unsqueeze(1)], 1)

    def _output(self, image: Tensor, dims: tuple[int, ...]) -> Tensor:
        """What the network says of the mirror image, turned back, in float32 or wider."""
        output = self.network(image.flip(dims) if dims else image)
        if output.shape[2:] != image.shape[2:]:
            raise ValueError(
                f"the model answers for {tuple(output.shape[2:])} pixels of an image of {tuple(image.shape[2:])}; take a model "
                "that keeps the image's size"
            )
        output = output.flip(dims) if dims else output
        return output.to(torch.promote_types(output.dtype, torch.float32))
