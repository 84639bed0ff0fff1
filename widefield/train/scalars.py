"""Where do a run's curves go beside its record?  TensorBoard, and Weights & Biases where it is asked for."""

from __future__ import annotations

import importlib.util
import re
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import yaml

from widefield.config import LogConfig


def check_log(log: LogConfig) -> None:
    """ValueError where the log asks for a package that is not installed.  Sends nothing: every rank may call it first."""
    if log.wandb is not None and importlib.util.find_spec("wandb") is None:
        raise ValueError(
            f"log.wandb={log.wandb} needs the package wandb, which is not installed; "
            "run `pip install 'widefield[wandb]'`, or set log.wandb=null"
        )


class ScalarLog(Protocol):
    def describe(self, start: Mapping[str, Any]) -> None: ...
    def scalars(self, step: int, values: Mapping[str, float]) -> None: ...
    def close(self) -> None: ...


def scalar_logs(folder: Path, log: LogConfig, resumed_step: int | None) -> list[ScalarLog]:
    logs: list[ScalarLog] = []
    if log.wandb is not None:
        logs.append(_WeightsAndBiases(folder, log.wandb))
    if log.tensorboard:
        logs.append(_TensorBoard(folder / "tensorboard", purge_step=0 if resumed_step is None else resumed_step + 1))
    return logs


class _TensorBoard:
    def __init__(self, folder: Path, purge_step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter  # here: importing it takes a second

        # purge_step makes the reader forget what a killed run wrote for that step and later ones
        self._writer = SummaryWriter(str(folder), purge_step=purge_step, flush_secs=10)

    def describe(self, start: Mapping[str, Any]) -> None: ...

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        for tag, value in values.items():
            self._writer.add_scalar(tag, value, step)

    def close(self) -> None:
        self._writer.close()


class _WeightsAndBiases:
    """One W&B run per run folder: its id is kept there, so that a resumed run goes on with the same curves."""

    def __init__(self, folder: Path, project: str) -> None:
        import wandb

        kept = folder / "wandb_run_id.txt"
        if not kept.exists():
            kept.write_text(uuid.uuid4().hex[:12])
        if not re.fullmatch(r"[\w-]{1,64}", kept.read_text()):  # it goes into names of files, and may be anybody's
            raise ValueError(f"{kept} holds no id of a W&B run: {kept.read_text()[:80]!r}; write it there, or delete the file")
        config = folder / "config.yaml"
        values = yaml.safe_load(config.read_text(encoding="utf-8")) if config.is_file() else {}
        self._run = wandb.init(project=project, dir=str(folder), id=kept.read_text(), resume="allow")
        self._run.config.update(values, allow_val_change=True)
        self._run.define_metric("*", step_metric="step")  # W&B's own step only grows, ours goes back on resume

    def describe(self, start: Mapping[str, Any]) -> None:
        facts = {key: start[key] for key in ("versions", "machine", "ranks", "plan", "parameters")}
        self._run.config.update(facts, allow_val_change=True)

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log({"step": step, **values})

    def close(self) -> None:
        self._run.finish()
