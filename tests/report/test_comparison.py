"""What a comparison says, from made-up measurements."""

from __future__ import annotations

import copy
import csv
import io
import json
import re
from typing import Any

import pytest

from widefield.report import write_bench
from widefield.report.comparison import findings, in_order, loss_difference, ranking, scaling, table_text, waits_for_loader


def pace(seconds: float, waiting: float = 0.0, spread: float = 0.01) -> dict[str, float]:
    return {
        "images_per_second": 8 / seconds, "step_seconds": seconds, "data_seconds": waiting,
        "fastest_seconds": seconds * (1 - spread), "slowest_seconds": seconds * (1 + spread),
    }  # fmt: skip


def row(
    name: str, real: dict, synthetic: dict, *, ranks: int = 2, losses=(2.0, 1.5, 1.0), memory: int = 2**20
) -> dict[str, Any]:
    return {
        "name": name, "overrides": [f"mesh.replicate={ranks}"], "state": "measured", "ranks": ranks, "real": real,
        "synthetic": synthetic, "losses": list(losses), "memory_bytes": memory, "communication_share": 0.25,
        "handed_bytes": 3 * 2**19, "messages": {"all_reduce": 3} if ranks > 1 else {}, "workers": 2, "precision": "float32",
        "layout": name, "reasons": ["because"], "shape": [1, 8, 8], "parameters": 10, "device": "CPU", "warmup": 3,
    }  # fmt: skip


def refused(name: str) -> dict[str, Any]:
    return {"name": name, "overrides": [], "state": "refused", "reason": f"{name} needs <3> ranks & there are 2"}


@pytest.fixture
def result() -> dict[str, Any]:
    """One rank takes 0.2 s, two take 0.1 s; nobody waits for data."""
    one = row("one rank", pace(0.2), pace(0.2), ranks=1, memory=3 * 2**20)
    two = row("replicate=2", pace(0.1), pace(0.1), losses=(2.0, 1.5 + 1.5e-7, 1.001))
    machine = {"host": "h", "cpu": "C", "cores": 2, "memory_bytes": 2**33, "gpus": []}
    return {
        "model": "resnet", "data": "digits", "recipe": "r.yaml", "overrides": [], "batch_size": 8, "ranks": 2, "threads": 1,
        "steps": 5, "load": 0.5,
        "versions": {"torch": "2", "widefield": "0"}, "machine": machine, "plans": [one, two, refused("stage=3")],
        "trap": [],
    }  # fmt: skip


def test_plans_are_ranked_by_images_per_second_with_the_loader(result):
    assert [row["name"] for row in ranking(result)] == ["replicate=2", "one rank"]
    assert findings(result)[0] == "Fastest: replicate=2 with 80 images/s, 2.00 times one rank; 2.00 times the next, one rank."
    assert scaling(result["plans"][1], result) == 2.0


@pytest.mark.parametrize(
    ("real", "synthetic", "waiting", "waits"),
    [
        (0.100, 0.100, 0.00, False),
        (0.109, 0.100, 0.009, False),  # within a tenth
        (0.120, 0.100, 0.02, True),
        (0.120, 0.100, 0.00, False),  # longer, but nobody waited: noise, or worse caching
        (0.400, 0.100, 0.30, True),
        (0.100, 0.120, 0.05, False),
    ],
)
def test_a_plan_waits_for_the_loader_where_waiting_makes_real_steps_longer(real, synthetic, waiting, waits):
    assert waits_for_loader(row("a", pace(real, waiting), pace(synthetic))) == waits


def test_plans_are_not_ranked_while_one_waits_for_the_loader(result):
    result["plans"][1]["real"] = pace(0.4, waiting=0.3)
    assert ranking(result) is None
    assert [row["name"] for row in in_order(result)] == ["one rank", "replicate=2"]
    told = findings(result)[0]
    assert told.startswith("NOT RANKED: 1 of 2 plans wait for the loader, most of all replicate=2")
    assert "400.0 ms on real data and 100.0 ms on a batch in memory, and 75 % of it is waiting" in told
    assert "data.workers=2" in told and "raise data.workers" in told


def test_losses_are_held_to_one_ranks_over_the_first_two_steps(result):
    assert loss_difference(result["plans"][0], result) is None
    assert loss_difference(result["plans"][1], result) == pytest.approx((1e-7, 1e-3), rel=1e-6)
    assert not any("Not one rank's" in text for text in findings(result))
    result["plans"][1]["losses"][1] = 1.6
    assert any("differ under replicate=2 (6.7e-02)" in text for text in findings(result))


