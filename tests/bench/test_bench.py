"""The command `widefield bench`, and which plans it tries."""

from __future__ import annotations

import json
import os

import pytest
from command import DIGITS, run

from widefield.bench import BenchRequest, bench
from widefield.bench.candidates import ONE, PLAIN, Candidate, candidates, chosen
from widefield.bench.compare import _recipes_own
from widefield.config import read_config
from widefield.plans import plan_of, ranks_asked_for

pytestmark = pytest.mark.alone


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 8])
def test_every_candidate_is_one_that_a_recipe_takes_and_needs_no_more_ranks(ranks):
    found = candidates(ranks, gpus=0, cores=1)
    assert found[0] == ONE and len({candidate.name for candidate in found}) == len(found)
    for candidate in found:
        config = read_config(DIGITS, [*PLAIN, *candidate.overrides])
        assert ranks_asked_for(config) in (1, ranks), candidate
        assert plan_of(config, ranks).ranks == ranks_asked_for(config)


def test_data_parallel_is_tried_on_gpus_and_all_cores_on_a_cpu():
    names = [[candidate.name for candidate in candidates(2, gpus=gpus, cores=2)] for gpus in (0, 2)]
    assert "one rank, 2 cores" in names[0] and "data_parallel" not in names[0]
    assert "one rank, 2 cores" not in names[1] and "data_parallel" in names[1]


def test_a_recipes_own_plan_is_undone_first():
    config = read_config(DIGITS, ["mesh.space=[2,1]", "mesh.replicate=2", "recompute={}", *PLAIN])
    assert str(plan_of(config, 1)) == "one rank"


def test_plans_are_chosen_by_name_or_override_and_one_rank_comes_first():
    known = candidates(2, gpus=0, cores=1)
    assert chosen(None, known) == known
    found = chosen(" replicate=2 ;; mesh.replicate=2 gradient.bucket_mib=1; one rank; replicate=2", known)
    own = Candidate("mesh.replicate=2 gradient.bucket_mib=1", ("mesh.replicate=2", "gradient.bucket_mib=1"))
    assert found == [ONE, next(c for c in known if c.name == "replicate=2"), own]


@pytest.mark.parametrize("text", ["replicat=2", "mesh.replicate", "everything"])
def test_a_plan_that_is_neither_is_refused(text):
    with pytest.raises(ValueError, match=r"--plans: '.*' is no plan.* Here are: one rank; .*Or write overrides"):
        chosen(text, candidates(2, gpus=0, cores=1))


@pytest.mark.parametrize(
    ("overrides", "own"),
    [
        ([], []),
        (["mesh.replicate=2"], []),
        (["recompute={}"], []),
        (["mesh.replicate=2", "recompute={keep: convolutions}"], ["mesh.replicate=2", "mesh.space=[]"]),
        (["mesh.space=[1,2]"], ["mesh.replicate=1", "mesh.space=[1, 2]"]),
    ],
)
def test_a_recipes_own_plan_is_tried_where_it_is_none_of_the_usual_ones(overrides, own):
    config = read_config(DIGITS, overrides)
    found = _recipes_own(BenchRequest(DIGITS, overrides), config, candidates(2, gpus=0, cores=1), 2)
    assert [candidate.name for candidate in found] == ["as the recipe says"] * bool(own)
    for candidate in found:
        assert set(own) < set(candidate.overrides)
        again = read_config(DIGITS, [*overrides, *PLAIN, *candidate.overrides])
        assert (again.mesh.model_dump(exclude={"replicate"}), again.recompute) == (
            config.mesh.model_dump(exclude={"replicate"}), config.recompute,
        )  # fmt: skip


@pytest.mark.parametrize("name", ["ranks", "steps", "warmup"])
def test_counts_below_one_are_refused(name):
    with pytest.raises(ValueError, match=f"--{name} is 0; write 1 or more"):
        bench(BenchRequest(DIGITS, **{name: 0}))


def test_a_folder_that_holds_a_comparison_is_not_overwritten(tmp_path):
    (tmp_path / "bench.json").write_text("{}")
    with pytest.raises(ValueError, match="holds a comparison already; name another --out"):
        bench(BenchRequest(DIGITS, out=tmp_path))


@pytest.mark.parametrize(("name", "says"), [("config.yaml", "is a run folder"), ("plans", "holds a comparison already")])
def test_a_folder_of_a_run_or_of_a_comparison_that_was_killed_is_not_overwritten(name, says, tmp_path):
    (tmp_path / name).mkdir()
    with pytest.raises(ValueError, match=f"{says}.*; name another --out"):
        bench(BenchRequest(DIGITS, out=tmp_path))


