"""Does a model whose layers are dealt out over ranks train as on one device?"""

from __future__ import annotations

import copy
import re
from contextlib import nullcontext
from functools import partial, partialmethod
from itertools import accumulate
from unittest import mock

import devices
import pytest
import torch
import torch.distributed as dist
from devices import on_gpu_too
from marks import LONG_ON_CPU, few
from ranks import on_ranks
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage
from torch.nn import functional as F

from widefield.capture.fake_parameters import named_tensors
from widefield.capture.interpreter import override_of
from widefield.capture.trace import trace
from widefield.geometry.interval import even_cut, parts_of
from widefield.parallel.inactive import inactive
from widefield.parallel.parallelize import fallbacks, parallelize, reasons
from widefield.parallel.passes import backward_of, without_sync
from widefield.parallel.strategies.pipeline import stage_problems
from widefield.pipelining import stage_state
from widefield.pipelining.runtime import _schedule
from widefield.pipelining.sample_mixing import where_samples_meet
from widefield.pipelining.schedule_view import STAGES_PER_RANK, idle_share, orders, schedule_grid
from widefield.pipelining.split_backward import merge_groups
from widefield.plans import Plan, check
from widefield.private_torch.process_groups import sequence_number
from widefield.sharded_state import gather_full_on_main, parts, shapes, total_norm
from widefield.training.state import optimizer_state

close = partial(torch.testing.assert_close, rtol=1e-10, atol=1e-10)  # float64; sums of micro-batches in another order


class Block(nn.Module):
    def __init__(self, ins: int, outs: int, norm, stride: int = 1) -> None:
        super().__init__()
        self.one, self.norm_one = nn.Conv2d(ins, outs, 3, stride, 1, bias=False), norm(outs)
        self.two, self.norm_two = nn.Conv2d(outs, outs, 3, 1, 1, bias=False), norm(outs)
        self.skip = nn.Conv2d(ins, outs, 1, stride) if stride > 1 or ins != outs else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.norm_one(self.one(x)))
        return F.relu(self.norm_two(self.two(y)) + self.skip(x), inplace=True)


def group_norm(channels: int) -> nn.Module:
    return nn.GroupNorm(2, channels)


def resnet(norm=group_norm) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 4, 3, padding=1, bias=False), norm(4), nn.ReLU(inplace=True), Block(4, 4, norm), Block(4, 8, norm, 2),
        Block(8, 8, norm), Block(8, 12, norm, 2), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(12, 5),
    )  # fmt: skip


class UNet(nn.Module):
    """Long skips, a pooling that gives its indices to the way up, and the image itself once more at the end."""

    def __init__(self, dims: int = 2) -> None:
        super().__init__()
        conv = nn.Conv2d if dims == 2 else nn.Conv3d
        self.up_conv = nn.ConvTranspose2d if dims == 2 else nn.ConvTranspose3d
        self.pool = (nn.MaxPool2d if dims == 2 else nn.MaxPool3d)(2, return_indices=True)
        self.unpool = (nn.MaxUnpool2d if dims == 2 else nn.MaxUnpool3d)(2)
        self.a, self.b, self.c = conv(2, 4, 3, padding=1), conv(4, 6, 3, padding=1), conv(6, 8, 3, padding=1)
        self.norm = nn.GroupNorm(2, 6)
        self.up = self.up_conv(8, 6, 2, 2)
        self.d, self.e, self.f = conv(12, 4, 3, padding=1), conv(8, 4, 3, padding=1), conv(6, 3, 1)

    def forward(self, x: Tensor) -> Tensor:
        a = F.silu(self.a(x))
        low, indices = self.pool(a)
        b = F.silu(self.norm(self.b(low)))
        c = F.silu(self.c(F.max_pool2d(b, 2) if x.ndim == 4 else F.max_pool3d(b, 2)))
        d = F.silu(self.d(torch.cat([self.up(c), b], 1)))
        e = F.silu(self.e(torch.cat([self.unpool(d, indices), a], 1)))
        return self.f(torch.cat([e, x], 1))


