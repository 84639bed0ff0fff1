"""Does a recipe say what it says, and is what it cannot say refused by field, line and suggestion?"""

import json
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from widefield.config import OptimizerConfig, RunConfig, json_schema, parse_config, read_config
from widefield.quantity import Duration, read_duration, read_memory
from widefield.section import differences, to_yaml

RECIPE = """\
seed: 3
model: {name: resnet}
data:
  name: digits
  batch_size: 32
optimizer:
  lr: 1e-3
"""


def refusal(text: str, *overrides: str) -> str:
    with pytest.raises(ValueError) as caught:
        parse_config(text, overrides, name="recipe.yaml")
    return str(caught.value)


# ---------------------------------------------------------------------------------------------- what is read


def test_a_recipe_is_read_over_the_defaults():
    config = parse_config(RECIPE)
    assert (config.seed, config.model.name, config.data.batch_size, config.optimizer.lr) == (3, "resnet", 32, 1e-3)
    assert (config.optimizer.name, config.schedule.length, config.precision) == ("sgd", Duration(90, "ep"), None)


def test_overrides_win_and_make_the_sections_they_name():
    overrides = ["optimizer.lr=0.2", "schedule.length=5ep", "model.options.widths=[8, 16]", "ema.decay=0.9", "seed=4", "seed=5"]
    config = parse_config(RECIPE, overrides)
    assert (config.optimizer.lr, config.seed, config.ema.decay) == (0.2, 5, 0.9)
    assert config.schedule.length == Duration(5, "ep") and config.model.options == {"widths": [8, 16]}
    assert config.data.batch_size == 32


def test_an_empty_override_and_null_leave_the_choice_to_the_program():
    assert parse_config(RECIPE, ["optimizer.lr="]).optimizer.lr is None
    assert parse_config(RECIPE, ["optimizer.lr=null"]).optimizer.lr is None


def test_an_override_may_hold_an_equals_sign():
    assert parse_config(RECIPE, ["data.path=a=b"]).data.path == "a=b"


@pytest.mark.parametrize(
    ("text", "value"),
    [("1e-3", 1e-3), ("1E2", 100.0), ("1.e-3", 1e-3), (".5", 0.5), ("-2.5e+1", -25.0), ("5", 5), ("true", True),
     ("false", False), ("yes", "yes"), ("on", "on"), ("off", "off"), ("no", "no"), ("1.2.3", "1.2.3"),
     ("2026-01-31", "2026-01-31"), ("null", None)],
)  # fmt: skip
def test_scalars_are_those_of_yaml_1_2(text, value):
    option = parse_config(RECIPE, [f"model.options.x={text}"]).model.options["x"]
    in_file = parse_config(RECIPE.replace("{name: resnet}", f"{{name: resnet, options: {{x: {text}}}}}")).model.options["x"]
    assert option == in_file == value and type(option) is type(in_file) is type(value)


def test_a_config_is_frozen():
    with pytest.raises(ValidationError, match="frozen"):
        parse_config(RECIPE).seed = 4


def test_a_whole_number_will_do_for_a_float_but_not_the_other_way_round():
    assert parse_config(RECIPE, ["optimizer.lr=1"]).optimizer.lr == 1.0
    assert "'data.batch_size' is 32.5 (float)" in refusal(RECIPE, "data.batch_size=32.5")


# ---------------------------------------------------------------------------------------------- durations


@given(count=st.integers(0, 10**6), unit=st.sampled_from(["ep", "step"]), gap=st.sampled_from(["", " "]))
def test_a_duration_reads_back_what_it_writes(count, unit, gap):
    duration = read_duration(f"{count}{gap}{unit}")
    assert duration == Duration(count, unit) == read_duration(str(duration)) == read_duration(duration)


def test_a_duration_in_steps():
    assert Duration(3, "ep").in_steps(23) == 69 and Duration(3, "step").in_steps(23) == 3


@pytest.mark.parametrize("text", ["90", 90, "ep", "-1ep", "1.5ep", "90 epochs", "", None, "5ep "])
def test_what_is_no_duration_says_how_to_write_one(text):
    with pytest.raises(ValueError, match="not a duration: .*; write a whole number and a unit, as 90ep"):
        read_duration(text)


