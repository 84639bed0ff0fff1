"""Does the reducer say, on every rank, what it cannot average, and is it right where models are used in unusual ways?"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from ranks import on_ranks
from torch import Tensor, nn
from torch.nn import functional as F

import widefield as wf
from widefield.engine.holding import wholes_on_main
from widefield.engine.parallelize import share_states
from widefield.plan import Plan

close = partial(torch.testing.assert_close, rtol=1e-12, atol=1e-12)  # float64, three steps of small nets


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
    wf.parallelize(nn.Sequential(*(nn.Linear(2, 2) for _ in range(1 + mesh.rank))), mesh)


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
    sparse: "NotImplementedError: the layer '0' has sparse gradients, which are not averaged over ranks",
    sparse_by_a_function: "NotImplementedError: the gradient of 'table' is torch.sparse_coo, which is not averaged over ranks",
    added: "RuntimeError: the parameter '4.weight' came after the model was laid out, so nobody averages its gradient",
    replaced: "RuntimeError: the parameter '3.weight' came after the model was laid out, so nobody averages its gradient",
}


@pytest.mark.parametrize("body", REFUSALS, ids=lambda body: body.__name__)
def test_what_cannot_be_averaged_is_refused_on_every_rank(body):
    plan = Plan(space=[2, 1]) if body is sparse_by_a_function else None
    said = on_ranks(2, said_by, body, plan=plan, timeout_seconds=30)
    assert [text.startswith(REFUSALS[body]) for text in said] == [True, True], said
