"""DDP waits for gradients of parameters that the loss does not use."""

from __future__ import annotations

TITLE = "parameters got no gradient, and DDP waits for them"
KIND = "cause"
PATTERNS = (
    r"Expected to have finished reduction in the prior iteration before starting a new one",
    r"[Pp]arameters? (?:that were|which was|was|were) not used in producing (?:the )?loss",
)
CAUSE = (
    "Some parameters had no part in this step's loss: a branch that was not taken, a head that is not trained, an output "
    "that the loss leaves out. DDP waits for a gradient of each."
)
REMEDY = (
    "Take them out: requires_grad_(False) for what is not trained, or let every output count. "
    "TORCH_DISTRIBUTED_DEBUG=DETAIL names them. Where the branch changes from step to step, find_unused_parameters=True "
    "is right. wf.parallelize needs no setting: it takes a missing gradient for zero."
)
WRONG = {
    "find_unused_parameters=True, always": (
        "it searches the graph in every step, and cures neither a loss that becomes NaN nor a hang: it only makes this "
        "one error go away"
    ),
    "static_graph=True": (
        "it is a promise that the same parameters are unused in every step; where that is not so, gradients are wrong"
    ),
}
SOURCE = "pytorch/pytorch#43259; DistributedDataParallel's documentation"

CASES: list[tuple[str, str | None]] = [
    (
        "[rank0]: RuntimeError: Expected to have finished reduction in the prior iteration before starting a new "
        "one. This error indicates that your module has parameters that were not used in producing loss.",
        "[rank0]",
    ),
    (
        "Warning: find_unused_parameters=True was specified in DDP constructor, but did not find any unused "
        "parameters in the forward pass.",
        None,
    ),
]