class Tiny(nn.Module):
    """A small transformer of patches: tokens, heads, positions that no image decides."""

    def __init__(self) -> None:
        super().__init__()
        self.patch, self.place = nn.Conv2d(3, 8, 4, 4), nn.Parameter(torch.randn(1, 16, 8))
        block = partial(nn.TransformerEncoderLayer, 8, 2, 16, 0.0, batch_first=True, norm_first=True)
        self.blocks = nn.ModuleList([block() for _ in range(3)])
        self.head = nn.Linear(8, 5)
        self.register_buffer("ramp", torch.linspace(0, 1, 16), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patch(x).flatten(2).transpose(1, 2) + self.place
        for block in self.blocks:
            x = block(x) + self.ramp[None, :, None] * torch.arange(8, device=x.device)
        return self.head(x.mean(1))


def convnext() -> nn.Module:
    import timm

    return timm.create_model("convnext_atto", pretrained=False, num_classes=5, depths=(1, 1, 2, 1), dims=(4, 8, 12, 16))


NETS = {
    "resnet": (resnet, (3, 12, 10)),
    "batch norm": (partial(resnet, nn.BatchNorm2d), (3, 12, 10)),
    "unet": (UNet, (2, 8, 12)),
    "unet 3d": (partial(UNet, 3), (2, 8, 4, 4)),
    "vit": (Tiny, (3, 16, 16)),
    "convnext": (convnext, (3, 32, 32)),
}


def net(name: str) -> nn.Module:
    torch.manual_seed(1)
    return NETS[name][0]().double()


def batch(name: str, step: int, rows: int) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(step)
    image = torch.randn(rows, *NETS[name][1], generator=draw, dtype=torch.float64)
    with torch.no_grad():
        outputs = net(name).eval()(image).shape
    return image, torch.randn(outputs, generator=draw, dtype=torch.float64)


def loss_of(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).square().sum()


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.002, momentum=0.9, weight_decay=0.01)


def compare_with_one_device(mesh, name: str, rows: int = 4) -> list[str]:
    """Three steps on both; what this rank has of the model must be the single device's, and all of it must be somewhere."""
    alone, model = net(name), net(name)
    mine = parts_of(even_cut(rows, mesh.copies))[mesh.copy]
    part = slice(mine.start, mine.stop)
    model = parallelize(model, mesh, sample=batch(name, 0, rows)[0][part].to("meta"))
    one, many = optimizer_of(alone), optimizer_of(model)
    scale = mesh.copies / rows
    for step in range(3):
        x, y = batch(name, step, rows)
        one.zero_grad()
        whole = loss_of(alone(x), y)
        (whole / rows).backward()
        one.step()
        many.zero_grad()
        own = backward_of(model, x[part], y[part], loss_of=loss_of, scaled=lambda loss: loss * scale)
        close(mesh.sum_(own.clone()) / mesh.plan.stage, whole.detach())
        many.step()
    names = same_where_here(model, alone)
    alone.eval(), model.eval()
    with torch.no_grad():
        close(model(x), alone(x))
    assert list(model.state_dict()) == list(alone.state_dict())
    assert set().union(*mesh.gather_objects(names)) == set(alone.state_dict()), "a weight is nowhere"
    return reasons(model)


def same_where_here(model: nn.Module, alone: nn.Module) -> set[str]:
    """Compare what this rank has; the names of that."""
    here = {name: tensor for name, tensor in model.state_dict().items() if not tensor.is_meta}
    close(here, {name: tensor for name, tensor in alone.state_dict().items() if name in here})
    gradients = {name: p.grad for name, p in model.named_parameters() if name in here}
    close(gradients, {name: p.grad for name, p in alone.named_parameters() if name in here})
    assert all(p.grad is None for p in model.parameters() if p.is_meta)
    return set(here)


def plan_of(stage: int, schedule: str = "1f1b", micro: int | None = None, replicate: int = 1, **options) -> Plan:
    return Plan(stage=stage, replicate=replicate, pipeline={"schedule": schedule, "micro_batches": micro, **options})


@pytest.mark.parametrize("micro", few([2, 3, 4], 3))
@pytest.mark.parametrize("name", ["resnet", "unet"])
def test_three_steps_in_micro_batches_equal_one_device(name, micro):
    on_ranks(2, compare_with_one_device, name, plan=plan_of(2, micro=micro))


@on_gpu_too
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "interleaved", "zero_bubble"])
@pytest.mark.parametrize("name", few(["resnet", "unet", "vit"], "unet"))
def test_every_schedule_gives_the_same_numbers(name, schedule):
    on_ranks(2, compare_with_one_device, name, plan=plan_of(2, schedule, 4))


