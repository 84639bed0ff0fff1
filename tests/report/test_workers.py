"""The table of a run's workers, from events written by hand."""

from __future__ import annotations

import pytest
from report.test_report import FULL, folder_of

from widefield.agreement.events import Event, EventLog
from widefield.report.page import write_report
from widefield.report.workers import HEAD, NAME, workers

EVENTS = (
    Event(1.0, "read", (0,), bytes=100),
    Event(1.5, "read", (1,), bytes=100),
    Event(3.0, "gradient", (0,), samples=(4, 5, 6), numbers=(0,), seconds=1.5, bytes=50),
    Event(3.0, "push", (0,), numbers=(0,)),
    Event(3.1, "read", (0,), bytes=100),
    Event(3.5, "die", (1,)),
    Event(4.0, "gradient", (0,), samples=(7,), numbers=(1,), seconds=0.5, bytes=50),
    Event(6.0, "join", (1,)),
    Event(6.0, "read", (1,), bytes=100),
    Event(8.0, "gradient", (1,), samples=(8, 9), numbers=(2,), seconds=1.0, bytes=50),
)
UPDATES = [{"kind": "updates", "staleness": [0, 0]}, {"kind": "updates", "staleness": [3]}]


def log(folder, events=EVENTS, seconds=10.0):
    folder.mkdir(exist_ok=True)
    text = EventLog("ParameterServer(...)", 2, 10, 1, 5, seconds, events).to_text()
    (folder / NAME).write_text(text)
    return folder


def test_a_row_for_each_worker(tmp_path):
    found = workers(log(tmp_path), UPDATES)
    assert found["head"] == HEAD and found["rows"] == [
        ("0", "2", "4", "2.0 s", "7.0 s, 78%", "300 bytes"),  # lived from 1 to 10 s
        ("1, gone, back", "1", "2", "1.0 s", "5.0 s, 83%", "250 bytes"),  # from 1.5 to 3.5, and from 6 to 10
    ]
    assert "1.00 in the mean, 3 at most" in found["staleness"] and found["picture"].startswith("<svg")


def test_a_run_that_was_killed_ends_with_its_last_event_and_a_torn_line_is_left_out(tmp_path):
    log(tmp_path, seconds=0.0)
    with (tmp_path / NAME).open("a") as file:
        file.write('{"time": 99.0, "kind": "gra')
    found = workers(tmp_path, [])
    assert [row[4] for row in found["rows"]] == ["5.0 s, 71%", "3.0 s, 75%"] and found["picture"] is None


def test_without_events_there_is_no_table(tmp_path):
    assert workers(tmp_path, UPDATES) is None


def test_much_staleness_is_drawn_in_few_bars(tmp_path):
    found = workers(log(tmp_path), [{"staleness": list(range(1000))}])
    assert 1000 > found["picture"].count("<path") and "999 at most" in found["staleness"]


@pytest.mark.parametrize("text", ["", "[1]\n", "torn", '{"seconds": 1}\n{"kind": "nothing", "time": 1, "workers": [0]}\n'])
def test_a_damaged_file_is_refused_with_its_name(tmp_path, text):
    (tmp_path / NAME).write_text(text)
    with pytest.raises(ValueError, match=f"{NAME}.* is damaged"):
        workers(tmp_path, [])


def test_the_page_has_the_table(tmp_path):
    folder = folder_of(tmp_path / "run", FULL)
    assert "<h2>Workers</h2>" not in write_report(folder).read_text()
    page = write_report(log(folder)).read_text()
    assert "<h2>Workers</h2>" in page and "1, gone, back" in page
