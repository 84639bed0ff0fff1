"""One training pass, forward, loss and backward, under any plan.

    backward_of(model, image, target, loss_of=task.loss_sum, scaled=lambda loss: loss / samples)

adds to the gradients as `scaled(loss_of(model(image), target)).backward()` does.  The stages of a pipeline work on several
micro-batches at a time, so there forward and backward are interleaved and one call runs both.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch import Tensor, nn

from widefield.capture.interpreter import override_of
from widefield.parallel import parallelize
from widefield.pipelining.runtime import PipelineForward


def backward_of(
    model: nn.Module,
    image: Tensor,
    target: Any,
    *,
    loss_of: Callable[[Any, Any], Tensor],
    scaled: Callable[[Tensor], Tensor] = lambda loss: loss,
    autocast: Callable[[], AbstractContextManager] = nullcontext,
    on_loss: Callable[[Tensor], None] = lambda loss: None,
) -> Tensor:
    """Run forward and backward, adding to the parameters' gradients on this rank; returns the detached loss.

    target: the second argument of `loss_of`; its tensors have the samples in dim 0, as the images do.
    loss_of: a sum over samples.  A pipeline calls it once per micro-batch, only on the rank with the last stage.
    scaled: a linear function of the loss; its result is differentiated.  autocast: for the forward, without the loss.
    on_loss: called with the detached loss as soon as this rank has it: before the backward, in a pipeline after it.
    """
    override = override_of(model)
    if isinstance(override, PipelineForward):
        loss = override.backward(model, image, target, loss_of=loss_of, scaled=scaled, autocast=autocast)
        on_loss(loss)
        return loss
    with autocast():
        output = model(image)
    loss = loss_of(output, target)
    on_loss(loss.detach())
    scaled(loss).backward()
    return loss.detach()


def without_sync(model: nn.Module) -> AbstractContextManager[None]:
    """Inside, backward adds to this rank's gradients and averages none over copies, as DDP's `no_sync`.

    Run all passes of a step but the last inside, forward and backward.  Does nothing where there is one copy.
    """
    override = override_of(model)
    return override.without_sync() if isinstance(override, PipelineForward) else parallelize.without_sync(model)
