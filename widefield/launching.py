"""Runs that are started elsewhere: `widefield launch` and `wf.launch`, by Slurm, Kubernetes, or torchrun on several hosts.

The recipe is read and its plan is checked for the ranks that are asked for, here, before anything waits in a queue.  Then the
launcher's file writes the job, see launchers/_job.py.
"""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Any

from widefield.config import RunConfig, read_config
from widefield.config.recipe import packaged_recipes, recipe_path
from widefield.launchers._job import Allocation, JobFiles, TrainCommand, refuse_secrets, shell
from widefield.launchers._together import run_together
from widefield.naming import did_you_mean, load, load_all
from widefield.plans import check, check_automatic, plan_of
from widefield.plans.links import slow_links
from widefield.redaction import redacted
from widefield.section import parse_section, text_of

PACKAGE = "widefield.launchers"


@dataclass(frozen=True)
class Launched:
    """What `launch` did, or would do.

    run: the run folder.  job: the files, and the commands that submit them.  plan: as text.  notes: what the user should
    know, a sentence each.  output: what the commands printed, as Slurm's number of the job; None where nothing was submitted.
    status: that of the commands on hosts, 0 where all is well.
    """

    run: Path
    job: JobFiles
    plan: str
    notes: tuple[str, ...]
    output: str | None = None
    status: int = 0


def launchers() -> dict[str, ModuleType]:
    """The files of launchers that write jobs, by name."""
    return {module.__name__.rpartition(".")[2]: module for module in load_all(PACKAGE) if hasattr(module, "JOB")}


def launch(
    launcher: str,
    recipe: str | Path,
    *overrides: str,
    run: str | Path | None = None,
    dry_run: bool = False,
    trust: bool = False,
    **options: Any,
) -> Launched:
    """Write a job that trains as `recipe` says, and submit it: `wf.launch("slurm", "my.yaml", nodes=4, gpus=8)`.

    launcher: slurm, kubernetes, torchrun.  recipe: a path, or the name of a packaged recipe.  overrides: `key=value`.
    run: the run folder, which all machines must share; None: a new numbered one under runs/.
    dry_run: check all, and write and submit nothing.  trust: let a recipe in a run folder name code of its own.
    options: those of `widefield launch NAME --help`, with underscores; a list where one may be given several times.
    ValueError, NotImplementedError, before anything is written: the recipe or the options are wrong, the plan cannot run on so
    many ranks, a file would hold a password, or the command that submits is not on this machine, or fails.
    """
    found = prepare(launcher, recipe, *overrides, run=run, trust=trust, **options)
    return found if dry_run else submit(found, is_new=run is None)


def prepare(
    launcher: str,
    recipe: str | Path,
    *overrides: str,
    run: str | Path | None = None,
    trust: bool = False,
    **options: Any,
) -> Launched:
    """The job that `launch` would submit, checked; nothing is written.  Arguments and errors: as of `launch`."""
    module = _module(launcher)
    asked = _options(module, options)
    text = _read(recipe, overrides, options)
    plan, notes = _checked(recipe, overrides, asked, trust=trust)
    folder = Path(run) if run is not None else _next_free()
    is_packaged = str(recipe) in packaged_recipes() and not Path(recipe).is_file()
    job = module.write(TrainCommand(str(recipe), overrides, folder, trust, "" if is_packaged else text, Path.cwd()), asked)
    return Launched(folder, job, plan, (*notes, *job.notes))


def submit(found: Launched, *, is_new: bool) -> Launched:
    """Write the files and start the job; where commands run on hosts, until they have ended.

    is_new: the run folder has a number that nobody else may take.  ValueError: as of `launch`.
    """
    job = found.job
    _find_programs(job)
    if job.by_hand:
        return found
    if is_new:
        found.run.mkdir(parents=True)
    _write(job)
    output = _submit(job)
    return replace(found, output=output, status=run_together(job.on_hosts) if job.on_hosts else 0)


