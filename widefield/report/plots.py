"""The curves of a run as SVG, whose colours and fonts the page sets.

Equal values give equal text: no dates, and ids from a fixed salt.  Colours are drawn as placeholders and replaced by the
page's CSS variables, so that one picture works in light and in dark mode.
"""

from __future__ import annotations

import io
import math
import re
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import matplotlib
import matplotlib.style
import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, MaxNLocator

WIDTH_IN, HEIGHT_IN = 5.6, 3.1  # 403 x 223 pt: about a phone's width, so that text stays readable where it is not enlarged
INK, FAINT, GRID, SURFACE = "#010101", "#020202", "#030303", "#040404"
SERIES = ("#050505", "#060606", "#070707", "#080808")
_VARIABLE = {
    INK: "--ink", FAINT: "--muted", GRID: "--line", SURFACE: "--card",
    **{colour: f"--series-{number}" for number, colour in enumerate(SERIES, start=1)},
}  # fmt: skip
_STYLE = {
    "svg.fonttype": "none", "figure.facecolor": "none", "axes.facecolor": "none", "font.size": 11, "axes.spines.top": False,
    "axes.spines.right": False, "axes.edgecolor": GRID, "axes.labelcolor": FAINT, "text.color": INK, "xtick.color": FAINT,
    "ytick.color": FAINT, "axes.grid": True, "grid.color": GRID, "grid.linewidth": 0.6, "axes.axisbelow": True,
    "lines.linewidth": 1.8, "lines.solid_capstyle": "round", "lines.solid_joinstyle": "round", "xtick.major.size": 0,
    "ytick.major.size": 0, "xtick.minor.size": 0, "ytick.minor.size": 0, "axes.formatter.useoffset": False,
    "text.parse_math": False, "axes.unicode_minus": True, "figure.constrained_layout.use": True,
}  # fmt: skip
ABOVE: dict[str, Any] = {
    "loc": "lower right", "bbox_to_anchor": (1, 1), "borderaxespad": 0.2, "frameon": False, "ncols": 3, "labelcolor": INK,
}  # fmt: skip
"""A legend above the axes, where it hides no point."""
BINS = 300
"""Curves of more than 2 * BINS points are drawn by the extremes of this many intervals of steps."""


def loss_curve(steps: Sequence[int], losses: Sequence[float]) -> tuple[str, str]:
    """(SVG, caption) of the training loss at every step, with its moving average."""
    x, y = np.asarray(steps, float), np.asarray(losses, float)
    span = smoothing_span(len(y))
    with style():
        figure, axes = _canvas(steps)
        scale = _loss_scale(axes, y)
        if span > 1:
            axes.plot(*thinned(x, y), color=SERIES[0], alpha=0.35, linewidth=0.9)
            axes.plot(*thinned(x, moving_average(y, span)), color=SERIES[0])
        else:
            axes.plot(x, y, color=SERIES[0], marker="o", markersize=3)
        text = f"Each step{f'; thick: mean of {span} steps around' if span > 1 else ''}{scale}."
        return drawn(figure, "training loss by step"), text + _left_out(y)


def evaluation_curve(
    epochs: Sequence[float], metrics: Mapping[str, Sequence[float]], losses: Sequence[float], best: int | None = None
) -> str:
    """SVG of the metrics (above) and of the loss (below) at every evaluation.  best: the number of the one that is marked."""
    marker: dict[str, Any] = {"marker": "o", "markersize": 3.2 if len(epochs) > 1 else 6} if len(epochs) <= 60 else {}
    with style():
        figure = Figure(figsize=(WIDTH_IN, HEIGHT_IN))
        above, below = figure.subplots(2, 1, sharex=True, height_ratios=[3, 2])
        for colour, (name, values) in zip(SERIES[:3], metrics.items(), strict=False):
            above.plot(epochs, values, color=colour, label=name, **marker)
        if metrics:
            above.legend(**ABOVE, handlelength=1.2)
        if _are_of_unlike_size(list(metrics.values())[:3]):
            _log_scale(above, sorted(value for values in list(metrics.values())[:3] for value in values), dense=2)
        below.plot(epochs, losses, color=SERIES[3], **marker)
        _loss_scale(below, np.asarray(losses, float))
        if len(epochs) == 1:
            _name_the_only_point(below, epochs[0], losses)
            _name_the_only_point(above, epochs[0], [values[0] for values in list(metrics.values())[:3]])
        elif best is not None:
            for axes in (above, below):
                axes.axvline(epochs[best], color=FAINT, linewidth=1.0, linestyle=(0, (4, 3)), zorder=0.5)
        below.set_xlabel("epoch")
        below.xaxis.set_major_locator(MaxNLocator(nbins=6, integer=max(epochs) - min(epochs) >= 4))
        below.set_ylabel("loss")
        above.set_ylabel("%" if metrics and all(re.fullmatch(r"top-\d+", name) for name in metrics) else "metric")
        return drawn(figure, "metrics and loss of evaluations by epoch")


