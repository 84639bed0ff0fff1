"""Is the code the same on all hosts, and the recipe?"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from widefield.diagnosis.finding import Facts, Finding, State, differing
from widefield.diagnosis.place import Surroundings

ORDER, TITLE, MESSAGES = 22, "same code", False


def look(surroundings: Surroundings) -> dict[str, Any]:
    package = Path(__file__).parents[2]
    own = [] if surroundings.recipe is None else sorted(surroundings.recipe.parent.glob("*.py"))
    recipe = [] if surroundings.recipe is None else [surroundings.recipe]
    return {
        "widefield": _hash(sorted(package.rglob("*.py")), package),
        "recipe": _hash(recipe, Path()),
        "own code": _hash(own, Path()),
        "files": len(own),
    }


def _hash(paths: Iterable[Path], below: Path) -> str:
    digest = hashlib.sha256()
    for path in paths:
        digest.update(path.relative_to(below).as_posix().encode() if below != Path() else path.name.encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()[:12]


def judge(facts: Sequence[Facts]) -> Finding:
    other = [f"{name} ({told})" for name in ("widefield", "recipe", "own code") if (told := differing(facts, name))]
    if other:
        return Finding(
            "bad", f"differs between hosts: {'; '.join(other)}", "copy the same files to all hosts, or share the folder"
        )
    more = f", and {facts[0]['files']} files beside the recipe" if facts[0]["files"] else ""
    return Finding("ok", f"widefield {facts[0]['widefield']}{more}")


_ONE = {"rank": 0, "host": "n1", "widefield": "a1", "recipe": "b2", "own code": "c3", "files": 2}

CASES: list[tuple[list[Facts], State, str]] = [
    ([_ONE, {**_ONE, "rank": 1, "host": "n2"}], "ok", "widefield a1, and 2 files"),
    ([_ONE, {**_ONE, "rank": 1, "host": "n2", "own code": "d4"}], "bad", "own code (n1: c3; n2: d4)"),
]