class _Nested(nn.Module):
    """Gives its features and its answer, as detectors and supervised decoders do."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = resnet()

    def forward(self, x: Tensor) -> dict[str, list[Tensor] | Tensor]:
        features = [x := layer(x) for layer in self.layers]
        return {"features": [features[3], features[6]], "answer": x}


def _nested_steps(mesh) -> None:
    torch.manual_seed(1)
    alone = _Nested().double()
    model = parallelize(copy.deepcopy(alone), mesh, sample=batch("resnet", 0, 4)[0].to("meta"))
    x, y = batch("resnet", 0, 4)

    def loss_of_all(output, target: Tensor) -> Tensor:
        return loss_of(output["answer"], target) + sum(f.square().sum() for f in output["features"])

    loss_of_all(alone(x), y).backward()
    backward_of(model, x, y, loss_of=loss_of_all)
    same_where_here(model, alone)


@on_gpu_too
@pytest.mark.parametrize("schedule", ["1f1b", "zero_bubble"])
def test_a_model_may_return_any_nest_of_tensors(schedule):
    on_ranks(2, _nested_steps, plan=plan_of(2, schedule, 2))


@on_gpu_too
@pytest.mark.parametrize("name", few(["unet 3d", "vit", "convnext", "batch norm"], "vit", "batch norm"))
def test_the_library_chooses_micro_batches_and_stays_exact(name):
    why = "\n".join(on_ranks(2, compare_with_one_device, name, plan=plan_of(2))[0])
    assert f"pipeline.micro_batches={1 if name == 'batch norm' else 4}:" in why, why


@on_gpu_too
@pytest.mark.parametrize(
    ("stage", "schedule", "micro", "name"),
    few([(3, "1f1b", 3, "unet"), (3, "zero_bubble", 3, "unet"), (3, "gpipe", 2, "vit"), (4, "1f1b", None, "batch norm"),
         (4, "interleaved", 4, "resnet"), (4, "zero_bubble", 8, "resnet")],
        (3, "zero_bubble", 3, "unet"), (4, "interleaved", 4, "resnet")),
)  # fmt: skip
def test_more_stages_equal_one_device(stage, schedule, micro, name):
    on_ranks(stage, compare_with_one_device, name, plan=plan_of(stage, schedule, micro))


@LONG_ON_CPU
@on_gpu_too
@pytest.mark.parametrize(
    ("name", "rows", "schedule"),
    few(
        [("resnet", 5, "1f1b"), ("batch norm", 5, "1f1b"), ("unet", 4, "zero_bubble"), ("vit", 3, "interleaved")],
        ("batch norm", 5, "1f1b"),
    ),
)
def test_copies_of_a_pipeline_average_their_gradients(name, rows, schedule):
    micro = None if name == "batch norm" else 2
    on_ranks(4, compare_with_one_device, name, rows, plan=plan_of(2, schedule, micro, replicate=2))


# ---------------------------------------------------------------------------------------------- passes of a step


def times(factor: float, output: Tensor, target: Tensor) -> Tensor:
    return loss_of(output, target) * factor


def accumulates(mesh):
    """Two passes of a step, the second one of a copy that has no sample left; then the norm that clipping asks for."""
    alone, model = net("batch norm"), net("batch norm")
    x, y = batch("batch norm", 0, 6)
    model = parallelize(model, mesh, sample=x[:2])
    share = [(slice(0, 2), slice(2, 4)), (slice(4, 6), None)][mesh.copy]
    for number, part in enumerate(share):
        context = without_sync(model) if number == 0 else nullcontext()
        with context, inactive(model) if part is None else nullcontext():
            rows = slice(0, 2) if part is None else part
            real = 0.0 if part is None else 1.0
            own = partial(times, real)
            backward_of(model, x[rows], y[rows], loss_of=own, scaled=lambda loss: loss * 2 / 6)
    for rows in (torch.tensor([0, 1, 4, 5]), torch.tensor([2, 3])):
        (loss_of(alone(x[rows]), y[rows]) / 6).backward()
    same_where_here(model, alone)
    named = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    close(total_norm(model, mesh, named), nn.utils.get_total_norm([p.grad for p in alone.parameters()]))


@LONG_ON_CPU
@on_gpu_too
def test_passes_add_up_and_a_copy_without_samples_adds_nothing():
    on_ranks(4, accumulates, plan=plan_of(2, replicate=2))


class Placed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.place = nn.Parameter(torch.randn(17, 8))

    def forward(self, tokens: Tensor) -> Tensor:
        return tokens + self.place.unsqueeze(0)


class Joined(nn.Module):
    """A token of its own before those of the image, and a weight that is turned, before the second stage begins."""

    def __init__(self) -> None:
        super().__init__()
        self.patch, self.token, self.turned = nn.Conv2d(3, 8, 4, 4), nn.Parameter(torch.randn(1, 1, 8)), nn.Linear(8, 8)
        self.placed = Placed()
        self.block = nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        tokens, turned = self.patch(x).flatten(2).transpose(1, 2), self.turned.weight.t()
        return self.block(self.placed(torch.cat([self.token.expand(len(x), -1, -1), tokens], 1))) @ turned


def accumulates_where_a_weight_is_sent(mesh):
    """Gradients that stay in place, as zero_grad(set_to_none=False) leaves them, and are added to by several passes."""
    torch.manual_seed(1)
    alone = Joined().double()
    model = parallelize(copy.deepcopy(alone), mesh, sample=torch.empty(2, 3, 16, 16, dtype=torch.float64, device="meta"))
    assert re.search(r"cut before placed.*, as pipeline.stages says", reasons(model)[0]), reasons(model)[0]
    draw, sent = torch.Generator().manual_seed(3), []
    for _ in range(2):
        for module in (alone, model):
            module.zero_grad(set_to_none=False)
        for _ in range(2):
            x, y = (torch.randn(shape, generator=draw, dtype=torch.float64) for shape in [(2, 3, 16, 16), (2, 17, 8)])
            with mock.patch.object(dist.P2POp, "__init__", partialmethod(_told_what_is_sent, dist.P2POp.__init__, sent)):
                backward_of(model, x, y, loss_of=loss_of)
            loss_of(alone(x), y).backward()
        same_where_here(model, alone)
    memory = {tensor.untyped_storage().data_ptr() for tensor in sent}
    assert memory, "nothing was sent"
    learned = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    written = [name for name, gradient in learned.items() if gradient.untyped_storage().data_ptr() in memory]
    assert not written, f"the next micro-batch adds to what may be under way: {written}"


def _told_what_is_sent(op, init, sent, kind, tensor, *args, **kwargs):
    sent += [tensor] * (kind is dist.isend)
    init(op, kind, tensor, *args, **kwargs)


@pytest.mark.long
def test_passes_add_up_where_a_weight_is_sent_on():
    for schedule in ("1f1b", "zero_bubble"):
        on_ranks(2, accumulates_where_a_weight_is_sent, plan=plan_of(2, schedule, 2, stages=["placed"]))


def runs_under_autocast(mesh):
    alone, model = net("resnet").float(), net("resnet").float()
    x, y = (tensor.float() for tensor in batch("resnet", 0, 4))
    autocast = partial(torch.autocast, devices.here().type, dtype=torch.bfloat16)
    model = parallelize(model, mesh, sample=x)
    loss = backward_of(model, x, y, loss_of=lambda o, t: loss_of(o.float(), t), autocast=autocast)
    whole = torch.zeros((), dtype=torch.float64)
    for part, target in zip(x.chunk(2), y.chunk(2), strict=True):
        with autocast():
            output = alone(part)
        own = loss_of(output.float(), target)
        own.backward()
        whole += own.detach()
    torch.testing.assert_close(loss, whole, rtol=1e-6, atol=0)
    for name, p in model.named_parameters():
        if not p.is_meta:
            torch.testing.assert_close(p.grad, alone.get_parameter(name).grad, rtol=1e-6, atol=1e-6)


@on_gpu_too
def test_autocast_casts_as_on_one_device():
    on_ranks(2, runs_under_autocast, plan=plan_of(2, micro=2))


def per_micro_batch(mesh):
    alone, model = net("batch norm"), net("batch norm")
    x, y = batch("batch norm", 0, 8)
    mine = x.chunk(mesh.copies)[mesh.copy], y.chunk(mesh.copies)[mesh.copy]
    model = parallelize(model, mesh, sample=mine[0])
    backward_of(model, *mine, loss_of=loss_of, scaled=lambda loss: loss * mesh.copies / 8)
    for number in range(2):  # a micro-batch has its part of every copy's share
        rows = torch.cat([torch.arange(8).chunk(mesh.copies)[copy].chunk(2)[number] for copy in range(mesh.copies)])
        (loss_of(alone(x[rows]), y[rows]) / 8).backward()
    same_where_here(model, alone)


@LONG_ON_CPU
@on_gpu_too
@pytest.mark.parametrize("copies", [1, 2])
def test_statistics_per_micro_batch_are_those_of_the_micro_batch_over_copies(copies):
    plan = Plan(stage=2, replicate=copies, batch_norm="per_micro_batch", pipeline={"micro_batches": 2})
    on_ranks(2 * copies, per_micro_batch, plan=plan)


class Noisy(nn.Module):
    """Every layer leaves out values by chance, all of one shape."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(64, 64) for _ in range(4)])

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = F.dropout(x + 0 * layer(x), 0.5)
        return x


