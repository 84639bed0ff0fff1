"""One training pass: forward, loss, backward, however the model is laid out.

    backward_of(model, image, target, loss_of=task.loss_sum, scaled=lambda loss: loss / samples)

adds to the gradients as `scaled(loss_of(model(image), target)).backward()` does.  A model that is cut into stages cannot be run
forward first and backward later, for its ranks work on several micro-batches at a time; so a loop asks for both at once.
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
    known: Callable[[Tensor], None] = lambda loss: None,
) -> Tensor:
    """The detached loss of a pass, whose gradients are added to the parameters' on this rank.

    target: what `loss_of` takes beside the model's output; tensors in it are samples first, as the images are.
    loss_of: a sum over samples: a model in stages calls it once per micro-batch, on the rank that has the last stage alone.
    scaled: what is differentiated, of a loss; linear.  autocast: what the model runs under; the loss does not.
    known: called with the detached loss as soon as this rank has it: before the backward, or after it where stages have it.
    """
    override = override_of(model)
    if isinstance(override, PipelineForward):
        loss = override.backward(model, image, target, loss_of=loss_of, scaled=scaled, autocast=autocast)
        known(loss)
        return loss
    with autocast():
        output = model(image)
    loss = loss_of(output, target)
    known(loss.detach())
    scaled(loss).backward()
    return loss.detach()


def without_sync(model: nn.Module) -> AbstractContextManager[None]:
    """Inside, backward adds to this rank's gradients and sends none to other copies.

    All passes of a step but the last run here, forward and backward.  Does nothing where there are no other copies.
    """
    override = override_of(model)
    return override.without_sync() if isinstance(override, PipelineForward) else parallelize.without_sync(model)
