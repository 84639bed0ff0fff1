"""Is a plan what the config asks for, does its text read back, and is what ranks cannot do refused in words?"""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from widefield.config import RunConfig, ShardingConfig, StreamConfig, parse_config
from widefield.config.strategies import AXES, SECTIONS, STRATEGIES
from widefield.naming import load, load_all
from widefield.plans import Plan, check, from_text, plan_of, ranks_asked_for, to_text

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"
RECIPE = "model: {name: resnet}\ndata: {name: digits}\n"


def plan(*overrides: str, ranks: int = 1) -> Plan:
    return plan_of(parse_config(RECIPE, overrides), ranks)


sizes = st.integers(1, 4)
plans = st.builds(
    Plan,
    replicate=sizes,
    shard=sizes,
    space=st.lists(sizes, max_size=3),
    channel=sizes,
    stage=sizes,
    batch_norm=st.sampled_from(["synchronized", "averaged", "broadcast"]),
    accumulate=sizes,
    bucket_mib=st.floats(0.001, 1e6),
    compression=st.sampled_from(["none", "fp16", "bf16", "powersgd"]),
    stream=st.none() | st.builds(StreamConfig, tiles=st.lists(sizes, min_size=1, max_size=3), compile=st.booleans()),
)


@pytest.mark.parametrize("space", [[1], [1, 1], [1, 1, 1]])
@given(one=plans)
def test_a_grid_of_one_tile_is_no_grid(space, one):
    """So no strategy, no command and no file can tell them apart."""
    fields = {name: getattr(one, name) for name in Plan.model_fields}
    without = Plan(**{**fields, "space": []})
    assert Plan(**{**fields, "space": space}) == without and from_text(f"space: {space}") == Plan()
    assert plan(f"mesh.space={space}", "mesh.stage=2", ranks=4) == plan("mesh.stage=2", ranks=4)
    assert Plan(**{**fields, "space": [*space, 2]}).space == [*space, 2]


@given(plans)
def test_the_text_of_a_plan_reads_back_equal(one):
    assert from_text(to_text(one)) == one


@given(plans)
def test_a_plan_needs_as_many_ranks_as_its_axes_multiply_to(one):
    product = one.replicate * one.shard * one.channel * one.stage
    for size in one.space:
        product *= size
    assert one.ranks == product and list(one.axes) == ["replicate", "shard", "space", "channel", "stage"]


ROWS = re.findall(
    r"^\| `(mesh|stream|recompute)(.*?)` \| (runs|refused)(?:; runs with `(.*)`)? \|$", README.read_text(encoding="utf-8"), re.M
)


@pytest.mark.parametrize(("first", "rest", "said", "cure"), ROWS, ids=lambda text: text)
def test_the_readme_says_which_plans_run(first, rest, said, cure):
    """A plan that is said to be refused is refused in words; one that runs, or runs with another setting, passes the check."""
    overrides = f"{first}{rest}".split()

    def problem(*more: str) -> str | None:
        config = parse_config(RECIPE, [*overrides, *more])
        one = plan_of(config, ranks_asked_for(parse_config(RECIPE, ["mesh.replicate=1", *overrides])) or 1)
        try:
            check(one, ranks=one.ranks, samples_per_step=64)
        except (ValueError, NotImplementedError) as error:
            return str(error)
        return None

    assert (problem() is None) == (said == "runs")
    assert not cure or problem(cure) is None


def test_the_readme_names_enough_plans():
    assert len(ROWS) >= 15


def test_a_plan_is_frozen_and_says_what_differs_from_one_device():
    with pytest.raises(ValidationError, match="frozen"):
        Plan().replicate = 2
    assert str(Plan()) == "one rank"
    assert str(Plan(replicate=2, space=[2, 2])) == "replicate=2 x space=[2, 2]"
    assert str(Plan(stream=StreamConfig(tiles=[4, 3]))) == "one rank, streamed in 4 x 3 tiles"
    assert str(Plan(space=[2, 1], stream=StreamConfig(memory="6GiB"))) == "space=[2, 1], streamed in tiles within 6GiB"


def test_a_wrong_key_in_a_plans_text_is_named_with_its_line():
    with pytest.raises(ValueError, match=r"unknown key 'replicat'; did you mean 'replicate'\?(?s:.*)plan\.yaml, line 2"):
        from_text("shard: 1\nreplicat: 2\n", name="plan.yaml")
    with pytest.raises(ValueError, match="'replicate' is 0"):
        from_text("replicate: 0\n")


def test_replicate_left_open_takes_the_ranks_that_other_axes_leave():
    assert plan(ranks=6).replicate == 6
    assert plan("mesh.shard=2", ranks=6).replicate == 3
    assert plan("mesh.space=[2, 2]", ranks=8).replicate == 2
    assert plan("mesh.replicate=2", ranks=6).replicate == 2
    assert plan("mesh.shard=4", ranks=2).replicate == 1


