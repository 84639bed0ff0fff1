"""What a Chrome trace says of communication, and that steps are recorded."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from ranks import on_ranks

from widefield.comm import collectives
from widefield.comm.timeline import MessageLog, Timeline, recorded, traffic, traffic_of


def gloo(name: str, start: float, stop: float, dims: list, kind: str = "float") -> dict:
    return {
        "ph": "X",
        "name": f"gloo:{name}",
        "ts": start,
        "dur": stop - start,
        "args": {"Input Dims": [dims], "Input type": [kind]},
    }


def test_overlapping_messages_are_busy_once_and_what_is_received_is_not_counted():
    events = [
        gloo("all_reduce", 0, 10, [5, 2]), gloo("all_reduce", 5, 20, [3], "double"), gloo("send", 30, 31, [7], "c10::BFloat16"),
        gloo("recv", 30, 40, [7]), {"ph": "X", "name": "gloo:barrier", "ts": 50, "dur": 1, "args": {}},
        {"ph": "X", "name": "aten::add", "ts": 0, "dur": 99, "args": {}}, {"ph": "f", "name": "gloo:all_reduce"},
    ]  # fmt: skip
    found = traffic(events)
    assert found.busy_seconds == pytest.approx(31e-6) and found.handed_bytes == 40 + 24 + 14
    assert found.messages == {"all_reduce": 2, "send": 1, "barrier": 1}


def test_nccls_kernels_are_the_time_and_its_records_the_bytes():
    arguments = {"Collective name": "allreduce", "In msg nelems": 100, "dtype": "BFloat16"}
    events = [
        {"ph": "X", "name": "record_param_comms", "ts": 0, "dur": 1, "args": arguments},
        {"ph": "X", "name": "record_param_comms", "ts": 2, "dur": 1, "args": {"Collective name": "wait"}},
        {"ph": "X", "cat": "kernel", "name": "ncclDevKernel_AllReduce_Sum_bf16_RING_LL", "ts": 10, "dur": 5, "args": arguments},
    ]
    assert traffic(events) == MessageLog(5e-6, 200, {"allreduce": 1})


def test_a_type_of_unknown_size_is_not_guessed():
    with pytest.raises(AssertionError, match="names the type 'complex<double>', whose size is not known here"):
        traffic([gloo("all_reduce", 0, 1, [3], "complex<double>")])


def test_bytes_and_messages_are_those_that_were_sent(tmp_path):
    for found in on_ranks(2, _sent, str(tmp_path)):
        assert found.messages == {"all_reduce": 2, "all_gather": 1, "broadcast": 1}
        assert found.handed_bytes == 4 * 1000 + 8 * 10 + 4 * 6 + 5 and found.busy_seconds > 0


def _sent(mesh, folder: str) -> MessageLog:
    path = mesh_path(folder, mesh.rank)
    with recorded(path):
        dist.all_reduce(torch.ones(1000), group=mesh.group)
        dist.all_reduce(torch.ones(10, dtype=torch.float64), group=mesh.group, async_op=True).wait()
        collectives.all_gather_single(torch.empty(12), torch.ones(6), group=mesh.group)
        dist.broadcast(torch.ones(5, dtype=torch.uint8), 0, group=mesh.group)
    return traffic_of(path)


def mesh_path(folder: str, rank: int):
    return Path(folder) / f"{rank}.json"


def test_a_timeline_holds_the_steps_after_the_first_ones(tmp_path):
    timeline = Timeline(tmp_path, rank=3, after=1, steps=2)
    for _ in range(5):
        timeline.step()
        torch.ones(4).add_(1)
    timeline.close()
    events = json.loads((tmp_path / "timeline-rank3.json").read_text())["traceEvents"]
    marks = [event["name"] for event in events if str(event.get("name", "")).startswith("step ")]
    assert marks == ["step 2 of this process", "step 3 of this process"]


def test_a_run_shorter_than_the_timeline_is_written_when_it_is_closed(tmp_path):
    timeline = Timeline(tmp_path, rank=0, after=1, steps=20)
    for _ in range(3):
        timeline.step()
    timeline.close()
    timeline.close()
    assert "step 3 of this process" in (tmp_path / "timeline-rank0.json").read_text()