def _module(launcher: str) -> ModuleType:
    known = launchers()
    if launcher not in known:
        hint = did_you_mean(launcher, known)
        raise ValueError(f"no launcher {launcher!r} writes jobs{hint} These do: {', '.join(known)}")
    return load(PACKAGE, launcher)


def _options(module: ModuleType, options: dict[str, Any]) -> Allocation:
    name = module.__name__.rpartition(".")[2]
    known = list(module.JOB.model_fields)
    for option in options:
        if option not in known:
            raise ValueError(f"a job of {name} has no {option}{did_you_mean(option, known)} It has: {', '.join(known)}")
    return parse_section(module.JOB, text_of(options, name="the options"), name=f"the options of {name}")


def _read(recipe: str | Path, overrides: Sequence[str], options: dict[str, Any]) -> str:
    """The recipe's text.  ValueError: it, an override or an option has a password in it, and would go into a file."""
    text = recipe_path(recipe).read_text(encoding="utf-8")
    given = [str(part) for value in options.values() for part in (value if isinstance(value, list) else [value])]
    refuse_secrets([text, *given], of="the recipe or an option")
    refuse_secrets(overrides, of="the command line", are_pairs=True)
    return text


def _checked(recipe: str | Path, overrides: Sequence[str], asked: Allocation, *, trust: bool) -> tuple[str, list[str]]:
    """The plan in words, and what is slow about it.  ValueError, NotImplementedError: it cannot run on the ranks asked for."""
    plans: list[tuple[str, list[str]]] = []
    for variant in asked.variants():
        config = read_config(recipe, [*overrides, *variant], trust=trust)
        found = _plan(config, asked)
        if found not in plans:
            plans.append(found)
    return "; ".join(plan for plan, _ in plans), list(dict.fromkeys(note for _, notes in plans for note in notes))


def _plan(config: RunConfig, asked: Allocation) -> tuple[str, list[str]]:
    ranks = asked.ranks
    if config.mesh.auto:
        check_automatic(config)
        return f"chosen when the run begins, for {ranks} ranks (mesh.auto)", [_unchecked(asked)]
    plan = plan_of(config, ranks)
    check(plan, ranks=ranks, samples_per_step=config.data.batch_if_known)
    return str(plan), slow_links(plan, asked.per_node)


def _unchecked(asked: Allocation) -> str:
    """That the plan of mesh.auto=true is not checked here, and how one sees it."""
    machine = f"{asked.gpus}xH100" if asked.gpus else f"1xcpu:{asked.per_node}"
    return (
        "mesh.auto=true: the plan is not checked here, since it is chosen on the machines on which the run begins, and the job "
        f"ends at once where none fits; widefield plan RECIPE --cluster {asked.nodes}x{machine}, with their GPU's name, shows "
        "it before"
    )


def _next_free() -> Path:
    from widefield.training.run_folder import next_free  # imported late, since it takes torch

    return next_free()


def _find_programs(job: JobFiles) -> None:
    for program in job.programs:
        if shutil.which(program) is None:
            raise ValueError(
                f"{program} is not on this machine, so the job cannot be submitted from here; look at it with --dry-run, or "
                f"run the command where {program} is, as on a login node"
            )


def _write(job: JobFiles) -> None:
    for path, text in job.files.items():
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
        except OSError as error:
            raise ValueError(
                f"{path} cannot be written ({error}), so nothing was submitted; name another folder with --run"
            ) from None


def _submit(job: JobFiles) -> str:
    """Run the commands; what they printed.  ValueError: one failed, with its words."""
    printed = []
    for words in job.submit:
        done = subprocess.run(words, capture_output=True, text=True, check=False)
        if done.returncode:
            said = redacted((done.stderr or done.stdout).strip())
            raise ValueError(f"{shell(words)} failed with status {done.returncode}: {said}")
        printed.append(done.stdout.strip())
    return "\n".join(printed)
