"""Does a model laid out over ranks train as on one device, and stay the module it was?"""

from __future__ import annotations

import copy
import io
import json
import pickle
import random
import re
import warnings
from functools import partial

import devices
import numpy as np
import pytest
import torch
from devices import on_gpu_too
from marks import few
from ranks import on_ranks
from torch import nn
from torch.nn import functional as F

from widefield.capture.interpreter import RankShardModule
from widefield.geometry.interval import even_cut, parts_of
from widefield.naming import load, names_in
from widefield.parallel.parallelize import parallelize, reasons, share_states, without_sync
from widefield.parallel.passes import backward_of
from widefield.parallel.strategies import Case, Phase
from widefield.parallel.strategies.data import hook_state, load_hook_state
from widefield.plans import Plan
from widefield.sharded_state import gather_full_on_main
from widefield.streaming.api import stream
from widefield.tiled.sync_batch_norm import SyncBatchNorm

close = devices.close  # 1e-12 on the CPU: float64, three steps of nets with 1e2 weights
FOLDER = "widefield.parallel.strategies"
CASES = [(name, index) for name in names_in(FOLDER) for index in range(len(load(FOLDER, name).CASES))]


def case_at(name, index) -> Case:
    return load(FOLDER, name).CASES[index]


def net(case, dtype=torch.float64):
    torch.manual_seed(1)
    return case.build().to(devices.here(), dtype)


def batch(case, step, dtype=torch.float64):
    """Inputs and targets of a step, the same on every rank."""
    generator = torch.Generator().manual_seed(step)
    outputs = net(case).eval()(torch.zeros(case.shape, dtype=torch.float64)).shape
    draw = partial(torch.randn, generator=generator, dtype=torch.float64)
    return draw(case.shape).to(dtype), draw(outputs).to(dtype)


def optimizer_of(model):
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01)


def squares(output, target):
    return (output - target).square().sum()


def step(model, optimizer, x, y, scale, passes=1):
    """One optimizer step on this rank's samples in `passes` passes; the sum of losses and the gradients."""
    optimizer.zero_grad()
    total = torch.zeros((), dtype=x.dtype)
    shares = parts_of(even_cut(len(x), passes))
    for index, share in enumerate(shares):
        part = slice(share.start, share.stop)
        with without_sync(model) if index < passes - 1 else torch.enable_grad():
            total += backward_of(model, x[part], y[part], loss_of=squares, scaled=lambda loss: loss * scale)
    here = {name: p for name, p in model.named_parameters() if not p.is_meta}
    gradients = {name: None if p.grad is None else p.grad.clone() for name, p in here.items()}
    optimizer.step()
    return total, gradients


def rehearsal(model, case, rank, dtype=torch.float64):
    """Random on purpose: a trial must leave the random states as they were."""
    return lambda: model(torch.randn(2, *case.shape[1:], dtype=dtype) + rank).square().sum()


def laid_out(mesh, case, dtype=torch.float64):
    model = net(case, dtype)
    sample = torch.empty(2, *case.shape[1:], dtype=dtype, device="meta")
    return parallelize(model, mesh, trial_step=rehearsal(model, case, mesh.rank, dtype), sample=sample)


def my_rows(mesh, rows):
    mine = parts_of(even_cut(rows, mesh.copies))[mesh.copy]
    return slice(mine.start, mine.stop)


# ---------------------------------------------------------------------------------------------- every strategy's cases


def compare_with_one_device(mesh, name, index):
    case = case_at(name, index)
    alone, model = net(case), laid_out(mesh, case)
    one, many = optimizer_of(alone), share_states(optimizer_of(model), mesh)
    for number in range(3):
        x, y = batch(case, number)
        mine = my_rows(mesh, len(x))
        loss, gradients = step(alone, one, x, y, 1 / len(x))
        my_loss, my_gradients = step(model, many, x[mine], y[mine], mesh.copies / len(x), mesh.plan.accumulate)
        close(mesh.sum_(my_loss) * mesh.copies / mesh.size, loss)
        close_on_main(mesh, model, my_gradients, gradients)
    close_on_main(mesh, model, dict(model.state_dict()), dict(alone.state_dict()))
    assert not case.reason or any(re.search(case.reason, why) for why in reasons(model)), reasons(model)


