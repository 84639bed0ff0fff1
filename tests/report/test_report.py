"""The report names every figure of a run, loads nothing, trusts no text, and is a pure function of the folder."""

from __future__ import annotations

import base64
import io
import json
import re
import shutil
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import pytest
from PIL import Image

from widefield.report import plots, write_report
from widefield.report.mistakes import confusion
from widefield.report.page import _duration

START = {
    "kind": "start", "time": 1_767_225_600.0, "ranks": 2, "plan": "replicate: 2\nshard: 1\n", "resumed_from": None,
    "versions": {"python": "3.11.9", "torch": "2.15.0", "torchvision": "0.30.0", "widefield": "0.1.0"},
    "machine": {"host": "node-17", "cpu": "Xeon 8481C", "cores": 2, "memory_bytes": 16 * 2**30, "gpus": ["H200, 139 GiB"] * 2},
    "reasons": ["optimizer.lr: 0.1 by the linear rule"], "steps": 4, "samples_per_epoch": 128, "parameters": 77018,
}  # fmt: skip
NAUGHTY = "<script>alert('x')</script>"


def step_line(step: int, *, seconds: float = 0.5, data_seconds: float = 0.01, loss: float = 1.0) -> dict[str, Any]:
    return {
        "kind": "step", "time": START["time"] + step, "step": step, "epoch": step / 2, "loss": loss / step, "lr": 0.0873,
        "samples": 64, "seconds": seconds, "data_seconds": data_seconds, "memory_bytes": 3 * 2**29,
    }  # fmt: skip


def evaluation_line(step: int) -> dict[str, Any]:
    return {
        "kind": "evaluation", "time": START["time"] + step, "step": step, "epoch": step / 2, "images": 7, "of": 8,
        "duplicates": 0, "skipped": 1, "loss": 0.0612, "metrics": {"top1": 71.4286, "top5": 100.0}, "seconds": 0.25,
    }  # fmt: skip


def end_line(reason: str = "complete", step: int = 4, text: str = "done") -> dict[str, Any]:
    return {"kind": "end", "time": START["time"] + 72, "reason": reason, "step": step, "text": text}


FULL = [
    START, step_line(1, seconds=9.0), step_line(2), evaluation_line(2), step_line(3), step_line(4), evaluation_line(4),
    {"kind": "checkpoint", "time": START["time"] + 5, "step": 4, "name": "step-0000004"},
    {"kind": "warning", "time": START["time"] + 1, "text": "train/a.png is empty; skipped"}, end_line(),
]  # fmt: skip


