"""The curves of precision by recall of an evaluation of boxes, as a picture for the page."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from widefield.quantity import count_of
from widefield.report.plots import ABOVE, FAINT, HEIGHT_IN, SERIES, WIDTH_IN, drawn, style


def precision_curve(evaluation: Mapping[str, Any] | None) -> tuple[str, str] | None:
    """(SVG, caption) of each class thin, the mean of all thick, and the best and the worst named; None without curves.

    A curve has the highest precision at each recall or more, at IoU 0.5, as COCO's average precision has it.
    """
    rows = ((evaluation or {}).get("curves") or {}).get("precision_by_recall") or []
    precision = np.array(rows, dtype=float)
    if evaluation is None or precision.ndim != 2 or len(precision) != len(evaluation["classes"]):
        return None
    there = np.flatnonzero(np.isfinite(precision).any(1))
    if not len(there):
        return None
    names, means = evaluation["classes"], precision[there].mean(1)
    best, worst = there[means.argmax()], there[means.argmin()]
    recall = np.linspace(0, 1, precision.shape[1])
    with style():
        figure = Figure(figsize=(WIDTH_IN, HEIGHT_IN))
        axes = figure.subplots()
        for number in there:
            axes.plot(recall, precision[number], color=FAINT, linewidth=0.7, alpha=0.5)
        if best != worst:
            axes.plot(recall, precision[best], color=SERIES[1], linewidth=1.2, label=f"best: {names[best]}")
            axes.plot(recall, precision[worst], color=SERIES[2], linewidth=1.2, label=f"worst: {names[worst]}")
        axes.plot(recall, precision[there].mean(0), color=SERIES[0], label="mean")
        axes.set(xlabel="recall", ylabel="precision", xlim=(0, 1), ylim=(0, 1.02))
        axes.legend(**ABOVE, handlelength=1.2)
        svg = drawn(figure, "precision by recall")
    count = f"{len(there):,} of {len(names):,} classes" if len(there) < len(names) else count_of(len(names), "class", "classes")
    return svg, f"At IoU 0.5: {count}, thin, and their mean. The area under a curve is the class's average precision there."
