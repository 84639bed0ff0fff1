"""The list of cases that `make test` leaves out keeps a case of each test, and only cases that are there."""

from __future__ import annotations

from slow_cases import chosen, seconds_of, slow_cases, unknown, without_quick_case

LOG = """
3.00s call     tests/a.py::test_of_three[the first]
1.60s call     tests/a.py::test_of_three[2]
0.01s call     tests/a.py::test_of_three[3]
9.00s setup    tests/a.py::test_of_three[3]
7.00s call     tests/a.py::test_by_itself
2.00s call     tests/b.py::test_of_two[all slow]
5.00s call     tests/b.py::test_of_two[slower]
"""


def test_of_each_test_the_quickest_case_stays():
    assert chosen(seconds_of(LOG.splitlines())) == {
        "tests/a.py::test_of_three[the first]", "tests/a.py::test_of_three[2]", "tests/b.py::test_of_two[slower]",
    }  # fmt: skip


def test_a_listed_case_that_is_gone_is_named():
    assert unknown(["a[1]", "b[1]"], ["a[1]", "a[2]"]) == ["b[1]"]


def test_a_test_of_which_no_quick_case_is_left_is_named():
    assert without_quick_case(["a[1]", "b[1]"], ["a[2]", "c[1]"]) == ["b"]


def test_listed_are_cases_of_tests_with_several():
    assert slow_cases() and all("::" in name and "[" in name for name in slow_cases())
