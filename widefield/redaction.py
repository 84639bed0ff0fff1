"""Secrets in texts are not for files: passwords in URLs, tokens, and what the environment keeps under such names."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import Any

HIDDEN = "***"
SECRET_NAME = re.compile(r"TOKEN(?!I)|SECRET|PASSW|API_?KEY|ACCESS_?KEY|PRIVATE_?KEY|CREDENTIAL", re.IGNORECASE)
"""In the name of a variable whose value is a secret."""
_KEY = re.compile(
    r"(?:^|[_.-])(?:token|secret|password|passwd|passphrase|api_?key|access_?key|private_?key|credentials?)s?$", re.IGNORECASE
)
_URL = re.compile(r"(\b[a-z][a-z0-9+.-]*://[^\s/:@'\"]*):[^\s/@'\"]+@", re.IGNORECASE)
_SETTING = re.compile(
    r"(\b[\w.-]*(?:token(?!i)|secret|passw(?:or)?d|api_?key|access_?key|private_?key|credentials?)[\w.-]*['\"]?\s*[=:]\s*['\"]?)"
    r"([^\s'\",;&]{4,})",
    re.IGNORECASE,
)
_BEARER = re.compile(r"(\b(?:Bearer|Basic)\s+)[A-Za-z0-9._~+/=-]{8,}")
_KNOWN = re.compile(r"\b(?:hf_|gh[pousr]_|github_pat_|glpat-|sk-|xox[abp]-|AKIA|ASIA)[A-Za-z0-9_-]{12,}")
SHORTEST = 8
"""Characters from which on the value of a variable is looked for: shorter ones are words that texts have."""


def redacted(text: str, environment: Mapping[str, str] | None = None) -> str:
    """`text` with `***` in place of secrets; everything else as it was.

    environment: whose variables with a secret's name are looked for by value; this process's by default.
    """
    for value in _values(os.environ if environment is None else environment):
        text = text.replace(value, HIDDEN)
    text = _URL.sub(rf"\1:{HIDDEN}@", text)
    text = _BEARER.sub(rf"\1{HIDDEN}", text)
    text = _SETTING.sub(rf"\1{HIDDEN}", text)
    return _KNOWN.sub(HIDDEN, text)


def is_secret(name: str) -> bool:
    """Whether a variable or key of that name holds a secret.

    >>> is_secret("HF_TOKEN"), is_secret("data.options.api_key"), is_secret("data.tokens_per_image")
    (True, True, False)
    """
    return bool(_KEY.search(name))


def redacted_tree(values: Any, environment: Mapping[str, str] | None = None) -> Any:
    """Nested dicts and lists, as of a recipe, with `***` in place of what a key of that name holds and of secrets in texts.

    >>> redacted_tree({"api_key": "abc", "path": "s3://me:pass@host/images", "tokens": None}, {})
    {'api_key': '***', 'path': 's3://me:***@host/images', 'tokens': None}
    """
    if isinstance(values, dict):
        return {
            key: HIDDEN if is_secret(str(key)) and value not in (None, "", {}, []) else redacted_tree(value, environment)
            for key, value in values.items()
        }
    if isinstance(values, list):
        return [redacted_tree(value, environment) for value in values]
    return redacted(values, environment) if isinstance(values, str) else values


def _values(environment: Mapping[str, str]) -> list[str]:
    """Secrets, the longest first, since one may hold another."""
    found = {value for name, value in environment.items() if SECRET_NAME.search(name) and _is_one(value)}
    return sorted(found, key=len, reverse=True)


def _is_one(value: str) -> bool:
    """No path, number or plain word: TOKENIZERS_PARALLELISM=false is none."""
    return len(value) >= SHORTEST and not value.startswith("/") and not value.isdigit() and not value.isalpha()
