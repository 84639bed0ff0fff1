"""Runs every plan in processes of its own, one after another, and writes the results.

out/config.yaml   the recipe with its overrides
out/bench.json    everything measured; the table, bench.csv and report.html follow from it alone
out/plans/N/      for each plan: order.json, the output of its ranks, and their timelines if asked for
"""

from __future__ import annotations

import contextlib
import io
import json
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from widefield.bench.candidates import PLAIN, Candidate, candidates, chosen
from widefield.config import RunConfig, parse_config, read_config
from widefield.config.recipe import recipe_path
from widefield.cores import usable_cores
from widefield.launchers import world_from
from widefield.launchers.local import local_ranks, python_of_ranks, start
from widefield.plans import check, plan_of, ranks_asked_for, ranks_of_a_replica
from widefield.report.bench import write_bench
from widefield.report.comparison import findings, line, table_text
from widefield.section import to_yaml
from widefield.training.disk import replace_text
from widefield.training.record import machine, versions
from widefield.training.run_folder import write_recipe

STOPPED = (130, 143)
"""The launcher's status where Ctrl-C or SIGTERM ended the ranks."""


@dataclass(frozen=True)
class BenchRequest:
    """What to compare.  ranks: for the plans with several; None: the number of GPUs, or of cores up to 4 on a CPU.

    plans: names or overrides, see candidates.chosen; None: all.  trap: also one plan with few and many loader workers.
    timeline: keep the traces of the ranks' profilers.  trust: let a recipe in a run folder name code of its own, see trust.py.
    """

    recipe: str
    overrides: Sequence[str] = ()
    ranks: int | None = None
    steps: int = 10
    warmup: int = 3
    plans: str | None = None
    out: Path | None = None
    trap: bool = False
    timeline: bool = False
    trust: bool = False


