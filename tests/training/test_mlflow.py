"""MLflow gets a run's config and curves, by a stand-in for its package."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from widefield.config import LogConfig
from widefield.training.scalars import check_log, scalar_logs

FAKE = """
calls = []
class Info: run_id = "abc123"
class Run: info = Info()
def set_experiment(name): calls.append(("experiment", name))
def start_run(**options):
    calls.append(("start", options))
    return Run()
def log_params(values): calls.append(("params", values))
def set_tags(values): calls.append(("tags", values))
def log_metrics(values, step): calls.append(("metrics", step, values))
def end_run(): calls.append(("end",))
"""
LOG = LogConfig(mlflow="digits", tensorboard=False)
START = {"versions": {"torch": "2"}, "ranks": 2, "plan": "replicate: 2", "parameters": 7}


@pytest.fixture
def fake(tmp_path, monkeypatch) -> Path:
    (tmp_path / "mlflow.py").write_text(FAKE)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "mlflow", raising=False)
    yield tmp_path
    sys.modules.pop("mlflow", None)  # monkeypatch would bring it back


def test_mlflow_gets_config_and_curves_and_the_same_run_again_on_resume(fake):
    folder = fake / "run"
    folder.mkdir()
    (folder / "config.yaml").write_text("seed: 3\nmodel: {name: resnet, options: {widths: [4]}}\n")
    check_log(LOG, folder)
    for step in (1, 2):
        (begin,) = scalar_logs(folder, LOG, None if step == 1 else 1).values()
        log = begin()
        log.describe(START)
        log.scalars(step, {"train/loss": 0.5})
        log.close()
    calls = sys.modules["mlflow"].calls
    assert [call[1] for call in calls if call[0] == "start"] == [{"run_name": "run"}, {"run_id": "abc123"}]
    assert ("params", {"seed": "3", "model.name": "resnet", "model.options.widths": "[4]"}) in calls
    assert [call for call in calls if call[0] == "metrics"] == [("metrics", step, {"train/loss": 0.5}) for step in (1, 2)]
    assert calls.count(("end",)) == 2 and ("experiment", "digits") in calls


def test_mlflow_missing_or_with_an_odd_id_is_refused(fake, monkeypatch):
    (fake / "mlflow_run_id.txt").write_text("../../somebody/else")
    with pytest.raises(ValueError, match="mlflow_run_id.txt holds no id of an MLflow run"):
        check_log(LOG, fake)
    monkeypatch.setitem(sys.modules, "mlflow", None)
    with pytest.raises(ValueError, match=r"log\.mlflow=digits needs the package mlflow.*pip install 'widefield\[mlflow\]'"):
        check_log(LOG, fake)
