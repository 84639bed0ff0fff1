"""Does the reducer say, on every rank, what it cannot average, and is it right where models are used in unusual ways?"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import devices
import pytest
import torch
from devices import on_gpu_too
from ranks import on_ranks
from torch import Tensor, nn
from torch.nn import functional as F

import widefield as wf
from widefield.parallel.parallelize import share_states
from widefield.parallel.passes import backward_of
from widefield.plans import Plan
from widefield.sharded_state import gather_full_on_main

close = devices.close  # 1e-12 on the CPU: float64, three steps of small nets


def net() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.SiLU(), nn.Conv2d(4, 2, 3)).double()


def images(seed: int = 0, samples: int = 4) -> Tensor:
    return torch.randn(samples, 3, 9, 8, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def mine(mesh: Any, x: Tensor) -> Tensor:
    """This copy's samples, this rank's tile."""
    each = len(x) // mesh.copies
    return wf.tile(x[mesh.copy * each : mesh.copy * each + each], mesh)


def said_by(mesh: Any, body: Callable[[Any], Any]) -> str:
    try:
        body(mesh)
    except (ValueError, NotImplementedError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


# ---------------------------------------------------------------------------------------------- what is refused


def other_shapes(mesh: Any) -> None:
    wf.parallelize(nn.Linear(3, 2 + mesh.rank), mesh)


def more_layers(mesh: Any) -> None:
    wf.parallelize(nn.Sequential(*(nn.Linear(2, 2) for _ in range(1 + mesh.rank))), mesh, sample=torch.empty(1, 2))


def other_buffers(mesh: Any) -> None:
    model = nn.Linear(2, 2)
    model.register_buffer("queue", torch.zeros(3 + mesh.rank, 2))
    wf.parallelize(model, mesh)


def lazy(mesh: Any) -> None:
    wf.parallelize(nn.Sequential(nn.LazyLinear(2)), mesh)


def lazy_on_one_rank(mesh: Any) -> None:
    wf.parallelize(nn.Sequential(nn.LazyLinear(2) if mesh.rank else nn.Linear(2, 2)), mesh)


def frozen_apart(mesh: Any) -> None:
    model = wf.parallelize(net(), mesh)
    model[0].requires_grad_(mesh.rank == 0)
    model(mine(mesh, images())).sum().backward()


def frozen_apart_later(mesh: Any) -> None:
    model = wf.parallelize(net(), mesh)
    for step in range(2):
        model[0].requires_grad_(step == 0 or mesh.rank == 0)
        model(mine(mesh, images())).sum().backward()


def frozen_apart_as_before(mesh: Any) -> None:
    """Ranks have laid out both ways by then."""
    model = wf.parallelize(net(), mesh)
    for step in range(3):
        model[0].requires_grad_((step + mesh.rank * (step == 2)) % 2 == 0)
        model(mine(mesh, images())).sum().backward()


def a_step_without_a_backward(mesh: Any) -> None:
    model = wf.parallelize(net(), mesh)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for step in range(4 + mesh.rank):
        if (step, mesh.rank) != (1, 1):
            model(mine(mesh, images()).detach()).sum().backward()
        optimizer.step()


class Picks(nn.Module):
    """Takes another BatchNorm on each rank, whose messages are of one size."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.rank, self.norms = rank, nn.ModuleList([nn.BatchNorm2d(3), nn.BatchNorm2d(3)])

    def forward(self, x: Tensor) -> Tensor:
        return self.norms[self.rank](x)


def another_batch_norm(mesh: Any) -> None:
    wf.parallelize(Picks(mesh.rank).double(), mesh)(mine(mesh, images()))


class Table(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.ones(5, 3))

    def forward(self, x: Tensor) -> Tensor:
        return F.embedding(x, self.table, sparse=True)


def sparse(mesh: Any) -> None:
    wf.parallelize(nn.Sequential(nn.Embedding(5, 3, sparse=True)), mesh)


def sparse_by_a_function(mesh: Any) -> None:
    wf.parallelize(Table(), mesh)(torch.arange(4)).sum().backward()


def added(mesh: Any) -> None:
    model = wf.parallelize(net(), mesh)
    model.append(nn.Conv2d(2, 2, 1).double())
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    model(mine(mesh, images())).sum().backward()
    optimizer.step()


