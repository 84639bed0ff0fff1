"""Does doctor name each failure from its log, with cause and remedy, and nothing where nothing is?"""

from __future__ import annotations

import json
import random
import re
from pathlib import Path

import pytest

from widefield.config import RunConfig
from widefield.diagnosis import evidence as evidence_room
from widefield.diagnosis.evidence import (
    Evidence,
    LogFile,
    evidence_of_text,
    rank_in,
    read_evidence,
)
from widefield.diagnosis.findings import KINDS, RULES, KnownFailure, diagnose, diagnosis_of, sighting
from widefield.naming import load, load_all, names_in
from widefield.section import Section

LOGS = Path(__file__).parent / "logs"
CASES = [
    pytest.param(name, text, seen, id=f"{name}-{number}")
    for name in names_in(RULES)
    for number, (text, seen) in enumerate(load(RULES, name).CASES)
]
CLASSIC = (
    "host_name_mismatch", "host_name_unresolved", "two_rank_zeros", "slurm_node_number", "worlds_of_one", "gpu_out_of_memory",
    "killed", "memory_limit", "shared_memory", "unequal_batches", "validation_on_one_rank", "unused_parameters",
    "stride_warning", "collective_mismatch", "rank_is_missing", "duplicate_gpu", "worker_ended", "other_world_size",
    "sync_batch_norm_cpu", "inexact_evaluation", "schedule_order", "preempted", "wrong_interface", "loss_not_finite",
)  # fmt: skip
"""What people ask about again and again.  Each has a rule; those that happen on a CPU have a log of a real run."""
NEEDS_MORE = (
    "worlds_of_one", "gpu_out_of_memory", "memory_limit", "duplicate_gpu", "other_world_size", "inexact_evaluation",
    "preempted", "wrong_interface",
)  # fmt: skip
"""Of these, those that need GPUs, Slurm, several machines or another library; they are named from an excerpt, in their file."""


def named(evidence: Evidence, *kinds: str) -> list[str]:
    return [failure.name for failure in diagnosis_of(evidence).failures if not kinds or failure.kind in kinds]


# ---------------------------------------------------------------------------------------------- each rule


@pytest.mark.parametrize(("name", "text", "seen"), CASES)
def test_a_rule_speaks_of_its_failure_alone_and_names_the_line(name, text, seen):
    rule, evidence = load(RULES, name), evidence_of_text(text)
    found = sighting(rule, evidence)
    assert (found is None) == (seen is None)
    if found is not None:
        assert seen in found.line.text and found.line.text in text
        assert name in named(evidence)
        others = set(named(evidence, "cause", "inferred")) - {name}
        assert not others or rule.KIND == "consequence", "another rule takes it for its own"


@pytest.mark.parametrize("name", names_in(RULES))
def test_every_rule_says_what_to_do_and_can_be_silent(name):
    rule = load(RULES, name)
    assert rule.KIND in KINDS and all(getattr(rule, word) for word in ("TITLE", "CAUSE", "REMEDY", "SOURCE"))
    assert {seen is None for _, seen in rule.CASES} == {True, False}
    assert rule.KIND != "inferred" or isinstance(rule.ORDER, int)
    assert hasattr(rule, "find") or not any(re.search(pattern, "") for pattern in rule.PATTERNS)


def keys_of(section: type[Section], prefix: str = "") -> set[str]:
    found = set()
    for name, field in section.model_fields.items():
        found.add(f"{prefix}{name}")
        for kind in (field.annotation, *getattr(field.annotation, "__args__", ())):
            if isinstance(kind, type) and issubclass(kind, Section):
                found |= keys_of(kind, f"{prefix}{name}.")
    return found


@pytest.mark.parametrize("name", names_in(RULES))
def test_a_rule_names_no_key_that_recipes_do_not_have(name):
    keys, rule = keys_of(RunConfig), load(RULES, name)
    sections = {key for key in keys if "." not in key}
    words = re.findall(r"\b([a-z_]+\.[a-z_.]+[a-z_])\b(?!\()", f"{rule.CAUSE} {rule.REMEDY}")
    assert [word for word in words if word.partition(".")[0] in sections - {"model"} and word not in keys] == []


# ---------------------------------------------------------------------------------------------- the classic failures


@pytest.mark.parametrize("name", CLASSIC)
def test_doctor_names_the_classic_failures(name):
    """From the log of a real run where the CPU and gloo can fail so; else from an excerpt."""
    log = LOGS / f"{name}.log"
    assert log.is_file() != (name in NEEDS_MORE)
    if log.is_file():
        found = diagnose(log)
        first = found.failures[0]
        assert first.name == name and first.remedy
        file, number, text = re.match(r"(.*?):(\d+): (.*)", first.seen).groups()
        assert log.read_text().splitlines()[int(number) - 1].strip().startswith(text.removesuffix("...")) and file == str(log)
    else:
        text = next(text for text, seen in load(RULES, name).CASES if seen is not None)
        assert named(evidence_of_text(text))[0] == name