def test_a_wrong_duration_in_a_recipe_names_its_field():
    assert refusal(RECIPE, "schedule.length=90") == (
        "'schedule.length' is 90 (int): not a duration: 90; write a whole number and a unit, as 90ep (epochs) or 2000step\n"
        "  command line:  schedule.length=90"
    )


# ---------------------------------------------------------------------------------------------- refusals


def test_an_unknown_key_names_field_and_line_and_suggests():
    text = refusal(RECIPE.replace("batch_size", "batchsize"))
    assert text.startswith(
        "unknown key 'data.batchsize'; did you mean 'batch_size'? 'data' has: name, path, options, batch_size,"
    )
    assert text.endswith("\n  recipe.yaml, line 5:  batchsize: 32")


def test_an_unknown_key_at_the_top_lists_the_sections():
    text = refusal(RECIPE + "optimiser: {lr: 0.1}\n")
    assert text.startswith("unknown key 'optimiser'; did you mean 'optimizer'? a recipe has: seed, task, model, data,")
    assert text.endswith("recipe.yaml, line 8:  optimiser: {lr: 0.1}")


def test_an_unknown_key_inside_an_optional_section_lists_its_keys():
    assert refusal(RECIPE, "ema.decay=0.9", "ema.deca=1").startswith(
        "unknown key 'ema.deca'; did you mean 'decay'? 'ema' has: decay\n"
    )


def test_an_unknown_key_from_the_command_line_shows_the_override():
    assert refusal(RECIPE, "optimizer.lrr=0.2").endswith("\n  command line:  optimizer.lrr=0.2")


def test_an_override_is_blamed_rather_than_the_line_it_replaced():
    assert refusal(RECIPE, "data.batch_size=0").endswith("command line:  data.batch_size=0")


def test_a_wrong_type_names_value_type_and_line():
    text = refusal(RECIPE.replace("32", "many"))
    assert text.startswith("'data.batch_size' is 'many' (str): a whole number of 1 or more is wanted, or auto")
    assert text.endswith("\n  recipe.yaml, line 5:  batch_size: many")


@pytest.mark.parametrize(
    ("override", "told"),
    [
        ("precision=float33", "'precision' is 'float33'; did you mean 'float32'? It can be 'float64', 'float32'"),
        ("mesh.data_strategy=dat", "'mesh.data_strategy' is 'dat'; did you mean 'data'? It can be 'data' or 'data_parallel'"),
        ("mesh.data_strategy=pipeline", "'mesh.data_strategy' is 'pipeline'. It can be 'data' or 'data_parallel'"),
        ("seed=-1", "'seed' is -1 (int): input should be greater than or equal to 0"),
        ("seed=true", "'seed' is True (bool): input should be a valid integer"),
        ("optimizer.lr=0", "'optimizer.lr' is 0 (int): input should be greater than 0"),
        ("optimizer.lr=fnd", "'optimizer.lr' is 'fnd' (str): a number above 0 is wanted, or find"),
        ("optimizer.betas=[0.9]", "'optimizer.betas' is [0.9] (list): list should have at least 2 items"),
        ("data.hold_out=1", "'data.hold_out' is 1 (int): input should be less than 1"),
        ("mesh.space=[2, 0]", "'mesh.space.1' is 0 (int): input should be greater than or equal to 1"),
        ("data.path=7", "'data.path' is 7 (int): input should be a valid string"),
        ("stream.tiles=[2, 0]", "'stream.tiles.1' is 0 (int): input should be greater than or equal to 1"),
        ("stream.tiles=[]", "'stream.tiles' is [] (list): list should have at least 1 item"),
        ("stream.keep=disk", "'stream.keep' is 'disk'. It can be 'device', 'host' or 'file'"),
        ("stream.memory=6", "'stream.memory' is 6 (int): no amount of memory: 6; write a number above 0 and a unit, as 6GiB"),
        ("stream={tiles: [2], strict: perhaps}", "'stream.strict' is 'perhaps' (str): "),
        ("stream.tile=[2, 2]", "unknown key 'stream.tile'; did you mean 'tiles'? 'stream' has: tiles, memory, keep, compile"),
        ("stream={}", "'stream' is {} (dict): a stream needs to know its tiles or its memory; write stream.tiles=[4, 4] or"),
    ],
)
def test_a_value_out_of_bounds_says_the_bound(override, told):
    text = refusal(RECIPE, override)
    assert text.startswith(told) and text.endswith(f"\n  command line:  {override}")


