"""What is installed is bounded on both sides; and what a run writes holds no secret of its environment."""

from __future__ import annotations

import importlib.metadata
import os
import subprocess
import sys

import audit
import oldest_versions
import pytest
from command import DIGITS

from widefield.diagnosis.checks.versions import is_within
from widefield.redaction import HIDDEN, redacted
from widefield.report import write_report

SECRETS = {
    "WANDB_API_KEY": "0123456789abcdef0123456789abcdef01234567",
    "HF_TOKEN": "hf_AbCdEfGhIjKlMnOpQrStUvWx",
    "AWS_SECRET_ACCESS_KEY": "wJalrXUtnFEMIK7MDENGbPxRfiCYEXAMPLEKEY",
    "MLFLOW_TRACKING_PASSWORD": "correct-horse-battery-staple",
    "MLFLOW_TRACKING_URI": "https://someone:s3cr3t-in-a-url@tracking.example:5000",
}


# ---------------------------------------------------------------------------------------------- versions


def test_every_dependency_has_a_lower_and_an_upper_bound():
    assert oldest_versions.unbounded() == []
    asked = [*oldest_versions.project()["dependencies"]]
    assert len(asked) > 10 and len(oldest_versions.oldest()) > 20


def test_what_is_installed_is_within_the_bounds():
    for line in oldest_versions.project()["dependencies"]:
        match = oldest_versions.BOUNDED.fullmatch(line)
        version = importlib.metadata.version(match["name"])
        assert is_within(version, line.removeprefix(match["name"])), f"{line}, and {version} is installed"


@pytest.mark.parametrize("line", ["numpy", "numpy>=1.26", "numpy<3", "numpy==2.1"])
def test_a_missing_bound_is_seen(line, monkeypatch):
    monkeypatch.setattr(oldest_versions, "project", lambda: {"dependencies": [line, "a>=1,<2"], "optional-dependencies": {}})
    assert oldest_versions.unbounded() == [line]


SKIPPED = {"name": "numpy", "skip_reason": "Dependency not found and could not be audited"}
SOUND = {"name": "numpy", "version": "2.4", "vulns": []}
BAD = {"name": "pillow", "version": "10.4", "vulns": [{"id": "CVE-1", "fix_versions": ["11.0"]}]}


@pytest.mark.parametrize(
    ("packages", "status", "words"),
    [
        (
            None,
            audit.NOT_AUDITED,
            "not audited: the database of vulnerabilities was not reached (pip-audit ended with 1: Max retries",
        ),
        ([SKIPPED, {"name": "widefield", "skip_reason": "x"}], audit.NOT_AUDITED, "it knows none of 1 packages"),
        ([SOUND], 0, "1 of 1 packages were looked up, and 0 have known vulnerabilities"),
        ([SOUND, {**SKIPPED, "name": "mine"}], 0, "not looked up, as the database does not know them: mine"),
        ([SOUND, BAD], 1, "pillow 10.4: CVE-1; mended in 11.0"),
    ],
)
def test_an_audit_that_could_not_ask_is_no_success(packages, status, words, capfd):
    told = (
        "import sys; sys.exit('Max retries exceeded')"
        if packages is None
        else f"import json; print(json.dumps({{'dependencies': {packages!r}}}))"
    )
    assert audit.audit([sys.executable, "-c", told]) == status
    printed = capfd.readouterr()
    assert words in printed.out + printed.err


# ---------------------------------------------------------------------------------------------- secrets


@pytest.mark.parametrize(
    ("text", "hidden"),
    [
        ("cannot reach https://someone:s3cr3t@host:5000/api", "cannot reach https://someone:***@host:5000/api"),
        ("--password=hunter22 --user=me", "--password=*** --user=me"),
        ('{"api_key": "abcdef123456", "seed": 3}', '{"api_key": "***", "seed": 3}'),
        ("Authorization: Bearer abcdef.ghijkl.mnopqr", "Authorization: Bearer ***"),
        ("token hf_AbCdEfGhIjKlMnOpQrStUvWx is wrong", "token *** is wrong"),
        ("the value is v3ry-long-value-1, twice", "the value is ***, twice"),
        ("https://host:5000/api and n1:29500 and a@b.example", "https://host:5000/api and n1:29500 and a@b.example"),
        ("step 3/9  loss 0.3  tokens: 12 per image", "step 3/9  loss 0.3  tokens: 12 per image"),
        ("TOKENIZERS_PARALLELISM=false", "TOKENIZERS_PARALLELISM=false"),
    ],
)
def test_secrets_are_left_out_of_texts_and_nothing_else_is(text, hidden):
    environment = {
        "MY_SECRET": "v3ry-long-value-1",
        "API_TOKEN": "short",
        "SSH_KEY_PASSWORD_FILE": "/home/me/key",
        "PATH": "/bin",
    }
    assert redacted(text, environment) == hidden
    assert redacted(hidden, environment) == hidden and HIDDEN == "***"


@pytest.mark.long
@pytest.mark.alone
def test_a_run_its_report_and_its_logs_hold_no_secret(tmp_path):
    """Of a run that ends well, and of one whose own code fails with a secret in its message."""
    (tmp_path / "leaky.py").write_text(LEAKY)
    environment = {**os.environ, **SECRETS, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    short = ["schedule.length=3step", "schedule.warmup=0step", "data.workers=0", "log.every=1"]
    logs = ""
    for name, more in (("good", []), ("bad", ["model.name=leaky:build"])):
        command = [sys.executable, "-m", "widefield", "train", DIGITS, *short, *more, "--run", str(tmp_path / name)]
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300, check=False)
        assert (done.returncode == 0) == (name == "good"), done.stderr
        logs += done.stdout + done.stderr
    assert "cannot reach the store" in logs
    write_report(tmp_path / "good")
    written = {path.name: path.read_bytes() for folder in ("good", "bad") for path in sorted((tmp_path / folder).rglob("*"))
               if path.is_file()}  # fmt: skip
    assert {"record.jsonl", "config.yaml", "report.html"} <= set(written)
    values = [*SECRETS.values(), "s3cr3t-in-a-url"]
    leaks = [(name, value) for name, data in {**written, "printed": logs.encode()}.items() for value in values
             if value.encode() in data]  # fmt: skip
    assert leaks == []


LEAKY = """
import os
from torch import nn

class Net(nn.Module):
    def __init__(self, channels, classes):
        super().__init__()
        self.net = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, classes))

    def forward(self, image):
        if self.training and image.shape[0] > 1:
            raise ValueError(f"cannot reach the store at {os.environ['MLFLOW_TRACKING_URI']} with {os.environ['HF_TOKEN']}")
        return self.net(image)

def build(in_channels, num_classes, **options):
    return Net(in_channels, num_classes)
"""


def test_where_a_secret_is_kept_is_none():
    """Names of variables may be written; only what is in them may not."""
    assert redacted("set WANDB_API_KEY, or log.wandb=null", SECRETS) == "set WANDB_API_KEY, or log.wandb=null"