def bench(request: BenchRequest, say: Callable[[str], None] = print) -> int:
    """Compare plans; returns the exit status: 0, 1 where a plan failed, 2 where none could run, 130 after Ctrl-C.

    ValueError, before anything is started: no such recipe or plan, counts below 1, or this process is a launcher's rank.
    """
    for name in ("ranks", "steps", "warmup"):
        value = getattr(request, name)
        if value is not None and value < 1:
            raise ValueError(f"--{name} is {value}; write 1 or more")
    if world_from(os.environ) is not None:
        raise ValueError(
            "a launcher has started this process as one of its ranks, and bench starts the ranks of each plan itself; run it "
            "once on one machine, outside torchrun, srun and mpirun"
        )
    config = read_config(request.recipe, request.overrides, trust=request.trust)
    if config.data.batch_if_known is None:
        raise ValueError("data.batch_size=auto would give each plan another batch, and plans are compared at one; set a number")
    gpus, cores = torch.cuda.device_count(), usable_cores()
    ranks = request.ranks or gpus or min(4, cores)
    threads = int(os.environ.get("OMP_NUM_THREADS") or max(1, cores // ranks))
    known = candidates(ranks, gpus=gpus, cores=1 if "OMP_NUM_THREADS" in os.environ else cores)
    tried = chosen(request.plans, [*known, *_recipes_own(request, config, known, ranks)])
    out = _folder(request.out)
    write_recipe(out / "config.yaml", config)
    what = f"{config.model.name} on {config.data.name}: {len(tried)} plans on up to {ranks} ranks"
    say(f"{what}, {request.steps} steps each -> {out}")
    result = _conditions(request, config, ranks, threads)
    stopped = 0
    for key, candidate in _all(request, tried, cores):
        row, stopped = _try(candidate, request, out, number=len(result["plans"]) + len(result["trap"]), threads=threads)
        result[key].append(row)
        say(line(row, result))
        if stopped:
            say(f"stopped; what was measured before is in {out / 'plans'}")
            return stopped
    return _write_results(result, out, say)


def _recipes_own(request: BenchRequest, config: RunConfig, known: list[Candidate], ranks: int) -> list[Candidate]:
    """The recipe's own plan as a candidate, unless it is one of `known`."""
    own = plan_of(config, ranks_asked_for(config) or 1)
    overrides = [f"mesh.{axis}={own.space if axis == 'space' else size}" for axis, size in own.axes.items()]
    overrides.append(f"mesh.data_strategy={own.data_strategy}")
    if own.recompute is not None:
        overrides.append(f"recompute={json.dumps(own.recompute.model_dump(mode='json'))}")
    candidate = Candidate("as the recipe says", tuple(overrides))

    def layout(tried: Candidate) -> str:
        plan = plan_of(parse_config(to_yaml(config), [*PLAIN, *tried.overrides]), ranks)
        return f"{plan}, {plan.data_strategy}, {plan.recompute}"

    return [] if layout(candidate) in map(layout, known) else [candidate]


def _all(request: BenchRequest, tried: list[Candidate], cores: int) -> Iterator[tuple[str, Candidate]]:
    """Every candidate, with the key of the result's list that it belongs to."""
    yield from (("plans", candidate) for candidate in tried)
    if request.trap:
        counts = [count for count in (1, 2, 4, 8) if count <= max(2, cores)]
        yield from (("trap", Candidate(f"{count} workers", (f"data.workers={count}",))) for count in counts)


def _conditions(request: BenchRequest, config: RunConfig, ranks: int, threads: int) -> dict[str, Any]:
    return {
        "model": config.model.name,
        "data": config.data.name,
        "recipe": request.recipe,
        "overrides": list(request.overrides),
        "batch_size": config.data.batch,
        "ranks": ranks,
        "threads": threads,
        "steps": request.steps,
        "load": os.getloadavg()[0],
        "versions": versions(),
        "machine": machine(),
        "plans": [],
        "trap": [],
    }


def _write_results(result: dict[str, Any], out: Path, say: Callable[[str], None]) -> int:
    """Write the files, print the table and the findings; returns the exit status."""
    replace_text(out / "bench.json", json.dumps(result, indent=1) + "\n")
    report = write_bench(out)
    say("\n" + table_text(result) + "\n")
    for sentence in findings(result):
        say(sentence)
    say(f"report: {report}")
    states = [row["state"] for row in (*result["plans"], *result["trap"])]
    return 1 if "failed" in states else 0 if "measured" in states else 2


def _folder(out: Path | None) -> Path:
    """Create the folder to write into; None: the next free `runs/bench-0001`."""
    if out is not None:
        if (out / "bench.json").exists() or (out / "plans").exists():
            raise ValueError(f"{out} holds a comparison already; name another --out, or delete it")
        if (out / "config.yaml").exists():
            raise ValueError(
                f"{out} is a run folder (it has config.yaml), whose files bench would overwrite; name another --out"
            )
        out.mkdir(parents=True, exist_ok=True)
        return out
    taken = {path.name for path in Path("runs").glob("bench-*")}
    free = next(name for number in range(1, 10**6) if (name := f"bench-{number:04}") not in taken)
    (Path("runs") / free).mkdir(parents=True)
    return Path("runs") / free


# ---------------------------------------------------------------------------------------------- one plan


def _try(candidate: Candidate, request: BenchRequest, out: Path, *, number: int, threads: int) -> tuple[dict[str, Any], int]:
    """The result of a plan, and the exit status where a signal ended it, else 0."""
    about = {"name": candidate.name, "overrides": list(candidate.overrides)}
    overrides = [*PLAIN, *candidate.overrides]
    try:
        ranks = _ranks_of(out / "config.yaml", overrides)
    except (ValueError, NotImplementedError) as error:
        return {**about, "state": "refused", "reason": str(error)}, 0
    place = out / "plans" / f"{number:02}"
    place.mkdir(parents=True)
    text = {"recipe": str(out / "config.yaml"), "overrides": overrides, "steps": request.steps, "warmup": request.warmup}
    text["beside"] = str(recipe_path(request.recipe).parent)
    replace_text(place / "order.json", json.dumps(text | {"trace": str(place)}, indent=1) + "\n")
    program = [*python_of_ranks(), "-m", "widefield.bench.measure"]
    said = io.StringIO()
    with _threads(candidate.threads or threads), contextlib.redirect_stderr(said):
        status = start(ranks, [str(place / "order.json")], program=program)
    if not request.timeline:
        for trace in place.glob("timeline-rank*.json"):
            trace.unlink()
    return {**about, "ranks": ranks, **_outcome(place, said.getvalue())}, status if status in STOPPED else 0


def _ranks_of(recipe: Path, overrides: list[str]) -> int:
    """The number of ranks of a plan; refuses what `check` refuses, and more ranks than there are GPUs."""
    config = read_config(recipe, overrides, trust=True)  # bench's own copy of the user's recipe
    ranks, _ = local_ranks(ranks_asked_for(config), torch.cuda.device_count(), replica=ranks_of_a_replica(config))
    check(plan_of(config, ranks), ranks=ranks, samples_per_step=config.data.batch)
    return ranks


def _outcome(place: Path, said: str) -> dict[str, Any]:
    """The result that the ranks wrote: rank 0's, or another's refusal, or else the end of what they printed."""
    for path in sorted(place.glob("outcome*.json")):
        found = json.loads(path.read_text(encoding="utf-8"))
        if found["state"] != "measured" or path.name == "outcome.json":
            return found
    logs = [log.read_text(encoding="utf-8", errors="replace").strip() for log in sorted(place.glob("rank*.log"))]
    last = next((log.splitlines()[-1] for log in logs if log), "the ranks printed nothing")
    return {"state": "failed", "reason": f"{last}. {said.strip().removeprefix('widefield: ')} (all of it in {place})"}


@contextlib.contextmanager
def _threads(count: int) -> Iterator[None]:
    """Set the number of threads of every rank, and restore the environment afterwards."""
    before = os.environ.get("OMP_NUM_THREADS")
    os.environ["OMP_NUM_THREADS"] = str(count)
    try:
        yield
    finally:
        os.environ.pop("OMP_NUM_THREADS")
        if before is not None:
            os.environ["OMP_NUM_THREADS"] = before