@pytest.mark.parametrize("log", sorted(LOGS.glob("*.log")), ids=lambda log: log.stem)
def test_the_log_of_a_real_run_leads_to_one_cause(log):
    """The first named is the right one, and no other cause stands beside it."""
    found = diagnose(log)
    assert found.failures[0].name == log.stem
    assert [one.name for one in found.failures if one.kind in ("cause", "inferred")] in ([log.stem], [])
    assert found.ok == (found.failures[0].kind == "notice")


def test_many_logs_of_real_runs_are_there():
    assert len(list(LOGS.glob("*.log"))) >= 20 and len(CLASSIC) >= 20


@pytest.mark.parametrize(
    ("name", "cure", "why"),
    [
        ("loss_not_finite", "find_unused_parameters=True", "cures no instability"),
        ("gpu_out_of_memory", "fewer accumulation steps", "memory is that of one pass"),
        ("collective_mismatch", "a longer NCCL timeout", "never fits"),
        ("watchdog_timeout", "a longer NCCL timeout", "cures no mismatch"),
        ("validation_on_one_rank", "a longer NCCL timeout", "only moves the end"),
        ("killed", "torch.cuda.empty_cache()", "memory of the GPU"),
        ("unequal_batches", "find_unused_parameters=True", "a whole step is missing"),
    ],
)
def test_usual_cures_that_are_none_are_corrected(name, cure, why):
    text = next(text for text, seen in load(RULES, name).CASES if seen is not None)
    told = next(failure for failure in diagnosis_of(evidence_of_text(text)).failures if failure.name == name)
    assert why in told.wrong[cure] and f"no cure  {cure}" in re.sub(r"\s*\n\s*", " ", str(told))


# ---------------------------------------------------------------------------------------------- what comes first


def test_a_cause_comes_before_what_follows_from_it_wherever_it_stands():
    lost = "[rank0]: RuntimeError: [gloo/transport/tcp/pair.cc:547] Connection closed by peer [10.0.0.2]:4711"
    oom = "[rank1]: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB."
    failed = "torch.distributed.elastic.multiprocessing.errors.ChildFailedError:"
    found = diagnosis_of(evidence_of_text(f"{lost}\n{oom}\n{failed}\n"))
    assert [failure.name for failure in found.failures] == ["gpu_out_of_memory", "lost_peer", "child_failed"]
    assert found.failures[0].cause.startswith("It was rank 1. ")
    text = str(found)
    assert text.index("cause: a GPU is out of memory") < text.index("what follows from it, and needs no cure of its own:")
    assert "consequence:" not in text


def test_without_a_cause_what_follows_is_told_in_full():
    found = diagnosis_of(evidence_of_text("RuntimeError: Connection closed by peer [10.0.0.2]:4711"))
    assert [failure.name for failure in found.failures] == ["lost_peer"] and "consequence: a rank lost" in str(found)
    assert not found.ok


def test_nothing_is_inferred_where_a_cause_was_found():
    waiting = "[Rank 7] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=64088, OpType=ALLREDUCE)"
    assert "rank_is_missing" in named(evidence_of_text(waiting))
    assert "rank_is_missing" not in named(evidence_of_text(f"{waiting}\n  exitcode  : -9 (pid: 7)"))


def test_a_log_without_a_failure_says_so_and_what_to_give():
    found = diagnosis_of(evidence_of_text("step 1 loss 0.3\nstep 2 loss 0.2\n"))
    assert found.ok and bool(found) and not found.failures
    assert f"none of the {len(load_all(RULES))} known failures" in str(found) and "NCCL_DEBUG=WARN" in str(found)


def test_a_diagnosis_is_data_too():
    found = diagnosis_of(evidence_of_text("OSError: [Errno 24] Too many open files"))
    tree = json.loads(json.dumps(found.to_tree()))
    assert (tree["ok"], tree["files"], tree["lines"]) == (False, 1, 1)
    assert [KnownFailure(**one).name for one in tree["failures"]] == ["open_files"]


# ---------------------------------------------------------------------------------------------- evidence