def _are_of_unlike_size(curves: Sequence[Sequence[float]]) -> bool:
    """Whether one curve would be flat on another's scale: all numbers are above 0, and some curves 100 times others."""
    if not all(math.isfinite(value) and value > 0 for values in curves for value in values) or len(curves) < 2:
        return False
    sizes = [float(np.median(values)) for values in curves]
    return max(sizes) > 100 * min(sizes)


def _name_the_only_point(axes: Axes, epoch: float, values: Sequence[float]) -> None:
    """Write each value beside its point, since a single point does not show on an axis how large it is."""
    finite = [value for value in values if math.isfinite(value)]
    for number, value in enumerate(sorted(finite)):  # right and left in turn, since close ones would lie over each other
        right = number % 2 == 0
        place: dict[str, Any] = {"xytext": (9 if right else -9, 0), "ha": "left" if right else "right"}
        axes.annotate(f"{value:.4g}", (epoch, value), **place, textcoords="offset points", va="center", color=INK)
    axes.set_xlim(epoch - 1, epoch + 1)
    span = max(finite, default=0.0) - min(finite, default=0.0)
    axes.margins(y=0.3 if span else 0.5)


def rate_curve(steps: Sequence[int], rates: Sequence[float]) -> str:
    """SVG of the learning rate at every step."""
    with style():
        figure, axes = _canvas(steps)
        marker: dict[str, Any] = {"marker": "o", "markersize": 3} if len(steps) < 3 else {}
        axes.plot(*thinned(np.asarray(steps, float), np.asarray(rates, float)), color=SERIES[0], **marker)
        axes.set_ylim(bottom=0)
        return drawn(figure, "learning rate by step")


def distance_curve(steps: Sequence[int], distances: Sequence[float]) -> str:
    """SVG of how far replicas were apart whenever they averaged."""
    with style():
        figure, axes = _canvas(steps)
        marker: dict[str, Any] = {"marker": "o", "markersize": 3} if len(steps) <= 60 else {}
        axes.plot(*thinned(np.asarray(steps, float), np.asarray(distances, float)), color=SERIES[0], **marker)
        axes.set_ylim(bottom=0)
        return drawn(figure, "distance of replicas by step")


def time_curve(steps: Sequence[int], seconds: Sequence[float], data_seconds: Sequence[float]) -> tuple[str, str]:
    """(SVG, caption) of the milliseconds of a step, split into compute and waiting for data."""
    whole = 1e3 * np.asarray(seconds, float)
    x, total, data = (_means(np.asarray(values, float)) for values in (steps, whole, 1e3 * np.asarray(data_seconds, float)))
    parts = {"waiting for data": data, "compute": np.maximum(total - data, 0)}
    with style():
        figure, axes = _canvas(steps)
        axes.set_ylabel("ms per step")
        if len(x) < 3:
            axes.bar(x, parts["waiting for data"], color=SERIES[1], width=0.5, label="waiting for data")
            axes.bar(x, parts["compute"], bottom=data, color=SERIES[0], width=0.5, label="compute")
        else:
            axes.stackplot(x, *parts.values(), colors=SERIES[1::-1], labels=list(parts), alpha=0.85, linewidth=0)
            axes.margins(x=0)
        top = 1.6 * float(np.quantile(total[1:] if len(total) > 1 else total, 0.95)) or 1.0  # the first would squash all others
        axes.set_ylim(0, top)
        axes.legend(**ABOVE, handlelength=1.0)
        return drawn(figure, "time per step, split into compute and waiting for data"), _beyond(steps, whole, top)


def style() -> AbstractContextManager[None]:
    """Our settings over matplotlib's own defaults, so that no matplotlibrc of the user changes the page."""
    return matplotlib.style.context(_STYLE, after_reset=True)


