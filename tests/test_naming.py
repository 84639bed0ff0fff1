import re
import sys

import pytest

from widefield.naming import constants_in, did_you_mean, load, load_all, names_in


@pytest.fixture
def package(tmp_path, monkeypatch):
    """A package `rooms` of two files, a folder and what must not count: a private file and a text."""
    place = tmp_path / "rooms"
    (place / "cellar").mkdir(parents=True)
    for name in ("__init__.py", "kitchen.py", "attic.py", "_pipes.py", "notes.txt", "cellar/__init__.py"):
        (place / name).write_text("HEIGHT = 3\n")
    monkeypatch.syspath_prepend(tmp_path)
    yield "rooms"
    for name in [name for name in sys.modules if name.split(".")[0] == "rooms"]:
        del sys.modules[name]


def test_the_names_of_a_folder_are_its_files_sorted_without_private_ones(package):
    assert names_in(package) == ["attic", "cellar", "kitchen"]


def test_listing_names_imports_none_of_the_files(package):
    names_in(package)
    assert "rooms.kitchen" not in sys.modules


def test_a_new_file_is_a_new_name(package, tmp_path):
    (tmp_path / "rooms" / "bath.py").write_text("HEIGHT = 2\n")
    assert load(package, "bath").HEIGHT == 2
    assert load(package, "kitchen").HEIGHT == 3


@pytest.mark.parametrize("name", ["kitchn", "_pipes", "../kitchen", "kitchen.py", ""])
def test_a_name_without_a_file_is_refused_with_what_there_is(package, name):
    with pytest.raises(ValueError, match=re.escape(f"rooms/ has no {name}.py") + "[.;].* It has: attic, cellar, kitchen"):
        load(package, name)


def test_the_nearest_name_is_suggested(package):
    with pytest.raises(ValueError, match="did you mean 'kitchen'"):
        load(package, "kitchn")
    assert did_you_mean("segmantation", ["classification", "segmentation"]) == "; did you mean 'segmentation'?"


def test_nothing_is_suggested_where_nothing_is_near():
    assert did_you_mean("zebra", ["classification", "segmentation"]) == "." == did_you_mean("zebra", [])


def test_a_package_that_is_none_is_our_bug():
    with pytest.raises(AssertionError, match=r"widefield\.naming is not a package"):
        names_in("widefield.naming")


def test_all_of_a_folder_comes_in_the_order_of_names(package):
    assert [module.__name__ for module in load_all(package)] == ["rooms.attic", "rooms.cellar", "rooms.kitchen"]


def test_constants_are_read_without_an_import(package, tmp_path):
    (tmp_path / "rooms" / "bath.py").write_text("WIDTH: int | None = None\nif WIDTH:\n    HEIGHT = 4\nraise OSError\n")
    found = constants_in(package, ("HEIGHT", "WIDTH"))
    assert found == {"attic": {"HEIGHT": 3}, "bath": {"WIDTH": None}, "cellar": {"HEIGHT": 3}, "kitchen": {"HEIGHT": 3}}
    assert not {f"rooms.{name}" for name in found} & set(sys.modules)


def test_a_constant_that_is_no_literal_is_refused_with_its_line(package, tmp_path):
    (tmp_path / "rooms" / "bath.py").write_text("import math\n\nHEIGHT = math.pi\n")
    with pytest.raises(ValueError, match=r"bath\.py, line 3: HEIGHT = math\.pi is read before the file runs; write a literal"):
        constants_in(package, ("HEIGHT",))
