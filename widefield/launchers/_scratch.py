"""A folder per rank for the files of Python's multiprocessing, which a rank that is killed would leave behind.

Workers that load data hand their tensors over by sockets in such a folder.  A rank removes its own at its end, and the launcher
those of ranks that were killed.
"""

from __future__ import annotations

import atexit
import multiprocessing
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

OURS = "widefield-"
"""How the ids of runs begin whose launcher removes the folders."""
_OWN: list[Path] = []
"""The folder of this process, a rank."""


def use_own_folder(environment: Mapping[str, str]) -> None:
    """Have this rank's multiprocessing, and that of the processes that it starts, use a folder that is removed with it.

    Does nothing where another launcher has started this process.
    """
    run_id, rank = environment.get("TORCHELASTIC_RUN_ID", ""), environment.get("RANK")
    if rank is None or not run_id.startswith(OURS):
        return
    folder = Path(f"{_beginning(run_id)}{rank}")
    try:
        folder.mkdir(exist_ok=True)
    except OSError:
        return  # no room for it: multiprocessing says so itself, if it ever needs a folder
    process: Any = multiprocessing.current_process()
    process._config["tempdir"] = str(folder)  # what multiprocessing.util.get_temp_dir() gives; inherited
    _OWN.append(folder)
    atexit.register(remove_own_folder)


def remove_own_folder() -> None:
    """Remove this rank's folder; for an end that skips what is registered for it, and where no launcher is left."""
    for folder in _OWN:
        shutil.rmtree(folder, ignore_errors=True)


def remove_folders(run_id: str) -> None:
    """Remove the folders of a run's ranks, which have ended."""
    begins = Path(_beginning(run_id))
    for folder in begins.parent.glob(f"{begins.name}*"):
        shutil.rmtree(folder, ignore_errors=True)


def _beginning(run_id: str) -> str:
    """Short, for the path of a socket has at most 107 characters."""
    return f"{tempfile.gettempdir()}/wf-{run_id[-12:]}-"
