"""What launchers write jobs from: the command of a run, what is asked of a cluster, and the files and commands that come of it.

A launcher whose file also writes jobs has there, besides what `detect` needs,

- `JOB`: its options, an Allocation.  A field's docstring is `METAVAR: help`; that of a flag is its help alone.
- `HELP`: the text of `widefield launch NAME --help`.
- `write(command, options) -> JobFiles`: the files, and the commands that submit them.  ValueError: the options do not fit.
- `JOBS`: cases, (options, texts that what is written must have, or a part of the error).

A password is neither written into a file nor printed: `refuse_secrets` looks for them in all that goes into one.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from widefield.config.field_types import Positive
from widefield.redaction import is_secret
from widefield.section import Section


@dataclass(frozen=True)
class TrainCommand:
    """`widefield train` with its arguments.

    recipe: a path, or the name of a packaged recipe.  text: of the recipe, where it is a file.  run: the run folder.
    here: the folder in which relative paths are meant.
    """

    recipe: str
    overrides: tuple[str, ...] = ()
    run: Path = Path("runs/0001")
    trust: bool = False
    text: str = ""
    here: Path = Path("/work")

    def arguments(self, *further: str, run: Path | None = None, recipe: str | None = None) -> list[str]:
        """The arguments of `widefield`.  further: overrides behind those of the command.  run, recipe: in place of its own."""
        words = ["train", recipe or self.recipe, *self.overrides, *further, "--run-dir", str(run or self.run)]
        return [*words, *["--trust"] * self.trust]

    @property
    def name(self) -> str:
        """A name for the job: that of the run folder, in lower-case letters, digits and hyphens, as Kubernetes wants it."""
        folder = re.sub(r"[^a-z0-9]+", "-", self.run.name.lower()).strip("-")
        return folder if re.match("[a-z]", folder) else f"widefield-{folder}".rstrip("-")

    @property
    def place(self) -> Path:
        """The folder for the job's files."""
        return self.run / "launch"


class Allocation(Section):
    """The machines of a run."""

    nodes: Positive = 1
    """N: machines (1)"""
    gpus: Positive | None = None
    """N: GPUs of each machine, a rank on each; without it, ranks are on CPUs"""
    ranks_per_node: Positive | None = None
    """N: CPU ranks of each machine (1)"""

    @property
    def per_node(self) -> int:
        """The ranks of each machine.  ValueError: both kinds are asked for."""
        if self.gpus is not None and self.ranks_per_node not in (None, self.gpus):
            raise ValueError(
                f"each of {self.gpus} GPUs gets a rank, and {self.ranks_per_node} ranks per node are asked for; give one "
                "of the two numbers"
            )
        return self.gpus or self.ranks_per_node or 1

    @property
    def ranks(self) -> int:
        return self.nodes * self.per_node

    def variants(self) -> Iterator[tuple[str, ...]]:
        """The overrides of each run that the job starts: one run, and none."""
        yield ()


@dataclass(frozen=True)
class JobFiles:
    """files: by path.  submit: the commands that start the job, one after the other.  notes: what the user should know.

    on_hosts: (host, command) of what runs at the same time until all have ended.  by_hand: (host, line of shell) of what the
    user types there.
    """

    files: dict[Path, str] = field(default_factory=dict)
    submit: tuple[tuple[str, ...], ...] = ()
    notes: tuple[str, ...] = ()
    on_hosts: tuple[tuple[str, tuple[str, ...]], ...] = ()
    by_hand: tuple[tuple[str, str], ...] = ()

    @property
    def programs(self) -> list[str]:
        """The programs that start the job from here."""
        return [words[0] for words in [*self.submit, *(words for _, words in self.on_hosts)]]


def shell(words: Iterable[object]) -> str:
    """Words as one line of a shell."""
    return shlex.join(map(str, words))


_LOGIN = re.compile(r"([a-z][a-z0-9+.-]*://)[^/\s@'\"]*:[^/\s@'\"]*@", re.IGNORECASE)


def without_logins(text: str) -> str:
    """`text`, with the login of every URL in it hidden.

    >>> without_logins("data.path=s3://me:pass@host/images")
    'data.path=s3://***@host/images'
    """
    return _LOGIN.sub(r"\1***@", text)


def refuse_secrets(texts: Iterable[str], *, of: str, are_pairs: bool = False) -> None:
    """ValueError: one of `texts` has a URL with a password, or is KEY=VALUE of a secret.  The error does not show it.

    of: what the texts are, for the error.  are_pairs: they are KEY=VALUE.
    """
    for text in texts:
        shown = without_logins(text)
        name, _, value = text.partition("=")
        if are_pairs and value and is_secret(name):
            shown = f"{name}=***"
        if shown != text:
            line = next(ours for ours, theirs in zip(shown.splitlines(), text.splitlines(), strict=True) if ours != theirs)
            raise ValueError(
                f"{of} would put a secret into a file of the job: {line.strip()}; files are read by others and stay. Give it "
                "in the environment of the job, or in a file of credentials that the library reads there"
            )
