"""Is the batch that is found the largest that fits every rank, and does training go on as if it had been given?"""

from __future__ import annotations

import json
import mmap
import shutil
from pathlib import Path
from unittest import mock

import pytest
import torch
from command import DIGITS
from marks import few
from ranks import on_ranks

import widefield as wf
from widefield.bench.compare import BenchRequest, bench
from widefield.comm.mesh import AgreedError, Mesh, World
from widefield.config import read_config
from widefield.plans import Plan, plan_of
from widefield.run import train
from widefield.training import batch_finder, memory
from widefield.training.assemble import assemble, learner_of, rebuilt, training_batches
from widefield.training.batch_finder import SHARE, MemoryPeak, candidates, find_batch_size, measured, without_model
from widefield.training.passes import Passes

SETTINGS = [
    "precision=float64", "model.options={widths: [4, 6], blocks: 1, dropout: 0.2}", "schedule.length=3step",
    "schedule.warmup=1step", "data.batch_size=auto", "data.workers=0", "optimizer.name=adamw",
]  # fmt: skip
PLANS = {
    "copies": ["mesh.replicate=2"],
    "tiles": ["mesh.space=[2,1]", "data.augment=[]"],
    "zero3": ["mesh.shard=2"],
    "hybrid": ["mesh.replicate=2", "mesh.shard=2"],
    "stage": ["mesh.stage=2", "model.options.dropout=0.0"],
}
RANKS = {"hybrid": 4}
OF_NONE, EACH, MOST = 1000.0, 100.0, 5000.0
"""The made-up memory of the weights, of an image of a rank, and of a rank, in bytes."""


def one_rank() -> Mesh:
    return Mesh(Plan(), World(), torch.device("cpu"))


def parts_of(mesh: Mesh, *settings: str):
    return without_model(assemble(read_config(str(DIGITS), [*SETTINGS, *settings]), mesh))


def never() -> bool:
    return False


def made_up(parts, mesh: Mesh, batch: int, is_asked_to_stop) -> MemoryPeak:
    """A line: of each copy's images, or tiles of them, and passes; the last rank needs more."""
    images = batch / mesh.copies / max(1, mesh.grid.size) / parts.config.gradient.accumulate
    return MemoryPeak(int(OF_NONE + EACH * images * (1 + mesh.rank)), int(OF_NONE))


def found(mesh: Mesh, *settings: str, measure=made_up, most: float = MOST) -> tuple[int, list[str]]:
    return find_batch_size(parts_of(mesh, *settings), is_asked_to_stop=never, measure=measure, usable=int(most / SHARE))


# ---------------------------------------------------------------------------------------------- which batch it is


@pytest.mark.long
@pytest.mark.parametrize(
    ("settings", "first", "batch"),
    [
        ([], 1, 32),  # 1000 + 100 x 32 of 5000
        (["gradient.accumulate=3"], 3, 48),  # twice as many would leave 15 steps
        (["data.mixup=0.2"], 2, 32),
        (["data.cutmix=0.2", "gradient.accumulate=2"], 4, 64),
        (["gradient.accumulate=100"], 100, 100),  # 15 steps, and fewer images are no batch
    ],
)
def test_the_largest_batch_that_fits_is_chosen_from_the_smallest_on(settings, first, batch):
    parts = parts_of(one_rank(), *settings)
    assert next(candidates(parts)) == first
    assert found(one_rank(), *settings)[0] == batch


def found_with(mesh: Mesh, settings: list[str]) -> tuple[int, list[str]]:
    return found(mesh, *settings)


FEWER = few([("copies", 32), ("tiles", 32), ("zero3", 32), ("stage", 16)], ("copies", 32), is_sweep=True)


@pytest.mark.long
@pytest.mark.parametrize(("name", "batch"), FEWER)
def test_the_rank_that_needs_most_decides_for_all(name, batch):
    """Of rank 1: 1000 + 200 x 16 images, or tiles of 32, of 5000."""
    answers = on_ranks(2, found_with, PLANS[name], plan=plan_of(read_config(str(DIGITS), PLANS[name]), 2))
    assert answers[0] == answers[1] and answers[0][0] == batch


