"""The pictures of plan.html: memory bars, memory over a step, timelines, cuts of the image, time against memory, scaling.

Bars, timelines and cuts are drawn as HTML and SVG by hand, so that they are as wide as the page; curves by matplotlib.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

from markupsafe import Markup, escape
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

from widefield.quantity import bytes_text
from widefield.report.plots import FAINT, HEIGHT_IN, INK, SERIES, WIDTH_IN, drawn, style

Tree = dict[str, Any]
GIB = 2**30
PARTS: dict[str, tuple[str, tuple[str, ...]]] = {
    "weights": ("var(--series-1)", ("weights",)),
    "gradients": ("color-mix(in srgb, var(--series-1) 45%, var(--card))", ("gradients",)),
    "optimizer": ("var(--series-3)", ("optimizer",)),
    "activations": ("var(--series-2)", ("activations",)),
    "temporary": ("color-mix(in srgb, var(--series-2) 45%, var(--card))", ("transient", "messages", "inputs", "buffers")),
    "allocator and driver": ("color-mix(in srgb, var(--muted) 55%, var(--card))", ()),
}
"""What is shown of a rank's memory: its colour, and the parts of the record that it stands for."""
PHASES = {
    "forward": "var(--series-1)", "loss": "var(--series-1)", "backward": "var(--series-2)", "optimizer": "var(--series-3)",
    "other": "var(--muted)",
}  # fmt: skip
MOST_BARS, MOST_TILES = 12, 64
WIDTH, LANE, GAP = 1000, 20, 8


def parts_of(rank: Tree) -> dict[str, int]:
    """Bytes by the names of PARTS; they add up to the rank's total."""
    found = {name: sum(rank["parts"].get(part, 0) for part in parts) for name, (_, parts) in PARTS.items()}
    found["allocator and driver"] = max(0, rank["total_bytes"] - sum(found.values()))
    return {name: size for name, size in found.items() if size}


def legend(names: Iterable[str], colours: dict[str, str]) -> Markup:
    items = [f'<li><span class="swatch" style="background: {colours[name]}"></span>{escape(name)}</li>' for name in names]
    return Markup(f'<ul class="legend">{"".join(items)}</ul>')


def memory_bars(plans: Sequence[Tree]) -> Markup:
    """A bar per plan: its fullest rank's memory by parts, and a mark where the device's memory ends."""
    shown = plans[:MOST_BARS]
    limit = max(plan["memory_bytes"] for plan in shown)
    most = max([plan["peak_memory_bytes"] for plan in shown] + [0])
    scale = 1.04 * min(max(most, limit if most > 0.2 * limit else most), 2.5 * limit)
    rows = [_bar(plan, scale, limit) for plan in shown]
    colours = {name: colour for name, (colour, _) in PARTS.items()}
    used = [name for name in PARTS if any(name in parts_of(_fullest(plan)) for plan in shown)]
    return legend(used, colours) + Markup(f'<div class="bars">{"".join(rows)}</div>')


def _fullest(plan: Tree) -> Tree:
    return max(plan["memory"], key=lambda rank: rank["total_bytes"])


def _bar(plan: Tree, scale: float, limit: int) -> str:
    rank = _fullest(plan)
    pieces = "".join(
        f'<i style="width: {100 * size / scale:.3f}%; background: {PARTS[name][0]}" title="{name} {bytes_text(size)}"></i>'
        for name, size in parts_of(rank).items()
    )
    mark = f'<b style="left: {100 * limit / scale:.3f}%"></b>' if limit < scale else ""
    over = "" if plan["state"] == "fits" else " over"
    return (
        f'<div class="bar{over}"><span>{escape(plan["name"])}</span><div>{pieces}{mark}</div>'
        f"<em>{bytes_text(rank['total_bytes'])}</em></div>"
    )


def memory_curve(plan: Tree) -> str | None:
    """SVG of each class of ranks' memory over the events of a step; None where nothing was kept."""
    ranks = [rank for rank in plan["memory"] if len(rank["curve"]) > 1]
    if not ranks:
        return None
    with style():
        figure = Figure(figsize=(WIDTH_IN, HEIGHT_IN))
        axes = figure.subplots()
        for number, rank in enumerate(ranks[:4]):
            x, y = [point[0] for point in rank["curve"]], [point[1] / GIB for point in rank["curve"]]
            axes.plot(x, y, color=SERIES[number], label=rank["role"], drawstyle="steps-post", linewidth=1.4)
            top = max(range(len(y)), key=y.__getitem__)
            axes.plot([x[top]], [y[top]], "o", color=SERIES[number], markersize=4)
        axes.set_ylim(bottom=0)
        axes.margins(x=0)
        axes.set_xlabel("operations of a step, in their order")
        axes.set_ylabel("GiB")
        if len(ranks) > 1:
            figure.legend(loc="outside upper left", frameon=False, ncols=2, handlelength=1.0, labelcolor=INK, fontsize=10)
        return drawn(figure, "memory of ranks over a step")