@pytest.mark.long
def test_the_command_measures_plans_and_lists_what_was_refused(tmp_path):
    plans = "replicate=2; mesh.replicate=2 data.batch_size=1; mesh.replicate=2 model.options.blocks=none"
    out = tmp_path / "out"
    text = run(
        "bench", DIGITS, "precision=float64", "--ranks", "2", "--steps", "2", "--warmup", "1", "--plans", plans, "--out", out,
        "--timeline",
    )  # fmt: skip
    result = json.loads((out / "bench.json").read_text())
    one, two, idle, wrong = result["plans"]
    assert [row["state"] for row in result["plans"]] == ["measured", "measured", "refused", "refused"], text
    assert two["losses"] == pytest.approx(one["losses"], rel=1e-10, abs=0) and len(one["losses"]) == 3
    assert "2 copies of the model share a batch of 1 samples" in idle["reason"]
    assert "model.options" in wrong["reason"] and "refused: " in text
    assert one["messages"] == {} and one["handed_bytes"] == 0 and one["communication_share"] == 0
    assert two["messages"]["all_reduce"] >= 2 and 0 < two["communication_share"] <= 1
    gradients = 8 * two["parameters"]  # float64, each handed once to an all-reduce, beside statistics and the loss
    assert gradients < two["handed_bytes"] < 1.2 * gradients
    assert (out / "report.html").is_file() and (out / "bench.csv").read_text().count("\n") == 5
    trace = json.loads((out / "plans" / "01" / "timeline-rank1.json").read_text())
    assert any(event.get("name") == "gloo:all_reduce" for event in trace["traceEvents"])
    assert run("report", out).strip() == str(out / "report.html")


BROKEN = """
import os
import torch
from torch import nn

class Broken(nn.Sequential):
    def forward(self, image):
        if os.environ.get("WORLD_SIZE") == "2" and os.environ["BREAK"] == "yes":
            raise RuntimeError("a kernel that is no good")
        return super().forward(torch.linalg.qr(image)[0] if os.environ["BREAK"] == "no" else image)

def build(in_channels, num_classes):
    return Broken(nn.Flatten(), nn.Linear(64, 10))
"""


@pytest.mark.long
@pytest.mark.parametrize(
    ("breaks", "state", "words", "status"),
    [
        ("yes", "failed", "RuntimeError: a kernel that is no good", 1),
        ("no", "refused", "linalg_qr.default cannot run on an image cut into tiles", 0),
    ],
)
def test_a_plan_that_breaks_has_failed_and_one_that_is_refused_on_its_ranks_has_not(breaks, state, words, status, tmp_path):
    (tmp_path / "broken.py").write_text(BROKEN)
    text = run(
        "bench", DIGITS, "model.name=broken:build", "model.options={}", "--ranks", "2", "--steps", "1", "--warmup", "1",
        "--plans", "space=[2,1]", "--out", tmp_path / "out", cwd=tmp_path, env=os.environ | {"BREAK": breaks}, status=status,
    )  # fmt: skip
    one, other = json.loads((tmp_path / "out" / "bench.json").read_text())["plans"]
    assert (one["state"], other["state"]) == ("measured", state) and words in other["reason"], text
    assert f"space=[2,1]: {state}: " in text and "Traceback" not in text


def test_ranks_of_a_launcher_are_told_that_bench_starts_its_own(monkeypatch):
    place = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "localhost"}
    for name, value in (place | {"MASTER_PORT": "29511"}).items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match="bench starts the ranks of each plan itself; run it once"):
        bench(BenchRequest(DIGITS))


@pytest.mark.sweep
@pytest.mark.long
def test_the_trap_runs_one_plan_with_few_and_many_workers(tmp_path):
    text = run("bench", DIGITS, "--ranks", "1", "--steps", "2", "--plans", "one rank", "--trap", "--out", tmp_path)
    rows = json.loads((tmp_path / "bench.json").read_text())["trap"]
    assert [row["workers"] for row in rows][:2] == [1, 2] and {row["ranks"] for row in rows} == {1}
    assert "Trap: " in text


@pytest.mark.long
def test_where_no_plan_can_run_the_status_says_so(tmp_path):
    text = run("bench", DIGITS, "model.options.blocks=none", "--plans", "one rank", "--out", tmp_path, status=2)
    assert "No plan could run" in text and "Traceback" not in text