def replaced(mesh: Any) -> None:
    model = wf.parallelize(net(), mesh)
    model[3].weight = nn.Parameter(model[3].weight.detach() * 2)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    model(mine(mesh, images())).sum().backward()
    optimizer.step()


REFUSALS = {
    other_shapes: "ValueError: ranks have different models: ('weight', (3, 3), 'torch.float32') on rank 1 where rank 0 has",
    more_layers: "ValueError: ranks have different models: 4 parameters and buffers on rank 1 where rank 0 has 2",
    other_buffers: "ValueError: ranks have different models: ('queue', (4, 2), 'torch.float32') on rank 1 where rank 0 has",
    lazy: "NotImplementedError: '0.weight' is lazy: it has no shape yet",
    lazy_on_one_rank: "NotImplementedError: '0.weight' is lazy: it has no shape yet",
    frozen_apart: "RuntimeError: the 2 ranks that average gradients do not train the same parameters",
    frozen_apart_later: "RuntimeError: the 2 ranks that average gradients do not train the same parameters",
    frozen_apart_as_before: "RuntimeError: the 2 ranks that average gradients do not train the same parameters",
    a_step_without_a_backward: "RuntimeError: the 2 ranks that average gradients have made unequally many optimizer steps",
    another_batch_norm: "RuntimeError: the 2 ranks that share statistics are at different BatchNorms, this one at number",
    sparse: "NotImplementedError: the layer '0' has sparse gradients, which are not averaged over ranks",
    sparse_by_a_function: "NotImplementedError: the gradient of 'table' is torch.sparse_coo, which is not averaged over ranks",
    added: "RuntimeError: the parameter '4.weight' came after the model was parallelized, so its gradient is not averaged",
    replaced: "RuntimeError: the parameter '3.weight' came after the model was parallelized, so its gradient is not averaged",
}


@pytest.mark.parametrize("body", REFUSALS, ids=lambda body: body.__name__)
def test_what_cannot_be_averaged_is_refused_on_every_rank(body):
    plan = Plan(space=[2, 1]) if body is sparse_by_a_function else None
    said = on_ranks(2, said_by, body, plan=plan, timeout_seconds=30)
    assert [text.startswith(REFUSALS[body]) for text in said] == [True, True], said


# ---------------------------------------------------------------------------------------------- what is right


def gradients_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.grad.detach().clone() for name, p in model.named_parameters() if p.grad is not None}


def difference(mesh: Any, model: nn.Module, found: dict[str, Tensor], expected: dict[str, Tensor]) -> list[str]:
    found = gather_full_on_main(model, mesh, found)
    try:
        close(found if mesh.is_main else expected, expected)
    except AssertionError as error:
        return [str(error)]
    return []


def maker() -> nn.Sequential:
    torch.manual_seed(2)
    return nn.Sequential(
        nn.Conv2d(3, 4, 3, padding=1, bias=False), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 3, 3, padding=1)
    ).double()


def judge() -> nn.Sequential:
    torch.manual_seed(3)
    pool = nn.AdaptiveAvgPool2d(1)
    return nn.Sequential(nn.Conv2d(3, 4, 3, 2), nn.LeakyReLU(0.2), nn.Conv2d(4, 1, 1), pool, nn.Flatten()).double()


def adversarial_step(mesh: Any, nets: list[nn.Module], optimizers: list, step: int, share: Callable[[Tensor], Tensor]) -> None:
    """As GANs are trained: the judge on real and made images, then the maker through the judge."""
    (made_by, judged_by), (makers, judges) = nets, optimizers
    real, noise = share(images(step)), share(images(100 + step))
    fake = made_by(noise)
    judges.zero_grad()
    (F.softplus(-judged_by(real)).mean() + F.softplus(judged_by(fake.detach())).mean()).backward()
    judges.step()
    makers.zero_grad()
    F.softplus(-judged_by(fake)).mean().backward()  # which adds to the judge's gradients, too
    makers.step()


