"""A recipe's secrets stay on this machine, in a file that only its owner can read."""

from __future__ import annotations

import doctest
import stat
import sys
import types
from pathlib import Path
from unittest import mock

import pytest
from command import DIGITS

from widefield import redaction
from widefield.config import LogConfig, read_config
from widefield.plans import Plan
from widefield.training.run_folder import write_config
from widefield.training.scalars import scalar_logs

SECRETS = ["data.options.api_key=hunter2hunter2", "data.path=https://me:correct-horse@host/images"]


def config_with(folder: Path, *settings: str) -> list[str]:
    folder.mkdir(exist_ok=True)
    return write_config(folder, read_config(DIGITS, list(settings)), Plan())


def test_a_config_with_a_secret_is_for_its_owner_alone_and_whole(tmp_path):
    config_with(tmp_path / "plain")
    config_with(tmp_path / "secret", *SECRETS)
    path = tmp_path / "secret/config.yaml"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600 and read_config(path).data.options["api_key"] == "hunter2hunter2"
    plain = stat.S_IMODE((tmp_path / "plain/config.yaml").stat().st_mode)
    (tmp_path / "any").touch()
    assert plain == stat.S_IMODE((tmp_path / "any").stat().st_mode)


def test_a_change_of_a_secret_is_told_without_it(tmp_path):
    config_with(tmp_path, *SECRETS)
    assert config_with(tmp_path, "data.options.api_key=other-secret", SECRETS[1]) == ["data.options.api_key: another secret"]


@pytest.mark.parametrize("name", ["wandb", "mlflow"])
def test_what_is_logged_elsewhere_has_no_secret_and_all_else(name, tmp_path, monkeypatch):
    config_with(tmp_path / "run", *SECRETS)
    package = mock.MagicMock()
    monkeypatch.setitem(sys.modules, name, package)
    package.start_run.return_value = types.SimpleNamespace(info=types.SimpleNamespace(run_id="abc"))
    (begin,) = scalar_logs(tmp_path / "run", LogConfig(**{name: "digits"}, tensorboard=False), None).values()
    begin()
    told = str(package.mock_calls)
    assert "hunter2" not in told and "correct-horse" not in told
    assert "https://me:***@host/images" in told and "classification" in told and "api_key" in told


def test_the_examples_of_redaction_hold():
    found = doctest.testmod(redaction)
    assert found.attempted and not found.failed


def test_a_secret_is_hidden_by_its_key_at_any_depth():
    tree = {"a": [{"password": 12345, "b": None}], "credentials": {"user": "me"}, "tokens_per_image": 4}
    hidden = {"a": [{"password": "***", "b": None}], "credentials": "***", "tokens_per_image": 4}
    assert redaction.redacted_tree(tree, {}) == hidden
