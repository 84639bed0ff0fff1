"""Why a plan won, why the others lost, and what would change the choice, in sentences made of the estimates' own figures."""

from __future__ import annotations

from collections import Counter

from widefield.planner.search.estimate import EQUAL, SAFETY, PlanEstimate, best_of_kinds
from widefield.planner.search.search import SearchResult
from widefield.quantity import bytes_text, count_of

MOST_SLOWER, MOST_TOO_LARGE, MOST_IMPOSSIBLE = 6, 4, 2


def verdict(found: SearchResult, device: str) -> str:
    """The choice in a sentence, or what is missing where nothing fits."""
    best = found.best
    if best is None:
        return nothing_fits(found, device)
    efficiency = "" if best.efficiency is None else f", {100 * best.efficiency:.0f} % of what {device} does alone"
    return (
        f"{best.name}: {seconds_text(best.seconds)} a step, {best.images_per_second:,.4g} images/s on "
        f"{count_of(found.ranks, 'device')}{efficiency}; {bytes_text(best.peak_memory_bytes)} of "
        f"{bytes_text(best.memory_bytes)} on the fullest rank"
    )


def nothing_fits(found: SearchResult, device: str) -> str:
    """What the nearest plan lacks; or why every plan was refused."""
    near = found.nearest
    if near is None:
        refused = [estimate for estimate in found.estimates if estimate.state == "refused"]
        if not refused:
            return f"no plan was tried: {_least(found)}"
        return f"no plan can run: {refused[0].name}: {refused[0].reason}"
    fullest = near.fullest
    parts = ", ".join(f"{name} {bytes_text(size)}" for name, size in _largest(fullest.parts))
    tried = f" of the {len(found.estimates)} that were tried" if found.untried else ""
    return (
        f"no plan{tried} fits {count_of(found.ranks, 'device')} with {bytes_text(near.memory_bytes)} each. The nearest is "
        f"{near.name}: its fullest rank ({fullest.role}) takes {bytes_text(fullest.total_bytes)}, with "
        f"{100 * (SAFETY - 1):.0f} % to be safe {bytes_text(near.wanted_bytes)}, so "
        f"{bytes_text(near.missing_bytes)} per device are missing; at its peak, "
        f"{fullest.where or 'in the step'}, it holds {parts}. {_cure(near, device)}"
    )


def _least(found: SearchResult) -> str:
    """What the leanest of the plans that were left out holds at least."""
    if not found.left_out:
        return "there is none for so many devices"
    layout, least = min(found.left_out, key=lambda pair: pair[1])
    return (
        f"even the leanest, {layout}, needs at least {bytes_text(least)} per device, more than each has. Use more devices, a "
        "smaller model, or smaller images"
    )


def _cure(near: PlanEstimate, device: str) -> str:
    """What the user may do, by what fills the memory."""
    largest = _largest(near.fullest.parts)[0][0]
    share = near.wanted_bytes / near.memory_bytes
    if largest in ("weights", "optimizer", "gradients"):
        return f"Weights and states fill it: shard over {share:.1f} times as many devices, or take an optimizer of fewer states"
    if near.layout.copies > 1:
        return "Activations fill it: a smaller batch, smaller images, or more devices for mesh.space"
    return f"Activations of one image fill it: {share:.1f} times as many devices for mesh.space, or smaller images"


def _largest(parts: dict[str, int]) -> list[tuple[str, int]]:
    return sorted(parts.items(), key=lambda part: -part[1])[:3] or [("nothing that was told apart", 0)]


def reasons(found: SearchResult) -> list[str]:
    """Why the others lost, the closest first; each kind of refusal once."""
    best = found.best
    if best is None:
        return [*refusals(found), *_left_out(found), *_untried(found)]
    slower = [why_slower(estimate, best) for estimate in best_of_kinds(found.ranking)[1:]]
    too_large = sorted((e for e in found.estimates if e.state == "too large"), key=lambda e: e.missing_bytes)
    large = best_of_kinds(too_large)
    losers = [*slower[:MOST_SLOWER], *(why_too_large(estimate, best) for estimate in large[:MOST_TOO_LARGE])]
    more = len(found.ranking) - 1 + len(too_large) - len(losers)
    losers += [f"{count_of(more, 'further plan')}, most of them of these kinds, lost too; --json has all"] if more else []
    return [*losers, *refusals(found), *_left_out(found), *_untried(found)]


