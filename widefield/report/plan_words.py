"""The table and the sentences of `widefield plan`, from the values of plan.json."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from widefield.quantity import bytes_text, count_of
from widefield.report.text_table import aligned
from widefield.training.terminal import rate_text

Tree = dict[str, Any]
HEAD = ("plan", "memory", "of", "ms/step", "img/s", "efficiency", "messages")
MOST_ROWS = 8


def table_rows(tree: Tree, most: int = MOST_ROWS) -> list[list[str]]:
    """The best plan of each kind, those that fit first; without those that were refused."""
    return [cells(plan) for plan in best_of_kinds(priced(tree))[:most]]


def best_of_kinds(plans: Sequence[Tree]) -> list[Tree]:
    """The first of each kind, in their order."""
    first: dict[str, Tree] = {}
    for plan in plans:
        first.setdefault(plan["kind"], plan)
    return list(first.values())


def priced(tree: Tree) -> list[Tree]:
    return [plan for plan in tree["plans"] if plan["state"] != "refused"]


def cells(plan: Tree) -> list[str]:
    """A plan's row of the table, with the columns of HEAD."""
    efficiency = plan["efficiency"]
    spread = 100 * (plan["seconds_high"] - plan["seconds_low"]) / 2 / max(plan["seconds"], 1e-12)
    return [
        plan["name"] + ("" if plan["state"] == "fits" else " (does not fit)"), bytes_text(plan["peak_memory_bytes"]),
        bytes_text(plan["memory_bytes"]), f"{1e3 * plan['seconds']:,.4g} ±{spread:.0f} %", rate_text(plan["images_per_second"]),
        "–" if efficiency is None else f"{100 * efficiency:.0f} %",
        bytes_text(plan["message_bytes"]) if plan["message_bytes"] else "–",
    ]  # fmt: skip


def table_text(tree: Tree, most: int = MOST_ROWS) -> str:
    """The table for a terminal."""
    return "\n".join(aligned([HEAD, *table_rows(tree, most)]))


def headline(tree: Tree) -> str:
    cluster = tree["cluster"]
    image = " x ".join(map(str, tree["image"]))
    return (
        f"{tree['model']}, images of {image}, {count_of(tree['batch'], 'image')} a step in {tree['precision']}, on "
        f"{cluster['text']}: {count_of(cluster['ranks'], 'device')} with {bytes_text(cluster['memory_bytes'])} each"
    )


def sentences(tree: Tree) -> list[str]:
    """What is printed below the table: the choice, why others lost, what would change it, scaling, answers, advice."""
    texts = [("plan", tree["verdict"])]
    texts += [("why", text) for text in tree["reasons"]]
    texts += [("else", text) for text in tree["changes"]]
    texts += [("scaling", tree["stops"])] if tree["stops"] else []
    texts += [(answer["question"], answer["text"]) for answer in tree["answers"]]
    texts += [("advice", text) for text in tree["advice"]]
    best = tree["best"] or {}
    if best.get("extrapolated"):
        names = [name.removeprefix("aten.") for name in best["extrapolated"][:4]]
        texts.append(("not measured", f"{', '.join(names)} and so on: from data sheets; widefield plan --calibrate measures"))
    texts += [("taken for granted", text) for text in best.get("assumed", [])]
    return [f"{kind}: {text}" for kind, text in texts]