def draws(mesh):
    torch.manual_seed(3)
    x = torch.ones(2, 64)
    model = parallelize(Noisy(), mesh, sample=x)
    outputs = []
    for _ in range(2):
        backward_of(model, x, x, loss_of=lambda o, t: outputs.append(o.detach()) or (o - t).square().sum())
    return torch.get_rng_state(), outputs


def test_stages_draw_apart_and_ranks_stand_alike_afterwards():
    (state, _), (other, outputs) = on_ranks(2, draws, plan=Plan(stage=2, independent=True, pipeline={"micro_batches": 1}))
    assert torch.equal(state, other)
    assert not torch.equal(outputs[0], outputs[1]), "every pass draws anew"
    kept = (outputs[0] != 0).double().mean().item()  # 1/16 of 128 survive four layers; 1/4 where stages drew the same twice
    assert kept < 0.15, kept


# ---------------------------------------------------------------------------------------------- who holds what


def memory_of(mesh):
    model = net("resnet")
    whole = sum(tensor.nbytes for tensor in named_tensors(model).values())
    model = parallelize(model, mesh, sample=batch("resnet", 0, 2)[0])
    return stage_state.bytes_of(named_tensors(model)) / whole, reasons(model)


def test_stages_balanced_by_memory_hold_their_share_of_the_weights():
    shares, why = zip(*on_ranks(2, memory_of, plan=plan_of(2, micro=2, balance="memory")), strict=True)
    assert max(shares) <= 0.6 and sum(shares) == pytest.approx(1), (shares, why)


