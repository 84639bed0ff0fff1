"""predictions.csv and predictions.json: the answers for all images in a folder of predictions."""

from __future__ import annotations

import csv
import io
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from widefield.data import Labels
from widefield.prediction.journal import TABLES, Done
from widefield.training.disk import replace_text

SURE = 0.5
"""Where an image may have several classes, those above this probability are named."""


def write_tables(
    folder: Path, done: Sequence[Done], about: Mapping[str, Any], *, labels: Labels, classes: Sequence[str]
) -> Path:
    """Write both files; returns the path of the CSV.  OSError: the disk refuses one."""
    rows = [_row(line, labels, classes) for line in done]
    columns = list(dict.fromkeys(key for row in rows for key in row)) or ["input"]
    text = io.StringIO()
    writer = csv.DictWriter(text, columns, lineterminator="\n", restval="")
    writer.writeheader()
    writer.writerows(rows)
    csv_name, json_name = TABLES
    replace_text(folder / csv_name, text.getvalue())
    predictions = [{"input": line["input"], **line["answer"]} for line in done]
    tree = {**about, "labels": labels, "classes": list(classes), "predictions": predictions}
    replace_text(folder / json_name, json.dumps(tree, indent=1) + "\n")
    return folder / csv_name


def _row(line: Done, labels: Labels, classes: Sequence[str]) -> dict[str, Any]:
    answer, row = line["answer"], {"input": line["input"]}
    named = dict(zip(answer["classes"], answer.get("probabilities") or [], strict=False))
    if labels == "class":
        for number, (name, share) in enumerate(named.items(), start=1):
            row |= {f"class_{number}" if number > 1 else "class": name}
            row |= {f"probability_{number}" if number > 1 else "probability": f"{share:.6g}"}
    elif labels == "classes":
        row |= {"classes": " | ".join(name for name, share in named.items() if share > SURE)}
        row |= {name: f"{named[name]:.6g}" for name in classes if name in named}
    elif labels == "values":
        row |= {name: f"{value:.9g}" for name, value in zip(answer["classes"], answer["values"], strict=True)}
    elif labels == "boxes":
        counted = Counter(answer["classes"])
        row |= {"boxes": len(answer["classes"]), "file": answer.get("labels", "")}
        row |= {name: counted[name] for name in classes}
    elif labels == "image":
        row |= {"image": answer.get("labels", "")}
    else:
        row |= {"labels": answer.get("labels", "")}
        row |= {f"share of {name}": f"{named[name]:.6g}" for name in classes if name in named}
    return row
