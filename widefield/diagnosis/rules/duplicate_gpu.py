"""Two ranks compute on one GPU."""

from __future__ import annotations

TITLE = "two ranks are on the same GPU"
KIND = "cause"
PATTERNS = (
    r"have the same GPU of \S+, and NCCL takes one",
    r"Duplicate GPU detected : rank \d+ and rank \d+",
    r"rank \d+ is number \d+ on its machine and that has \d+ GPUs",
)
CAUSE = (
    "The GPU was chosen by the wrong number: every rank took cuda:0, or the rank among all was taken for the one on the "
    "machine, or Slurm gives each task one GPU that is called 0."
)
REMEDY = (
    "torch.cuda.set_device(int(os.environ['LOCAL_RANK'])) before the first tensor, and as many ranks per machine as it "
    "has GPUs. Under Slurm the number is SLURM_LOCALID; with --gpus-per-task=1 every task sees one GPU, which is 0 for "
    "each."
)
WRONG = {
    "CUDA_VISIBLE_DEVICES=0,1,2,3 in the script": "it is the same on all ranks, so they still choose the same one",
    "backend gloo": "two ranks then share a GPU, slowly",
}
SOURCE = "NCCL, init.cc; pytorch/pytorch#50921"

CASES: list[tuple[str, str | None]] = [
    (
        "n1:29880:30398 [0] init.cc:497 NCCL WARN Duplicate GPU detected : rank 2 and rank 0 both on CUDA device 1000",
        "rank 2 and rank 0",
    ),
    ("ncclInvalidUsage: This usually reflects invalid usage of NCCL library.", None),
]
