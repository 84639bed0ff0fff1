"""The batch script of a run under Slurm: `widefield launch slurm RECIPE --nodes 4 --gpus 8 --time 12:00:00`.

One task per rank, started by one srun; ranks find each other by Slurm's variables (slurm.py).  Before the time is over, and at
a preemption, the ranks save and end with the status TO_BE_CONTINUED, and the script puts the job back into the queue; so does
Slurm itself where a node fails.  Where the time is over before they have saved, the script does it at Slurm's SIGTERM, since
nothing of the job outlives the SIGKILL.  The job that starts then is the same command, and goes on from the newest checkpoint.

Options and their meaning: https://slurm.schedmd.com/sbatch.html.  srun has taken no --cpus-per-task from sbatch since 22.05.
"""

from __future__ import annotations

import itertools
import os
import re
import shlex
from collections.abc import Iterator
from pathlib import Path, PurePath
from typing import Any, Literal

from pydantic import field_validator

from widefield.config.field_types import Positive
from widefield.launchers._job import Allocation, JobFiles, TrainCommand, shell
from widefield.launchers.local import python_of_ranks
from widefield.refusal import REFUSED, TO_BE_CONTINUED

HELP = """\
Write a batch script for Slurm into RUN/launch/ and submit it with sbatch.  One task per rank; before the
time is over, and at a preemption, the ranks save, end, and the job is queued again:

  widefield launch slurm my.yaml --nodes 4 --gpus 8 --time 12:00:00 --dry-run
  widefield launch slurm my.yaml optimizer.lr=0.2 --nodes 2 --gpus 4 --partition gpu --account me
  widefield launch slurm digits --ranks-per-node 2 --setup 'module load python'

An array has a run for every value, in a folder of its own, RUN/KEY=VALUE:

  widefield launch slurm my.yaml --array seed=1,2,3 --array optimizer.lr=0.1,0.2 --array-limit 2

In a container, by Apptainer for .sif files and addresses, else by Pyxis:

  widefield launch slurm my.yaml --nodes 2 --gpus 8 --container widefield.sif --mount /data:/data

--dry-run checks the recipe and its plan on so many ranks, prints the script, and submits nothing.
"""
SIGNALS = ("USR1", "TERM", "INT")
"""Those upon which ranks save and end."""
_TIME = re.compile(r"\d+(:\d\d){0,2}|\d+-\d+(:\d\d){0,2}")
_SIGNAL = re.compile(rf"({'|'.join(SIGNALS)})@\d+")


class SlurmJob(Allocation):
    """What is asked of Slurm."""

    time: str | None = None
    """D-HH:MM:SS: how long the job may run; the partition's default if left out"""
    partition: str | None = None
    """NAME: the partition, or several with commas"""
    account: str | None = None
    """NAME: who is charged"""
    qos: str | None = None
    """NAME: the quality of service"""
    constraint: str | None = None
    """FEATURES: which nodes will do"""
    memory: str | None = None
    """SIZE: of each node, as 200G; 0 is all of it"""
    cpus: Positive | None = None
    """N: CPU cores of each rank"""
    exclusive: bool = False
    """share the nodes with no other job"""
    name: str | None = None
    """NAME: of the job; the run folder's if left out"""
    array: list[str] = []
    """KEY=A,B,...: a run for each value of a key; may be given several times"""
    array_limit: Positive | None = None
    """N: runs of the array at the same time"""
    container: str | None = None
    """IMAGE: run in a container: a .sif file, docker://..., or an image for Pyxis"""
    container_runtime: Literal["apptainer", "pyxis"] | None = None
    """KIND: apptainer or pyxis; by the image's name if left out"""
    mount: list[str] = []
    """HOST:INSIDE: a folder for the container; may be given several times"""
    setup: list[str] = []
    """LINE: of shell, before the run starts, as 'module load cuda'; may be given several times"""
    requeue: bool = True
    """queue the job again when it was preempted, its time is over, or a node has failed"""
    restarts: Positive | None = None
    """N: queue the job again where a rank has failed too, while it was queued again fewer than N times"""
    signal: str = "USR1@120"
    """NAME@SECONDS: the warning before the time is over (USR1@120)"""
    sbatch: list[str] = []
    """OPTION: a further option of sbatch, as --sbatch=--reservation=x; may be given several times"""

    @field_validator("time", "signal", mode="after")
    @classmethod
    def _slurms_form(cls, text: str | None, info: Any) -> str | None:
        if info.field_name == "time" and text is not None and not _TIME.fullmatch(text):
            raise ValueError("that is no time; write HH:MM:SS, or D-HH:MM:SS with days, as 12:00:00 or 2-00:00:00")
        if info.field_name == "signal" and text is not None and not _SIGNAL.fullmatch(text):
            raise ValueError(f"write a signal upon which ranks save ({', '.join(SIGNALS)}) and seconds, as USR1@120")
        return text

    @field_validator("sbatch", mode="after")
    @classmethod
    def _options_alone(cls, options: list[str]) -> list[str]:
        wrong = next((option for option in options if not re.fullmatch(r"--?[a-zA-Z][^\n]*", option)), None)
        if wrong is not None:
            raise ValueError(f"{wrong!r} is no option of sbatch; write it whole, as --sbatch=--reservation=name")
        return options

    def variants(self) -> Iterator[tuple[str, ...]]:
        """The overrides of each run of the array."""
        yield from itertools.product(*(_values(entry) for entry in self.array))


