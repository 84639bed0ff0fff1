"""plan.html says what plan.json says, needs nothing else, and is whole for every kind of answer."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser

import pytest
from made_records import MIB, MadeModel, made_pricing

from widefield.planner.search.answer import answer
from widefield.planner.search.backwards import largest_batch
from widefield.report.plan_page import page, write_plan, write_plan_page
from widefield.report.plan_pictures import cut, memory_bars, parts_of, timeline
from widefield.report.plan_words import HEAD, best_of_kinds, cells, priced, sentences, table_text
from widefield.report.predicted import predicted

GIB = 1024 * MIB


@pytest.fixture(scope="module")
def tree():
    model = MadeModel(weights=400 * MIB, activations=30 * GIB)
    pricing = made_pricing(model, "2x8xA100-40G", batch=16)
    found = answer(pricing, (3, 512, 512), data="made", seconds=10, questions=[largest_batch])
    return json.loads(json.dumps(found.to_tree()))


@pytest.fixture(scope="module")
def hopeless():
    pricing = made_pricing(MadeModel(weights=900 * GIB, activations=GIB), "2xA100-40G", batch=2)
    return json.loads(json.dumps(answer(pricing, (1, 64, 64, 64), data="made", seconds=5).to_tree()))


class Reader(HTMLParser):
    """The tags that are open, and what a page would load."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open, self.loads, self.wrong = [], [], []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.loads += [value for name, value in attrs if name in ("src", "href") and not value.startswith(("data:", "#"))]
        if tag not in ("meta", "br", "img", "link"):
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        pass

    def handle_endtag(self, tag):
        if not self.open or self.open.pop() != tag:
            self.wrong.append(tag)


@pytest.mark.long
def test_the_page_is_whole_and_loads_nothing(tree, tmp_path):
    path = write_plan(tmp_path / "out", tree)
    text = path.read_text()
    read = Reader(text)
    assert not read.loads and not read.wrong and not read.open
    assert "Content-Security-Policy" in text and "default-src 'none'" in text
    assert write_plan_page(tmp_path / "out").read_text() == text, "equal files give equal bytes"


def test_the_page_has_the_choice_the_reasons_and_every_kind_of_picture(tree):
    text = page(tree)
    plain = re.sub(r"\s+", " ", re.sub(r"<[^>]*>", " ", text))
    assert tree["best"]["name"] in plain
    for title in ("Memory of the fullest rank", "A step of the plan", "Time against memory", "Memory over a step",
                  "More devices",
                  "Why the others lost", "What would change the choice", "Asked backwards"):  # fmt: skip
        assert title in plain, title
    assert "16,384" in plain and "largest batch" in plain


def test_a_page_of_what_does_not_fit_says_so(hopeless):
    text = page(hopeless)
    assert "it does not fit" in text and "per device are missing" in text and "A step of the nearest plan" in text
    assert not Reader(text).wrong


def test_names_are_text_and_never_markup(tree):
    text = page(tree | {"model": "<script>alert(1)</script>", "verdict": "<b>"})
    assert "<script" not in text and "<b>." not in text


def test_bars_have_the_parts_of_memory_which_add_up(tree):
    for plan in priced(tree):
        for rank in plan["memory"]:
            assert sum(parts_of(rank).values()) == max(rank["total_bytes"], rank["peak_memory_bytes"])
    widths = [
        float(width) for width in re.findall(r'<i style="width: ([\d.]+)%', str(memory_bars(best_of_kinds(priced(tree)))))
    ]
    assert widths and all(0 < width <= 100 for width in widths)


def test_the_timeline_has_each_recorded_rank_and_stays_inside(tree):
    plan = next(plan for plan in priced(tree) if plan["plan"]["stage"] > 1 or plan["timeline"])
    svg = str(timeline(plan))
    for x, width in re.findall(r'<rect x="([\d.]+)" y="\d+" width="([\d.]+)"', svg):
        assert 0 <= float(x) and float(x) + float(width) <= 1001
    assert all(rank["role"] in svg for rank in plan["memory"])
    assert timeline(plan | {"timeline": []}) is None