def test_a_loss_that_is_no_number_differs(result):
    result["plans"][1]["losses"][0] = float("nan")
    assert any("differ under replicate=2" in text for text in findings(result))


def test_plans_within_the_spread_of_steps_are_not_told_apart(result):
    close = row("space=[2,1]", pace(0.102, spread=0.1), pace(0.1))
    result["plans"].append(close)
    assert "Steps vary by more than what lies between it and space=[2,1]" in findings(result)[0]


def test_steps_on_one_batch_that_differ_tell_of_a_busy_machine(result):
    assert not any("Unsteady" in text for text in findings(result))
    result["plans"][0]["synthetic"] = pace(0.2, spread=0.5)
    assert (
        "Unsteady: steps of one rank on one and the same batch took from 100.0 to 300.0 ms, and 1 of 2" in findings(result)[-1]
    )


def test_the_trap_says_whose_speed_up_it_is(result):
    few, many = (row("w", pace(seconds, seconds - 0.1), pace(0.1), ranks=1) for seconds in (0.8, 0.2))
    result["trap"] = [{**few, "workers": 1}, {**many, "workers": 4}]
    assert "would call the second one 4.00 times as fast; that 'speed-up' is the loader's" in findings(result)[-1]
    result["trap"][0]["real"] = pace(0.2)
    assert findings(result)[-1].startswith("Trap: none here")


def test_the_table_lists_what_was_refused(result):
    lines = table_text(result).splitlines()
    assert lines[0].split()[:2] == ["plan", "ranks"] and lines[1].startswith("replicate=2")
    assert lines[-1] == "stage=3: refused: stage=3 needs <3> ranks & there are 2"


def test_the_page_is_a_function_of_the_file(result, tmp_path):
    pages = []
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "bench.json").write_text(json.dumps(result))
        pages.append(write_bench(tmp_path / name).read_bytes())
    assert pages[0] == pages[1]
    page = pages[0].decode()
    assert "stage=3 needs &lt;3&gt; ranks &amp; there are 2" in page
    assert page.count("<svg") == 5 and not re.search(r'(src|href)="(?!data:|#)', page)
    rows = list(csv.DictReader(io.StringIO((tmp_path / "a" / "bench.csv").read_text())))
    assert [(row["name"], row["state"]) for row in rows][2] == ("stage=3", "refused")
    assert float(rows[1]["scaling"]) == 2.0 and rows[0]["loss_difference_first"] == ""


NAUGHTY = """"'><script>alert('x')</script><img src=x onerror=alert(1)>--></style><svg onload=alert(2)>"""


def naughty(value: Any, key: str = "") -> Any:
    """`value` with every text that may be anything in place of the honest one."""
    if isinstance(value, dict):
        return {name: naughty(inner, name) for name, inner in value.items()}
    if isinstance(value, list):
        return [naughty(inner, key) for inner in value]
    return NAUGHTY if isinstance(value, str) and key not in ("state", "precision", "device") else value


def test_text_from_outside_is_never_markup(result, tmp_path):
    (tmp_path / "bench.json").write_text(json.dumps(naughty(result)))
    page = write_bench(tmp_path).read_text()
    assert page.count("&lt;script&gt;alert(") >= 15
    assert not re.search(r"<script|<img|onerror=alert\(1\)>|<svg on", page.replace("onerror=alert(1)&gt;", ""))


@pytest.mark.parametrize("change", [{"plans": [{}]}, {"machine": 3}, {"load": "x"}, {"versions": None}, {"steps": [[]]}])
def test_a_comparison_that_somebody_made_up_is_refused(change, result, tmp_path):
    (tmp_path / "bench.json").write_text(json.dumps(result | change))
    if change == {"steps": [[]]}:
        assert write_bench(tmp_path).is_file()  # a value that is only said
        return
    with pytest.raises(ValueError, match="holds values that widefield does not write, so there is no report of it"):
        write_bench(tmp_path)
    assert not (tmp_path / "report.html").exists() and not (tmp_path / "bench.csv").exists()


def test_a_comparison_in_which_nothing_ran_has_a_page(result, tmp_path):
    nothing = copy.deepcopy(result) | {"plans": [refused("stage=3")]}
    (tmp_path / "bench.json").write_text(json.dumps(nothing))
    assert "No plan could run" in write_bench(tmp_path).read_text()


def test_a_folder_without_a_comparison_is_refused(tmp_path):
    with pytest.raises(ValueError, match="has no bench.json; name the --out folder"):
        write_bench(tmp_path)
    (tmp_path / "bench.json").write_text("{}")
    with pytest.raises(ValueError, match="is damaged .KeyError: 'plans'.; run `widefield bench` again"):
        write_bench(tmp_path)