def keeps_its_checkpoint(mesh):
    """What ranks hold together is the model; a plain model takes it, and so does one in other stages."""
    model = parallelize(net("batch norm"), mesh, sample=batch("batch norm", 0, 2)[0])
    optimizer = optimizer_of(model)
    x, y = batch("batch norm", 0, 4)
    backward_of(model, x, y, loss_of=loss_of)
    optimizer.step()
    state = {"model": dict(model.state_dict()), "optimizer": optimizer_state(model, optimizer)}
    before = sequence_number(mesh.group)
    found = gather_full_on_main(model, mesh, state)
    begun = mesh.gather_objects(sequence_number(mesh.group) - before)
    assert begun == [begun[0]] * mesh.size, "a watch for missing ranks counts collectives"
    if mesh.rank:
        return None
    alone = net("batch norm")
    alone.load_state_dict(found["model"])
    return found["model"], {name: values["momentum_buffer"] for name, values in found["optimizer"]["parameters"].items()}


def resumes(mesh, wholes):
    """Load wholes into a model in stages."""
    model = parallelize(net("batch norm"), mesh, sample=batch("batch norm", 0, 2)[0])
    assert shapes(model) == {name: list(value.shape) for name, value in wholes.items()}
    model.load_state_dict(parts(model, wholes))
    for name, value in model.state_dict().items():
        assert value.is_meta or torch.equal(value, wholes[name])
    model.eval()
    with torch.no_grad():
        return model(batch("batch norm", 1, 3)[0])


@pytest.mark.long
def test_checkpoints_hold_wholes_and_resume_in_other_stages():
    weights, momenta = on_ranks(2, keeps_its_checkpoint, plan=plan_of(2))[0]
    alone = net("batch norm")
    optimizer = optimizer_of(alone)
    x, y = batch("batch norm", 0, 4)
    loss_of(alone(x), y).backward()
    optimizer.step()
    close(weights, dict(alone.state_dict()))
    close(momenta, {name: optimizer.state[p]["momentum_buffer"] for name, p in alone.named_parameters()})
    with torch.no_grad():
        expected = alone.eval()(batch("batch norm", 1, 3)[0])
    for output in on_ranks(3, resumes, weights, plan=plan_of(3)):
        close(output, expected)


def order_of(mesh, schedule, micro):
    """What a rank does in a pass: forwards and backwards in the order in which they run."""
    model = parallelize(net("resnet"), mesh, sample=batch("resnet", 0, micro)[0])
    x, y = batch("resnet", 0, micro)
    backward_of(model, x, y, loss_of=loss_of)
    (stage,) = override_of(model).known.values()[0].stages
    module = stage.submod
    forward, done = module.forward, []

    def run(*given):
        out = forward(*given)
        number = sum(what[0] == "F" for what in done)
        done.append(f"F{number}")
        (out[0] if isinstance(out, tuple) else out).register_hook(lambda _: done.append(f"B{number}"))
        return out

    module.forward = run
    backward_of(model, x, y, loss_of=loss_of)
    return done


KEPT = [("gpipe", 4, [4, 4, 4]), ("1f1b", 6, [3, 2, 1]), ("1f1b", 2, [2, 2, 2]), ("1f1b", 6, [2, 1])]


@pytest.mark.parametrize(("schedule", "micro", "most"), KEPT)
def test_ranks_work_as_the_grid_says_and_1f1b_keeps_few_micro_batches(schedule, micro, most):
    stages = len(most)
    ours = [[f"{action.kind}{action.micro_batch}" for action in actions] for actions in orders(schedule, stages, micro)]
    assert on_ranks(stages, order_of, schedule, micro, plan=plan_of(stages, schedule, micro)) == ours
    kept = [list(accumulate(1 if what[0] == "F" else -1 for what in rank)) for rank in ours]
    assert [max(counts) for counts in kept] == most


# ---------------------------------------------------------------------------------------------- where it is cut


def reasons_of(mesh, name):
    model = parallelize(net(name), mesh, sample=batch(name, 0, 4)[0])
    return reasons(model), [key for key, tensor in named_tensors(model).items() if not tensor.is_meta]


def test_stages_begin_where_they_are_named():
    (why, first), (_, second) = on_ranks(2, reasons_of, "resnet", plan=plan_of(2, stages=["6"]))
    assert "cut before 6.one, as pipeline.stages says" in why[0]
    assert {name.split(".")[0] for name in first} == {"0", "1", "3", "4", "5"}
    assert {name.split(".")[0] for name in second} == {"6", "9"}


