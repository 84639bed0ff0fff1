"""Does a run that resumes with another data.intensity take the statistics that its recipe now asks for?"""

import json

import pytest

import widefield as wf

SHORT = ["schedule.warmup=0step", "evaluate.every=1000step", "log.tensorboard=false", "data.workers=0", "data.batch_size=8"]


@pytest.mark.long
def test_a_resumed_run_takes_the_statistics_that_its_recipe_now_asks_for(tmp_path):
    def trained(steps: int, intensity: str) -> dict:
        wf.train("digits", *SHORT, f"schedule.length={steps}step", f"data.intensity={intensity}", run=tmp_path / "run")
        return json.loads((tmp_path / "run/model.json").read_text())["intensity"]

    first, again = trained(2, "zscore"), trained(4, "zscore")
    assert first == again and first["statistics"] == "zscore"
    (tmp_path / "run/statistics.json").unlink()
    other = trained(6, "{percentiles: [1, 90]}")
    assert other["statistics"] == "percentiles 1 and 90" and other["low"] != first["low"] and other["clip"] is not None
    assert (tmp_path / "run/statistics.json").is_file()