@pytest.mark.long
def test_the_reason_says_why_it_is_not_larger():
    assert found(one_rank(), most=5e9)[1] == [
        "data.batch_size=64: 23 steps an epoch, and 12 with twice as many images, fewer than 20; a step's peak is 7 KiB of the "
        "4.7 GiB that a rank may use",
        "  peak by batch: 1: 1 KiB  2: 1 KiB  4: 1 KiB  8: 2 KiB  16: 3 KiB  32: 4 KiB  64: 7 KiB",
    ]
    assert found(one_rank())[1][0] == (
        "data.batch_size=32: 45 steps an epoch; a step's peak is 4 KiB of the 5 KiB that a rank may use, and with 64 images it "
        "would be 7 KiB"
    )


@pytest.mark.long
def test_a_peak_above_what_the_line_says_ends_the_search_too():
    def bent(parts, mesh, batch, is_asked_to_stop):
        return MemoryPeak(100 if batch < 16 else 6000, 50)

    batch, reasons = found(one_rank(), measure=bent)
    assert batch == 8 and reasons[0].endswith(", and with 16 images it was 6 KiB")


def test_a_second_candidate_is_not_tried_where_the_first_one_nearly_fills_the_memory():
    def large(parts, mesh, batch, is_asked_to_stop):
        assert batch == 1
        return MemoryPeak(4000, 1000)

    assert found(one_rank(), measure=large)[0] == 1


# ---------------------------------------------------------------------------------------------- without memory


def out_of_memory_from(most: int):
    def measure(parts, mesh, batch, is_asked_to_stop):
        if batch >= most:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB.\nGPU 0 has ...")
        return MemoryPeak(100, 100)

    return measure


@pytest.mark.long
def test_out_of_memory_ends_the_search_at_the_batch_before():
    batch, reasons = found(one_rank(), measure=out_of_memory_from(16))
    assert batch == 8
    assert reasons[0].endswith("with 16 images: out of memory (CUDA out of memory. Tried to allocate 2 GiB.)")


def test_out_of_memory_at_the_smallest_batch_is_refused():
    with pytest.raises(AgreedError, match="the smallest batch cannot be trained on, with 1 images: out of memory .*; set grad"):
        found(one_rank(), measure=out_of_memory_from(1))


@pytest.mark.long
def test_a_batch_of_one_pixel_per_channel_is_passed_over():
    def measure(parts, mesh, batch, is_asked_to_stop):
        if batch == 1:
            raise ValueError("Expected more than 1 value per channel when training, got input size torch.Size([1, 4, 1, 1])")
        return MemoryPeak(100, 100)

    assert found(one_rank(), measure=measure)[0] == 64


def test_a_model_that_is_refused_with_any_batch_is_refused_in_the_same_words():
    settings = ["optimizer.lr=find", "optimizer.groups=[{match: head, lr: 0.1}]"]
    with pytest.raises(AgreedError, match="^optimizer.groups has lr: 0.1 and optimizer.lr is to be found"):
        found(one_rank(), *settings, measure=measured)


def test_another_error_is_raised():
    def measure(parts, mesh, batch, is_asked_to_stop):
        raise KeyError("of the user's code")

    with pytest.raises(KeyError, match="of the user's code"):
        found(one_rank(), measure=measure)


def full_on_one(mesh: Mesh, settings: list[str], most: int, full: int) -> tuple:
    """The search by steps of training, in which rank `full` runs out of memory in the middle of a pass of `most` images."""
    made = batch_finder.learner_of

    def with_little_memory(parts):
        learner, reasons = made(parts)
        if parts.config.data.batch >= most and parts.mesh.rank == full:
            learner.task = Failing()
        return learner, reasons

    batch_finder.learner_of = with_little_memory
    try:
        chosen = find_batch_size(parts_of(mesh, *settings), is_asked_to_stop=never)
    except AgreedError as error:
        chosen = (str(error), [])
    finally:
        batch_finder.learner_of = made
    return chosen, mesh.sum_(torch.ones(1)).item()


