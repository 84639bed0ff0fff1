"""The step waits for data."""

from __future__ import annotations

from widefield.diagnosis.evidence import Evidence, Sighting

TITLE = "most of the time goes into waiting for data"
KIND = "notice"
CAUSE = "The GPUs are idle while images are read and decoded: more of them, or half precision, make nothing faster."
REMEDY = (
    "More workers (data.workers), smaller or pre-decoded files, or images cut to size beforehand. widefield bench RECIPE "
    "--trap measures what workers change."
)
WRONG = {
    "more GPUs": "they wait as well",
    "bfloat16": "the part that computes is not the one that takes the time",
}
SOURCE = "tczhangzhi/pytorch-distributed: its table measures 2 and 8 decoding processes"


HALF = 50.0
"""Per cent of a step's time, from which on it is told."""


def find(evidence: Evidence) -> Sighting | None:
    """The record's last 200 steps, or the last line that a run printed."""
    steps = [row for row in evidence.record if row.get("kind") == "step"][-200:]
    if len(steps) >= 20:
        seconds = sum(float(row["seconds"]) for row in steps)
        share = 100 * sum(float(row["data_seconds"]) for row in steps) / max(seconds, 1e-9)
        line = next(file.line_at(0) for file in evidence.files if file.name.endswith("record.jsonl"))
        told = f"Of the last {len(steps)} steps {share:.0f} % were waiting for data."
        return Sighting(line, {}, told) if share > HALF else None
    printed = list(evidence.all(r"img/s\s+data (?P<share>[\d.]+) %"))
    return printed[-1] if printed and float(printed[-1].groups["share"]) > HALF else None


CASES: list[tuple[str, str | None]] = [
    (
        "step 10/90  ep 0.41  loss 0.3  812 img/s  data 71.4 %  lr 0.1\n"
        "step 20/90  ep 0.81  loss 0.2  810 img/s  data 68.0 %  lr 0.1",
        "data 68.0 %",
    ),
    (
        "step 10/90  ep 0.41  loss 0.3  812 img/s  data 71.4 %  lr 0.1\n"
        "step 20/90  ep 0.81  loss 0.2  810 img/s  data 1.0 %  lr 0.1",
        None,
    ),
]
