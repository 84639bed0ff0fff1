"""From an answer of the planner to plan.json and plan.html.  Equal answers give equal bytes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from markupsafe import Markup

from widefield.installed import version_of
from widefield.quantity import bytes_text, count_of
from widefield.report import plan_pictures as pictures
from widefield.report.filling import from_files, render
from widefield.report.plan_words import HEAD, Tree, best_of_kinds, cells, headline, priced
from widefield.training.disk import replace_text
from widefield.training.terminal import rate_text

MOST_TABLED, MOST_POINTS = 24, 200


def write_plan(folder: Path, tree: Tree) -> Path:
    """Write plan.json and plan.html into a folder, which is made; returns the page's path.

    tree: of PlanAnswer.to_tree.  ValueError: the folder is a run's, or cannot be written.
    """
    if (folder / "config.yaml").exists():
        raise ValueError(f"{folder} is a run folder (it has config.yaml); name another --out")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        replace_text(folder / "plan.json", json.dumps(tree, indent=1) + "\n")
    except OSError as error:
        raise ValueError(f"{folder} cannot be written ({error}); name another --out") from None
    return write_plan_page(folder)


def write_plan_page(folder: Path) -> Path:
    """Write plan.html from the plan.json of a folder.  ValueError: it is missing or damaged."""
    path = folder / "plan.json"
    if not path.is_file():
        raise ValueError(f"{folder} has no plan.json; name the --out folder of a `widefield plan`")
    try:
        tree = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is damaged ({error}); run `widefield plan` again") from None
    replace_text(folder / "plan.html", from_files(lambda: page(tree), folder))
    return folder / "plan.html"


def page(tree: Tree) -> str:
    plans, best = priced(tree), tree["best"]
    kinds = best_of_kinds(plans)
    shown = best or (plans[0] if plans else None)
    return render(
        "plan.html",
        title=f"{tree['model']} on {tree['cluster']['text']}",
        headline=headline(tree),
        state="complete" if best else "failed",
        state_words="it fits" if best else "it does not fit",
        verdict=tree["verdict"],
        cards=_cards(tree, shown) if shown else [],
        head=HEAD,
        rows=[(plan["state"] == "fits", cells(plan)) for plan in kinds[:MOST_TABLED]],
        further=len(plans) - len(kinds[:MOST_TABLED]),
        bars=pictures.memory_bars(kinds) if plans else None,
        figures=_figures(tree, plans, shown),
        timeline=pictures.timeline(shown) if shown else None,
        timeline_legend=pictures.timeline_legend(),
        parts=_seconds_by(shown) if shown else [],
        ranks=_ranks(shown) if shown else [],
        reasons=tree["reasons"],
        changes=tree["changes"],
        answers=[(answer["question"], answer["text"]) for answer in tree["answers"]],
        advice=tree["advice"],
        doubts=_doubts(shown) if shown else [],
        scaling=_scaling_rows(tree["scaling"]),
        stops=tree["stops"],
        overrides=" ".join(best["overrides"]) if best else "",
        planning=f"{count_of(tree['emulations'], 'rank')} emulated in {tree['planning_seconds']:.0f} s",
        version=version_of("widefield", otherwise=""),
    )


def _cards(tree: Tree, plan: Tree) -> list[dict[str, str]]:
    spread = f"{1e3 * plan['seconds_low']:,.3g} to {1e3 * plan['seconds_high']:,.3g} ms"
    free = plan["memory_bytes"] - plan["peak_memory_bytes"]
    cluster = tree["cluster"]
    efficiency = plan["efficiency"]
    return [
        _card(plan["name"], "plan" if tree["best"] else "nearest plan", f"of {count_of(len(tree['plans']), 'plan')} looked at"),
        _card(f"{1e3 * plan['seconds']:,.4g} ms", "a step", spread),
        _card(rate_text(plan["images_per_second"]), "images per second",
              "" if efficiency is None else f"{100 * efficiency:.0f} % of one device with endless memory, times devices"),
        _card(bytes_text(plan["peak_memory_bytes"]), f"of {bytes_text(plan['memory_bytes'])} on the fullest rank",
              f"{bytes_text(abs(free))} {'free' if free >= 0 else 'missing'}"),
        _card(f"{cluster['ranks']:,}", cluster["device"], _links(cluster)),
        _card(f"{tree['batch']:,}", "images a step", " x ".join(map(str, tree["image"]))),
        _card(bytes_text(plan["message_bytes"]) if plan["message_bytes"] else "none", "messages a step and rank",
              count_of(sum(one["number"] for one in plan["messages"].values()), "message")),
        _card(f"{plan['flops'] / 1e12:,.4g} TFLOP", "a step and rank", tree["precision"]),
    ]  # fmt: skip


def _links(cluster: Tree) -> str:
    inside = f"{count_of(cluster['nodes'], 'node')}, {cluster['inside']} inside"
    return inside + (f", {cluster['between']} between" if cluster["nodes"] > 1 else "")


def _card(value: str, label: str, detail: str) -> dict[str, str]:
    return {"value": value, "label": label, "detail": detail, "long": "long" if len(value) > 16 else ""}


def _figures(tree: Tree, plans: list[Tree], shown: Tree | None) -> list[dict[str, Any]]:
    """Title, picture and caption of the front, the memory over a step, the cut and the scaling, as far as there are any."""
    figures: list[dict[str, Any]] = []
    if shown is None:
        return figures
    if len(plans) > 1:
        caption = "Each mark is a plan, a cross one that does not fit. No plan is better in both than those on the line."
        figures.append(_figure("Time against memory", pictures.front(plans[:MOST_POINTS]), caption))
    curve = pictures.memory_curve(shown)
    if curve is not None:
        fullest = max(shown["memory"], key=lambda rank: rank["total_bytes"])
        caption = (
            f"{shown['name']}. The peak, {bytes_text(fullest['peak_memory_bytes'])}, is at {fullest['where'] or 'no name'}."
        )
        figures.append(_figure("Memory over a step", curve, caption))
    cut = pictures.cut(shown, tree["image"])
    if cut is not None:
        figures.append(_figure("How an image is cut over ranks", *cut))
    if len(tree["scaling"]) > 1:
        text = tree["stops"]
        figures.append(_figure("More devices", pictures.scaling(tree["scaling"]), f"{text[0].upper()}{text[1:]}. Simulated."))
    return figures


def _figure(title: str, svg: str, caption: str) -> dict[str, Any]:
    return {"title": title, "svg": Markup(svg), "caption": caption}


def _seconds_by(plan: Tree) -> list[tuple[str, str, str]]:
    total = max(plan["seconds"], 1e-12)
    return [(name, f"{1e3 * took:,.4g} ms", f"{100 * took / total:.1f} %") for name, took in plan["seconds_by"].items() if took]


def _ranks(plan: Tree) -> list[tuple[str, str, str, str, str]]:
    """Of each class of ranks: role, how many, allocated, in all, and where the peak is."""
    return [
        (
            rank["role"],
            f"{rank['ranks']:,}",
            bytes_text(rank["peak_memory_bytes"]),
            bytes_text(rank["total_bytes"]),
            rank["where"],
        )
        for rank in plan["memory"]
    ]


def _doubts(plan: Tree) -> list[str]:
    """What the figures take for granted."""
    names = [name.removeprefix("aten.") for name in plan["extrapolated"]]
    measured = [f"Never measured here, so from data sheets: {', '.join(names[:12])}"] if names else []
    return [*measured, *plan["assumed"]]


def _scaling_rows(points: list[Tree]) -> list[list[str]]:
    return [
        [f"{point['devices']:,}", point["plan"], f"{point['samples']:,}", f"{1e3 * point['seconds']:,.4g}",
         rate_text(point["images_per_second"]), f"{100 * point['efficiency']:.0f} %"]
        for point in points
    ]  # fmt: skip
