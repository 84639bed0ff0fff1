"""The script does not know torchrun's way of passing the rank."""

from __future__ import annotations

TITLE = "the script was started in a way that it does not know (--local-rank)"
KIND = "cause"
PATTERNS = (
    r"unrecognized arguments: --local[-_]rank",
    r"the following arguments are required: --local[-_]rank",
    r"ambiguous option: --run could match",
)
CAUSE = (
    "torch.distributed.launch passed --local_rank as an argument; torchrun sets the variable LOCAL_RANK instead, and "
    "newer versions write --local-rank. torchrun also takes abbreviations of its own options out of the script's."
)
REMEDY = (
    "int(os.environ['LOCAL_RANK']), and torchrun. Behind -m write --, as torchrun -m -- widefield train ..., so that all "
    "after it is the script's."
)
WRONG = {
    "rank=local_rank": "on more than one machine there are then two rank 0s",
}
SOURCE = "torchrun's documentation, on moving from torch.distributed.launch"

CASES: list[tuple[str, str | None]] = [
    ("train.py: error: unrecognized arguments: --local-rank=1", "--local-rank=1"),
    ("torchrun: error: ambiguous option: --run could match --run-path, --run_path", "ambiguous"),
    ("train.py: error: unrecognized arguments: --lr", None),
]
