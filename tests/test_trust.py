"""What a run folder may name: files of its own, links within it, and no code but what the user has named."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from widefield.config import parse_config, read_config
from widefield.launchers.local import python_of_ranks
from widefield.trust import check_links, inside, run_folder_of

ENTRY = "from widefield.__main__ import entry; entry()"
RECIPE = "model: {name: 'mynets:tiny', options: {width: 5}}\ndata: {name: digits}\n"


@pytest.mark.parametrize("name", ["a.png", "mistakes/00.png", "a/./b.png", "..a", "link/to"])
def test_a_name_of_what_is_inside_is_taken(name, tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "link").symlink_to("a")
    assert inside(tmp_path, name) == tmp_path / name


@pytest.mark.parametrize(
    "name", ["/etc/passwd", "../a.png", "a/../../b", "a/../b", "out", "out/b", "circle", "", "a\0b", None, 3]
)
def test_a_name_that_leads_out_is_refused(name, tmp_path):
    (tmp_path / "out").symlink_to(tmp_path.parent)
    (tmp_path / "circle").symlink_to("circle")
    with pytest.raises(ValueError, match="is no name of a file in|leads out of|is a link out of"):
        inside(tmp_path, name)


def test_links_are_looked_for_in_what_is_named_and_below_it(tmp_path):
    (tmp_path / "deep" / "er").mkdir(parents=True)
    (tmp_path / "deep" / "er" / "in").symlink_to("../../deep")
    (tmp_path / "other").symlink_to("/")
    check_links(tmp_path, ["deep", "nowhere"])
    for link, target in (("deep/er/file", "/etc/hostname"), ("deep/folder", "/etc"), ("deep/gone", "../../gone")):
        (tmp_path / link).symlink_to(target)
        with pytest.raises(
            ValueError, match=f"{link} is a link to {target}, out of the run folder .* link the whole run folder"
        ):
            check_links(tmp_path, ["deep"])
        (tmp_path / link).unlink()


OURS = ["record.jsonl", "plan.yaml", "bench.json"]
ANYBODYS = ["model.json", "evaluation.json", "weights.safetensors", "checkpoints"]


@pytest.mark.parametrize("mark", [*OURS, *ANYBODYS])
def test_a_recipe_lies_in_a_run_folder_where_a_run_left_something_beside_or_above(mark, tmp_path, monkeypatch):
    for name in ("config.yaml", "mine.yaml"):
        (tmp_path / name).write_text(RECIPE)
    (tmp_path / "recipes").mkdir()
    (tmp_path / "recipes" / "deep.yaml").write_text(RECIPE)
    assert run_folder_of(tmp_path / "config.yaml") is None
    (tmp_path / mark).mkdir()
    monkeypatch.chdir(tmp_path)
    below = ["recipes/deep.yaml"]
    if mark in ANYBODYS:  # a project's root may have a config.yaml of another program and a folder of checkpoints
        assert run_folder_of(below.pop()) is None
    for name in ("config.yaml", "mine.yaml", "recipes/../mine.yaml", str(tmp_path / "mine.yaml"), *below):
        assert run_folder_of(name) == tmp_path
        with pytest.raises(ValueError, match="model.name is 'mynets:tiny', code of its own, and .* lies in the run folder"):
            read_config(name)
        assert read_config(name, trust=True) == parse_config(RECIPE)


def test_the_users_own_recipe_may_name_code_and_resume(tmp_path):
    (tmp_path / "mine.yaml").write_text(RECIPE)
    run = tmp_path / "runs" / "0001"
    run.mkdir(parents=True)
    for name in ("config.yaml", "record.jsonl"):
        (run / name).write_text(RECIPE)
    assert read_config(tmp_path / "mine.yaml", run=run).model.name == "mynets:tiny"
    with pytest.raises(ValueError, match="nothing of it was run"):
        read_config(tmp_path / "mine.yaml", run=tmp_path)


@pytest.mark.parametrize(
    ("overrides", "named"),
    [
        (["model.name=mynets:tiny"], True),
        (["model.name=other:net"], True),
        (["model={name: 'mynets:tiny'}"], True),
        (["model.name=resnet"], True),
        (["model.options.width=6"], False),
        (["seed=1", "data.options.name=mynets:tiny"], False),
        ([], False),
    ],
)
def test_code_counts_as_named_where_the_user_gave_the_name(overrides, named, tmp_path):
    (tmp_path / "config.yaml").write_text(RECIPE)
    if named:
        assert read_config(tmp_path / "config.yaml", overrides, run=tmp_path) == parse_config(RECIPE, overrides)
    else:
        with pytest.raises(ValueError, match="nothing of it was run"):
            read_config(tmp_path / "config.yaml", overrides, run=tmp_path)


@pytest.mark.parametrize(
    ("override", "named"),
    [("model.options={pretrained_cfg: {file: a}}", True), ("model.options.pretrained_cfg={}", True),
     ("model.options.pretrained_cfg.tag=b", False), ("model.name=timm/resnet34", False)],
)  # fmt: skip
def test_files_of_weights_count_as_named_where_all_of_the_argument_is_given(override, named, tmp_path):
    (tmp_path / "config.yaml").write_text(
        "model: {name: timm/resnet18, options: {pretrained_cfg: {file: evil}}}\ndata: {name: page}"
    )
    if named:
        read_config(tmp_path / "config.yaml", [override], run=tmp_path)
    else:
        with pytest.raises(
            ValueError, match="model.options.pretrained_cfg is {'file': 'evil'.*, where weights would be loaded from"
        ):
            read_config(tmp_path / "config.yaml", [override], run=tmp_path)


def test_no_module_of_the_folder_that_one_stands_in_hides_an_installed_one(tmp_path, monkeypatch):
    (tmp_path / "yaml.py").write_text(
        f"import pathlib\npathlib.Path({str(tmp_path / 'trace')!r}).touch()\nraise SystemExit(3)\n"
    )
    monkeypatch.chdir(tmp_path)
    installed = str(Path(__file__).parent.parent)
    starts = ([*python_of_ranks(), "-m", "widefield"], [sys.executable, "-m", "widefield"], [sys.executable, "-c", ENTRY])
    for start in starts:
        words = [*start, "train", "digits", "--print-config"]
        done = subprocess.run(words, env={"PYTHONPATH": installed}, capture_output=True, check=False)
        assert (done.returncode, (tmp_path / "trace").exists()) == (0, False), done.stderr
