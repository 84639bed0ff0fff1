"""Do ranks have more threads than there are cores?"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import torch

from widefield.cores import usable_cores
from widefield.diagnosis.finding import Facts, Finding, State, by_host
from widefield.diagnosis.place import Surroundings

ORDER, TITLE, MESSAGES = 56, "cores", False


def look(surroundings: Surroundings) -> dict[str, Any]:
    """cores: that this process may use, which is its own share where the launcher binds ranks to cores."""
    everywhere = os.cpu_count() or 1
    return {
        "cores": usable_cores(), "bound": usable_cores() < everywhere, "threads": torch.get_num_threads(),
        "ranks": surroundings.world.local_size, "workers": surroundings.workers,
    }  # fmt: skip


def judge(facts: Sequence[Facts]) -> Finding:
    def load(one: Facts) -> float:
        return one["threads"] * (1 if one["bound"] else one["ranks"]) / one["cores"]

    host, worst = max(by_host(facts).items(), key=lambda pair: load(pair[1]))
    figure = f"{host}: {worst['ranks']} ranks x {worst['threads']} threads on {worst['cores']} cores"
    if worst["bound"]:
        figure += " that each rank may use"
    if load(worst) > 1 and worst["ranks"] > 1:
        share = max(1, worst["cores"] // worst["ranks"])
        return Finding("warn", figure, f"OMP_NUM_THREADS={share}: threads that share a core wait for each other")
    if worst["bound"] and worst["cores"] < min(2, worst["workers"]):
        return Finding(
            "warn", figure, "a rank and its loader workers share one core: #SBATCH --cpus-per-task, srun --cpu-bind=none"
        )
    return Finding("ok", figure)


_ONE = {"rank": 0, "host": "n1", "cores": 16, "bound": False, "threads": 2, "ranks": 8, "workers": 4}

CASES: list[tuple[list[Facts], State, str]] = [
    ([_ONE], "ok", "n1: 8 ranks x 2 threads on 16 cores"),
    ([{**_ONE, "threads": 16}], "warn", "OMP_NUM_THREADS=2"),
    ([{**_ONE, "cores": 1, "bound": True, "threads": 1}], "warn", "share one core"),
    ([{**_ONE, "threads": 16, "ranks": 1}], "ok", "1 ranks"),
]