def timeline(plan: Tree) -> Markup | None:
    """SVG of what each recorded rank computes and sends in a step, by phase; None where nothing was kept."""
    spans = plan["timeline"]
    if not spans:
        return None
    end = max(start + seconds for *_, start, seconds in spans)
    ranks = sorted({span[0] for span in spans})
    role = {rank["rank"]: rank["role"] for rank in plan["memory"]}
    parts, y = [], 0
    for rank in ranks:
        parts.append(f'<text x="0" y="{y + 13}">{escape(role.get(rank, f"rank {rank}"))}</text>')
        y += 20
        for lane, kinds in (("computes", ("compute", "data")), ("sends, waits", ("message", "wait"))):
            parts += _drawn_lane([span for span in spans if span[0] == rank and span[1] in kinds], y, end)
            parts.append(f"<title>{lane}</title>")
            y += LANE + 3
        y += GAP
    axis = "".join(
        f'<line x1="{WIDTH * k / 4:.0f}" x2="{WIDTH * k / 4:.0f}" y1="0" y2="{y}" class="grid"/>'
        f'<text x="{WIDTH * k / 4:.0f}" y="{y + 14}" text-anchor="{("start", "middle", "middle", "middle", "end")[k]}" '
        f'class="faint">{1e3 * end * k / 4:.3g} ms</text>'
        for k in range(5)
    )
    return Markup(
        f'<svg role="img" aria-label="timeline of a step" class="drawing" viewBox="0 0 {WIDTH} {y + 20}">{axis}{"".join(parts)}'
        "</svg>"
    )


def _drawn_lane(spans: Sequence[list[Any]], y: int, end: float) -> list[str]:
    """Rectangles of one lane; neighbours of one kind and phase, with less than a pixel between them, are one."""
    merged: list[list[Any]] = []
    for _, kind, name, phase, start, seconds in sorted(spans, key=lambda span: span[4]):
        last = merged[-1] if merged else None
        if last and last[:2] == [kind, phase] and start - last[4] < end / WIDTH:
            last[4] = max(last[4], start + seconds)
        else:
            merged.append([kind, phase, name, start, start + seconds])
    return [
        f'<rect x="{WIDTH * start / end:.2f}" y="{y}" width="{max(0.6, WIDTH * (stop - start) / end):.2f}" height="{LANE}" '
        f'style="fill: {_fill(kind, phase)}"><title>{escape(phase if kind == "compute" else f"{kind}: {name}")}</title></rect>'
        for kind, phase, name, start, stop in merged
    ]


def _fill(kind: str, phase: str) -> str:
    if kind == "compute":
        return PHASES.get(phase, "var(--muted)")
    return "var(--series-4)" if kind == "message" else "color-mix(in srgb, var(--muted) 40%, var(--card))"


def timeline_legend() -> Markup:
    names = {
        "forward": PHASES["forward"], "backward": PHASES["backward"], "optimizer": PHASES["optimizer"],
        "messages": "var(--series-4)", "waiting": "color-mix(in srgb, var(--muted) 40%, var(--card))",
    }  # fmt: skip
    return legend(names, names)