def why_slower(estimate: PlanEstimate, best: PlanEstimate) -> str:
    ratio = estimate.seconds / best.seconds
    if ratio < 1 + EQUAL:
        more = estimate.peak_memory_bytes - best.peak_memory_bytes
        beside = f"{bytes_text(abs(more))} {'more' if more > 0 else 'less'} memory" if more else "equal memory"
        return f"{estimate.name} is as fast (within {100 * EQUAL:.0f} %), with {beside}"
    text = f"{estimate.name} takes {ratio:.2f} times as long ({seconds_text(estimate.seconds)})"
    grown = {name: took - best.seconds_by.get(name, 0.0) for name, took in estimate.seconds_by.items()}
    name, most = max(grown.items(), key=lambda part: part[1], default=("", 0.0))
    if most > 0:
        text += f": {name} takes {seconds_text(most)} more"
    if estimate.message_bytes > 1.2 * best.message_bytes and "communication" in name:
        text += f", for {bytes_text(estimate.message_bytes)} of messages a rank in place of {bytes_text(best.message_bytes)}"
    return text


def why_too_large(estimate: PlanEstimate, best: PlanEstimate) -> str:
    fullest = estimate.fullest
    name, size = _largest(fullest.parts)[0]
    faster = "would be faster and " if estimate.seconds < best.seconds else ""
    return (
        f"{estimate.name} {faster}does not fit: {bytes_text(estimate.wanted_bytes)} of {bytes_text(estimate.memory_bytes)}, of "
        f"which {name} {bytes_text(size)}"
    )


def refusals(found: SearchResult) -> list[str]:
    """Each reason of a refusal once, with the plans that it met; of kinds of plans that cannot be, an example each."""
    met: dict[str, list[str]] = {}
    for estimate in found.estimates:
        if estimate.state == "refused":
            met.setdefault(estimate.reason, []).append(estimate.name)
    texts = [f"{' and '.join(names[:2])}{f' and {len(names) - 2} more' if len(names) > 2 else ''} cannot run: {reason}"
             for reason, names in met.items()]  # fmt: skip
    impossible = [f"{layout.kind} cannot be combined, as {layout}: {reason}" for layout, reason in found.impossible.values()]
    return [*texts, *impossible[:MOST_IMPOSSIBLE]]


def _left_out(found: SearchResult) -> list[str]:
    if not found.left_out:
        return []
    kinds = Counter(layout.family for layout, _ in found.left_out)
    example, least = min(found.left_out, key=lambda pair: pair[1])
    return [
        f"{count_of(len(found.left_out), 'further plan')} of {count_of(len(kinds), 'kind')} hold at least "
        f"{bytes_text(least)} per rank ({example}) and were not looked at"
    ]


def _untried(found: SearchResult) -> list[str]:
    if not found.untried:
        return []
    return [
        f"the time for the search was over with {count_of(found.untried, 'layout')} waiting, the least likely to win last; "
        "--seconds gives it more"
    ]


def changes(found: SearchResult) -> list[str]:
    """What would change the choice: the least further memory with which a faster plan fits; and how near the second is."""
    best, texts = found.best, []
    faster = [e for e in found.estimates if e.state == "too large" and (best is None or e.seconds < best.seconds)]
    if faster:
        least = min(faster, key=lambda estimate: estimate.missing_bytes)
        gain = "" if best is None else f", {best.seconds / least.seconds:.2f} times as fast"
        texts.append(f"with {bytes_text(least.missing_bytes)} more per device, {least.name} wins{gain}")
        fastest = min(faster, key=lambda estimate: estimate.seconds)
        if fastest is not least:
            times = "" if best is None else f", {best.seconds / fastest.seconds:.2f} times as fast"
            texts.append(f"with {bytes_text(fastest.missing_bytes)} more per device, {fastest.name} wins{times}")
    if best is None:
        return texts
    near = [e for e in found.ranking[1:] if e.low_seconds <= best.high_seconds]
    if near:
        names = ", ".join(estimate.name for estimate in near[:3])
        texts.append(
            f"the times of {names} overlap the best one's within what is uncertain ({seconds_text(best.low_seconds)} to "
            f"{seconds_text(best.high_seconds)}); widefield bench measures them"
        )
    lean = min(found.ranking, key=lambda estimate: estimate.peak_memory_bytes)
    if lean is not best and lean.peak_memory_bytes < 0.9 * best.peak_memory_bytes:
        texts.append(
            f"with {bytes_text(best.memory_bytes - lean.wanted_bytes)} less per device only {lean.name} is left, which takes "
            f"{lean.seconds / best.seconds:.2f} times as long"
        )
    return texts


def seconds_text(seconds: float) -> str:
    """As `1.25 s`, `12.3 ms`, `240 us`."""
    for unit, name in ((1.0, "s"), (1e-3, "ms")):
        if abs(seconds) >= unit:
            return f"{seconds / unit:.3g} {name}"
    return f"{seconds * 1e6:.3g} us"