def trained_against_each_other(mesh: Any) -> list[str]:
    alone, nets = [maker(), judge()], [maker(), judge()]
    for model in nets:
        wf.parallelize(model, mesh)
    optimizers = [[share_states(torch.optim.Adam(net.parameters(), 1e-3), mesh) for net in pair] for pair in (nets, alone)]
    optimizers[1] = [torch.optim.Adam(net.parameters(), 1e-3) for net in alone]
    wrong = []
    for step in range(3):
        adversarial_step(mesh, nets, optimizers[0], step, partial(mine, mesh))
        adversarial_step(mesh, alone, optimizers[1], step, lambda x: x)
    for model, expected in zip(nets, alone, strict=True):
        wrong += difference(mesh, model, dict(model.state_dict()), dict(expected.state_dict()))
    return wrong


def sharded(zero: int, **axes: Any) -> Plan:
    return Plan(shard=2, sharding={"zero": zero}, **axes)


def laid_out_otherwise(mesh: Any) -> list[str]:
    """As where the first rank alone loads weights with assign=True, which lay with channels last when they were saved."""
    alone, model = net(), net()
    if mesh.is_main:
        model.load_state_dict(net().to(memory_format=torch.channels_last).state_dict(), assign=True)
    assert model[0].weight.is_contiguous() != mesh.is_main
    wf.parallelize(model, mesh)
    model(mine(mesh, images())).square().mean().backward()
    alone(images()).square().mean().backward()
    assert model[0].weight.is_contiguous(memory_format=torch.channels_last)
    return difference(mesh, model, gradients_of(model), gradients_of(alone))


@on_gpu_too
@pytest.mark.parametrize("plan", [Plan(replicate=2), Plan(shard=2, sharding={"zero": 1})], ids=str)
def test_weights_that_lie_otherwise_on_one_rank(plan):
    assert on_ranks(2, laid_out_otherwise, plan=plan) == [[], []]


@on_gpu_too
@pytest.mark.parametrize(
    "plan", [Plan(replicate=2), Plan(space=[2, 1]), sharded(1), sharded(3), Plan(replicate=2, space=[2, 1])], ids=str
)
def test_two_models_on_one_mesh_train_each_other(plan):
    wrong = on_ranks(plan.ranks, trained_against_each_other, plan=plan)[0]
    assert not wrong, "\n".join(wrong)


def laid_out_twice(mesh: Any) -> str | list[str]:
    alone, model = net(), net()
    sample = (
        mine(mesh, images()).to("meta") if not mesh.plan.space else torch.empty(4, 3, 9, 8, dtype=torch.float64, device="meta")
    )
    wf.parallelize(model, mesh, sample=sample)
    try:
        wf.parallelize(model, mesh, sample=sample)
    except (ValueError, NotImplementedError) as error:
        return str(error)
    wrong = []
    for step in range(2):
        alone.zero_grad(), model.zero_grad()
        alone(images(step)).square().mean().backward(), model(mine(mesh, images(step))).square().mean().backward()
        wrong += difference(mesh, model, gradients_of(model), gradients_of(alone))
    return wrong


@on_gpu_too
@pytest.mark.parametrize(
    "plan", [Plan(replicate=2), Plan(space=[2, 1]), sharded(1), sharded(2), sharded(3), Plan(channel=2)], ids=str
)
def test_a_model_laid_out_twice_is_right_or_refused(plan):
    said = on_ranks(2, laid_out_twice, plan=plan)[0]
    if isinstance(said, str):
        assert "is parallelized already" in said
    else:
        assert not said, "\n".join(said)


def with_torchs_synchronized(mesh: Any) -> list[str]:
    alone, model = net(), nn.SyncBatchNorm.convert_sync_batchnorm(net())
    wf.parallelize(model, mesh, sample=images().to("meta"))
    optimizers = [torch.optim.SGD(each.parameters(), 0.1) for each in (alone, model)]
    target = torch.zeros(4, 2, 5, 4, dtype=torch.float64)
    for step in range(2):
        for optimizer in optimizers:
            optimizer.zero_grad()
        alone(images(step)).square().mean().backward()
        if mesh.plan.stage > 1:
            backward_of(model, images(step), target, loss_of=F.mse_loss)
        else:
            model(mine(mesh, images(step))).square().mean().backward()
        for optimizer in optimizers:
            optimizer.step()
    return difference(mesh, model, dict(model.state_dict()), dict(alone.state_dict()))


