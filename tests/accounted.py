"""Which images did each step of a run learn from, on whichever ranks and after however many starts?

A recipe with `data.name=accounted:open_dataset` trains on the digits, and its ranks write the numbers of the images of every
step into the folder that ACCOUNTED names.  `problems_of` compares them with the order of the epochs.
"""

from __future__ import annotations

import json
import os
import time
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

from widefield.config import DataConfig
from widefield.data import Dataset
from widefield.data.formats import digits
from widefield.data.order import Steps, order_of
from widefield.training.loop import Learner

FOLDER = "ACCOUNTED"
SAMPLES = 1437
_learn = Learner.learn


def open_dataset(config: DataConfig) -> Dataset:
    Learner.learn = _noting  # type: ignore[method-assign]
    return digits.open_dataset(config)


def _noting(self: Learner, passes: list[Any], *, stop: bool) -> tuple[float, bool]:
    found = _learn(self, passes, stop=stop)
    if self.mesh.is_first_of_copy:
        index = [int(number) for batch in passes if not batch.idle for number in batch.index[: batch.samples]]
        start = (
            os.environ.get("ACCOUNTED_START")
            or f"{os.environ.get('TORCHELASTIC_RUN_ID', os.getpid())}/{os.environ.get('TORCHELASTIC_RESTART_COUNT', 0)}"
        )
        line = json.dumps({"start": start, "time": time.time(), "step": self.step, "index": index})
        with (Path(os.environ[FOLDER]) / f"{os.getpid()}.jsonl").open("a") as file:
            file.write(line + "\n")
    return found


def problems_of(folder: Path, *, steps: int, batch: int, seed: int = 0) -> list[str]:
    """Of every step that was not learned, by the start that did it last, from exactly its images, a sentence."""
    starts: dict[str, dict[int, list[int]]] = defaultdict(lambda: defaultdict(list))
    began: dict[str, float] = {}
    for place in folder.glob("*.jsonl"):
        for line in map(json.loads, place.read_text().splitlines()):
            starts[line["start"]][line["step"]] += line["index"]
            began[line["start"]] = min(line["time"], began.get(line["start"], line["time"]))
    last: dict[int, list[int]] = {}
    for start in sorted(starts, key=began.__getitem__):
        last.update(starts[start])
    problems, arithmetic = [], Steps(SAMPLES, batch)
    for step in range(steps):
        order = order_of(seed, arithmetic.epoch_of(step), SAMPLES)
        positions = arithmetic.positions(step)
        wanted, seen = Counter(order[positions.start : positions.stop].tolist()), Counter(last.get(step + 1, []))
        if wanted != seen:
            lost, extra = sorted((wanted - seen).elements()), sorted((seen - wanted).elements())
            problems.append(f"step {step + 1}: lost {lost[:5]}, extra {extra[:5]}")
    return problems
