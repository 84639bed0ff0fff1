"""A rank of widefield ended because another had failed."""

from __future__ import annotations

TITLE = "a rank ended because another one had failed, and says which"
KIND = "consequence"
PATTERNS = (r"widefield: rank \d+: rank \d+ (?:failed|lost)",)
CAUSE = "Every rank hears of the first failure, prints it and ends with status 3."
REMEDY = "The rank that it names has the traceback."
SOURCE = "widefield, guide, launching"

CASES: list[tuple[str, str | None]] = [
    ("widefield: rank 0: rank 1 failed: KeyError: 'x' (at net.py:12 in forward)", "rank 1 failed"),
    ("widefield: 2 ranks: as the mesh asks", None),
]
