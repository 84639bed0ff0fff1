"""Gradients have other strides than DDP's buckets."""

from __future__ import annotations

TITLE = "gradients are copied in every step, as their strides are not those of DDP's buckets"
KIND = "notice"
PATTERNS = (r"Grad strides do not match bucket view strides",)
CAUSE = (
    "DDP laid out its buckets by the strides that weights had when it was made; the model was brought to channels_last "
    "afterwards, or a 1 x 1 convolution's gradient has strides of its own. Numbers are right; each step copies."
)
REMEDY = (
    "Call model.to(memory_format=torch.channels_last) before DistributedDataParallel(model), and "
    "gradient_as_bucket_view=True. It is a warning: where the run fails too, this is not why."
)
WRONG = {
    "find_unused_parameters": "it has nothing to do with strides",
}
SOURCE = "pytorch/pytorch#47163; timm#2147"

CASES: list[tuple[str, str | None]] = [
    (
        "torch/autograd/graph.py:841: UserWarning: Grad strides do not match bucket view strides. This may "
        "indicate grad was not created according to the gradient layout contract, or that the param's strides "
        "changed since DDP was constructed.",
        "Grad strides do not match",
    ),
    ("UserWarning: The given NumPy array is not writable", None),
]