def test_reasons_say_what_a_stage_costs_and_how_long_it_waits():
    why = "\n".join(on_ranks(2, reasons_of, "batch norm", plan=plan_of(2))[0][0])
    assert "1 micro-batch on 2 ranks leaves 50% of the time idle" in why
    assert "batch_norm=per_micro_batch" in why


def whole_batches(mesh, name):
    return fallbacks(parallelize(net(name), mesh, sample=batch(name, 0, 4)[0]))


def test_layers_that_keep_a_batch_in_one_are_named_with_its_bytes():
    found = on_ranks(2, whole_batches, "batch norm", plan=plan_of(2))[0]
    norms = [name for name, layer in net("batch norm").named_modules() if isinstance(layer, nn.BatchNorm2d)]
    assert [one.module for one in found] == norms and {one.kind for one in found} == {"whole batch"}
    image = batch("batch norm", 0, 4)[0]
    pixels = 4 * image.shape[2] * image.shape[3]  # of four images, of four channels, and their means and variances
    assert found[0].bytes == (4 * pixels + 2 * 4) * image.element_size()
    assert on_ranks(2, whole_batches, "resnet", plan=plan_of(2))[0] == []


class TwoLayers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(4, 4), nn.Linear(4, 4)


class Tied(TwoLayers):
    """The last layer has the first one's weights."""

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(self.two(self.one(x)), self.one.weight)


def refused(mesh, build, shape):
    with pytest.raises((ValueError, NotImplementedError)) as caught:
        parallelize(build().double(), mesh, sample=torch.zeros(shape, dtype=torch.float64))
    return str(caught.value)


REFUSALS = [
    (partial(resnet, nn.BatchNorm2d), plan_of(2, micro=2), "pipeline.micro_batches=2 cannot give .*per_micro_batch"),
    (resnet, plan_of(2, stages=["layer6"]), "pipeline.stages has 'layer6', and no module"),
    (resnet, plan_of(2, stages=["0"]), "with which the model begins"),
    (resnet, plan_of(2, stages=["4", "6"]), "names 2 modules and 2 stages have 1 beginning"),
]


@pytest.mark.parametrize(("build", "plan", "words"), REFUSALS)
def test_what_cannot_be_is_refused_in_words(build, plan, words):
    for text in on_ranks(2, refused, build, (4, 3, 12, 10), plan=plan):
        assert re.search(words, text), text


@pytest.mark.parametrize(("plan", "words"), [
    (plan_of(2, "interleaved", 5), "works in rounds of 2 micro-batches.* set 4 or 6 micro-batches"),
    (Plan(stage=2, compression="bf16"), "gradient.compression=bf16 is for whole copies"),
])  # fmt: skip
def test_a_plan_that_cannot_be_is_refused_before_ranks_meet(plan, words):
    with pytest.raises(ValueError, match=words):
        check(plan, ranks=2)


def test_layers_that_share_weights_are_not_taken_apart():
    for text in on_ranks(2, refused, Tied, (4, 4), plan=plan_of(2)):
        assert "0 places where a stage can begin" in text
    for text in on_ranks(2, refused, Tied, (4, 4), plan=plan_of(2, stages=["two"])):
        assert "one.weight is read before and in it" in text


class Centred(TwoLayers):
    """What learns sees how far a sample is from the others."""

    def forward(self, x: Tensor) -> Tensor:
        seen = self.one(x)
        return self.two(seen - seen.mean(0))


class Numbered(TwoLayers):
    """Weighs samples by their number in the batch, or sets features above it to zero."""

    def __init__(self, is_weighed: bool) -> None:
        super().__init__()
        self.is_weighed = is_weighed

    def forward(self, x: Tensor) -> Tensor:
        seen = self.one(x)
        return self.two(seen * torch.arange(len(x)).add(1)[:, None] if self.is_weighed else seen.tril())


def test_copies_in_stages_refuse_samples_told_apart_by_their_number():
    for is_weighed, name in ((True, "aten.mul.Tensor"), (False, "aten.tril")):
        for text in on_ranks(4, refused, partial(Numbered, is_weighed), (3, 4), plan=Plan(replicate=2, stage=2)):
            assert f"Numbered mixes the samples of a batch ({name}), and 2 copies of it" in text