def numbers(kind: type = RunConfig, prefix: str = "") -> list[tuple[str, str, str]]:
    """(key, `integer` or `number`, the value as a recipe has it) of every key that holds a number or numbers."""
    schema = RunConfig.model_json_schema()

    def walk(here: dict, key: str) -> list[tuple[str, str, str]]:
        options = [
            schema["$defs"][one["$ref"].rpartition("/")[2]] if "$ref" in one else one for one in here.get("anyOf", [here])
        ]
        found = []
        for one in options:
            if one.get("type") in ("integer", "number"):
                found.append((key, one["type"], "{}"))
            elif one.get("type") == "array" and one.get("items"):
                more = ", {}" * (one.get("minItems", 1) - 1)
                found += [(key, kind, f"[{{}}{more}]") for _, kind, _ in walk(one["items"], key)]
            for name, inner in one.get("properties", {}).items():
                found += walk(inner, f"{key}.{name}".lstrip("."))
        return found

    return walk(schema, "")


def test_no_key_takes_a_number_that_cannot_be():
    """Each key that holds numbers: nan and the infinities for those with a point, and -1, which no key wants, for all."""
    found = numbers()
    assert {"optimizer.lr", "data.std", "optimizer.betas", "log.stall_seconds", "ema.decay", "data.mean"} <= {
        k for k, *_ in found
    }
    assert len(found) > 35
    for key, kind, text in found:
        for value in [".nan", ".inf", "-.inf"] * (kind == "number") + ["-1"]:
            override = f"{key}={text.replace('{}', value)}"
            told = refusal(RECIPE, override)
            assert told.startswith(f"'{key}") and told.endswith(f"\n  command line:  {override}"), (override, told)


@pytest.mark.parametrize(
    "override",
    [
        "data.std=[0]", "data.std=[0.2, 0]", "data.std=[1e-320]", "data.mean=[120]", "optimizer.betas=[0.9, 1.0]",
        "optimizer.momentum=1.0", "ema.decay=1", "ema.decay=0", "log.stall_seconds=0.001", "schedule.gamma=0",
        "optimizer.clip_norm=0", "gradient.bucket_mib=0", "data.hold_out=1.5",
    ],
)  # fmt: skip
def test_numbers_that_make_no_sense_are_refused(override):
    assert refusal(RECIPE, override).startswith(f"'{override.partition('=')[0]}")


@pytest.mark.parametrize(
    ("override", "odd"),
    [
        ("optimizer.options={eps: .nan}", "nan"), ("model.options={dropout: .inf}", "inf"),
        ("task.options={a: {b: [-.inf]}}", "-inf"), ("data.options={size: [.nan, 3]}", "nan"),
        ("data.read=[ColorJitter: {brightness: .nan}]", "nan"),
        ("data.augment=[RandomCrop: {size: 8, fill: .inf}]", "inf"), ("data.read_evaluate=[Resize: {size: .nan}]", "nan"),
    ],
)  # fmt: skip
def test_options_hold_no_number_that_is_none(override, odd):
    told = refusal(RECIPE, override)
    assert told.startswith(f"'{override.partition('=')[0]}' is ")
    assert f"it holds {odd}, which is no finite number; give a number, or leave it out" in told


def test_a_missing_key_says_so_with_the_section_it_belongs_to():
    text = refusal(RECIPE.replace("  name: digits\n", ""))
    assert text == "'data.name' is missing; it has no default, so write it in the recipe\n  recipe.yaml, line 3:  data:"


def test_all_problems_are_told_at_once():
    text = refusal(RECIPE, "seed=-1", "data.batchsize=3")
    assert "'seed' is -1" in text and "unknown key 'data.batchsize'" in text