def close_on_main(mesh, model, parts, expected):
    """Whether parts are those of the wholes that one device has; looked at on rank 0, since parts send no copies."""
    found = gather_full_on_main(model, mesh, parts)
    if mesh.is_main:
        close(found, expected)


def plan_of(name, size, options):
    """`size` ranks on the axis that a strategy is for."""
    axis = load(FOLDER, name).AXIS
    named = {"data_strategy": name} if axis == "replicate" else {}
    return Plan(**{axis or "replicate": size}, **named, **options)


@on_gpu_too
@pytest.mark.parametrize("size", few([2, 3], 2))
@pytest.mark.parametrize(("name", "index"), CASES, ids=[f"{n}: {case_at(n, i).name}" for n, i in CASES])
def test_three_steps_over_ranks_equal_one_device(name, index, size):
    on_ranks(size, compare_with_one_device, name, index, plan=plan_of(name, size, case_at(name, index).options))


@pytest.mark.parametrize("name", names_in(FOLDER))
def test_every_strategy_says_its_phase_and_brings_cases(name):
    strategy = load(FOLDER, name)
    assert strategy.PHASE in Phase and isinstance(strategy.CASES, list)


# ---------------------------------------------------------------------------------------------- the same module


BATCH_NORM = case_at("data", 0)


def stays_itself(mesh):
    model = net(BATCH_NORM)
    objects, names, kind = list(model.modules()), list(model.state_dict()), type(model)
    parameters = [id(p) for p in model.parameters()]
    calls = []
    model.register_forward_hook(lambda *_: calls.append("hook"))
    given = parallelize(model, mesh, trial_step=rehearsal(model, BATCH_NORM, mesh.rank))
    calls.clear()
    given(batch(BATCH_NORM, 0)[0])
    assert given is model and isinstance(model, kind) and type(model).__name__ == kind.__name__
    assert all(a is b for a, b in zip(objects, model.modules(), strict=True))
    assert names == list(model.state_dict()) and parameters == [id(p) for p in model.parameters()]
    assert calls == ["hook"], "a hook of the model runs once per call"


@on_gpu_too
def test_the_same_module_comes_back_with_names_and_hooks():
    on_ranks(2, stays_itself)


def gradients_after(mesh, change):
    """Whether the gradient is averaged: ranks hold different samples, so only then do they agree."""
    model = laid_out(mesh, BATCH_NORM)
    model = change(model) or model
    torch.manual_seed(mesh.rank)
    model(torch.randn(2, 2, 6, 5, dtype=torch.float64)).square().sum().backward()
    mine = torch.cat([p.grad.flatten() for p in model.parameters()])
    return torch.equal(mesh.gather_objects(mine)[0], mesh.gather_objects(mine)[1])


def evaluate_and_train_again(model):
    model.eval()
    with torch.no_grad():
        model(torch.randn(2, 2, 6, 5, dtype=torch.float64))
    model.train()


def compile_with(backend, model):
    # torch's compiler looks at .grad of a tensor inside the graph, and its own warning would stop it
    warnings.filterwarnings("ignore", message="The .grad attribute of a Tensor that is not a leaf")
    model.compile(backend=backend)


def passes_without_sync(mesh):
    """Whether ranks hold the same gradient after a pass inside, and after one more outside."""
    model = parallelize(nn.Linear(2, 2), mesh)
    x = torch.full((1, 2), mesh.rank + 1.0)
    with without_sync(model):
        model(x).sum().backward()
    inside = model.weight.grad.clone()
    model(x).sum().backward()
    return [gradient[0, 0].item() for gradient in (inside, model.weight.grad)]


@on_gpu_too
def test_a_pass_without_sync_sends_nothing_and_the_next_sends_both():
    assert on_ranks(2, passes_without_sync) == [[1.0, 3.0], [2.0, 3.0]]  # 2 passes * (1 + 2) / 2


def swap_for_a_copy(model):
    return copy.deepcopy(model)


@pytest.mark.parametrize(
    "change", [evaluate_and_train_again, partial(compile_with, "eager"), partial(compile_with, "aot_eager")],
    ids=["eval and train", "compile eager", "compile aot_eager"],
)  # fmt: skip
def test_gradients_are_averaged(change):
    assert on_ranks(2, gradients_after, change) == [True, True]


@on_gpu_too
def test_a_copy_is_plain_and_averages_nothing():
    assert on_ranks(2, gradients_after, swap_for_a_copy) == [False, False]