def folder_of(folder: Path, lines: list[dict[str, Any]], *, evaluated: bool = True, **changes: Any) -> Path:
    """A run folder with these lines; `changes` go into evaluation.json."""
    (folder / "mistakes").mkdir(parents=True)
    (folder / "record.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (folder / "config.yaml").write_text("seed: 0\nmodel: {name: resnet}\ndata: {name: digits}\n")
    Image.fromarray(np.arange(64, dtype=np.uint8).reshape(8, 8)).save(folder / "mistakes/00.png")
    if evaluated:
        mistake = {"id": "digits/123", "picture": "mistakes/00.png", "truth": "cat", "prediction": "dog",
                   "probability": 0.914, "loss": 2.4}  # fmt: skip
        evaluation = {
            "step": 4, "epoch": 2.0, "sentence": "71.43 % top-1 on 7/8 images", "images": 7, "of": 8,
            "duplicates": 0, "skipped": ["val/cat/broken.jpg"], "loss": 0.0612, "metrics": {"top1": 71.4286, "top5": 100.0},
            "classes": ["cat", "dog"], "confusion": [[3, 1], [1, 2]], "mistakes": [mistake],
        }  # fmt: skip
        (folder / "evaluation.json").write_text(json.dumps(evaluation | changes))
    return folder


def page(folder: Path) -> str:
    return write_report(folder).read_text()


class Reader(HTMLParser):
    """Text outside <style>, all tags, addresses of other things (`#id` is this page), and tags left open."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.words: list[str] = []
        self.tags: list[str] = []
        self.addresses: list[str] = []
        self.open: list[str] = []
        self.feed(html)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        links = [value for name, value in attrs if name in ("src", "href", "xlink:href", "srcset", "data", "action")]
        self.addresses += [link for link in links if not link.startswith("#")]
        if tag not in ("meta", "img", "link", "br"):
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.handle_starttag(tag, attrs)
        self.open.pop()

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if "style" not in self.open:
            self.words.append(data)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.words).split())


def cards(html: str) -> dict[str, tuple[str, str]]:
    pattern = r'<span class="label">(.*?)</span><span class="value">(.*?)</span><span class="detail">(.*?)</span>'
    return {label: (value, detail) for label, value, detail in re.findall(pattern, html)}


# ---------------------------------------------------------------------------------------------- what it says


def test_the_headline_figures_are_those_of_the_record(tmp_path):
    assert cards(page(folder_of(tmp_path / "run", FULL))) == {
        "top-1": ("71.43 %", "5 of 7 right; 7/8 images"),
        "evaluation loss": ("0.0612", "training loss 0.25"),
        "trained": ("2 epochs", "step 4 of 4"),
        "wall time": ("1 min 12 s", "steps 10.5 s, evaluation 0.5 s"),
        "throughput": ("128 img/s", "median step, all ranks together"),  # the slow first step left out
        "waiting for data": ("2.0 %", "compute-bound"),
        "peak memory of the process": ("1.5 GiB", "of rank 0, with libraries and mapped files; highest of any step"),
        "ranks": ("2", "replicate 2"),
    }


def test_the_page_names_all_it_should(tmp_path):
    text = Reader(page(folder_of(tmp_path / "run", FULL))).text
    for words in (
        "resnet on digits",
        "Trained 2 epochs (4 steps) on 2 ranks in 1 min 12 s. It reached 71.43 % top-1 on 7/8 images.",
        "Compute-bound: 2.0 % of the time of steps went into waiting for data.",
        "Training loss", "Evaluation", "Time per step", "Learning rate", "Highest 0.0873, last 0.0873.",
        "Median 128 img/s. Step 1 reaches beyond the picture, the slowest with 9,000 ms.",
        "2 1.00 71.43 % 100.00 % 0.0612 7/8 0.25 s",
        "cat 3 1 75.0 %", "dog 1 2 66.7 %",
        "is cat , predicted dog with 91.4 %, loss 2.4 digits/123",
        "train/a.png is empty; skipped", "1 image was skipped in the newest evaluation val/cat/broken.jpg",
        "replicate 2 data", "space 1 –", "replicate: 2 shard: 1",
        "optimizer.lr: 0.1 by the linear rule",
        "Xeon 8481C, 2 cores", "16.0 GiB", "2 × H200, 139 GiB", "77,018", "torch 2.15.0", "node-17",
        "2026-01-01 00:00:00 UTC started", "complete at step 4", "newest of 1 checkpoint: step-0000004",
        "seed: 0 model: {name: resnet} data: {name: digits}",
    ):  # fmt: skip
        assert words in text, words


def test_a_run_that_waits_for_data_is_told_what_to_do(tmp_path):
    lines = [START, *(step_line(step, data_seconds=0.215) for step in (1, 2, 3))]
    text = Reader(page(folder_of(tmp_path / "run", lines))).text
    assert "Data-bound: 43.0 % of the time of steps went into waiting for data; raise data.workers" in text


@pytest.mark.parametrize(("reason", "says"), [
    ("interrupted", "Interrupted at step 2 of 4. The same command again goes on from the newest checkpoint. It reached"),
    ("failed", "Failed at step 2 of 4: no space left. It reached"),
    (None, "Still running, or killed: the record ends at step 2 of 4."),
])  # fmt: skip
def test_a_run_that_did_not_end_well_says_so(tmp_path, reason, says):
    lines = [START, step_line(1), step_line(2)] + ([end_line(reason, 2, "no space left")] if reason else [])
    html = page(folder_of(tmp_path / "run", lines))
    assert says in Reader(html).text
    assert f'class="state {reason or "open"}"' in html


def test_a_resumed_run_is_no_longer_interrupted_and_counts_the_time_of_both_attempts(tmp_path):
    second = {**START, "resumed_from": 2, "time": START["time"] + 10_000}
    late = [{**step_line(step), "time": START["time"] + 10_000 + step} for step in (3, 4)]
    lines = [START, step_line(1), step_line(2), {**end_line("interrupted", 2), "time": START["time"] + 3}, second, *late]
    html = page(folder_of(tmp_path / "run", lines))
    assert 'class="state open"' in html
    assert cards(html)["wall time"][0] == "7.0 s"
    assert "resumed from step 2" in Reader(html).text


def test_an_evaluation_of_an_earlier_step_says_which(tmp_path):
    text = Reader(page(folder_of(tmp_path / "run", FULL, step=2))).text
    assert "on 7/8 images, measured at step 2." in text


@pytest.mark.parametrize("lines", [[START], [START, step_line(1)], [step_line(1)], []])
def test_a_run_with_next_to_nothing_has_a_page(tmp_path, lines):
    text = Reader(page(folder_of(tmp_path / "run", lines, evaluated=False))).text
    assert "No evaluation was made." in text
    assert ("No step was recorded" in text) == (not any(line["kind"] == "step" for line in lines))


def test_losses_that_are_not_finite_are_drawn_around_and_counted(tmp_path):
    lines = [START, *(step_line(step) for step in range(1, 41)), {**step_line(41), "loss": "nan"}]
    assert "1 step has a loss that is not finite." in Reader(page(folder_of(tmp_path / "run", lines))).text


def test_a_run_that_only_diverged_has_a_page(tmp_path):
    lines = [START, *({**step_line(step), "loss": "inf"} for step in range(1, 31))]
    assert "30 steps have a loss that is not finite." in Reader(page(folder_of(tmp_path / "run", lines))).text


def test_many_classes_are_listed_by_their_most_confused_pairs(tmp_path):
    matrix = np.diag(np.full(41, 10))
    matrix[7, 3] += 5
    matrix[3, 7] += 2
    names = [f"class-{index:02d}" for index in range(41)]
    text = Reader(page(folder_of(tmp_path / "run", FULL, classes=names, confusion=matrix.tolist()))).text
    assert "class-07 class-03 5 33.3 % class-03 class-07 2 16.7 %" in text
    assert "class-07 10 of 15 66.7 % class-03 10 of 12 83.3 % class-00 10 of 10 100.0 %" in text
    assert "Rows are the truth" not in text


def test_the_matrix_is_drawn_up_to_forty_classes():
    matrix = np.diag(np.full(40, 1)).tolist()
    found = confusion({"classes": list(map(str, range(40))), "confusion": matrix})
    assert found is not None and len(found["rows"]) == 40
    assert confusion({"classes": ["0"], "confusion": None}) is None


def test_a_plan_of_another_version_is_shown_as_text(tmp_path):
    lines = [{**START, "plan": "hexagonal: 6\n"}, step_line(1)]
    assert "hexagonal: 6" in Reader(page(folder_of(tmp_path / "run", lines))).text


def test_a_warning_that_came_often_is_listed_once(tmp_path):
    warning = {"kind": "warning", "time": 0.0, "text": "slow disk"}
    assert "slow disk (3 times)" in Reader(page(folder_of(tmp_path / "run", [START, warning, warning, warning]))).text


def test_durations_read_well_at_every_scale():
    scales = {4.24: "4.2 s", 59.99: "1 min 00 s", 72: "1 min 12 s", 3599.7: "1 h 00 min", 7380: "2 h 03 min"}
    assert {seconds: _duration(seconds) for seconds in scales} == scales


# ---------------------------------------------------------------------------------------------- what it is


def test_the_page_loads_nothing_and_closes_every_tag(tmp_path):
    html = page(folder_of(tmp_path / "run", FULL))
    reader = Reader(html)
    assert reader.open == []
    assert len(reader.addresses) == 1 and reader.addresses[0].startswith("data:image/png;base64,")
    assert not {"script", "link", "iframe", "object", "base"} & set(reader.tags)
    assert not re.search(r"https?://|@import|url\((?!#)", html)
    assert "default-src 'none'" in html
    for id_ in re.findall(r"(?:url\(|href=\")#([^)\"]*)", html):
        assert html.count(f'id="{id_}"') == 1


def test_text_from_outside_is_never_markup(tmp_path):
    lines = [
        {**START, "reasons": [NAUGHTY], "plan": NAUGHTY, "fallbacks": [{**WHOLE, "module": NAUGHTY, "why": NAUGHTY}],
         "machine": {**START["machine"], "host": NAUGHTY}}, step_line(1),
        {**evaluation_line(1), "metrics": {NAUGHTY: 1.0}}, {"kind": "warning", "time": 0.0, "text": NAUGHTY},
        {"kind": "checkpoint", "time": 0.0, "step": 1, "name": NAUGHTY}, end_line("failed", 1, NAUGHTY),
    ]  # fmt: skip
    mistake = {"id": f'"{NAUGHTY}', "picture": NAUGHTY, "truth": NAUGHTY, "prediction": "$x^", "probability": 0.5, "loss": 1.0}
    folder = folder_of(
        tmp_path / "run", lines, classes=[NAUGHTY, f'"{NAUGHTY}'], sentence=NAUGHTY, skipped=[NAUGHTY],
        mistakes=[mistake], metrics={NAUGHTY: 1.0},
    )  # fmt: skip
    (folder / "config.yaml").write_text(f'model: {{name: "{NAUGHTY}"}}\ndata: {{name: digits}}\n# </pre>{NAUGHTY}\n')
    reader = Reader(page(folder))
    assert "script" not in reader.tags and reader.open == []
    assert reader.text.count("alert('x')") >= 15


WHOLE = {"kind": "run whole", "module": "up.attention", "operation": "bmm", "bytes": 3 * 2**20, "why": "no rule", "count": 2}


def test_what_ran_whole_is_a_table_with_its_bytes_the_largest_first(tmp_path):
    rows = [{**WHOLE, "module": f"layer{n}", "bytes": n * 2**20} for n in (1, 9)] + [
        {**WHOLE, "kind": "drawn whole", "why": ""}
    ]
    html = page(folder_of(tmp_path / "run", [{**START, "fallbacks": rows}, step_line(1), end_line()]))
    text = Reader(html).text
    assert "run whole: 4 operations, 10 MiB in all, on the whole image at once" in text
    assert "drawn whole: 2 operations, 3.0 MiB in all, random numbers for the whole" in text
    assert text.index("layer9") < text.index("layer1") and "9.0 MiB" in text and "no rule" in text
    assert "Run on the whole" not in page(folder_of(tmp_path / "other", FULL))


def test_a_long_table_ends_with_what_is_left(tmp_path):
    rows = [{**WHOLE, "module": f"layer{n}", "bytes": 2**20, "count": 1} for n in range(60)]
    text = Reader(page(folder_of(tmp_path / "run", [{**START, "fallbacks": rows}, step_line(1), end_line()]))).text
    assert "10 more" in text and "run whole: 60 operations, 60 MiB in all" in text and "layer59" not in text


def test_a_record_whose_fallbacks_are_odd_is_refused(tmp_path):
    for number, odd in enumerate((7, [3], [{"kind": "run whole"}], [{**WHOLE, "bytes": "many"}])):
        folder = folder_of(tmp_path / f"run{number}", [{**START, "fallbacks": odd}, step_line(1), end_line()])
        with pytest.raises(ValueError, match="holds values that widefield does not write"):
            write_report(folder)


@pytest.mark.long
def test_equal_folders_give_equal_bytes(tmp_path):
    first = folder_of(tmp_path / "a", FULL)
    shutil.copytree(first, tmp_path / "b")
    assert write_report(first).read_bytes() == write_report(tmp_path / "b").read_bytes() == write_report(first).read_bytes()


def test_pictures_are_inside_the_page_as_they_are(tmp_path):
    uri = Reader(page(folder_of(tmp_path / "run", FULL))).addresses[0]
    with Image.open(io.BytesIO(base64.b64decode(uri.partition(",")[2]))) as image:
        assert np.array_equal(np.asarray(image), np.arange(64).reshape(8, 8))


@pytest.mark.parametrize("name", ["mistakes/none.png", "../secret.png", "mistakes/torn.png"])
def test_a_picture_that_is_gone_damaged_or_outside_the_folder_is_left_out(tmp_path, name):
    Image.new("L", (8, 8)).save(tmp_path / "secret.png")
    mistake = {"id": "a", "picture": name, "truth": "0", "prediction": "1", "probability": 0.5, "loss": 1.0}
    folder = folder_of(tmp_path / "run", FULL, mistakes=[mistake])
    (folder / "mistakes/torn.png").write_bytes((tmp_path / "secret.png").read_bytes()[:40])
    reader = Reader(page(folder))
    assert reader.addresses == [] and "picture missing" in reader.text


def test_a_huge_picture_is_made_smaller(tmp_path):
    folder = folder_of(tmp_path / "run", FULL)
    Image.effect_noise((2000, 1000), 80).save(folder / "mistakes/00.png")
    assert len(page(folder)) < 600_000  # 2 M pixels of noise are 2.7 MB in base64


# ---------------------------------------------------------------------------------------------- refusals


def test_a_folder_without_a_record_is_refused_by_name(tmp_path):
    with pytest.raises(ValueError, match=f"{re.escape(str(tmp_path))} has no record.jsonl.*name the --run folder"):
        write_report(tmp_path)
    assert not (tmp_path / "report.html").exists()


@pytest.mark.parametrize("text", ['{"step": 4, "lo', "[]", '{"loss": 1.0}', '{"loss": "x", "metrics": {}}'])
def test_a_damaged_evaluation_is_refused_by_name(tmp_path, text):
    folder = folder_of(tmp_path / "run", FULL)
    (folder / "evaluation.json").write_text(text)
    with pytest.raises(ValueError, match=r"evaluation\.json is damaged .*delete it, then run `widefield evaluate"):
        write_report(folder)


# ---------------------------------------------------------------------------------------------- curves


def test_thinning_keeps_every_peak():
    x = np.arange(100_000.0)
    y = np.sin(x)
    y[[12_345, 77_777]] = 9.0, -9.0
    few_x, few_y = plots.thinned(x, y)
    assert len(few_x) <= 2 * plots.BINS and (few_y.max(), few_y.min()) == (9.0, -9.0)
    assert list(few_x) == sorted(few_x) and np.array_equal(y[few_x.astype(int)], few_y)


def test_the_moving_average_is_the_mean_of_the_finite_neighbours():
    values = np.array([1.0, 2.0, np.nan, 4.0, 9.0])
    np.testing.assert_allclose(plots.moving_average(values, 3), [1.5, 1.5, 3.0, 6.5, 6.5], rtol=1e-15)
    assert np.isnan(plots.moving_average(np.full(3, np.nan), 3)).all()


def test_the_users_matplotlib_settings_change_nothing():
    plain = plots.rate_curve([1, 2, 3], [0.1, 0.2, 0.3])
    with matplotlib.rc_context({"font.size": 30, "xtick.major.pad": 20, "axes.xmargin": 0.4}):
        assert plots.rate_curve([1, 2, 3], [0.1, 0.2, 0.3]) == plain


def test_a_picture_takes_its_colours_from_the_page():
    drawn = [
        plots.loss_curve([1, 2], [1.0, 0.5])[0], plots.rate_curve([1, 2], [0.1, 0.2]),
        plots.evaluation_curve([1.0, 2.0], {"top-1": [1.0, 2.0], "$": [3.0, 4.0]}, [1.0, 0.5]),
        plots.time_curve([1, 2, 3], [0.1, 0.1, 0.1], [0.0, 0.0, 0.05])[0],
    ]  # fmt: skip
    for svg in drawn:
        assert not re.search(r"#[0-9a-f]{6}|font-family", svg) and "var(--series-" in svg


def test_a_run_whose_layers_are_dealt_out_shows_who_works_when(tmp_path):
    told = {"plan": "stage: 2\n", "reasons": ["pipeline.micro_batches=4, as asked"]}
    html = page(folder_of(tmp_path / "run", [START | told, *FULL[1:]]))
    assert "<h2>Stages</h2>" in html and "20% of the time is idle" in html
    assert "<h2>Stages</h2>" not in page(folder_of(tmp_path / "other", FULL))