def test_a_run_folder_gives_its_record_and_its_logs(tmp_path):
    (tmp_path / "logs" / "attempt_0" / "1").mkdir(parents=True)
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints" / "old.log").write_text("CUDA out of memory")
    (tmp_path / "weights.safetensors").write_bytes(b"\0" * 9)
    (tmp_path / "logs" / "attempt_0" / "1" / "stderr.log").write_text("OSError: [Errno 24] Too many open files\n")
    rows = [
        {"kind": "start", "ranks": 2},
        {"kind": "step", "step": 1, "loss": "nan", "seconds": 1.0, "data_seconds": 0.0},
        {"kind": "end", "reason": "failed", "text": "rank 1 failed: OutOfMemoryError: CUDA out of memory"},
    ]
    (tmp_path / "record.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows) + '{"torn')
    evidence = read_evidence([tmp_path])
    assert [file.name for file in evidence.files] == ["logs/attempt_0/1/stderr.log", "record.jsonl"]
    assert len(evidence.record) == 3
    found = diagnose(tmp_path)
    seen = {failure.name: failure.seen for failure in found.failures}
    assert seen["loss_not_finite"].startswith("record.jsonl:2: step 1 loss nan")
    assert seen["gpu_out_of_memory"].startswith("record.jsonl:3: end: failed rank 1 failed")
    assert seen["open_files"].startswith("logs/attempt_0/1/stderr.log:1: ")


def test_a_record_tells_that_the_loader_is_slow(tmp_path):
    rows = [{"kind": "step", "step": n, "loss": 0.1, "seconds": 1.0, "data_seconds": 0.75} for n in range(30)]
    (tmp_path / "record.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = diagnose(tmp_path)
    assert found.ok and [failure.name for failure in found.failures] == ["slow_loader"]
    assert found.failures[0].cause.startswith("Of the last 30 steps 75 % were waiting for data. ")


def test_of_a_large_file_the_beginning_and_the_end_are_read_with_their_numbers(tmp_path, monkeypatch):
    monkeypatch.setattr(evidence_room, "HEAD_BYTES", 2**16)
    monkeypatch.setattr(evidence_room, "TAIL_BYTES", 2**17)
    line, count = "x" * 1023 + "\n", 5000
    with (tmp_path / "big.log").open("w") as file:
        file.write("OSError: [Errno 24] Too many open files\n")
        file.writelines([line] * count)
        file.write("RuntimeError: DataLoader timed out after 120 seconds\n")
    found = diagnose(tmp_path / "big.log")
    assert [failure.name for failure in found.failures] == ["open_files", "loader_stalled"]
    assert f"big.log:{count + 2}: RuntimeError" in found.failures[1].seen and "big.log:1: OSError" in found.failures[0].seen


def test_files_that_are_too_many_are_told(tmp_path, monkeypatch):
    for number in range(3):
        (tmp_path / f"{number}.log").write_text("OSError: [Errno 24] Too many open files\n")
    monkeypatch.setattr(evidence_room, "ALL_BYTES_MOST", 50)
    found = diagnose(tmp_path)
    assert (found.files, found.left_out) == (2, 1) and "1 file not read" in str(found)


def test_any_text_is_read_without_an_error():
    """Pieces of real logs, cut and mixed at random, with damage between them."""
    pieces = [text for rule in load_all(RULES) for text, _ in rule.CASES]
    draw = random.Random(7)
    for _ in range(200):
        chosen = "\n".join(draw.choice(pieces) for _ in range(draw.randrange(6)))
        cut = chosen[draw.randrange(len(chosen) + 1) :] + "".join(map(chr, draw.choices(range(1, 300), k=20)))
        found = diagnosis_of(evidence_of_text(cut))
        assert str(found) and json.dumps(found.to_tree()) and found.ok == (not set(map(_kind, found.failures)) - {"notice"})


def _kind(failure: KnownFailure) -> str:
    return failure.kind


def test_colours_progress_bars_and_broken_bytes_do_not_matter(tmp_path):
    (tmp_path / "a.log").write_bytes(
        b"ok\xff\xfe\r\nepoch 1:  10%\repoch 1:  20%\r\x1b[31mOSError: [Errno 24] Too many open files\x1b[0m\r\n"
    )
    (failure,) = diagnose(tmp_path / "a.log").failures
    assert failure.seen == f"{tmp_path / 'a.log'}:2: OSError: [Errno 24] Too many open files"


@pytest.mark.parametrize(
    "text", ["[rank3]: x", "[Rank 3] Watchdog", "[default3]:x", "widefield: rank 3 failed", "  rank      : 3 (local"]
)
def test_a_lines_rank_is_read(text):
    assert rank_in(text) == 3 and rank_in("no number here") is None


def test_what_is_not_there_and_folders_without_logs_are_refused(tmp_path):
    with pytest.raises(ValueError, match=r"none.log cannot be read: No such file or directory; name a log file"):
        diagnose(tmp_path / "none.log")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match=r"empty has no record.jsonl and no file that is called like a log"):
        diagnose(tmp_path / "empty")


def test_a_line_is_quoted_without_its_secrets():
    text = "DataLoader timed out after 120 seconds while reading https://user:hunter22@data.example/x"
    (failure,) = diagnosis_of(evidence_of_text(text)).failures
    assert "hunter22" not in str(failure) and "https://user:***@data.example/x" in failure.seen


def test_a_file_name_of_a_line_is_that_of_its_file():
    assert LogFile("a", "one\ntwo\n").line_at(5).where == "a:2"