def write(command: TrainCommand, options: SlurmJob) -> JobFiles:
    """The batch script, and the sbatch that submits it.  ValueError: an option does not fit the others."""
    _check_together(options)
    _check_folders(command, options)
    path = command.place / "job.sbatch"
    return JobFiles({path: _script(command, options)}, (("sbatch", "--parsable", str(path)),))


def _check_together(options: SlurmJob) -> None:
    if options.container is None and (options.mount or options.container_runtime):
        raise ValueError("--mount and --container-runtime are for a container; name one with --container, or leave them out")
    if options.array_limit is not None and not options.array:
        raise ValueError("--array-limit is for an array; give one, as --array seed=1,2,3, or leave it out")
    if options.restarts is not None and not options.requeue:
        raise ValueError("--restarts queues the job again and --no-requeue forbids it; leave one of them out")


def _check_folders(command: TrainCommand, options: SlurmJob) -> None:
    """ValueError: two runs of an array have one folder."""
    taken: dict[str, str] = {}
    for overrides in options.variants() if options.array else ():
        name, this = _name(overrides), " ".join(overrides)
        if name in taken:
            raise ValueError(
                f"the runs {taken[name]} and {this} of the array would train into one folder, {command.run / name}; submit one "
                "of them by itself, with a --run of its own"
            )
        taken[name] = this


def _values(entry: str) -> list[str]:
    """The overrides of an array, `KEY=A,B`, one per value; commas inside of brackets belong to a value."""
    key, equals, text = entry.partition("=")
    values = [value.strip() for value in _at_commas(text)]
    if not key or not equals or not values:
        raise ValueError(f"{entry!r} is no array; write a key and its values, as --array seed=1,2,3")
    if len(set(values)) < len(values):
        raise ValueError(f"the array {entry!r} has a value twice, and two runs would train into one folder; take one out")
    return [f"{key}={value}" for value in values]


def _at_commas(text: str) -> Iterator[str]:
    """The parts of `text` between commas that are in no bracket and no quotes, without empty ones."""
    part, depth, quote = "", 0, ""
    for sign in text:
        if quote:
            quote = "" if sign == quote else quote
        elif sign in "'\"":
            quote = sign
        depth += 0 if quote else (sign in "[{") - (sign in "]}")
        if sign == "," and depth == 0 and not quote:
            yield from [part] * bool(part.strip())
            part = ""
        else:
            part += sign
    if depth or quote:
        raise ValueError(f"the array's values {text!r} have a bracket or a quote that is not closed; close it")
    yield from [part] * bool(part.strip())


# ------------------------------------------------------------------------------------------------ the script