def pickled(mesh):
    model = laid_out(mesh, case_at("data", 1))
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    return type(loaded) is nn.Sequential and set(vars(loaded)) == set(vars(nn.Sequential()))


@on_gpu_too
def test_a_pickle_is_the_plain_model():
    assert on_ranks(2, pickled) == [True, True]


def copied_from(mesh, is_streamed):
    """Whether copies of a model that several strategies have wrapped are plain models, with its weights; but for a stream's,
    and for those of what one rank has of channels, which compute nothing."""
    case, found = case_at("data", 1), []
    alone = net(case).eval()
    model = stream(net(case), tiles=(2, 2)) if is_streamed else net(case)
    image = batch(case, 0)[0]
    parallelize(model, mesh, sample=image.to("meta"))
    model.eval()
    for made in (copy.deepcopy(model), pickle.loads(pickle.dumps(model)), copy.deepcopy(copy.deepcopy(model))):
        is_part = isinstance(made, RankShardModule)
        kind = type(made).__mro__[3] if is_streamed or is_part else type(made)  # classes of ours come before
        same = is_part if mesh.plan.channel > 1 else torch.allclose(made(image), alone(image), rtol=1e-10)
        found.append(
            (kind is nn.Sequential, same, set(vars(made)) - set(vars(nn.Sequential())) <= {"_stream", *RankShardModule.COPIED})
        )
    return found


@on_gpu_too
@pytest.mark.parametrize(
    ("plan", "is_streamed"),
    [
        (Plan(replicate=2), True), (Plan(replicate=2, recompute={"blocks": ["0"]}), False),
        (Plan(replicate=2, channel=2), False), (Plan(shard=2, sharding={"zero": 1}), True), (Plan(space=[2, 1]), True),
    ],
    ids=str,
)  # fmt: skip
def test_copies_of_what_several_strategies_wrapped_are_plain(plan, is_streamed):
    assert on_ranks(plan.ranks, copied_from, is_streamed, plan=plan) == [[(True, True, True)] * 3] * plan.ranks


def alone_in(mesh, mode):
    """Only rank 0 calls the model; it would wait for rank 1 if the call sent anything."""
    model = laid_out(mesh, BATCH_NORM)
    mesh.barrier()
    if mesh.rank == 0:
        model.eval() if mode == "eval" else (model[1].eval(), model[4].eval())  # else SyncBatchNorm has messages of its own
        with torch.no_grad():
            model(batch(BATCH_NORM, 0)[0])


@on_gpu_too
@pytest.mark.parametrize("mode", ["eval", "no_grad"])
def test_evaluation_sends_nothing(mode):
    on_ranks(2, alone_in, mode, plan=Plan(replicate=2, batch_norm="broadcast"), timeout_seconds=20)


class CallsItself(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 3)

    def forward(self, x, again=True):
        x = self.layer(x)
        return self(x, again=False) if again else x


def calls_itself(mesh):
    model = parallelize(CallsItself(), mesh)
    model(torch.full((1, 3), mesh.rank + 1.0)).sum().backward()
    return model.layer.weight.grad


@on_gpu_too
def test_a_model_that_calls_itself_is_one_pass():
    first, second = on_ranks(2, calls_itself)
    assert torch.equal(first, second) and first.count_nonzero()


def with_its_own_forward(mesh):
    model = nn.Linear(2, 2)
    model.forward = lambda x: F.linear(x * 2, model.weight)
    parallelize(model, mesh)
    model(torch.full((1, 2), mesh.rank + 1.0)).sum().backward()
    return model.weight.grad


def test_a_forward_set_on_the_object_is_averaged_too():
    assert all((gradient == 3).all() for gradient in on_ranks(2, with_its_own_forward))  # (2 + 4) / 2


# ---------------------------------------------------------------------------------------------- trial passes


def traces(mesh):
    """What trial passes leave: nothing, on weights, gradients, buffers, flags and random states."""
    case = BATCH_NORM
    model = net(case)
    model[1].eval()
    before = copy.deepcopy(model.state_dict())
    state = torch.get_rng_state()

    def trial_step():
        model.train()
        return model(torch.randn(2, *case.shape[1:], dtype=torch.float64)).square().sum()

    parallelize(model, mesh, trial_step=trial_step)
    torch.testing.assert_close(model.state_dict(), before, rtol=0, atol=0)
    assert torch.equal(state, torch.get_rng_state())
    assert not model[1].training and model[4].training
    assert all(p.grad is None for p in model.parameters())