def cut(plan: Tree, image: Sequence[int]) -> tuple[Markup, str] | None:
    """(SVG, caption) of how an image is cut over ranks, of volumes a face; None where images stay whole."""
    space = plan["plan"]["space"]
    pixels = list(image[1:])
    if math.prod(space or [1]) == 1 or max(space) > MOST_TILES:
        return None
    (rows, columns), (high, wide) = _face(space, pixels)
    width = 360.0
    height = max(40.0, min(480.0, width * high / wide))
    lines = [_line(0, height * k / rows, width, height * k / rows) for k in range(1, rows)]
    lines += [_line(width * k / columns, 0, width * k / columns, height) for k in range(1, columns)]
    each = plan["plan"]["channel"] * plan["plan"]["stage"]
    depth = math.prod(space) // (rows * columns)
    names = [
        f'<text x="{width * (column + 0.5) / columns:.1f}" y="{height * (row + 0.5) / rows + 4:.1f}" text-anchor="middle">'
        f"{(row * columns + column) * each}</text>"
        for row in range(rows) for column in range(columns)
    ] if rows * columns <= MOST_TILES and depth == 1 else []  # fmt: skip
    tile = " x ".join(str(-(-length // size)) for length, size in zip(pixels, space, strict=True))
    svg = (
        f'<svg role="img" aria-label="tiles of an image" class="drawing cuts" viewBox="-1 -1 {width + 2:.0f} {height + 2:.0f}">'
        f'<rect x="0" y="0" width="{width:.1f}" height="{height:.1f}" class="whole"/>{"".join(lines)}{"".join(names)}</svg>'
    )
    behind = f", {depth} deep behind each other" if depth > 1 else ""
    numbers = " Numbers are ranks of the first copy." if names else ""
    text = f"{' x '.join(map(str, space))} tiles of {tile} pixels, each with its halo{behind}.{numbers}"
    return Markup(svg), text


def _face(space: Sequence[int], pixels: Sequence[int]) -> tuple[tuple[int, int], tuple[int, int]]:
    """Tiles and pixels along the two dims that are drawn: the last two, or the first and another where those are not cut."""
    if len(space) == 2:
        return (space[0], space[1]), (pixels[0], pixels[1])
    if space[1] * space[2] == 1:
        return (space[0], space[2]), (pixels[0], pixels[2])
    return (space[1], space[2]), (pixels[1], pixels[2])


def _line(x1: float, y1: float, x2: float, y2: float) -> str:
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" class="cutline"/>'


def front(plans: Sequence[Tree]) -> str:
    """SVG of time against memory: the plans that none beats in both are joined."""
    with style():
        figure = Figure(figsize=(WIDTH_IN, HEIGHT_IN))
        axes = figure.subplots()
        x, y = [plan["peak_memory_bytes"] / GIB for plan in plans], [1e3 * plan["seconds"] for plan in plans]
        best = sorted(_undominated(list(zip(x, y, strict=True))))
        axes.plot(*zip(*best, strict=True), color=SERIES[0], linewidth=1.2, drawstyle="steps-post")
        for plan, a, b in zip(plans, x, y, strict=True):
            fits = plan["state"] == "fits"
            filled = {"color": SERIES[0] if fits else SERIES[1]}
            axes.plot([a], [b], "o" if fits else "x", markersize=6, **filled)
        limit = plans[0]["memory_bytes"] / GIB
        if limit < 3 * max(x):
            axes.axvline(limit, color=FAINT, linewidth=1.0, linestyle=(0, (4, 3)))
            axes.annotate("memory of a device", (limit, 1), xycoords=("data", "axes fraction"), xytext=(-4, -4), ha="right",
                          va="top", textcoords="offset points", fontsize=9, color=FAINT, rotation=90)  # fmt: skip
        for axis, values in ((axes.xaxis, x), (axes.yaxis, y)):
            _scaled(axis, [*values, limit] if values is x and limit < 3 * max(x) else values)
        axes.set_xlabel("GiB on the fullest rank")
        axes.set_ylabel("ms per step")
        return drawn(figure, "time of a step against memory")


def _scaled(axis: Any, values: Sequence[float]) -> None:
    """Logarithmic where values span more than a factor of 10."""
    if min(values) > 0 and max(values) > 10 * min(values):
        axis.axes.set_xscale("log") if axis.axis_name == "x" else axis.axes.set_yscale("log")
        axis.set_major_locator(LogLocator(subs=(1, 3)))
        axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,g}"))
        axis.set_minor_locator(NullLocator())
    else:
        (axis.axes.set_xlim if axis.axis_name == "x" else axis.axes.set_ylim)(0, 1.12 * max(values))


def _undominated(points: list[tuple[float, float]]) -> list[tuple[float, float]]:
    return [
        (x, y) for x, y in points if not any(a <= x and b <= y and (a, b) != (x, y) for a, b in points)
    ]  # fmt: skip


def scaling(points: Sequence[Tree]) -> str:
    """SVG of the efficiency on more and more devices."""
    with style():
        figure = Figure(figsize=(WIDTH_IN, HEIGHT_IN))
        axes = figure.subplots()
        x, y = [point["devices"] for point in points], [100 * point["efficiency"] for point in points]
        axes.plot(x, y, color=SERIES[0], marker="o", markersize=4)
        apart = [a for a, after in zip(x, [*x[1:], 4 * x[-1]], strict=True) if after >= 3 * a]  # others lie over each other
        for a, b in zip(x, y, strict=True):
            if a in apart:
                axes.annotate(
                    f"{b:.0f} %", (a, b), xytext=(0, 7), textcoords="offset points", ha="center", fontsize=9, color=INK
                )
        axes.set_xscale("log", base=2)
        axes.set_xticks(apart, [f"{devices:,}" for devices in apart])
        axes.xaxis.set_minor_locator(NullLocator())
        axes.set_ylim(0, max(115.0, 1.12 * max(y)))
        axes.margins(x=0.08)
        axes.set_xlabel("devices, with the same samples for each")
        axes.set_ylabel("efficiency, %")
        return drawn(figure, "efficiency on more devices")
