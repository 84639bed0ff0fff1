"""Does each check find what it is for, on what ranks might see, and look without harm at what is here?"""

from __future__ import annotations

import doctest
import json
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
from ranks import on_ranks

from widefield.comm.mesh import Mesh, World
from widefield.config import parse_config
from widefield.diagnosis import checkup
from widefield.diagnosis.checks import interfaces, memory, versions
from widefield.diagnosis.checkup import CHECKS, CheckupRequest, check_up, examine
from widefield.diagnosis.finding import STATES, Checkup, Finding, differing, in_words
from widefield.diagnosis.place import Surroundings
from widefield.naming import load, load_all, names_in

CASES = [
    pytest.param(name, facts, state, words, id=f"{name}-{number}")
    for name in names_in(CHECKS)
    for number, (facts, state, words) in enumerate(load(CHECKS, name).CASES)
]
TITLES = [module.TITLE for module in sorted(load_all(CHECKS), key=lambda module: module.ORDER)]


@pytest.fixture(autouse=True)
def environment() -> Iterator[None]:
    """A meeting leaves its address in the environment."""
    with mock.patch.dict(os.environ):
        yield


@pytest.mark.parametrize(("name", "facts", "state", "words"), CASES)
def test_what_ranks_saw_is_judged(name, facts, state, words):
    found = load(CHECKS, name).judge(facts)
    assert found.state == state and words in f"{found.figure} {found.remedy}"
    assert state in ("ok", "not here") or found.remedy, "what is not in order needs a remedy"


@pytest.mark.parametrize("name", names_in(CHECKS))
def test_every_check_can_be_green_and_red(name):
    states = {state for _, state, _ in load(CHECKS, name).CASES}
    assert states & {"warn", "bad"} and states & {"ok", "not here"} and states <= set(STATES)


def test_titles_and_places_are_each_others_own():
    modules = load_all(CHECKS)
    assert len({module.TITLE for module in modules}) == len({module.ORDER for module in modules}) == len(modules) > 20


def test_the_doctests_hold():
    for module in (interfaces, versions):
        assert doctest.testmod(module).failed == 0


# ---------------------------------------------------------------------------------------------- here


def test_one_rank_is_looked_at_and_leaves_no_file(tmp_path):
    found = check_up(CheckupRequest(folder=tmp_path / "runs" / "one"), World())
    assert [finding.check for finding in found.findings] == TITLES
    assert not [finding for finding in found.findings if "could not look" in finding.figure]
    assert found["launcher"].figure.startswith("one rank, on ") and found["parity"].state == "not here"
    assert str(tmp_path) in found["disk"].figure and list(tmp_path.iterdir()) == []


def checked_on_ranks(mesh: Mesh, folder: str) -> tuple[str, dict]:
    found = check_up(CheckupRequest(folder=Path(folder)), mesh.world)
    return str(found), found.to_tree()


@pytest.mark.long
def test_ranks_all_get_the_same_and_are_compared_with_one(tmp_path):
    (text, tree), (other, _) = on_ranks(2, checked_on_ranks, str(tmp_path))
    assert text == other and list(tmp_path.iterdir()) == []
    found = {finding["check"]: finding for finding in tree["findings"]}
    assert found["parity"]["state"] == "ok" and "tensors of 3 steps under replicate=2" in found["parity"]["figure"]
    assert found["all-reduce"]["state"] in ("ok", "warn") and "GB/s" in found["halo exchange"]["figure"]
    assert found["meeting"]["figure"].startswith("2 ranks met in ")
    assert not [one for one in tree["findings"] if "could not look" in one["figure"]]
    assert "check" not in text.splitlines()[0] and text.splitlines()[0].startswith("widefield doctor: 2 ranks on 1 host (")


def parity_with_a_rank_that_computes_wrongly(mesh: Mesh, folder: str) -> str:
    from widefield.diagnosis.checks import parity

    build = parity.build

    def broken_on_rank_1(*args, **options):
        model = build(*args, **options)
        if mesh.rank == 1:
            model.stem[0].register_forward_hook(_one_pixel_wrong)
        return model

    parity.build = broken_on_rank_1
    try:
        facts = mesh.gather_objects(parity.look(Surroundings(mesh.world, Path(folder), mesh)))
    finally:
        parity.build = build
    return parity.judge([{**one, "rank": rank, "host": "n1"} for rank, one in enumerate(facts)]).state


def _one_pixel_wrong(module, inputs, output):
    output = output.clone()
    output[..., 0, 0] *= 1.5
    return output


def test_a_rank_that_computes_one_pixel_wrongly_is_found(tmp_path):
    assert on_ranks(2, parity_with_a_rank_that_computes_wrongly, str(tmp_path)) == ["bad", "bad"]


# ---------------------------------------------------------------------------------------------- what goes wrong while looking


def test_ranks_that_do_not_meet_leave_a_table_of_one(tmp_path):
    world = World(1, 2, 1, 2, "127.0.0.1", 1, "torchrun")  # nobody serves at port 1
    found = check_up(CheckupRequest(folder=tmp_path), world, seconds=1.0)
    assert not found.ok and not found.has_met
    assert found["meeting"].state == "bad" and "did not meet the others at 127.0.0.1:1 " in found["meeting"].figure
    assert "host name mismatch" in found["meeting"].figure, "a rule knows it"
    assert found["parity"].figure.startswith("needs messages between ranks, which failed: ")
    assert found["disk"].state != "not here" and "alone, as the ranks did not meet" in str(found)