@pytest.mark.parametrize(
    ("space", "image", "lines", "words"),
    [
        ([2, 2], [3, 64, 96], 2, "2 x 2 tiles of 32 x 48 pixels"),
        ([2, 2, 2], [1, 64, 64, 64], 2, "2 x 2 x 2 tiles of 32 x 32 x 32 pixels, each with its halo, 2 deep behind each other"),
        ([4, 1, 1], [1, 64, 64, 64], 3, "4 x 1 x 1 tiles of 16 x 64 x 64 pixels, each with its halo."),
    ],
)
def test_cuts_are_drawn(space, image, lines, words, tree):
    drawn = cut(tree["best"] | {"plan": {"space": space, "channel": 1, "stage": 1}}, image)
    assert drawn is not None and words in drawn[1] and str(drawn[0]).count("cutline") == lines
    assert cut(tree["best"] | {"plan": {"space": [], "channel": 1, "stage": 1}}, image) is None


def test_the_table_has_the_best_of_every_kind(tree):
    lines = table_text(tree, most=100).splitlines()
    kinds = {plan["kind"] for plan in priced(tree)}
    assert len(lines) == 1 + len(kinds) and len(cells(priced(tree)[0])) == len(HEAD)
    assert lines[1].startswith(tree["best"]["name"])
    assert sentences(tree)[0] == f"plan: {tree['verdict']}"


@pytest.mark.parametrize("text", [None, "{", '{"plans": 3}'])
def test_a_missing_or_damaged_plan_is_refused(text, tmp_path):
    if text is not None:
        (tmp_path / "plan.json").write_text(text)
    with pytest.raises(ValueError, match="plan.json|values that widefield does not write"):
        write_plan_page(tmp_path)


# ---------------------------------------------------------------------------------------------- predicted and measured

PREDICTION = {
    "machines": "2xA100-40G", "measured_device": False, "peak_memory_bytes": 10 * GIB, "seconds": 0.2,
    "parts": {"weights": GIB, "activations": 9 * GIB}, "seconds_by": {"forward": 0.1, "backward": 0.1, "bubble": 0.0},
}  # fmt: skip


def measured(seconds: float, memory: float, *, of: str = "GPU", library_bytes: int = 0) -> dict:
    steps = [{"seconds": seconds + 0.05, "data_seconds": 0.05, "memory_bytes": int(memory)}] * 3
    found = predicted({"prediction": {**PREDICTION, "library_bytes": library_bytes}, "memory_of": of}, steps)
    assert found is not None
    return found


def test_what_agrees_is_said_to_and_what_does_not_offers_to_measure_again():
    near = measured(0.205, 10.1 * GIB)
    assert [row[3] for row in near["rows"]] == ["-2.4 %", "-1.0 %"] and "near it" in near["words"]
    late = measured(0.4, 10 * GIB)
    assert late["rows"][0][3] == "-50.0 %" and "widefield plan --calibrate measures this machine" in late["words"]
    assert "memory is off by more than 5 %" in measured(0.2, 12 * GIB)["words"]
    with_cublas = measured(0.2, 10.1 * GIB, library_bytes=GIB // 10)
    assert with_cublas["rows"][1][3] == "+0.0 %"
    assert near["parts"][0] == ("memory: activations", "9.0 GiB")


def test_the_memory_of_a_process_is_not_compared_with_that_of_tensors():
    found = measured(0.2, 20 * GIB, of="process")
    assert found["rows"][1][3] == "–" and "not what was predicted" in found["words"]


def test_a_run_without_a_prediction_has_no_card():
    assert predicted({}, []) is None
    found = predicted({"prediction": PREDICTION}, [])
    assert found is not None and "No step was recorded" in found["words"]