@on_gpu_too
@pytest.mark.parametrize(
    "plan",
    [
        Plan(replicate=2), Plan(space=[2, 1]), sharded(3), Plan(channel=2), Plan(replicate=2, space=[2, 1]),
        Plan(stage=2, pipeline={"micro_batches": 1}),
    ],
    ids=str,
)  # fmt: skip
def test_torchs_synchronized_batch_norm_is_one_devices(plan):
    wrong = on_ranks(plan.ranks, with_torchs_synchronized, plan=plan)[0]
    assert not wrong, "\n".join(wrong)


def without_parameters(mesh: Any) -> list[str]:
    """Poolings, resizes and losses are laid out as any module; their gradient reaches the image."""
    wrong = []
    for module in (nn.AvgPool2d(2), nn.Upsample(scale_factor=2, mode="bilinear"), nn.Sequential(nn.ReLU()), nn.Identity()):
        wf.parallelize(module, mesh)
        image = images().requires_grad_()
        module(image).square().mean().backward()
        share = images().requires_grad_()
        (module(mine(mesh, share)).square().mean() / mesh.copies).backward()
        gradient = share.grad if not mesh.plan.space else mesh.sum_(share.grad.clone()) / mesh.size
        rows = slice(mesh.copy * 4 // mesh.copies, (mesh.copy + 1) * 4 // mesh.copies)
        if not torch.allclose(gradient[rows], image.grad[rows], rtol=1e-12, atol=1e-12):
            wrong.append(type(module).__name__)
    torch.manual_seed(5)
    dropped = nn.Dropout()(images())[mesh.copy * 4 // mesh.copies : (mesh.copy + 1) * 4 // mesh.copies]
    torch.manual_seed(5)
    close(wf.whole(wf.parallelize(nn.Dropout(), mesh)(mine(mesh, images()))), dropped)
    loss = wf.parallelize(nn.MSELoss(), mesh)
    output, target = mine(mesh, images()), mine(mesh, images(1))
    close(mesh.sum_(loss(output, target)) / mesh.size, F.mse_loss(images(), images(1)))
    return wrong


@on_gpu_too
@pytest.mark.parametrize("plan", [Plan(replicate=2), Plan(space=[2, 1]), sharded(1), sharded(3)], ids=str)
def test_modules_without_parameters_are_laid_out_as_any(plan):
    assert on_ranks(2, without_parameters, plan=plan) == [[], []]


# ---------------------------------------------------------------------------------------------- weights in parts, stages


def hooked(mesh: Any) -> None:
    model = wf.parallelize(net(), mesh)
    model[0].weight.register_hook(lambda gradient: gradient * 2)
    model(mine(mesh, images()))


def a_layer_by_itself(mesh: Any) -> None:
    model = wf.parallelize(net(), mesh)
    model[0](mine(mesh, images()))


def drawn_in_stages(mesh: Any) -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Dropout(0.5), nn.Conv2d(4, 2, 3)).double()
    wf.parallelize(model, mesh, sample=images().to("meta"))


OF_PARTS = {
    hooked: (sharded(3), "NotImplementedError: a hook of the parameter '0.weight' would never run: weights lie in parts"),
    a_layer_by_itself: (sharded(3), "RuntimeError: Conv2d is called by itself and its weights lie in parts on 2 ranks"),
    drawn_in_stages: (
        Plan(stage=2),
        "NotImplementedError: the model draws random numbers, as dropout does, and with mesh.stage=2",
    ),
    other_shapes: (sharded(3), REFUSALS[other_shapes]),
    other_buffers: (sharded(3), REFUSALS[other_buffers]),
    more_layers: (Plan(channel=2), REFUSALS[more_layers]),
    lazy: (Plan(stage=2), REFUSALS[lazy]),
    sparse: (sharded(3), REFUSALS[sparse]),
}


@on_gpu_too
@pytest.mark.parametrize("body", OF_PARTS, ids=lambda body: body.__name__)
def test_what_cannot_be_where_ranks_hold_parts_is_refused_on_every_rank(body):
    plan, words = OF_PARTS[body]
    said = on_ranks(2, said_by, body, plan=plan, timeout_seconds=30)
    assert [text.startswith(words) for text in said] == [True, True], said
