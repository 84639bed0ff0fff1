"""What is read, each with a sound example, and what must hold of what was read."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import random
from pathlib import Path
from typing import Any

import torch
import yaml

from widefield.comm.mesh import World, join
from widefield.config import RunConfig, parse_config, read_config
from widefield.config.log import LogConfig
from widefield.data.tables import read_table
from widefield.data.vector_masks import read_vectors
from widefield.planner.machines import calibration
from widefield.planner.machines.catalogue import cpu_core
from widefield.planner.machines.link import Link
from widefield.plans import Plan, check, from_text, plan_of, to_text
from widefield.report import write_report
from widefield.run import train
from widefield.section import to_yaml
from widefield.training import manifest, refused_batch, tensors
from widefield.training.assemble import assemble, learner_of
from widefield.training.checkpoint import newest_sound_in, read
from widefield.training.chosen_weights import choose
from widefield.training.planned import PlannedRun, read_planned, write_planned
from widefield.training.record import Record
from widefield.training.record import read as read_record
from widefield.training.resume import resume
from widefield.training.run_folder import read_model

from .images import image_subjects
from .mutation import ODD, damaged_bytes, damaged_json, damaged_lines, damaged_yaml
from .trial import Subject

RECIPES = Path(__file__).parents[2] / "recipes"
SMALL = [
    "model.options={widths: [4], blocks: 1}",
    "schedule.length=4step",
    "schedule.warmup=0step",
    "checkpoint.every=2step",
    "evaluate.every=2step",
    "log.tensorboard=false",
    "data.workers=0",
    "ema.decay=0.9",
    "mesh.replicate=1",
    "guard.non_finite=skip",
]


def subjects(place: Path) -> list[Subject]:
    """All of them; their examples are written below `place`."""
    run = _example_run(place)
    return [
        *_texts(place),
        *_run_folder(run),
        *_checkpoints(place, run),
        *_others(place),
        *image_subjects(place),
    ]


def _folder(place: Path, name: str, **files: bytes | str) -> Path:
    folder = place / name
    folder.mkdir(parents=True)
    for file, content in files.items():
        (folder / file.replace("__", ".")).write_bytes(content if isinstance(content, bytes) else content.encode())
    return folder


# ---------------------------------------------------------------------------------------------- texts


def _texts(place: Path) -> list[Subject]:
    found = []
    for path in sorted(RECIPES.glob("*.yaml")):
        folder = _folder(place, f"recipe {path.stem}", recipe__yaml=path.read_bytes())
        found.append(Subject("recipe", folder, {"recipe.yaml": damaged_yaml}, _recipe))
    keys = yaml.safe_dump(["optimizer.lr=0.2"])
    found.append(
        Subject(
            "overrides",
            _folder(place, "overrides", overrides__yaml=keys),
            {"overrides.yaml": _overrides},
            _overridden,
            weight=8,
        )
    )
    for number, plan in enumerate((Plan(), Plan(shard=4, space=[2, 1], channel=2), Plan(replicate=2, stage=2))):
        folder = _folder(place, f"plan {number}", plan__yaml=to_text(plan))
        found.append(Subject("plan", folder, {"plan.yaml": damaged_yaml}, _plan, weight=2))
    return found


def _recipe(folder: Path) -> None:
    _checked(read_config(folder / "recipe.yaml"))


def _checked(config: RunConfig) -> None:
    assert parse_config(to_yaml(config)) == config, "its text does not read back equal"
    if config.data.batch_if_known is not None:
        check(plan_of(config, 4), ranks=4, samples_per_step=config.data.batch_if_known)


def _plan(folder: Path) -> None:
    plan = from_text((folder / "plan.yaml").read_text(encoding="utf-8", errors="replace"))
    assert from_text(to_text(plan)) == plan, "its text does not read back equal"
    check(plan, ranks=plan.ranks)


@functools.cache
def _keys() -> list[str]:
    def flat(values: Any, prefix: str) -> list[str]:
        if not isinstance(values, dict) or not values:
            return [prefix]
        return [
            key
            for name, inner in values.items()
            for key in (f"{prefix}.{name}".strip("."), *flat(inner, f"{prefix}.{name}".strip(".")))
        ]

    config = read_config(RECIPES / "digits.yaml", ["stream.tiles=[2,2]", "ema.decay=0.5", "recompute={}"])
    return sorted(set(flat(config.model_dump(mode="json"), "")))


def _overrides(content: bytes, draw: random.Random) -> bytes:
    """Some overrides: a key, known or nearly so, and a value of any kind."""
    found = []
    for _ in range(draw.choice((1, 1, 2, 4))):
        key = draw.choice(_keys())
        if draw.random() < 0.15:
            key = damaged_bytes(key.encode(), draw).decode("utf-8", "replace")
        odd = draw.choice(ODD)
        text = draw.choice(
            (
                str(odd),
                json.dumps(odd),
                yaml.safe_dump(odd).strip() if not isinstance(odd, str) else odd,
                "*a",
                "&a [*a]",
                "!!python/object:x",
                "'",
            )
        )
        found.append(f"{key}{draw.choice(('=', '=', '=', '=', '==', ''))}{text}")
    return json.dumps(found).encode()


def _overridden(folder: Path) -> None:
    overrides = json.loads((folder / "overrides.yaml").read_bytes())
    _checked(read_config(RECIPES / "digits.yaml", overrides))


# ---------------------------------------------------------------------------------------------- a run folder


def _example_run(place: Path) -> Path:
    """A run of four steps, one of them skipped, with its batch."""
    from widefield.training.loop import Learner

    real = Learner.loss_of

    def loss_of(self: Learner, *args: Any, **options: Any) -> Any:
        return real(self, *args, **options) * (float("nan") if self.step == 2 else 1.0)

    Learner.loss_of = loss_of  # type: ignore[method-assign]
    try:
        with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):
            train(read_config(RECIPES / "digits.yaml", SMALL), place / "run", World())
    finally:
        Learner.loss_of = real
    write_planned(place / "run", PlannedRun("k", "cpu:1", ["mesh.replicate=1"], ["why"], {"seconds": 1.0}))
    return place / "run"


def _run_folder(run: Path) -> list[Subject]:
    batch = "guard/step_00000003/batch_0.safetensors"
    return [
        Subject(
            "config.yaml of a run",
            run,
            {"config.yaml": damaged_yaml},
            lambda folder: _checked(read_config(folder / "config.yaml", run=folder)),
            weight=2,
        ),
        Subject("model.json", run, {"model.json": damaged_json}, _model, weight=3),
        Subject("record", run, {"record.jsonl": damaged_lines}, read_record, weight=3),
        Subject(
            "record that goes on", run, {"record.jsonl": damaged_lines}, _record_goes_on, ("record.jsonl", "summary.csv"), 3
        ),
        Subject("planned.json", run, {"planned.json": damaged_json}, _planned, weight=2),
        Subject(
            "report",
            run,
            {
                "record.jsonl": damaged_lines,
                "evaluation.json": damaged_json,
                "plan.yaml": damaged_yaml,
                "config.yaml": damaged_yaml,
            },
            write_report,
            ("report.html",),
            0.4,
        ),
        Subject("weights", run, {"weights.safetensors": damaged_bytes, "best.safetensors": damaged_bytes}, _weights, weight=2),
        Subject("refused batch", run, {batch: damaged_bytes}, _batch, weight=1),
        Subject("refused batch, forged", run, {batch: _forged_batch}, _batch, weight=3),
    ]


def _model(folder: Path) -> None:
    dataset = read_model(folder)
    assert all(isinstance(name, str) for name in dataset.classes) and dataset.channels == dataset.train.shape[0]
    assert all(isinstance(length, int) and length > 0 for length in dataset.train.shape), f"an image of {dataset.train.shape}"


def _record_goes_on(folder: Path) -> None:
    before = (folder / "record.jsonl").read_bytes()
    try:
        record = Record.open(folder, log=LogConfig(tensorboard=False), resumed_step=2)
    except ValueError:
        assert (folder / "record.jsonl").read_bytes() == before, "it was refused, and is changed"
        raise
    record.close()
    assert all(line.get("step", 0) <= 2 for line in read_record(folder)), "lines of later steps are left"


def _planned(folder: Path) -> None:
    found = read_planned(folder)
    if found is not None:
        assert all(isinstance(text, str) for text in (found.key, found.machines, *found.overrides, *found.reasons))
        assert isinstance(found.prediction, dict)


@functools.cache
def _learner() -> Any:
    parts = assemble(read_config(RECIPES / "digits.yaml", SMALL), join(World(), Plan()))
    return learner_of(parts)[0]


def _weights(folder: Path) -> None:
    for which in ("last", "best"):
        choose(folder, which, default="last").load(_learner().model)


def _batch(folder: Path) -> None:
    found = refused_batch.joined(folder, 3)
    assert found is not None and all(len(batch.image) >= batch.samples >= 0 for batch in found)


def _forged_batch(content: bytes, draw: random.Random) -> bytes:
    """Other JSON in the metadata of a sound file."""
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    header["__metadata__"]["widefield"] = damaged_json(header["__metadata__"]["widefield"].encode(), draw).decode(
        "utf-8", "replace"
    )
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + content[8 + length :]


# ---------------------------------------------------------------------------------------------- checkpoints


def _checkpoints(place: Path, run: Path) -> list[Subject]:
    step = "checkpoints/step_00000004"
    files = {
        f"{step}/{name}": damaged_bytes
        for name in ("about.json", "plain.json", "own_0.json", "tensors.json", "tensors_0.safetensors")
    }
    forged = {f"{step}/{name}": damaged_json for name in ("about.json", "plain.json", "own_0.json", "tensors.json")}
    return [
        Subject("manifest", run, {f"{step}/{manifest.MANIFEST}": damaged_bytes}, _newest, weight=3),
        Subject("checkpoint", run, files, _newest, weight=3),
        Subject(
            "checkpoint, forged",
            run,
            forged | {f"{step}/tensors_0.safetensors": damaged_bytes},
            _resumed,
            weight=14,
            settle=_hashed,
        ),
    ]


def _hashed(folder: Path, draw: random.Random) -> None:
    """New hashes, as somebody makes them who forges a checkpoint."""
    place = folder / "checkpoints/step_00000004"
    names = [entry.name for entry in place.iterdir() if entry.name != manifest.MANIFEST]
    manifest.write_manifest(place, manifest.hashes_of(place, names))


def _newest(folder: Path) -> None:
    said: list[str] = []
    found = newest_sound_in(folder / "checkpoints", warn=said.append)
    assert found is not None, "the older checkpoint is sound"
    assert found.folder.name == "step_00000004" or len(said) == 1, "it was passed over without a word"
    read(found, rank=0, ranks=1)


class _ReadOnly:
    def load(self, found: Any, *, model: Any = None, unread: bool = False) -> Any:
        return read(found, rank=0, ranks=1, model=model, unread=unread)

    def own_of_first(self, found: Any) -> Any:
        return read(found, unread=True)[1]


def _resumed(folder: Path) -> None:
    found = newest_sound_in(folder / "checkpoints", warn=lambda text: None)
    assert found is not None, "the older checkpoint is sound"
    learner = _learner()
    resume(learner, _ReadOnly(), found)
    assert learner.step >= 0 and all(isinstance(p, torch.Tensor) for p in learner.model.parameters())
    assert tensors.files_in(found.folder)


# ---------------------------------------------------------------------------------------------- others


def _others(place: Path) -> list[Subject]:
    kernel = calibration.Kernel(("aten.relu", ((1, 2), "float32")), "relu", "float32", 1.0, 8, 1e-6)
    measured = calibration.Calibration(
        {"torch": "2"},
        cpu_core(2**30),
        Link("gloo", "gloo", 1e-4, 1e9),
        {},
        [calibration.SentMessage("all_reduce", 2, 8, 1e-4)],
    )
    measured.add([kernel])
    calibrated = _folder(place, "calibration")
    calibration.write_calibration(measured, calibrated / "m.json")
    polygons = {
        "type": "FeatureCollection",
        "features": [
            {
                "type": "Feature",
                "properties": {"class": "a"},
                "geometry": {"type": "Polygon", "coordinates": [[[0, 0], [4, 0], [4, 4], [0, 0]]]},
            },
            {
                "type": "Feature",
                "properties": {"class": "b"},
                "geometry": {"type": "MultiPolygon", "coordinates": [[[[1, 1], [4, 0], [4, 4], [1, 1]]]]},
            },
        ],
    }
    rows = "image,label,split\na.png,cat,train\nb.png,dog,val\n"
    lines = '{"image": "a.png", "label": "cat"}\n{"image": "b.png", "label": "dog"}\n'
    return [
        Subject("calibration", calibrated, {"m.json": damaged_json}, _calibration, weight=4),
        Subject(
            "polygons",
            _folder(place, "polygons", m__geojson=json.dumps(polygons)),
            {"m.geojson": damaged_json},
            lambda folder: read_vectors(folder / "m.geojson"),
            weight=4,
        ),
        Subject(
            "table", _folder(place, "table", t__csv=rows), {"t.csv": damaged_bytes}, lambda folder: read_table(folder / "t.csv")
        ),
        Subject(
            "table of lines",
            _folder(place, "lines", t__jsonl=lines),
            {"t.jsonl": damaged_lines},
            lambda folder: read_table(folder / "t.jsonl"),
        ),
    ]


def _calibration(folder: Path) -> None:
    found = calibration.read_calibration(folder / "m.json")
    assert found is not None
    numbers = [
        found.host_seconds,
        found.message_host_seconds,
        found.unevenness,
        found.waking_seconds,
        found.message_cpu_share,
        found.zero_host_seconds,
        found.link.bytes_per_second,
        found.link.latency_seconds,
        found.device.memory_bytes,
        found.device.launch_seconds,
        *found.device.flops_per_second.values(),
        *(row.seconds for row in found.messages),
        *(row.seconds for row in found.kernels.values()),
    ]
    assert all(isinstance(number, int | float) and number >= 0 for number in numbers), "numbers that are none"