def test_a_key_given_twice_names_both_lines():
    assert refusal(RECIPE + "seed: 4\n") == "recipe.yaml, line 8: seed is given twice, first on line 1"
    nested = refusal(RECIPE.replace("  batch_size: 32\n", "  batch_size: 32\n  batch_size: 64\n"))
    assert nested == "recipe.yaml, line 6: data.batch_size is given twice, first on line 5"


@pytest.mark.parametrize("text", ["- a\n- b\n", "resnet", "3"])
def test_a_recipe_that_is_no_mapping_is_refused(text):
    assert re.match(r"recipe.yaml holds a (list|str|int); a mapping of keys to values is wanted", refusal(text))


def test_an_empty_recipe_misses_model_and_data():
    text = refusal("")
    assert "'model' is missing" in text and "'data' is missing" in text


def test_broken_yaml_says_where():
    assert re.match(r"recipe\.yaml is not YAML: (?s:.*)line 2", refusal("seed: 3\ndata: {name: [digits}\n"))


@pytest.mark.parametrize("override", ["optimizer.lr", "=3", ""])
def test_what_is_no_override_says_how_to_write_one(override):
    assert refusal(RECIPE, override) == (
        f"not an override: {override!r}; write KEY=VALUE, as optimizer.lr=0.2 or data.path=images"
    )


def test_an_override_below_a_plain_value_is_refused():
    assert refusal(RECIPE, "seed.x=3") == "command line: seed.x=3: seed holds 3, which has no keys"


def test_an_override_that_is_no_yaml_is_refused():
    assert refusal(RECIPE, "mesh.space=[2, 2").startswith("command line: mesh.space=[2, 2: '[2, 2' is not YAML")


# ---------------------------------------------------------------------------------------------- memory


@pytest.mark.parametrize(
    ("text", "size"),
    [("6GiB", 6 * 2**30), ("1.5 GiB", 3 * 2**29), ("800MiB", 800 * 2**20), ("2KiB", 2048), ("0.25TiB", 2**38)],
)
def test_an_amount_of_memory_is_a_number_and_a_unit(text, size):
    assert read_memory(text) == size
    assert parse_config(RECIPE, [f"stream.memory={text}"]).stream.memory == text


@pytest.mark.parametrize(
    "text", ["6GB", "6", "GiB", "0GiB", "0.00001KiB", "-1GiB", "6 gib", "6GiB ", "1e3GiB", "", None, 6, 6.5, "9" * 400 + "GiB"]
)
def test_what_is_no_amount_of_memory_says_how_to_write_one(text):
    with pytest.raises(
        ValueError, match="no amount of memory: .* write a number above 0 and a unit, as 6GiB, 1.5GiB or 800MiB"
    ):
        read_memory(text)


def test_a_stream_is_off_until_it_is_asked_for_and_says_its_tiles():
    assert parse_config(RECIPE).stream is None and parse_config(RECIPE, ["stream.tiles=[2]", "stream=null"]).stream is None
    one = parse_config(RECIPE, ["stream.tiles=[4, 2]"]).stream
    assert (one.tiles, one.memory, one.keep, one.compile, str(one)) == ([4, 2], None, None, False, "4 x 2 tiles")
    other = parse_config(
        RECIPE + "stream: {tiles: [4, 2]}\n", ["stream.tiles=", "stream.memory=6GiB", "stream.keep=file"]
    ).stream
    assert (other.tiles, other.memory, other.keep, str(other)) == (None, "6GiB", "file", "tiles within 6GiB")


# ---------------------------------------------------------------------------------------------- files


def test_a_recipe_is_read_from_its_file(tmp_path):
    (tmp_path / "digits.yaml").write_text(RECIPE)
    assert read_config(tmp_path / "digits.yaml", ["seed=9"]) == parse_config(RECIPE, ["seed=9"])


def test_a_recipe_that_is_not_there_names_its_neighbours(tmp_path):
    (tmp_path / "digits.yaml").write_text(RECIPE)
    with pytest.raises(ValueError, match=r"no recipe at .*digit\.yaml; did you mean 'digits\.yaml'\? .* has: digits\.yaml\."):
        read_config(tmp_path / "digit.yaml")
    with pytest.raises(ValueError, match=r"no recipe at .*nowhere/digits\.yaml\.$"):
        read_config(tmp_path / "nowhere" / "digits.yaml")