class NormedWeight(TwoLayers):
    """Scales features by a weight that a BatchNorm has normalized, as no sample is."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.norm = nn.Parameter(torch.randn(3, 4)), nn.BatchNorm1d(4)

    def forward(self, x: Tensor) -> Tensor:
        return self.two(self.one(x) * self.norm(self.weight).square().mean())


def test_copies_in_stages_refuse_a_batch_norm_of_what_every_copy_would_count():
    for text in on_ranks(4, refused, NormedWeight, (3, 4), plan=Plan(replicate=2, stage=2)):
        assert "NormedWeight mixes the samples of a batch (batch_norm of what holds no samples, which every copy" in text


class Counts(TwoLayers):
    """Features depend on how many samples there are: by a number, or by a choice."""

    def __init__(self, chooses: bool) -> None:
        super().__init__()
        self.chooses = chooses

    def forward(self, x: Tensor) -> Tensor:
        seen = self.one(x)
        return self.two(seen.neg() if self.chooses and len(x) > 3 else seen if self.chooses else seen / len(x))


def counts(mesh, chooses):
    torch.manual_seed(0)
    alone, model = Counts(chooses).double(), Counts(chooses).double()
    model.load_state_dict(alone.state_dict())
    x = torch.randn(4, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    parallelize(model, mesh, sample=x)
    with torch.no_grad():
        model.eval()
        torch.testing.assert_close(model(x), alone(x))
    model.train()
    backward_of(model, x, torch.zeros(4, 4).double(), loss_of=partial(times, 1.0))
    times(1.0, alone(x), torch.zeros(4, 4).double()).backward()
    theirs = dict(alone.named_parameters())
    for name, parameter in model.named_parameters():
        if not parameter.is_meta:
            torch.testing.assert_close(parameter.grad, theirs[name].grad)


@pytest.mark.parametrize("chooses", [False, True], ids=["a number", "a choice"])
def test_models_that_count_their_samples_get_whole_batches(chooses):
    on_ranks(2, counts, chooses, plan=Plan(stage=2))
    for text in on_ranks(2, refused, partial(Counts, chooses), (4, 4), plan=plan_of(2, micro=4)):
        assert "pipeline.micro_batches=4 cannot give what 1 layers or operations make of the whole batch" in text, text
    for text in on_ranks(4, refused, partial(Counts, chooses), (2, 4), plan=Plan(replicate=2, stage=2)):
        assert "Counts computes with the number of samples in a batch" in text, text


def test_copies_in_stages_refuse_samples_that_meet_however_few_each_has():
    plan = Plan(replicate=2, stage=2)
    for samples in (1, 3):
        for text in on_ranks(4, refused, Centred, (samples, 4), plan=plan):
            assert "Centred mixes the samples of a batch (aten.mean.dim), and 2 copies of it in mesh.stage=2 stages" in text
            assert "set mesh.independent=true" in text


ADDED_UP = {
    "groups of channels": (lambda x: F.group_norm(x, 1), []),
    "channels that are samples": (lambda x: F.group_norm(x.transpose(0, 1), 1), ["aten.native_group_norm"]),
    "pixels that are samples": (lambda x: F.group_norm(x.transpose(0, 2), 1), ["aten.native_group_norm"]),
    "a norm of pixels": (lambda x: F.layer_norm(x.transpose(0, 1), (3, 5)), []),
    "a norm of samples": (lambda x: F.layer_norm(x.transpose(0, 2), (2, 4, 5)), ["aten.native_layer_norm"]),
    "rows of a product": (lambda x: x.flatten(1) @ torch.ones(30, 2), []),
    "columns of a product": (lambda x: torch.ones(2, 30) @ x.flatten(1).t(), []),
    "a product over samples": (lambda x: torch.ones(2, 4) @ x.flatten(1), ["aten.mm"]),
    "a product of samples": (lambda x: x.flatten(1) @ x.flatten(1).t(), ["aten.mm"]),
    "a layer over samples": (lambda x: F.linear(x.permute(1, 2, 3, 0), torch.ones(2, 4)), ["linear"]),
    "a sum of products": (lambda x: torch.addmm(x.flatten(1)[:, :2], x.flatten(1), torch.ones(30, 2)), []),
    "products of pixels": (lambda x: x[:, 0] @ torch.ones(4, 5, 2), []),
    "products over samples": (lambda x: torch.ones(3, 2, 4) @ x[:, 0].transpose(0, 1), ["aten.bmm"]),
}


@pytest.mark.parametrize("adds, mixing", ADDED_UP.values(), ids=ADDED_UP)
def test_norms_and_products_mix_the_samples_that_they_add_up_over(adds, mixing):
    model = nn.Identity()
    graph = trace(model, adds, (torch.empty(4, 2, 3, 5),), {})
    assert where_samples_meet(graph) == mixing


class FirstAlone(TwoLayers):
    """The first sample of a batch goes another way."""

    def forward(self, x: Tensor) -> Tensor:
        seen = self.one(x)
        return self.two(torch.cat([seen[:1].relu(), seen[1:]]))


def test_micro_batches_refuse_a_model_that_picks_samples():
    for text in on_ranks(2, refused, FirstAlone, (4, 4), plan=plan_of(2, micro=2)):
        assert "micro_batches=2 cannot give what" in text and "aten.slice.Tensor" in text


def changes_mode(mesh):
    """A model without a batch norm that learns, until somebody lets it."""
    model = net("batch norm")
    for layer in model.modules():
        layer.train(not isinstance(layer, nn.BatchNorm2d))
    x, y = batch("batch norm", 0, 4)
    model = parallelize(model, mesh, sample=x)
    backward_of(model, x, y, loss_of=loss_of)
    model.train()
    with pytest.raises(
        NotImplementedError, match="micro_batches=2 cannot give what 9 layers or operations make of the whole batch"
    ):
        backward_of(model, x, y, loss_of=loss_of)
    with pytest.raises(NotImplementedError, match="backward_of"):
        model(x)


@pytest.mark.long
def test_a_batch_norm_that_is_let_to_learn_is_refused_when_it_does():
    on_ranks(2, changes_mode, plan=plan_of(2, micro=2))


@pytest.mark.parametrize(
    ("options", "words"),
    [({"shard": 2}, "sharding.zero=3 would both"),
     ({"stream": {"tiles": [2]}}, "stream=null"),
     ({"recompute": {}}, "recompute=null"), ({"compression": "fp16"}, "compression=fp16"),
     ({"batch_norm": "averaged"}, "batch_norm=averaged"), ({"data_strategy": "data_parallel"}, "data_strategy=data"),
     ({"pipeline": {"schedule": "zero_bubble", "micro_batches": 5}}, "rounds of 2")],
)  # fmt: skip
def test_plans_that_cannot_be_have_words_for_it(options, words):
    (text,) = stage_problems(Plan(stage=2, **options))
    assert words in text
    assert stage_problems(Plan(stage=2)) == stage_problems(Plan(**options)) == []


# ---------------------------------------------------------------------------------------------- the order of work


def torchs_order(mesh, schedule, micro):
    plan = mesh.plan
    stages = [
        PipelineStage(nn.Identity(), stage, plan.stage * STAGES_PER_RANK[schedule], mesh.device, group=mesh.stage_group)
        for stage in range(mesh.stage, plan.stage * STAGES_PER_RANK[schedule], plan.stage)
    ]
    made = _schedule(schedule, stages, micro, loss_of)
    return [text for text in map(str, filter(None, made.pipeline_order[mesh.stage])) if re.fullmatch(r"\d+[FBIW]\d+", text)]


@pytest.mark.parametrize("turn", [1, -1])
def test_weights_that_meet_at_the_same_places_are_one_group_and_the_last_node_comes_first(turn):
    """Whichever group torch gives first: it goes by addresses, which are each rank's own."""
    v, w, x, y, z = ((torch.ones(1, requires_grad=True) + 1).grad_fn for _ in range(5))
    groups = [
        {"params": {"a"}, "intermediates": [x, y], "grads": [1, 2]},
        {"params": {"b"}, "intermediates": [z], "grads": [3]},
        {"params": {"c"}, "intermediates": [y, w], "grads": [2, 4]},
        {"params": {"c", "d"}, "intermediates": [v], "grads": [5]},
    ]
    found = [(group["params"], group["intermediates"], group["grads"]) for group in merge_groups(groups[::turn])]
    assert found == [({"b"}, [z], [3]), ({"a", "c", "d"}, [y, x, w, v], [2, 1, 4, 5])]