class Failing:
    def __getattr__(self, name: str):
        raise torch.OutOfMemoryError("out of memory")


@pytest.mark.long
@pytest.mark.parametrize("name", few(PLANS, "copies", is_sweep=True))
@pytest.mark.parametrize("full", few([1, 0], 1, is_sweep=True))
def test_one_rank_without_memory_ends_the_search_of_all_and_the_run_goes_on(name, full):
    ranks = RANKS.get(name, 2)
    plan = plan_of(read_config(str(DIGITS), PLANS[name]), ranks)
    if name == "stage":
        full = 1  # the last stage has the loss
    for (batch, reasons), met in on_ranks(ranks, full_on_one, PLANS[name], 8, full, plan=plan):
        assert batch == 4 and f"with 8 images: rank {full}: out of memory" in reasons[0] and met == ranks


@pytest.mark.long
def test_one_rank_without_memory_at_the_smallest_batch_is_refused_on_all():
    for (text, _), met in on_ranks(2, full_on_one, PLANS["copies"], 2, 1, plan=Plan(replicate=2)):
        assert "the smallest batch cannot be trained on, with 2 images: rank 1: out of memory" in text and met == 2


# ---------------------------------------------------------------------------------------------- as if it had been given


def next_losses(parts, steps: int = 2) -> list[float]:
    learner, _ = learner_of(parts)
    passes = Passes(training_batches(parts, first=0, last=steps), 1)
    losses = [learner.learn(passes.next(), stop=False)[0] for _ in range(steps)]
    passes.close()
    return [*losses, learner.lr, torch.rand(1).item()]


def after_search(mesh: Mesh, settings: list[str]) -> tuple[int, list[float], list[float]]:
    """The batch, and the losses of training with it where it was found and where it is given."""
    bare = parts_of(mesh, *settings)
    batch, _ = find_batch_size(bare, is_asked_to_stop=never, measure=up_to_16)
    after = next_losses(rebuilt(bare, mesh, batch=batch))
    return (
        batch,
        after,
        next_losses(assemble(read_config(str(DIGITS), [*SETTINGS, *settings, f"data.batch_size={batch}"]), mesh)),
    )


def up_to_16(parts, mesh, batch, is_asked_to_stop):
    found = measured(parts, mesh, batch, is_asked_to_stop)
    return MemoryPeak(2**60, 0) if batch > 16 else found


@pytest.mark.long
@pytest.mark.parametrize("name", few(PLANS, "copies", is_sweep=True))
def test_every_plan_trains_on_as_if_the_batch_had_been_given(name):
    ranks = RANKS.get(name, 2)
    for batch, after, given in on_ranks(
        ranks, after_search, PLANS[name], plan=plan_of(read_config(str(DIGITS), PLANS[name]), ranks)
    ):
        assert batch == 16 and after == given


@pytest.fixture(name="memory_for_16")
def _memory_for_16(monkeypatch):
    monkeypatch.setattr(batch_finder, "measured", up_to_16)


@pytest.fixture(name="begun", scope="module")
def _begun(tmp_path_factory) -> Path:
    """A run of three steps whose batch was found."""
    folder = tmp_path_factory.mktemp("begun") / "run"
    with mock.patch.object(batch_finder, "measured", up_to_16):
        wf.train(DIGITS, *SETTINGS, run=folder)
    return folder


def copied(begun: Path, folder: Path) -> Path:
    return Path(shutil.copytree(begun, folder, ignore=shutil.ignore_patterns(".lock")))


def outcome(folder: Path) -> tuple[list[float], bytes]:
    losses = [line["loss"] for line in record_of(folder) if line["kind"] == "step"]
    return losses, (folder / "weights.safetensors").read_bytes()


def record_of(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "record.jsonl").read_text().splitlines()]


