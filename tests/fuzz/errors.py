"""What exceptions on ranks say of a program: a refusal in words, or a finding."""

from __future__ import annotations

import re
import traceback
from dataclasses import dataclass

SAID = ("do not call the same layers", "came once more after it was sent")
"""Words of refusals that come when a pass is under way."""
TOO_FEW = "a copy has fewer samples than the program names"


@dataclass(frozen=True)
class Finding:
    kind: str
    """differs, crashes, hangs, refuses without words, refuses on some ranks."""
    text: str


@dataclass(frozen=True)
class Refusal:
    text: str


Verdict = Finding | Refusal | None


def verdict_of_errors(errors: list[tuple[BaseException, str] | None]) -> Verdict:
    """What exceptions on ranks are: None where there are none."""
    raised = [error for error in errors if error is not None]
    if not raised:
        return None
    stuck = [text for error, text in raised if type(error).__name__ in ("Stuck", "Mismatch")]
    words = [(error, text) for error, text in raised if is_refusal(error)]
    if len(words) == len(errors):
        return Refusal(str(words[0][0]))
    others = [
        (error, text) for error, text in raised if not is_refusal(error) and type(error).__name__ not in ("Stuck", "Mismatch")
    ]
    if others and all(has_too_few_samples(error) for error, _ in others):
        return Refusal(TOO_FEW)
    if others:
        return Finding("crashes", last_of(others[0][1]))
    if words:
        return Finding("refuses on some ranks", last_of(words[0][1]))
    return Finding("hangs", last_of(stuck[0]))


def has_too_few_samples(error: BaseException) -> bool:
    """Whether the program itself asks for more samples than this copy's share of the batch has."""
    of_torch = isinstance(error, IndexError) or "torch.gradient expected each dimension size" in str(error)
    return of_torch and "<program>" in traceback.extract_tb(error.__traceback__)[-1].filename


def is_refusal(error: BaseException) -> bool:
    """Whether it is raised by widefield, on purpose, in words."""
    if any(words in str(error) for words in SAID):
        return True
    if not isinstance(error, (NotImplementedError, ValueError, TypeError)) or len(str(error)) < 40:
        return False
    last = traceback.extract_tb(error.__traceback__)[-1]
    return "/widefield/" in last.filename and (last.line or "").startswith(("raise", 'f"', '"'))


def last_of(text: str, frames: int = 4) -> str:
    """The last calls of a traceback, what was raised first."""
    lines = [line for line in text.strip().splitlines() if line.strip(" ^~")]
    at = max((n for n, line in enumerate(lines) if line.startswith("  File")), default=0) + 2
    return "\n".join([*lines[at:][:6], *lines[max(0, at - 2 * frames) : at]])


def pattern(text: str) -> str:
    """A refusal or a finding without its numbers and names, to count by."""
    return re.sub(r"\[[\d, ]*\]|\d+(\.\d+)?(e-?\d+)?|'[^']*'", "#", text)[:110]
