"""Bar charts as SVG, whose colours the page sets (see plots)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from widefield.report.plots import INK, SERIES, WIDTH_IN, drawn, style

ROW_IN = 0.30
MOST_LETTERS = 24


def bars(
    names: Sequence[str],
    series: Mapping[str, Sequence[float]],
    *,
    label: str,
    text: Callable[[float], str],
    stacked: bool = False,
) -> str:
    """An SVG with a horizontal bar per name, the first on top; several series side by side, or stacked.

    label: of the axis, with the unit.  text: formats the value at a bar's end; of stacked bars, the sum.
    """
    count = 1 if stacked else len(series)
    thick = 0.78 / count
    with style():
        figure = Figure(figsize=(WIDTH_IN, 0.75 + ROW_IN * len(names) * (1 + 0.45 * (count - 1)) + 0.25 * (len(series) > 1)))
        axes = figure.subplots()
        ends = [0.0] * len(names)
        for number, (name, values) in enumerate(series.items()):
            places = [place + (0 if stacked else (number - (count - 1) / 2) * thick) for place in range(len(names))]
            axes.barh(places, values, left=ends if stacked else None, height=0.9 * thick, color=SERIES[number], label=name)
            ends = [end + value for end, value in zip(ends, values, strict=True)] if stacked else list(values)
            if not stacked or number == len(series) - 1:
                for place, end in zip(places, ends, strict=True):
                    axes.annotate(text(end), (end, place), xytext=(4, 0), textcoords="offset points", va="center", fontsize=9)
        axes.set_yticks(range(len(names)), [_short(name) for name in names])
        axes.tick_params(axis="y", labelcolor=INK, labelsize=9.5)
        axes.set_ylim(len(names) - 0.45, -0.55)
        top = max([1e-12, *(max(values) for values in series.values()), *(ends if stacked else [])])
        axes.set_xlim(0, 1.22 * top)
        axes.xaxis.set_major_locator(MaxNLocator(nbins=5))
        axes.set_xlabel(label)
        axes.grid(axis="y", visible=False)
        if len(series) > 1:
            figure.legend(loc="outside upper left", frameon=False, ncols=3, handlelength=1.0, labelcolor=INK, fontsize=10)
        return drawn(figure, label)


def _short(name: str) -> str:
    return name if len(name) <= MOST_LETTERS else name[: MOST_LETTERS - 1] + "…"