@on_gpu_too
def test_trial_passes_leave_no_trace():
    on_ranks(2, traces)


class ByChance(nn.Module):
    """A branch is taken with even odds; the seed makes the first trial take it and the second not."""

    def __init__(self):
        super().__init__()
        self.stem, self.side = nn.Linear(2, 2), nn.Linear(2, 2)

    def forward(self, x):
        x = self.stem(x)
        return x + self.side(x) if torch.rand(()) < 0.5 else x


def by_chance(mesh):
    model = ByChance()
    taken = [torch.rand(2, generator=torch.Generator().manual_seed(seed)) < 0.5 for seed in range(99)]
    torch.manual_seed([branches.tolist() for branches in taken].index([True, False]))
    parallelize(model, mesh, trial_step=lambda: model(torch.ones(1, 2)).sum())
    return reasons(model)


@on_gpu_too
def test_a_branch_taken_by_chance_is_seen():
    for said in on_ranks(2, by_chance):
        assert "all 4 parameters get one in trial passes" in " ".join(said)


class Counts(nn.Module):
    """Which branch is taken depends on what forwards keep: an attribute, a buffer, or a generator of Python or NumPy."""

    def __init__(self, kind):
        super().__init__()
        self.kind, self.forwards = kind, 0
        self.layer, self.norm = nn.Linear(2, 2), nn.BatchNorm1d(2)
        self.register_buffer("steps", torch.zeros(()))

    def forward(self, x):
        if self.kind == "an attribute":
            self.forwards += 1
        elif self.kind == "a buffer":
            self.steps += 1
        elif self.kind == "random":
            random.random()
        elif self.kind == "numpy":
            np.random.rand()
        return self.norm(self.layer(x))


def runs_of_trial_steps(mesh):
    """How often the trial step runs, by the kind of model; of the last on rank 0 alone it counts."""
    found = []
    for kind in ("nothing", "an attribute", "a buffer", "random", "numpy", "an attribute" if mesh.rank == 0 else "nothing"):
        model, runs = Counts(kind), []
        parallelize(model, mesh, trial_step=lambda: (runs.append(1), model(torch.ones(2, 2)).sum())[1])  # noqa: B023
        found.append(len(runs))
    return found


@on_gpu_too
def test_a_trial_step_runs_again_only_where_that_may_take_another_branch():
    assert on_ranks(2, runs_of_trial_steps) == [[1, 2, 2, 2, 2, 2]] * 2


def on_some_ranks(mesh):
    model = nn.ModuleDict({"a": nn.Linear(2, 2), "b": nn.Linear(2, 2)})
    model.__class__ = RankChooses
    model.rank = mesh.rank
    parallelize(model, mesh, trial_step=lambda: model(torch.ones(1, 2)).sum())
    model(torch.ones(1, 2)).sum().backward()
    return " ".join(reasons(model)), model["b"].weight.grad[0, 0].item()


class RankChooses(nn.ModuleDict):
    def forward(self, x):
        return self["a"](x) if self.rank == 0 else self["b"](x)


@on_gpu_too
def test_parameters_used_on_some_ranks_alone_are_seen():
    for why, gradient in on_ranks(2, on_some_ranks):
        assert "all 4 parameters get one in trial passes" in why and gradient == 0.5  # (0 + 1) / 2


def without_rehearsal(mesh):
    return reasons(parallelize(nn.Linear(2, 2), mesh))


def test_without_a_trial_pass_the_reason_says_so():
    assert on_ranks(2, without_rehearsal)[0] == [
        "gradients travel in messages of up to 25 MiB: the first backward shows which parameters get some and sends at its "
        "end, later ones while they run"
    ]


# ---------------------------------------------------------------------------------------------- buffers


def kinds_and_buffers(mesh):
    model = laid_out(mesh, BATCH_NORM)
    torch.manual_seed(mesh.rank)
    for _ in range(2):  # DDP sends buffers before a pass, so the second shows it
        before = model[1].running_mean.clone()
        model(torch.randn(3, 2, 6, 5, dtype=torch.float64)).sum().backward()
    return isinstance(model[1], SyncBatchNorm), mesh.gather_objects(model[1].running_mean), before