@pytest.mark.long
def test_a_run_is_that_of_the_number_and_goes_on_with_it(tmp_path, begun, capsys):
    """Bit for bit, with dropout, augmentation and a learning rate of the batch; then three more steps."""
    wf.train(DIGITS, *SETTINGS, "data.batch_size=16", run=tmp_path / "given")
    assert outcome(begun) == outcome(tmp_path / "given")
    assert read_config(begun / "config.yaml").data.batch_size == 16
    (start,) = (line for line in record_of(begun) if line["kind"] == "start")
    assert start["reasons"][0].startswith("data.batch_size=16: 90 steps an epoch; a step's peak is ")
    capsys.readouterr()
    found = copied(begun, tmp_path / "found")
    wf.train(DIGITS, *SETTINGS, "schedule.length=6step", run=found)
    said = capsys.readouterr()
    assert "data.batch_size=16: as the run found it when it began" in said.out and "batch_size=auto" not in said.out
    assert "data.batch_size: " not in said.out + said.err  # no warning that it has changed
    wf.train(DIGITS, *SETTINGS, "data.batch_size=16", "schedule.length=6step", run=tmp_path / "given")
    assert outcome(found) == outcome(tmp_path / "given")


@pytest.mark.long
def test_a_passed_model_is_copied_and_callbacks_hear_of_the_run_alone(tmp_path, memory_for_16):
    heard: list[int] = []

    class Listener:
        def on_step(self, facts) -> None:
            heard.append(facts.step)

    net = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Dropout(0.1), torch.nn.Linear(64, 10))
    before = net[2].weight.detach().clone()
    settings = [setting for setting in SETTINGS if not setting.startswith("model.")]
    wf.train(DIGITS, *settings, "data.augment=[]", "optimizer.lr=1e-30", run=tmp_path, model=net, callbacks=[Listener()])
    assert heard == [1, 2, 3] and torch.equal(net[2].weight.float(), before)


@pytest.mark.long
@pytest.mark.sweep
def test_the_learning_rate_is_looked_for_with_the_batch_that_was_found(tmp_path, memory_for_16, monkeypatch, capsys):
    monkeypatch.setattr("widefield.training.learning_rate_finder.STEPS", 4)
    wf.train(DIGITS, *SETTINGS, "optimizer.lr=find", run=tmp_path)
    said = capsys.readouterr().out
    assert said.index("data.batch_size=auto: ") < said.index("optimizer.lr=find: ") < said.index("  data.batch_size=16: ")


def test_a_run_whose_config_has_lost_its_batch_says_so(tmp_path, begun):
    folder = copied(begun, tmp_path / "run")
    (folder / "config.yaml").unlink()
    with pytest.raises(ValueError, match="goes on with the batch size in .*config.yaml, and there is none"):
        wf.train(DIGITS, *SETTINGS, run=folder)


@pytest.mark.long
def test_a_run_goes_on_with_the_batch_that_it_found_on_another_number_of_ranks(tmp_path, begun):
    folder = copied(begun, tmp_path / "run")
    for step, batch in on_ranks(2, goes_on, str(folder)):
        assert step == 5 and batch == 16


def goes_on(mesh: Mesh, folder: str) -> tuple[int, int]:
    config = read_config(str(DIGITS), [*SETTINGS, "schedule.length=5step", "mesh.replicate=2"])
    done = train(config, Path(folder), mesh.world)
    return done.step, read_config(Path(folder) / "config.yaml").data.batch


def test_a_search_that_is_asked_to_stop_says_that_nothing_was_trained():
    with pytest.raises(AgreedError, match="stopped in the search for a batch size, so nothing was trained"):
        find_batch_size(parts_of(one_rank()), is_asked_to_stop=lambda: True)


# ---------------------------------------------------------------------------------------------- memory, as measured


@pytest.mark.long
def test_the_measured_peak_grows_with_the_batch():
    """512 images of 8 x 8 px and 64 channels are 8 MiB for each operation that keeps them, of which there are more than 4."""
    parts = parts_of(one_rank(), "precision=float32", "model.options={widths: [64], blocks: 1}")
    freed_before = [torch.ones(2**18) for _ in range(256)]  # 256 MiB below what comes next, as after a day in a notebook
    above = torch.ones(2**10)
    freed_before.clear()
    small, large = (measured(parts, one_rank(), batch, never) for batch in (8, 512))
    assert large.peak - small.peak > 32 * 2**20 and small.fixed <= small.peak and above.numel()