# ---------------------------------------------------------------------------------------------- writing


OVERRIDES = [
    "precision=tf32", "ema.decay=0.999", "mesh.space=[2, 2]", "data.read=[Resize: {size: [8, 8]}, RandomHorizontalFlip]",
    "schedule.warmup=100step", "schedule.every=3ep", "optimizer.lr=1e-7", "data.path='yes'", "data.hold_out=0.1",
    "model.options={a: 'null', b: [1, 2.5], c: 'on', d: '1e-3', e: 1e-3}", "log.wandb='5'",
    "data.path='1e3'", "data.path=2026-01-31", "stream={memory: 1.5GiB, keep: host, compile: true}",
]  # fmt: skip


@pytest.mark.parametrize("overrides", [[], *([override] for override in OVERRIDES), OVERRIDES], ids=lambda o: " ".join(o)[:30])
def test_yaml_reads_back_equal(overrides):
    config = parse_config(RECIPE, overrides)
    assert parse_config(to_yaml(config)) == config


@pytest.mark.long
@given(lr=st.floats(1e-300, 1e300), decay=st.floats(0, 1e9), text=st.text(st.characters(codec="utf-8"), max_size=12))
def test_yaml_keeps_every_bit_of_floats_and_every_letter(lr, decay, text):
    config = parse_config(RECIPE)
    optimizer = OptimizerConfig(lr=lr, weight_decay=decay)
    config = config.model_copy(update={"optimizer": optimizer, "data": config.data.model_copy(update={"path": text})})
    assert parse_config(to_yaml(config)) == config


def test_differences_name_each_field_that_changed_and_no_other():
    old = parse_config(RECIPE)
    new = parse_config(RECIPE, ["optimizer.lr=0.2", "ema.decay=0.9", "schedule.length=5ep"])
    assert differences(old, old) == []
    assert differences(old, new) == ["optimizer.lr: 0.001 -> 0.2", "schedule.length: 90ep -> 5ep", "ema.decay: None -> 0.9"]
    assert differences(new, old)[-1] == "ema.decay: 0.9 -> None"


def test_the_json_schema_knows_every_section_with_its_words():
    schema = json.loads(json_schema())
    assert set(schema["properties"]) == set(RunConfig.model_fields) and schema["additionalProperties"] is False
    assert set(schema["required"]) == {"model", "data"}
    data = schema["$defs"]["DataConfig"]["properties"]
    assert data["evaluate_batch_size"]["anyOf"][0]["minimum"] == 1 and data["batch_size"]["anyOf"][1]["const"] == "auto"
    assert data["batch_size"]["anyOf"][0]["minimum"] == 1 and "Samples per optimizer step" in data["batch_size"]["description"]
    assert schema["$defs"]["ScheduleConfig"]["properties"]["length"]["pattern"] == r"^\d+\s*(ep|step)$"


@pytest.mark.parametrize("text", ["a: &x {b: *x}\n", "a: &x [*x]\n", "[" * 5000, "{a: " * 5000])
def test_a_recipe_that_holds_itself_or_is_endlessly_deep_is_refused(text):
    with pytest.raises(ValueError, match="recipe.yaml is nested .*write its values out"):
        parse_config(text, name="recipe.yaml")


@pytest.mark.parametrize("text", ["&a [*a]", "[" * 60 + "]" * 60, "{a: &b {c: *b}}"])
def test_a_value_that_holds_itself_or_is_nested_deep_is_refused(text):
    with pytest.raises(
        ValueError, match="nested more than 50 deep, or has more than 1,000,000 values, as where one holds itself"
    ):
        parse_config(RECIPE, [f"model.options.blocks={text}"])


def test_values_that_grow_endless_through_aliases_are_refused_at_once():
    bomb = "a: &a [x, x, x, x, x, x, x, x, x, x]\n" + "".join(
        f"{new}: &{new} [{', '.join([f'*{old}'] * 10)}]\n" for old, new in zip("abcdefgh", "bcdefghi", strict=True)
    )
    with pytest.raises(ValueError, match="more than 1,000,000 values"):
        parse_config(bomb)