def test_every_choice_of_the_config_reaches_the_plan():
    overrides = [
        "mesh.shard=2", "mesh.space=[2, 1]", "mesh.channel=3", "mesh.stage=4", "mesh.data_strategy=data_parallel",
        "batch_norm=averaged", "gradient.accumulate=3", "gradient.bucket_mib=7", "gradient.compression=bf16",
        "gradient.powersgd_rank=2", "gradient.powersgd_start_step=50", "mesh.replicate=5", "stream.tiles=[2, 2]",
        "sharding.zero=1", "pipeline.schedule=gpipe", "recompute.keep=convolutions", "agreement=adasum",
        "batch_norm_group=2", "mesh.independent=true",
    ]  # fmt: skip
    changed = plan(*overrides).model_dump()
    defaults = Plan().model_dump()
    assert [name for name in defaults if changed[name] == defaults[name]] == []


def test_the_ranks_a_config_asks_for():
    assert ranks_asked_for(parse_config(RECIPE)) is None
    assert ranks_asked_for(parse_config(RECIPE, ["mesh.replicate=3"])) == 3
    assert ranks_asked_for(parse_config(RECIPE, ["mesh.replicate=3", "mesh.space=[2, 2]", "mesh.stage=2"])) == 24


def test_a_plan_that_fits_is_accepted():
    check(Plan(), ranks=1, samples_per_step=1)
    check(Plan(replicate=3), ranks=3, samples_per_step=3)
    check(Plan(data_strategy="data_parallel", batch_norm="broadcast"), ranks=1)


@pytest.mark.parametrize(
    ("one", "ranks", "told"),
    [
        (Plan(replicate=2), 3, "the mesh (replicate 2) needs 2 ranks and there are 3; set mesh.replicate=3, or start 2 ranks"),
        (Plan(), 2, "the mesh (every axis 1) needs 1 ranks and there are 2; set mesh.replicate=2, or start 1 ranks"),
        (
            Plan(data_strategy="data_parallel", batch_norm="broadcast", replicate=2),
            2,
            "data_strategy=data_parallel drives all GPUs from one process and the mesh asks for 2; set mesh.replicate=1,",
        ),
        (
            Plan(data_strategy="data_parallel", batch_norm="broadcast", space=[2, 1]),
            2,
            "deals out whole images to the GPUs of one process and mesh.space=[2, 1] cuts them; set mesh.space=[], or",
        ),
        (
            Plan(data_strategy="data_parallel", batch_norm="broadcast", stream=StreamConfig(tiles=[2, 2])),
            1,
            "runs copies of the model in threads and a stream (here 2 x 2 tiles) runs one at a time; set stream=null, or",
        ),
        (Plan(data_strategy="data_parallel"), 1, "normalizes each GPU's share alone, so batch_norm=synchronized cannot hold;"),
    ],
)
def test_a_plan_that_does_not_fit_the_ranks_says_which_axis_to_change(one, ranks, told):
    with pytest.raises(ValueError, match=re.escape(told)):
        check(one, ranks=ranks)


@pytest.mark.parametrize(
    ("one", "told"),
    [
        (Plan(replicate=2, sharding=ShardingConfig(offload=True)), "the CPU's memory and mesh.shard=1 leaves weights whole"),
        (
            Plan(shard=2, sharding=ShardingConfig(zero=1, offload=True)),
            "and sharding.zero=1 leaves weights whole; set mesh.shard",
        ),
        (Plan(stage=2, sharding=ShardingConfig(zero=1, offload=True)), "and mesh.shard=1 leaves weights whole"),
    ],
)
def test_there_are_no_parts_to_offload(one, told):
    with pytest.raises(ValueError, match=re.escape(told)):
        check(one, ranks=2)


def test_ranks_that_no_multiple_fits_say_the_multiple():
    with pytest.raises(
        ValueError, match=r"\(replicate 2 x shard 2\) needs 4 ranks and there are 3; start a multiple of 2 ranks"
    ):
        check(Plan(replicate=2, shard=2), ranks=3)


@pytest.mark.parametrize(
    ("axis", "size", "told"),
    [
        ("shard", 2, 'mesh.shard=2 cannot run: parallel/strategies/ has no file with AXIS = "shard". It has: '),
        ("space", [2, 2], 'mesh.space=[2, 2] cannot run: parallel/strategies/ has no file with AXIS = "space". It has: '),
        ("channel", 2, 'mesh.channel=2 cannot run: parallel/strategies/ has no file with AXIS = "channel". It has: '),
        ("stage", 2, 'mesh.stage=2 cannot run: parallel/strategies/ has no file with AXIS = "stage". It has: '),
    ],
)
def test_an_axis_without_a_strategy_file_is_refused(monkeypatch, axis, size, told):
    found = [load(STRATEGIES, name) for name in ("data", "data_parallel")]
    monkeypatch.setattr("widefield.plans.checks.load_all", lambda package: found)
    one = Plan(**{axis: size})
    with pytest.raises(NotImplementedError, match=re.escape(told + "data, data_parallel. Set mesh." + axis + "=")):
        check(one, ranks=one.ranks)


