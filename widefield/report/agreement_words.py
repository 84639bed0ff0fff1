"""The table and the sentences of `widefield plan --agreement`, from the values of its JSON."""

from __future__ import annotations

from typing import Any

from widefield.quantity import count_of, size_text
from widefield.report.text_table import aligned
from widefield.training.terminal import rate_text

Tree = dict[str, Any]
HEAD = ("agreement", "time to loss", "samples/s", "busy", "staleness", "most", "bytes/step", "distance")


def agreement_headline(tree: Tree) -> str:
    """What is compared: workers, their steps, their link, their stragglers."""
    slow = [f"worker {worker} {factor:g} times" for worker, factor in tree["stragglers"].items()]
    late = f"; slower: {', '.join(slow[:4])}{f' and {len(slow) - 4} more' * (len(slow) > 4)}" if slow else ""
    return (
        f"{tree['model']}, {tree['workers']} workers, {count_of(tree['samples'], 'sample')} and "
        f"{_seconds(tree['step_seconds'])} for each a step; {size_text(tree['model_bytes'])} of weights over a link of "
        f"{_seconds(tree['latency_seconds'])} and {_rate(tree['bytes_per_second'])}{late}"
    )


def agreement_table(tree: Tree) -> str:
    """A row for each way, for a terminal."""
    return "\n".join(aligned([HEAD, *map(_cells, tree["ways"])]))


def _cells(way: Tree) -> list[str]:
    """A row, with the columns of HEAD."""
    if way["loss"] is None:
        reached = "diverged"
    elif way["seconds_to_loss"] is None:
        reached = f"not: {way['loss']:.3f}"
    else:
        reached = _seconds(way["seconds_to_loss"])
    mean, most, distance = way["staleness_mean"], way["staleness_most"], way["distance"]
    name, busy = way["name"] + ("" if way["recipe"] else " *"), f"{100 * way['busy']:.0f} %"
    return [
        name, reached, rate_text(way["samples_per_second"]), busy,
        "–" if mean is None else f"{mean:.3g}", "–" if most is None else f"{most:,}", size_text(way["bytes_per_step"]),
        "–" if distance is None else "0" if distance < 1e-9 else f"{distance:.3g}",
    ]  # fmt: skip


def agreement_sentences(tree: Tree) -> list[str]:
    """What the figures are of, and what they are not."""
    found = [
        f"small problem: the loss of {tree['loss']:g} is that of softmax regression on {tree['problem_samples']:,} of "
        f"scikit-learn's handwritten digits, {count_of(tree['problem_batch'], 'sample')} a worker's step, by plain SGD at one "
        f"rate for all ways, seed {tree['seed']}. It is a small problem and not the recipe's model, for which the order of the "
        "ways, and times to a loss, may be others",
        "numbers: mean and synchronous compute what one device computes; the others give that up, and nothing here says how "
        "much accuracy your model would keep by them",
        f"times: virtual ones, of {tree['steps']} steps of all workers or more. A step takes the recipe's seconds, a message "
        "its bytes over the link, without other traffic; bytes/step are of all messages, for each worker's step",
    ]
    if any(way["recipe"] is None for way in tree["ways"]):
        found.append("* in the simulator alone, no recipe asks for it")
    return [*found, *(f"note: {text}" for text in tree["notes"])]


def _seconds(seconds: float) -> str:
    for unit, name in ((1.0, "s"), (1e-3, "ms"), (1e-6, "us")):
        if seconds >= unit:
            return f"{seconds / unit:,.4g} {name}"
    return f"{seconds / 1e-9:,.4g} ns"


def _rate(bytes_per_second: float) -> str:
    return f"{bytes_per_second / 1e9:,.3g} GB/s" if bytes_per_second >= 1e8 else f"{bytes_per_second / 1e6:,.3g} MB/s"