def test_a_reset_peak_is_that_of_later_memory_alone():
    cpu = torch.device("cpu")
    memory.reset_peak(cpu)
    before = memory.memory_bytes(cpu)
    with mmap.mmap(-1, 64 * 2**20) as block:  # no allocator keeps its pages
        block.write(b"1" * len(block))
    with_block = memory.peak_memory_bytes(cpu)
    assert with_block > before + 32 * 2**20
    if memory.reset_peak(cpu):
        assert memory.peak_memory_bytes(cpu) < with_block - 32 * 2**20
    else:
        assert memory.peak_memory_bytes(cpu) >= with_block
    assert 0 < memory.memory_bytes(cpu) <= memory.usable_bytes(cpu, World())


def test_a_peak_that_cannot_be_reset_is_said_to_be_of_the_lifetime(monkeypatch):
    """As in containers whose /proc cannot be written to."""
    cpu = torch.device("cpu")
    resident = memory.memory_bytes(cpu)
    monkeypatch.setattr(memory, "peak_memory_bytes", lambda device: resident + 2**30)
    assert not memory.reset_peak(cpu)


@pytest.mark.long
@pytest.mark.parametrize(("usable", "expected"), [(6250, 1), (10_000, 64)])
def test_equal_lifetime_peaks_do_not_say_that_images_need_nothing(usable, expected):
    """Memory before the search was 3,900; of usable, 0.8 may be used, and 64 images need 6,760."""
    asked = []

    def measure(parts, mesh, batch, is_asked_to_stop):
        asked.append(batch)
        return MemoryPeak(max(3900, 1000 + 90 * batch), 1000, is_lifetime=True)

    batch, _ = find_batch_size(parts_of(one_rank()), is_asked_to_stop=never, measure=measure, usable=usable)
    assert batch == expected and all(1000 + 90 * each <= 0.8 * usable for each in asked)


@pytest.mark.parametrize(
    ("files", "free"),
    [
        ({"memory.max": "1000\n", "memory.current": "700", "memory.stat": "anon 1\ninactive_file 200\n"}, 500),
        ({"memory.max": "max\n", "memory.current": "700", "memory.stat": "anon 1\n"}, 2**63),
        ({"memory/memory.limit_in_bytes": "900", "memory/memory.usage_in_bytes": "300", "memory/memory.stat": ""}, 600),
        ({}, 2**63),
    ],
)
def test_the_limit_of_a_control_group_counts(tmp_path, files, free):
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    assert min(memory._free_in_groups(tmp_path)) == free


# ---------------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ("autoo", "'data.batch_size' is 'autoo' .*: a whole number of 1 or more is wanted, or auto"),
        ("0", "'data.batch_size' is 0 .*: input should be greater than or equal to 1"),
        ("-3", "greater than or equal to 1"),
        ("2.5", "valid integer"),
        ("true", "valid integer"),
        ("", "valid integer"),
    ],
)
def test_a_batch_size_is_a_number_or_auto(value, words):
    with pytest.raises(ValueError, match=words):
        read_config(str(DIGITS), [f"data.batch_size={value}"])


def test_plans_are_compared_at_a_number(tmp_path):
    with pytest.raises(ValueError, match="data.batch_size=auto would give each plan another batch"):
        bench(BenchRequest(str(DIGITS), ["data.batch_size=auto"], out=tmp_path / "out"))
    assert not (tmp_path / "out").exists()


def test_a_plan_is_known_before_the_batch_is():
    assert wf.plan("digits", "data.batch_size=auto", "mesh.replicate=1000", ranks=1000).replicate == 1000


def test_an_evaluation_wants_a_number(begun):
    with pytest.raises(ValueError, match="data.batch_size=auto is found where training begins; set data.evaluate_batch_size"):
        wf.evaluate(begun, "data.batch_size=auto")
