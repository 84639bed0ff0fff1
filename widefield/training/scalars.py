"""A run's curves in TensorBoard, and in Weights & Biases and MLflow where the config asks for them."""

from __future__ import annotations

import importlib.util
import os
import re
import socket
import time
import uuid
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import yaml

from widefield.config import LogConfig
from widefield.redaction import redacted_tree

_RUN_ID, _MLFLOW_ID = "wandb_run_id.txt", "mlflow_run_id.txt"


def check_log(log: LogConfig, folder: Path) -> None:
    """ValueError: wandb or mlflow is asked for and not installed, or its run id in the folder is invalid.  Changes no file."""
    for name, asked, id_name, of in (("wandb", log.wandb, _RUN_ID, "a W&B"), ("mlflow", log.mlflow, _MLFLOW_ID, "an MLflow")):
        if asked is None:
            continue
        if importlib.util.find_spec(name) is None:
            raise ValueError(
                f"log.{name}={asked} needs the package {name}, which is not installed; "
                f"run `pip install 'widefield[{name}]'`, or set log.{name}=null"
            )
        id_file = folder / id_name
        run_id = id_file.read_text(encoding="utf-8", errors="replace") if id_file.is_file() else None
        if run_id is not None and not re.fullmatch(r"[\w-]{1,64}", run_id):  # not trusted: it is used in file names
            raise ValueError(f"{id_file} holds no id of {of} run: {run_id[:80]!r}; write it there, or delete the file")


class ScalarLog(Protocol):
    """A view of the record: `describe` gets its `start` line, `scalars` numbers by name."""

    def describe(self, start: Mapping[str, Any]) -> None: ...
    def scalars(self, step: int, values: Mapping[str, float]) -> None: ...
    def close(self) -> None: ...


def scalar_logs(folder: Path, log: LogConfig, resumed_step: int | None) -> dict[str, Callable[[], ScalarLog]]:
    """The logs that the config asks for, by name; call one to open it."""
    logs: dict[str, Callable[[], ScalarLog]] = {}
    if log.wandb is not None:
        logs["Weights & Biases' log"] = partial(_WeightsAndBiases, folder, log.wandb)
    if log.mlflow is not None:
        logs["MLflow's log"] = partial(_MLflow, folder, log.mlflow)
    if log.tensorboard:
        purge_step = 0 if resumed_step is None else resumed_step + 1
        logs["TensorBoard's file"] = partial(_TensorBoard, folder / "tensorboard", purge_step=purge_step)
    return logs


class _TensorBoard:
    """Writes events itself: torch's SummaryWriter writes in a thread, whose error on a full disk cannot be caught."""

    def __init__(self, folder: Path, purge_step: int) -> None:
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog  # here: importing it takes a second
        from tensorboard.summary.writer.record_writer import RecordWriter

        folder.mkdir(parents=True, exist_ok=True)
        # TensorBoard reads files in the order of their names: a run that is resumed within a second must come after
        name = f"events.out.tfevents.{time.time():017.6f}.{socket.gethostname()}.{os.getpid()}"
        self._event, self._file = Event, (folder / name).open("wb")
        self._writer = RecordWriter(self._file)
        self._write(file_version="brain.Event:2")
        # a session start makes TensorBoard drop what a killed run wrote for this step and later ones
        self._write(step=purge_step, session_log=SessionLog(status=SessionLog.START))

    def describe(self, start: Mapping[str, Any]) -> None: ...

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        from torch.utils.tensorboard.summary import scalar

        for tag, value in values.items():
            self._write(step=step, summary=scalar(tag, value))
        self._writer.flush()

    def close(self) -> None:
        self._file.close()

    def _write(self, **of_event: Any) -> None:
        self._writer.write(self._event(wall_time=time.time(), **of_event).SerializeToString())


class _WeightsAndBiases:
    """One W&B run per run folder: its id is saved there, so that a resumed run continues the same curves."""

    def __init__(self, folder: Path, project: str) -> None:
        import wandb

        id_file = folder / _RUN_ID
        if not id_file.exists():
            id_file.write_text(uuid.uuid4().hex[:12])
        self._run = wandb.init(project=project, dir=str(folder), id=id_file.read_text(), resume="allow")
        self._run.config.update(_config_in(folder), allow_val_change=True)
        self._run.define_metric("*", step_metric="step")  # W&B's own step never decreases, as ours may on resume

    def describe(self, start: Mapping[str, Any]) -> None:
        facts = {key: start[key] for key in ("versions", "machine", "ranks", "plan", "parameters")}
        self._run.config.update(facts, allow_val_change=True)

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log({"step": step, **values})

    def close(self) -> None:
        self._run.finish()


class _MLflow:
    """One MLflow run per run folder: its id is saved there, so that a resumed run continues the same curves."""

    def __init__(self, folder: Path, experiment: str) -> None:
        import mlflow

        id_file, self._mlflow = folder / _MLFLOW_ID, mlflow
        mlflow.set_experiment(experiment)
        if id_file.exists():
            mlflow.start_run(run_id=id_file.read_text())
            return
        run = mlflow.start_run(run_name=folder.name)
        id_file.write_text(run.info.run_id)
        mlflow.log_params({key: str(value)[:_MOST_OF_A_PARAMETER] for key, value in _dotted(_config_in(folder)).items()})

    def describe(self, start: Mapping[str, Any]) -> None:
        self._mlflow.set_tags({key: str(start[key]) for key in ("versions", "ranks", "plan", "parameters")})

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        self._mlflow.log_metrics(dict(values), step=step)

    def close(self) -> None:
        self._mlflow.end_run()


_MOST_OF_A_PARAMETER = 500
"""Characters that every MLflow server takes."""


def _config_in(folder: Path) -> Any:
    """The run's config without its secrets: what is logged elsewhere is read by others."""
    path = folder / "config.yaml"
    return redacted_tree(yaml.safe_load(path.read_text(encoding="utf-8"))) if path.is_file() else {}


def _dotted(values: Any, prefix: str = "") -> dict[str, Any]:
    """The values of nested dicts by dotted key."""
    if not isinstance(values, dict):
        return {prefix: values}
    inner = [_dotted(value, f"{prefix}.{key}" if prefix else key) for key, value in values.items()]
    return {key: value for part in inner for key, value in part.items()}