def smoothing_span(count: int) -> int:
    """How many steps the moving average covers: about a twentieth of the run, odd; 1, which is none, below 20 steps."""
    return 1 if count < 20 else max(5, count // 20) | 1


def moving_average(values: np.ndarray, span: int) -> np.ndarray:
    """Mean of the finite ones among `span` (odd) values around each, fewer at the ends; NaN where there is none."""
    finite = np.isfinite(values)
    sums = np.concatenate([[0.0], np.cumsum(np.where(finite, values, 0.0))])
    counts = np.concatenate([[0], np.cumsum(finite)])
    middle = np.arange(len(values))
    start, stop = np.maximum(middle - span // 2, 0), np.minimum(middle + span // 2 + 1, len(values))
    there = counts[stop] - counts[start]
    return np.where(there > 0, (sums[stop] - sums[start]) / np.maximum(there, 1), np.nan)


def thinned(x: np.ndarray, y: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The curve by the lowest and highest point of each of BINS runs; as it is up to 2 * BINS points.  No peak is lost."""
    if len(x) <= 2 * BINS:
        return x, y
    keep: list[int] = []
    for run in np.array_split(np.arange(len(x)), BINS):
        finite = run[np.isfinite(y[run])]
        if len(finite):
            keep += sorted({int(finite[y[finite].argmin()]), int(finite[y[finite].argmax()])})
    return x[keep], y[keep]


def _means(values: np.ndarray) -> np.ndarray:
    if len(values) <= BINS:
        return values
    return np.array([run.mean() for run in np.array_split(values, BINS)])


def _canvas(steps: Sequence[int]) -> tuple[Figure, Axes]:
    figure = Figure(figsize=(WIDTH_IN, HEIGHT_IN))
    axes = figure.subplots()
    axes.set_xlabel("step")
    axes.xaxis.set_major_locator(MaxNLocator(nbins=6, integer=True))
    if len(steps) < 3:  # matplotlib would show a fraction of a step around a single point
        axes.set_xlim(steps[0] - 1, steps[-1] + 1)
    return figure, axes


def _loss_scale(axes: Axes, losses: np.ndarray) -> str:
    """A logarithmic scale where losses span more than a factor of 30, for the end of training hides on a linear one."""
    finite = losses[np.isfinite(losses)]
    if len(finite) and finite.min() > 0 and finite.max() > 30 * finite.min():
        _log_scale(axes, sorted(finite))
        return "; logarithmic scale"
    return ""


def _log_scale(axes: Axes, rising: Sequence[float], *, dense: float = 4) -> None:
    """rising: what is drawn, all above 0.  dense: up to how many decades there is a mark at 3 times each power of 10, too."""
    axes.set_yscale("log")
    decades = math.log10(rising[-1] / rising[0])
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 3) if decades < dense else (1,)))
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.yaxis.set_minor_formatter(lambda value, _: "")


def _left_out(losses: np.ndarray) -> str:
    bad = int((~np.isfinite(losses)).sum())
    return f" {bad} {'step has' if bad == 1 else 'steps have'} a loss that is not finite." if bad else ""


def _beyond(steps: Sequence[int], milliseconds: np.ndarray, top: float) -> str:
    beyond = np.flatnonzero(milliseconds > top)
    if not len(beyond):
        return ""
    subject = f"Step {steps[beyond[0]]:,} reaches" if len(beyond) == 1 else f"{len(beyond):,} steps reach"
    return f" {subject} beyond the picture, the slowest with {milliseconds.max():,.0f} ms."


def drawn(figure: Figure, label: str) -> str:
    """The figure as an `<svg>` element to stand inside HTML: no prolog, sizes, ids or namespaces that the page has itself."""
    text = io.StringIO()
    with matplotlib.rc_context({"svg.hashsalt": label}):
        FigureCanvasSVG(figure).print_svg(text, metadata={"Date": None, "Creator": None, "Format": None, "Type": None})
    svg = text.getvalue()
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>|<style .*?</style>|<!--.*?-->", "", svg, flags=re.DOTALL)
    svg = re.sub(r' xmlns(:xlink)?="[^"]*"| (version|width|height)="[^"]*"(?=[^<>]*viewBox)', "", svg)
    svg = re.sub(r'<g id="[^"]*"', "<g", svg).replace("<svg", f'<svg role="img" aria-label="{label}"', 1)
    svg = re.sub(r" font-family: [^;\"]*;", "", svg)
    return re.sub("|".join(_VARIABLE), lambda match: f"var({_VARIABLE[match[0]]})", svg)