@pytest.mark.parametrize(("choice", "synchronized", "equal"), [
    ("synchronized", True, True), ("averaged", False, False), ("broadcast", False, False),
])  # fmt: skip
def test_batch_norm_is_what_the_plan_says(choice, synchronized, equal):
    found = on_ranks(2, kinds_and_buffers, plan=Plan(replicate=2, batch_norm=choice))
    for is_synchronized, (first, second), _ in found:
        assert is_synchronized is synchronized and torch.equal(first, second) is equal


def buffers_met(mesh):
    model = laid_out(mesh, BATCH_NORM)
    model[1].running_mean.fill_(mesh.rank)
    model[1].momentum = 0.0  # what a pass finds, it leaves
    model(batch(BATCH_NORM, 0)[0]).sum().backward()
    return model[1].running_mean[0].item()


@pytest.mark.parametrize(("choice", "met"), [("broadcast", [0.0, 0.0]), ("averaged", [0.0, 1.0])])
def test_rank_zeros_buffers_are_sent_before_a_pass_for_broadcast_alone(choice, met):
    assert on_ranks(2, buffers_met, plan=Plan(replicate=2, batch_norm=choice)) == met


def start_values(mesh):
    torch.manual_seed(mesh.rank)
    model = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
    model[1].running_mean.fill_(mesh.rank)
    parallelize(model, mesh)
    return model.state_dict()


@on_gpu_too
@pytest.mark.parametrize("choice", ["synchronized", "averaged", "broadcast"])
def test_all_ranks_start_from_rank_zero(choice):
    first, second = on_ranks(2, start_values, plan=Plan(replicate=2, batch_norm=choice))
    torch.testing.assert_close(first, second, rtol=0, atol=0)
    assert first["1.running_mean"].tolist() == [0.0, 0.0]


# ---------------------------------------------------------------------------------------------- resuming, compression


def train_on(mesh, model, optimizer, steps):
    for number in steps:
        x, y = batch(BATCH_NORM, number, torch.float32)
        mine = my_rows(mesh, len(x))
        step(model, optimizer, x[mine], y[mine], mesh.size / len(x))


def interrupted(mesh):
    """Six steps at once, and three, a fresh start from what was saved, and three more."""
    through = laid_out(mesh, BATCH_NORM, torch.float32)
    train_on(mesh, through, optimizer_of(through), range(6))
    first = laid_out(mesh, BATCH_NORM, torch.float32)
    optimizer = optimizer_of(first)
    train_on(mesh, first, optimizer, range(3))
    saved = copy.deepcopy((first.state_dict(), optimizer.state_dict(), hook_state(first)))
    second = laid_out(mesh, BATCH_NORM, torch.float32)
    second.load_state_dict(saved[0])
    again = optimizer_of(second)
    again.load_state_dict(saved[1])
    load_hook_state(second, saved[2])
    train_on(mesh, second, again, range(3, 6))
    return [(name, torch.equal(a, second.state_dict()[name])) for name, a in through.state_dict().items()], saved[2]


@on_gpu_too
@pytest.mark.parametrize("compression", ["none", "fp16", "bf16", "powersgd"])
def test_resumed_equals_uninterrupted_bit_for_bit(compression):
    plan = Plan(replicate=3, bucket_mib=1e-3, compression=compression, powersgd_start_step=2)
    for equal, _ in on_ranks(3, interrupted, plan=plan):
        assert all(same for _, same in equal), equal


def test_the_state_of_powersgd_is_tensors_and_plain_values_and_has_begun():
    plan = Plan(replicate=3, compression="powersgd", powersgd_start_step=2)
    (_, state), (_, other), _ = on_ranks(3, interrupted, plan=plan)
    assert state["iter"] == 3 and state["error_dict"] and state["q_memory_dict"]
    assert not torch.equal(*(s["error_dict"]["0"] for s in (state, other))), "the error is each rank's own"
    json.dumps(state, default=lambda value: value.tolist() if isinstance(value, torch.Tensor) else pytest.fail(repr(value)))


def compressed(mesh):
    model = laid_out(mesh, BATCH_NORM)
    x, y = batch(BATCH_NORM, 0)
    mine = my_rows(mesh, len(x))
    return step(model, optimizer_of(model), x[mine], y[mine], mesh.size / len(x))[1], reasons(model)


