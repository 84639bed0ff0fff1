"""Files in the cache of Hugging Face, found there and never downloaded."""

from __future__ import annotations

from pathlib import Path

from huggingface_hub import try_to_load_from_cache
from huggingface_hub.constants import HF_HUB_CACHE


def cached_file(repository: str, name: str, *, asked: str, revision: str | None = None) -> Path:
    """The path of a file of a repository.  ValueError: it is not in the cache, with the command that gets it."""
    found = try_to_load_from_cache(repository, name, revision=revision)
    if isinstance(found, str):
        return Path(found)
    at = "" if revision is None else f", revision='{revision}'"
    raise ValueError(
        f"{asked} is {name} of {repository}, which is not in {HF_HUB_CACHE}; get it once, where there is a network: python -c "
        f"\"from huggingface_hub import hf_hub_download as get; get('{repository}', '{name}'{at})\""
    )