def _script(command: TrainCommand, options: SlurmJob) -> str:
    variants = list(options.variants()) if options.array else []
    directives = "\n".join(f"#SBATCH {shlex.quote(line)}" for line in _directives(command, options, len(variants)))
    title = "# Written by `widefield launch slurm`.  Submitted again, it goes on from the newest checkpoint."
    parts = [
        f"#!/bin/bash\n{title}\n{directives}",
        "\n".join(options.setup),
        _case(command, variants),
        BEFORE if options.requeue else "",
        f"{LIVE_ON}{AT_LIMIT if options.requeue else ''}",
        f"{_srun(command, options)} &\n{WAIT}",
        _requeue(options) if options.requeue else "",
        "exit $status",
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def _directives(command: TrainCommand, options: SlurmJob, variants: int) -> list[str]:
    """The options of sbatch, as `--nodes=4`."""
    limit = f"%{options.array_limit}" if options.array_limit else ""
    number = "%A_%a" if variants else "%j"
    values = {
        "job-name": options.name or command.name,
        "nodes": options.nodes,
        "ntasks-per-node": options.per_node,
        "gpus-per-node": options.gpus,
        "cpus-per-task": options.cpus,
        "mem": options.memory,
        "time": options.time,
        "partition": options.partition,
        "account": options.account,
        "qos": options.qos,
        "constraint": options.constraint,
        "array": f"0-{variants - 1}{limit}" if variants else None,
        "signal": options.signal,
        "open-mode": "append",
        "chdir": command.here,
        "output": f"{str(command.place).replace('%', '%%')}/slurm-{number}.out",
    }
    found = [f"--{name}={value}" for name, value in values.items() if value is not None]
    found += ["--exclusive"] * options.exclusive + ["--requeue" if options.requeue else "--no-requeue", *options.sbatch]
    broken = next((line for line in found if not line.isprintable()), None)
    if broken is not None:
        raise ValueError(f"{broken!r} has a line break or a control character, and a line of the script cannot; leave it out")
    return found


def _case(command: TrainCommand, variants: list[tuple[str, ...]]) -> str:
    """The run folder and, of an array, the overrides that each task has."""
    if not variants:
        return f"folder={shell([command.run])}"
    lines = [
        f"  {number}) values=({shell(overrides)}); folder={shell([command.run / _name(overrides)])} ;;"
        for number, overrides in enumerate(variants)
    ]
    return "\n".join(['case "$SLURM_ARRAY_TASK_ID" in', *lines, "esac"])


def _name(overrides: tuple[str, ...]) -> str:
    return re.sub(r"[^\w.,=+-]+", "_", " ".join(overrides))


def _srun(command: TrainCommand, options: SlurmJob) -> str:
    srun = ["srun", "--kill-on-bad-exit=1", *([f"--cpus-per-task={options.cpus}"] if options.cpus else [])]
    program = ["widefield"] if options.container else [*python_of_ranks(), "-m", "widefield"]
    words = [*srun, *_container(command, options), *program, "train", command.recipe, *command.overrides]
    values = ' "${values[@]}"' if options.array else ""
    return f'{shell(words)}{values} --run-dir "$folder"' + " --trust" * command.trust


def _container(command: TrainCommand, options: SlurmJob) -> list[str]:
    """The words between srun and the program, for a container in which the current folder is where it is outside."""
    if options.container is None:
        return []
    mounts = ",".join(_mounts(command, options))
    is_address = re.match(r"[a-z]+://", options.container)
    runtime = options.container_runtime or ("apptainer" if is_address or options.container.endswith(".sif") else "pyxis")
    if runtime == "pyxis":
        names = {"image": options.container, "mounts": mounts, "workdir": command.here}
        return [f"--container-{name}={value}" for name, value in names.items()]
    gpus = ["--nv"] if options.gpus else []
    return ["apptainer", "exec", *gpus, "--bind", mounts, "--pwd", str(command.here), options.container]


def _mounts(command: TrainCommand, options: SlurmJob) -> list[str]:
    """The current folder, those of `--mount`, and those of the run and of the recipe, unless one of the others has them."""
    found = [f"{command.here}:{command.here}", *options.mount]
    folders = [command.here / command.run, *[(command.here / command.recipe).parent] * bool(command.text)]
    for folder in (Path(os.path.normpath(folder)) for folder in folders):
        if not any(folder.is_relative_to(PurePath(mount.split(":")[1])) for mount in found if ":" in mount):
            found.append(f"{folder}:{folder}")
    return found


BEFORE = """\
stop() { stat --format '%i %Y' "$folder/stopped.json" 2> /dev/null; }
before=$(stop)  # of an earlier start"""
LIVE_ON = "trap signaled=yes TERM USR1  # for the script to live on: the ranks save and end upon these"
AT_LIMIT = """
at_limit() {  # not all have saved: what is left has KillWait for it, and then the job goes on from the newest checkpoint
  scontrol show job "$SLURM_JOB_ID" | grep --quiet Reason=TimeLimit && scontrol requeue "$SLURM_JOB_ID"
}
trap 'signaled=yes; at_limit' TERM"""
WAIT = """\
srun=$!
wait "$srun"
status=$?
while [ "$signaled" ]; do  # a signal has ended the wait, and not srun
  signaled=
  wait "$srun"
  status=$?
done"""


def _requeue(options: SlurmJob) -> str:
    """What puts the job back into the queue once srun has ended."""
    again = f'[ "${{SLURM_RESTART_COUNT:-0}}" -lt {options.restarts} ]' if options.restarts else "false"
    return f"""\
# {TO_BE_CONTINUED}, unless srun has killed a task that was about to end with it; 138, 143: SIGUSR1 or SIGTERM while ranks load
case "$status" in
  0 | {REFUSED}) goes_on= ;;
  {TO_BE_CONTINUED} | 138 | 143) goes_on=yes ;;
  *) goes_on=$( ([ -n "$(stop)" ] && [ "$(stop)" != "$before" ]) || {again} && echo yes) ;;
esac
if [ "$goes_on" ]; then
  # a cancelled job, whose ranks have saved too, is no longer running
  [ "$(squeue --noheader --jobs "$SLURM_JOB_ID" --format %T)" = RUNNING ] && scontrol requeue "$SLURM_JOB_ID"
fi"""


JOB = SlurmJob

JOBS: list[tuple[dict[str, Any], list[str] | str]] = [
    (
        {"nodes": 4, "gpus": 8, "time": "12:00:00", "partition": "gpu", "account": "me"},
        [
            "#SBATCH --nodes=4\n", "#SBATCH --ntasks-per-node=8\n", "#SBATCH --gpus-per-node=8\n", "#SBATCH --time=12:00:00\n",
            "#SBATCH --partition=gpu\n", "#SBATCH --account=me\n", "#SBATCH --signal=USR1@120\n", "#SBATCH --requeue\n",
            "srun --kill-on-bad-exit=1 ", '  75 | 138 | 143) goes_on=yes', "scontrol requeue", ' --run-dir "$folder" &\n',
        ],
    ),
    ({"requeue": False}, ["#SBATCH --no-requeue\n", "\ndone\n\nexit $status\n"]),
    (
        {"cpus": 6, "exclusive": True},
        ["#SBATCH --cpus-per-task=6\n", "srun --kill-on-bad-exit=1 --cpus-per-task=6 ", "#SBATCH --exclusive\n"],
    ),
    (
        {"array": ["seed=1,2", "optimizer.betas=[0.9,0.99],[0.8,0.9]"], "array_limit": 2},
        [
            "#SBATCH --array=0-3%2\n", "  3) values=(seed=2 'optimizer.betas=[0.8,0.9]'); folder=", '"${values[@]}"',
            "slurm-%A_%a.out", "/seed=1_optimizer.betas=_0.9,0.99_",
        ],
    ),
    (
        {"container": "wf.sif", "gpus": 2, "mount": ["/data:/data"]},
        ["apptainer exec --nv --bind /work:/work,/data:/data,/runs/first:/runs/first --pwd /work wf.sif widefield train "],
    ),
    ({"container": "nvcr.io#a/b:1"}, ["'--container-image=nvcr.io#a/b:1'", "--container-workdir=/work widefield train "]),
    ({"restarts": 3}, [' || [ "${SLURM_RESTART_COUNT:-0}" -lt 3 ] && echo yes']),
    ({"container": "x.sif", "container_runtime": "pyxis"}, ["--container-image=x.sif"]),
    ({"setup": ["module load cuda"], "sbatch": ["--reservation=r"]}, ["\nmodule load cuda\n", "#SBATCH --reservation=r\n"]),
    ({"time": "soon"}, "'time' is 'soon' (str): that is no time; write HH:MM:SS"),
    ({"signal": "KILL@10"}, "write a signal upon which ranks save (USR1, TERM, INT) and seconds, as USR1@120"),
    ({"array": ["seed"]}, "'seed' is no array; write a key and its values, as --array seed=1,2,3"),
    ({"array": ["mesh.space=[[1,2],[3,4]],{a: [1,2]},'a,b'"]}, ["array=0-2", "=[[1,2],[3,4]]')", "{a: [1,2]}'); folder"]),
    ({"array": ["data.path=a/b,a_b"]}, "data.path=a/b and data.path=a_b of the array would train into one folder, /runs/"),
    ({"array": ["seed=[1,2"]}, "'[1,2' have a bracket or a quote that is not closed"),
    ({"restarts": 2, "requeue": False}, "--restarts queues the job again and --no-requeue forbids it"),
    ({"array": ["seed=1,1"]}, "has a value twice, and two runs would train into one folder"),
    ({"array_limit": 2}, "--array-limit is for an array"),
    ({"mount": ["/a:/a"]}, "--mount and --container-runtime are for a container"),
    ({"gpus": 4, "ranks_per_node": 2}, "each of 4 GPUs gets a rank, and 2 ranks per node are asked for"),
    ({"partition": "a\nrm -rf"}, "has a line break or a control character"),
    ({"sbatch": ["reservation=x"]}, "'reservation=x' is no option of sbatch"),
    ({"nodes": 0}, "'nodes' is 0 (int)"),
]  # fmt: skip