def test_fewer_samples_than_copies_are_refused():
    told = "3 copies of the model share a batch of 2 samples, so some would always be idle; use data.batch_size=3 or more"
    with pytest.raises(ValueError, match=told):
        check(Plan(replicate=3), ranks=3, samples_per_step=2)


# ---------------------------------------------------------------------------------------------- the files of strategies


def test_what_is_read_from_a_strategys_text_is_what_its_file_says():
    found = {strategy.__name__.rpartition(".")[2]: strategy for strategy in load_all(STRATEGIES)}
    assert {name: strategy.AXIS for name, strategy in found.items()} == AXES
    assert {s.SECTION: s.AXIS for s in found.values() if hasattr(s, "SECTION")} == SECTIONS
    assert set(Plan().axes) == {axis for axis in AXES.values() if axis is not None}
    assert SECTIONS.keys() <= Plan.model_fields.keys() & RunConfig.model_fields.keys()


@given(plans)
def test_a_strategy_is_used_where_its_axis_or_its_section_turns_it_on(one):
    used = {name for name in AXES if load(STRATEGIES, name).is_used(one)}
    assert {AXES[name] for name in used} <= {axis for axis, size in one.axes.items() if size > 1} | {"replicate", None}
    assert ("recompute" in used) == (one.recompute is not None)
    assert ("pipeline" in used) == (one.stage > 1) and not {"data", "fully_shard"} <= used


def test_of_two_problems_the_one_of_the_earlier_strategy_is_told():
    both = Plan(channel=2, stage=2, stream=StreamConfig(tiles=[2]))
    assert load(STRATEGIES, "channel").CHECK_ORDER < load(STRATEGIES, "pipeline").CHECK_ORDER
    with pytest.raises(NotImplementedError, match="the two cannot be combined"):
        check(both, ranks=4)
    with pytest.raises(ValueError, match="mesh.stage=2 runs a stage at once"):
        load(STRATEGIES, "pipeline").check_plan(both)


FREEZE = """
from widefield.plans import Plan

AXIS = None
SECTION = "freeze"
CHECK_ORDER = 35

def is_used(plan: Plan) -> bool:
    return plan.freeze is not None

def check_plan(plan: Plan) -> None:
    if plan.freeze is not None and plan.stage > 1:
        raise NotImplementedError(f"freeze.layers={plan.freeze.layers} beside mesh.stage={plan.stage}; set freeze=null")
"""
FREEZE_CONFIG = """
from widefield.section import Section

class FreezeConfig(Section):
    layers: list[str] = []
    \"\"\"Layers whose weights stay as they are.\"\"\"
"""
FREEZE_PLAN = """
import sys
from widefield.config import parse_config
from widefield.plans import Plan, check, from_text, plan_of, to_text

recipe = "model: {name: resnet}\\ndata: {name: digits}"
one = plan_of(parse_config(recipe, ["freeze.layers=[stem]", "mesh.stage=2"]), 2)
assert from_text(to_text(one)) == one and one.freeze.layers == ["stem"] and Plan().freeze is None
assert parse_config(recipe).freeze is None and "torch" not in sys.modules
print(one)
try:
    check(one, ranks=2)
except NotImplementedError as error:
    print(error)
"""


def with_freeze(folder, config: str) -> subprocess.CompletedProcess:
    """What becomes of FREEZE_PLAN in a copy of the package that has one more strategy, and the file of its section."""
    shutil.copytree(ROOT / "widefield", folder / "widefield", ignore=shutil.ignore_patterns("__pycache__"))
    (folder / "widefield/parallel/strategies/freeze.py").write_text(FREEZE)
    (folder / "widefield/config/freeze.py").write_text(config)
    environment = {**os.environ, "PYTHONPATH": str(folder)}
    return subprocess.run([sys.executable, "-c", FREEZE_PLAN], cwd=folder, env=environment, capture_output=True, text=True)


@pytest.mark.long
def test_a_new_strategy_brings_its_section_to_recipes_and_plans(tmp_path):
    done = with_freeze(tmp_path, FREEZE_CONFIG)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        "stage=2, freeze", "freeze.layers=['stem'] beside mesh.stage=2; set freeze=null"
    ]  # fmt: skip


def test_a_file_of_the_config_without_a_section_is_refused(tmp_path):
    done = with_freeze(tmp_path, "")
    assert "ValueError: config/freeze.py defines 0 sections; a file there is one, a subclass of Section" in done.stderr
