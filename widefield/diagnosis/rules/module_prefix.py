"""A checkpoint was saved from a wrapped model."""

from __future__ import annotations

TITLE = "the names of weights differ by a wrapper's prefix (module., _orig_mod.)"
KIND = "cause"
PATTERNS = (r"(?:Missing|Unexpected) key\(s\) in state_dict:[^\n]*\W(?:module|_orig_mod|_fsdp_wrapped_module)\.",)
CAUSE = "state_dict() of DistributedDataParallel, of torch.compile and of FSDP1 has a prefix before each name."
REMEDY = (
    "Save model.module.state_dict(), or take the prefix out: {name.removeprefix('module.'): tensor}. widefield's names "
    "are the same under every plan; weights_map of a recipe renames foreign ones."
)
WRONG = {
    "strict=False": "no name fits, so that the model keeps its random weights without a word",
}
SOURCE = "pytorch/pytorch, DistributedDataParallel"

CASES: list[tuple[str, str | None]] = [
    (
        'RuntimeError: Error(s) in loading state_dict for ResNet: Missing key(s) in state_dict: "conv1.weight". '
        'Unexpected key(s) in state_dict: "module.conv1.weight".',
        "module.conv1",
    ),
    ('Missing key(s) in state_dict: "fc.weight"', None),
]