@pytest.mark.parametrize("micro", [3, 4, 6])
@pytest.mark.parametrize("schedule", ["interleaved", "zero_bubble"])
def test_the_grid_is_what_torch_runs(schedule, micro):
    ours = [[f"{a.stage}{a.kind}{a.micro_batch}" for a in actions] for actions in orders(schedule, 3, micro)]
    assert on_ranks(3, torchs_order, schedule, micro, plan=plan_of(3, schedule, micro)) == ours


@pytest.mark.parametrize(("ranks", "micro"), [(2, 1), (2, 4), (4, 4), (4, 16), (3, 2)])
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_the_bubble_is_what_the_papers_say(schedule, ranks, micro):
    grid = schedule_grid(schedule, ranks, micro)
    assert idle_share(grid) == pytest.approx((ranks - 1) / (micro + ranks - 1))
    assert all(len([slot for slot in row if slot]) == 3 * micro for row in grid)


def test_a_grid_worked_out_by_hand():
    assert schedule_grid("1f1b", 2, 2) == [
        ["F0", "F1", "", "", "B0", "B0", "", "B1", "B1"],
        ["", "F0", "B0", "B0", "F1", "B1", "B1", "", ""],
    ]


def test_finer_schedules_wait_less():
    idle = [idle_share(schedule_grid(kind, 4, 8)) for kind in ("1f1b", "interleaved", "zero_bubble")]
    assert idle[1] < idle[0] and idle[2] < idle[0], idle