@on_gpu_too
@pytest.mark.parametrize(("compression", "tolerance"), [("fp16", 2**-11), ("bf16", 2**-8)])
def test_compressed_gradients_are_off_by_rounding_alone(compression, tolerance):
    """Each rank's part is rounded once and the sum once: 2 units in the last place of the largest part."""
    exact, _ = on_ranks(2, compressed)[0]
    found, why = on_ranks(2, compressed, plan=Plan(replicate=2, compression=compression))[0]
    largest = max(gradient.abs().max() for gradient in exact.values())
    errors = [(found[name] - exact[name]).abs().max() for name in exact]
    assert 0 < max(errors) <= 2 * tolerance * largest
    assert f"gradients travel as {compression}" in why[-1]


def full_rank(mesh, memory_format):
    """Gradients that PowerSGD sends with as many ranks as their smallest matrix has, which lose nothing."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 2, 3)).to(memory_format=memory_format)
    parallelize(model, mesh)
    for number in range(3):
        x = torch.randn(2, 3, 7, 8, generator=torch.Generator().manual_seed(10 * number + mesh.rank))
        model.zero_grad()
        model(x.contiguous(memory_format=memory_format)).square().mean().backward()
    return {name: parameter.grad for name, parameter in model.named_parameters()}


def test_powersgd_sends_weights_in_channels_last():
    plan = Plan(replicate=2, compression="powersgd", powersgd_rank=4, powersgd_start_step=2)
    (exact, _), (found, other) = (
        on_ranks(2, full_rank, torch.channels_last),
        on_ranks(2, full_rank, torch.channels_last, plan=plan),
    )
    for name in exact:
        assert torch.equal(found[name], other[name]) and found[name].stride() == exact[name].stride()
        torch.testing.assert_close(found[name], exact[name], rtol=1e-4, atol=1e-6)


def mismatched(mesh, saved):
    model = laid_out(mesh, BATCH_NORM)
    try:
        load_hook_state(model, saved)
    except ValueError as error:
        return str(error)


@pytest.mark.parametrize(("compression", "saved", "words"), [
    ("powersgd", None, "has none PowerSGD state and this run wants one; set gradient.compression=none"),
    ("none", {}, "has one PowerSGD state and this run wants none; set gradient.compression=powersgd"),
])  # fmt: skip
def test_a_state_that_does_not_fit_the_compression_is_refused(compression, saved, words):
    for said in on_ranks(2, mismatched, saved, plan=Plan(replicate=2, compression=compression)):
        assert words in said


# ---------------------------------------------------------------------------------------------- one rank


def untouched(mesh):
    model = net(BATCH_NORM)
    kinds = [type(layer) for layer in model.modules()]
    assert parallelize(model, mesh) is model
    with without_sync(model):
        model(batch(BATCH_NORM, 0)[0])
    return kinds == [type(layer) for layer in model.modules()], reasons(model), hook_state(model)


def test_on_one_rank_the_model_is_untouched():
    assert on_ranks(1, untouched) == [(True, ["one rank: nothing is exchanged"], None)]


def test_a_model_never_laid_out_has_no_reasons():
    assert reasons(nn.Linear(1, 1)) == []


def no_gpus(mesh):
    model = nn.Linear(2, 2)
    try:
        parallelize(model, mesh)
    except ValueError as error:
        return str(error), type(model) is nn.Linear


def test_data_parallel_refuses_fewer_than_two_gpus():
    plan = Plan(data_strategy="data_parallel", batch_norm="broadcast")
    ((said, plain),) = on_ranks(1, no_gpus, plan=plan)
    assert "this one has 0; set mesh.data_strategy=data" in said and plain


def pretended_gpus(mesh):
    """DataParallel without GPUs calls what it wraps: the routing is what is tried here."""
    count, torch.cuda.device_count = torch.cuda.device_count, lambda: 2
    try:
        model = parallelize(net(BATCH_NORM), mesh)
    finally:
        torch.cuda.device_count = count
    x = batch(BATCH_NORM, 0)[0]
    return torch.equal(model(x), net(BATCH_NORM)(x)), reasons(model)


def test_data_parallel_keeps_the_module_too():
    plan = Plan(data_strategy="data_parallel", batch_norm="broadcast")
    assert on_ranks(1, pretended_gpus, plan=plan)[0][1] == [
        "torch.nn.DataParallel: each batch is spread over 2 GPUs by one process"
    ]
