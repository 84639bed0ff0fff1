"""Does a small net give the same numbers on all ranks as on one?"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from widefield.diagnosis.finding import Facts, Finding, State
from widefield.diagnosis.place import Surroundings
from widefield.models.resnet import build
from widefield.verification.training import compare_training

ORDER, TITLE, MESSAGES = 80, "parity", True
PER_COPY = 2


def look(surroundings: Surroundings) -> dict[str, Any]:
    """Three steps of a small residual network under the ranks' plan and on one device, in float64: `widefield verify`."""
    mesh = surroundings.mesh
    if mesh is None or mesh.size == 1:
        return {"rows": 0}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        model = build(3, 4, widths=[4, 8], blocks=1)
    verdict = compare_training(model, (PER_COPY * mesh.copies, 3, 12, 12), mesh)
    worst = max(verdict.rows, key=lambda row: row.error, default=None)
    return {
        "rows": len(verdict.rows), "ok": verdict.ok, "refusal": verdict.refusal or "", "plan": str(mesh.plan),
        "worst": "" if worst is None else f"{worst.kind} {worst.name}", "error": 0.0 if worst is None else worst.error,
    }  # fmt: skip


def judge(facts: Sequence[Facts]) -> Finding:
    first = facts[0]
    if first.get("refusal"):
        return Finding(
            "warn",
            f"the plan refuses the net that is compared: {first['refusal']}",
            "widefield verify MODEL --plan compares another",
        )
    if not first["rows"]:
        return Finding("not here", "one rank is one device")
    figure = f"{first['rows']} tensors of 3 steps under {first['plan']}, largest difference {first['error']:.1e}"
    if not first["ok"]:
        return Finding("bad", f"{figure} ({first['worst']})", REMEDY)
    return Finding("ok", figure)


REMEDY = (
    "ranks compute other numbers than one device. See whether versions, code and environment differ above; a GPU that "
    "computes wrongly shows on its host alone: run doctor there with one host less, and nvidia-smi -q -d ECC"
)

_ONE = {"rank": 0, "host": "n1", "rows": 61, "ok": True, "refusal": "", "plan": "replicate=2", "worst": "loss", "error": 3e-16}

CASES: list[tuple[list[Facts], State, str]] = [
    ([_ONE], "ok", "61 tensors of 3 steps under replicate=2, largest difference 3.0e-16"),
    ([{**_ONE, "ok": False, "error": 0.5, "worst": "gradient step 0: stem"}], "bad", "5.0e-01 (gradient step 0: stem)"),
    ([{**_ONE, "rows": 0}], "not here", "one rank"),
    ([{**_ONE, "refusal": "no stages"}], "warn", "no stages"),
]
