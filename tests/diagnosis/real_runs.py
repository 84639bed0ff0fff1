"""Makes the logs in logs/: small programs of plain PyTorch that fail in the ways of which people ask, on the CPU with gloo.

    python tests/diagnosis/real_runs.py            all of them, some minutes
    python tests/diagnosis/real_runs.py killed     one

Each program is what a user might write.  Paths, process numbers and times are replaced, so that a new log differs from an old
one where PyTorch says something else.  As root only: full file systems, which are mounted in a namespace of their own.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

LOGS = Path(__file__).parent / "logs"
SECONDS = 120
HEAD = """
import datetime, os, sys, time
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset

def begin(seconds=30):
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=seconds))
    return dist.get_rank()
"""
LOOP = """
rank = begin({seconds})
model = DDP(nn.Linear(4, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range({steps}):
    optimizer.zero_grad()
    loss = model(torch.randn(8, 4)).square().mean()
    loss.backward()
    optimizer.step()
    print(f"rank {{rank}} step {{step}} loss {{loss.item():.3f}}", flush=True)
"""
BROKEN_SET = """
class Images(Dataset):
    def __len__(self):
        return 64
    def __getitem__(self, index):
        {body}
        return torch.zeros(3, 64, 64)
"""
LOADED = "for batch in DataLoader(Images(), {}): pass\n"


@dataclass(frozen=True)
class Run:
    """program: after HEAD.  start: the words before the program's path; `torchrun` by default, of two ranks.

    others: programs' environments that are started at the same time.  shell: before the command, in the same shell.
    """

    program: str
    start: tuple[str, ...] = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    environments: tuple[dict[str, str], ...] = ({},)
    shell: str = ""
    arguments: tuple[str, ...] = field(default=())


def by_hand(rank: int, size: int, port: int, address: str = "127.0.0.1") -> dict[str, str]:
    return {"RANK": str(rank), "WORLD_SIZE": str(size), "MASTER_ADDR": address, "MASTER_PORT": str(port)}


PLAIN = ()
RUNS = {
    "host_name_unresolved": Run("begin(10)", PLAIN, (by_hand(1, 2, 29611, "node-a.invalid"),)),
    "host_name_mismatch": Run(
        "begin()",
        ("-m", "torch.distributed.run", "--nnodes", "2", "--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:29612",
         "--rdzv-conf", "is_host=0,read_timeout=5", "--rdzv-id", "7"),
    ),
    "two_rank_zeros": Run("begin(8)", PLAIN, (by_hand(0, 2, 29613), by_hand(0, 2, 29613))),
    "ranks_did_not_come": Run("begin(5)", PLAIN, (by_hand(0, 3, 29614),)),
    "port_in_use": Run(
        "import socket\ns = socket.socket(); s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1); "
        "s.bind(('0.0.0.0', 29615)); s.listen()\nbegin(5)",
        PLAIN, (by_hand(0, 2, 29615),),
    ),
    "killed": Run(
        LOOP.format(seconds=30, steps=3) + "    if step == 1 and rank == 1:\n        os.kill(os.getpid(), 9)\n"
    ),
    "shared_memory": Run(
        BROKEN_SET.format(body="torch.manual_seed(index)") + LOADED.format("batch_size=32, num_workers=2"),
        PLAIN, shell="mount -t tmpfs -o size=1m tmpfs /dev/shm",
    ),
    "unequal_batches": Run(LOOP.format(seconds=30, steps="(5 if rank == 0 else 3)")),
    "validation_on_one_rank": Run(
        LOOP.format(seconds=5, steps=2)
        + "if rank == 0:\n    print('rank 0 validating', flush=True)\n    time.sleep(20)\ndist.barrier()\n"
    ),
    "rank_is_missing": Run(
        LOOP.format(seconds=5, steps=3) + "    if step == 1 and rank == 1:\n        time.sleep(20)\n"
    ),
    "unused_parameters": Run(
        "rank = begin()\nnet = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])\nclass Net(nn.Module):\n"
        "    def __init__(self):\n        super().__init__()\n        self.used, self.other = net\n"
        "    def forward(self, x):\n        return self.used(x)\n"
        "model = DDP(Net())\nfor step in range(2):\n    model(torch.randn(2, 4)).sum().backward()\n"
    ),
    "stride_warning": Run(
        "rank = begin()\nmodel = DDP(nn.Sequential(nn.Conv2d(8, 8, 3), nn.Conv2d(8, 4, 1)))\n"
        "model.to(memory_format=torch.channels_last)\n"
        "x = torch.randn(2, 8, 9, 9).to(memory_format=torch.channels_last)\n"
        "for step in range(2):\n    model(x).sum().backward()\n"
    ),
    "collective_mismatch": Run(
        "rank = begin(10)\nx = torch.ones(4)\ndist.all_reduce(x) if rank == 0 else dist.broadcast(x, 0)\n",
        environments=({"TORCH_DISTRIBUTED_DEBUG": "DETAIL"},),
    ),
    "different_models": Run("rank = begin(10)\nDDP(nn.Sequential(*[nn.Linear(2, 2) for _ in range(1 + rank)]))\n"),
    "ready_twice": Run(
        "from torch.utils.checkpoint import checkpoint\nrank = begin()\nclass Net(nn.Module):\n    def __init__(self):\n"
        "        super().__init__()\n        self.layer = nn.Linear(4, 4)\n    def forward(self, x):\n"
        "        for _ in range(2):\n            x = checkpoint(self.layer, x, use_reentrant=True)\n        return x\n"
        "model = DDP(Net(), find_unused_parameters=True)\nmodel(torch.randn(2, 4, requires_grad=True)).sum().backward()\n"
    ),
    "loss_not_finite": Run(
        "rank = begin()\nmodel = DDP(nn.Linear(4, 2))\noptimizer = torch.optim.SGD(model.parameters(), lr=1e30)\n"
        "for step in range(9):\n    optimizer.zero_grad()\n    loss = model(torch.randn(8, 4)).square().mean()\n"
        "    if not torch.isfinite(loss):\n        print(f'Loss is {loss.item()}, stopping training', flush=True)\n"
        "        sys.exit(1)\n    loss.backward()\n    optimizer.step()\n"
    ),
    "open_files": Run(
        BROKEN_SET.format(body="pass") + "kept = [batch for batch in DataLoader(Images(), num_workers=2)]",
        PLAIN, shell="ulimit -n 40",
    ),
    "disk_full": Run(
        "torch.save({'weights': torch.zeros(2**20)}, '/mnt/step_200.pt')", PLAIN, shell="mount -t tmpfs -o size=1m tmpfs /mnt"
    ),
    "worker_raised": Run(
        BROKEN_SET.format(body="return {}['label']") + LOADED.format("num_workers=2"), PLAIN
    ),
    "worker_ended": Run(
        BROKEN_SET.format(body="import ctypes; ctypes.string_at(0)") + LOADED.format("num_workers=2"), PLAIN
    ),
    "loader_stalled": Run(
        BROKEN_SET.format(body="time.sleep(20)") + LOADED.format("num_workers=1, timeout=3"), PLAIN
    ),
    "local_rank_argument": Run(
        "import argparse\nparser = argparse.ArgumentParser()\n"
        "parser.add_argument('--local_rank', type=int, required=True)\nparser.parse_args()\n"
    ),
    "module_prefix": Run(
        "net = nn.Linear(2, 2)\nnet.load_state_dict({f'module.{name}': w for name, w in net.state_dict().items()})", PLAIN
    ),
    "one_value_per_channel": Run("nn.BatchNorm2d(4)(torch.randn(1, 4, 1, 1))", PLAIN),
    "sync_batch_norm_cpu": Run("begin()\nnn.SyncBatchNorm(4)(torch.randn(2, 4, 3, 3))"),
    "device_assert": Run("nn.functional.cross_entropy(torch.randn(2, 10), torch.tensor([3, 10]))", PLAIN),
    "schedule_order": Run(
        "optimizer = torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1)\n"
        "schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)\nschedule.step(); optimizer.step()\n", PLAIN,
    ),
    "slurm_node_number": Run(
        "begin(5)",
        ("-m", "torch.distributed.run", "--nnodes", "2", "--node-rank", "0", "--master-addr", "127.0.0.1", "--master-port",
         "29616", "--rdzv-conf", "timeout=6"),
        ({"LOGLEVEL": "INFO"}, {"LOGLEVEL": "INFO"}),
    ),
}  # fmt: skip


def log_of(name: str) -> str:
    """What all processes of a run print, in the order in which they were started."""
    run = RUNS[name]
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder) / "train.py"
        script.write_text(HEAD + run.program)
        command = " ".join([sys.executable, *run.start, str(script), *run.arguments])
        if run.shell:
            command = (
                f"unshare --mount sh -c '{run.shell} && exec {command}'" if "mount" in run.shell else f"{run.shell}; {command}"
            )
        outputs = []
        for number, environment in enumerate(run.environments):
            output = (Path(folder) / f"{number}.log").open("w+")
            told = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", **environment}
            started = subprocess.Popen(command, shell=True, env=told, cwd=folder, stdout=output, stderr=subprocess.STDOUT)
            outputs.append((started, output))
        texts = []
        for process, output in outputs:
            process.wait(SECONDS)
            output.seek(0)
            texts.append(output.read())
        return plain("\n".join(texts), folder)


def plain(text: str, folder: str) -> str:
    """Without what differs from machine to machine and from run to run; frames of C++ left out."""
    text = text.replace(folder, "/home/user").replace(sys.prefix, "/opt/python").replace(os.uname().nodename, "n1")
    text = re.sub(r"\bpid[ :=]+\d+|\(pid: \d+\)|PID \d+", lambda match: re.sub(r"\d+", "4242", match[0]), text)
    text = re.sub(r"(\d\d:\d\d:\d\d)[.,]\d+", r"\1", re.sub(r"\d{4}-\d\d-\d\d[ _T]\d\d:\d\d:\d\d", "2026-11-25 10:00:00", text))
    text = re.sub(r"\[([WE])\d{3,4} \d\d:\d\d:\d\d(?: \d+)?", r"[\g<1>1125 10:00:00", text)
    text = re.sub(r"127\.0\.0\.1\]:\d+", "127.0.0.1]:4711", text)
    lines = [
        line for line in text.splitlines() if not re.search(r"^(?:\[\w+\]:\s*)?\s*(?:frame #\d+|Exception raised from)", line)
    ]
    return "\n".join(lines).strip() + "\n"


if __name__ == "__main__":
    for name in sys.argv[1:] or RUNS:
        (LOGS / f"{name}.log").write_text(log_of(name))
        print(name, flush=True)