def test_a_name_that_does_not_resolve_is_told_by_name(tmp_path):
    found = check_up(CheckupRequest(folder=tmp_path), World(1, 2, 0, 1, "node-a.invalid", 29500, "torchrun"), seconds=1.0)
    assert "cannot resolve the meeting place node-a.invalid:29500" in found["meeting"].figure
    assert (
        found["host names"].state == "bad" and "node-a.invalid, where ranks meet, has no address" in found["host names"].figure
    )


def test_a_check_that_fails_is_a_finding_and_no_end(tmp_path, monkeypatch):
    def look(surroundings):
        raise PermissionError("/proc is closed, with token=abcdefgh")

    monkeypatch.setattr(versions, "look", look)
    found = check_up(CheckupRequest(folder=tmp_path), World())
    assert found["versions"].state == "warn" and "could not look: PermissionError: /proc is closed" in found["versions"].figure
    assert "abcdefgh" not in str(found) and found["disk"].state != "not here"


def test_a_recipe_that_does_not_fit_is_told(tmp_path):
    config = parse_config("model: {name: resnet}\ndata: {name: imagefolder, path: /no/such}", ["mesh.space=[3,1]"])
    found = examine(Surroundings(World(0, 1), tmp_path, config=config))
    assert found["recipe"].state == "bad" and not found.ok
    config = parse_config("model: {name: resnet}\ndata: {name: imagefolder, path: /no/such}", [])
    found = examine(Surroundings(World(0, 1), tmp_path, config=config))
    assert "data.path=/no/such is not there" in found["recipe"].figure


def test_machines_that_are_named_and_not_there_are_told(tmp_path):
    found = check_up(CheckupRequest(cluster="8xH100", folder=tmp_path), World())
    assert found["GPUs"].state == "bad" and "has no GPU, and H100-80G is wanted" in found["GPUs"].figure
    with pytest.raises(ValueError, match="no cluster: 'nine!'"):
        check_up(CheckupRequest(cluster="nine!", folder=tmp_path), World())


def test_a_folder_that_cannot_be_written_is_told(tmp_path, monkeypatch):
    from widefield.diagnosis.checks import disk

    def full(*args, **options):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(disk.tempfile, "NamedTemporaryFile", full)
    found = examine(Surroundings(World(), tmp_path))
    assert found["disk"].state == "bad" and "No space left on device" in found["disk"].figure


# ---------------------------------------------------------------------------------------------- parts


@pytest.mark.parametrize(
    ("limits", "left"),
    [
        ({}, None),
        ({"memory.max": "max", "memory.current": "5"}, None),
        ({"memory.max": "3000", "memory.current": "1000"}, 2000),
    ],
)
def test_a_jobs_memory_limit_is_that_of_its_control_group_or_one_above(tmp_path, limits, left):
    (tmp_path / "job" / "step").mkdir(parents=True)
    for name, text in limits.items():
        (tmp_path / "job" / name).write_text(text)
    (tmp_path / "own").write_text("0::/job/step\n")
    assert memory.job_limit(tmp_path, tmp_path / "own") == left
    assert memory.job_limit(tmp_path, tmp_path / "none") is None


def test_the_table_shows_state_figure_and_remedy():
    findings = (Finding("ok", "fine", "", "versions"), Finding("bad", "64 MiB", "more", "shared memory"))
    text = str(Checkup("widefield doctor: 1 rank", findings))
    assert text.splitlines() == [
        "widefield doctor: 1 rank", "", "versions       ok        fine", "shared memory  bad       64 MiB",
        "                         -> more", "", "1 ok, 1 bad",
    ]  # fmt: skip
    checked = Checkup("", findings)
    assert not checked and json.loads(json.dumps(checked.to_tree()))["findings"][1]["remedy"] == "more"
    assert replace(checked, findings=findings[:1])


def test_hosts_that_differ_are_told_in_groups():
    facts = [{"host": host, "torch": version} for host, version in (("a", 1), ("b", 1), ("b", 1), ("c", 2))]
    assert differing(facts, "torch") == "a and b: 1; c: 2" and differing(facts[:3], "torch") == ""
    assert in_words(["a", "b", "c", "d", "e"]) == "a, b, c and 2 more" and in_words([]) == "" and in_words(["a"]) == "a"


def test_messages_that_fail_stop_the_checks_that_need_them(tmp_path, monkeypatch):
    def fails(*args):
        raise RuntimeError("Connection closed by peer")

    mesh = SimpleNamespace(size=2, is_main=True, barrier=lambda: None, gather_objects=fails, group=None, copies=2, plan="x")
    monkeypatch.setattr(checkup, "join", lambda *args, **options: mesh)
    found = examine(Surroundings(World(0, 2, 0, 2, "127.0.0.1", 1), tmp_path))
    assert not found.has_met and "could not look: RuntimeError: Connection closed by peer" in found["clocks"].figure
    assert found["parity"].figure.startswith("needs messages between ranks, which failed")
