"""Does a gradient of which each rank has a part pass for its value, whatever is done with it, and who adds the parts up?"""

from __future__ import annotations

import copy
import io
import pickle
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from ranks import on_ranks
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._pytree import tree_leaves, tree_map

import widefield as wf
from widefield.comm.halo import TRAFFIC
from widefield.plans import Plan
from widefield.tiled.partial_gradient import (
    PartialGradient,
    full_value,
    full_value_with_grad,
    manage,
    part_of_mean,
    partial_of,
    release,
)
from widefield.tiled.tensor import TiledTensor

TWO = Plan(space=[2, 1])
close = partial(torch.testing.assert_close, rtol=1e-12, atol=1e-12)  # float64, a few sums


def drawn(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def parts(seed: int = 0) -> list[Tensor]:
    """Of both ranks, which every rank knows; their mean is the value."""
    return [drawn(2 * seed + rank, 4, 3) for rank in range(2)]


def value(seed: int = 0) -> Tensor:
    return torch.stack(parts(seed)).mean(0)


def gradient(mesh: Any, seed: int = 0) -> Tensor:
    return partial_of(parts(seed)[mesh.rank], mesh.grid)


def problems(mesh: Any, check: Callable[[str, Any], str | None], names: list[str]) -> list[str]:
    """What is wrong by name; ranks go on together."""
    told = {name: check(name, mesh) for name in names}
    return [f"{name}: {text}" for name, text in told.items() if text]


def difference(found: Any, expected: Any) -> str | None:
    try:
        close(tree_map(_plain, found), expected)
    except AssertionError as error:
        return str(error)
    return None


def _plain(leaf: Any) -> Any:
    return wf.whole(leaf).detach() if isinstance(leaf, Tensor) else leaf


# ---------------------------------------------------------------------------------------------- what stays a part


P, Q, ROWS = drawn(10, 4, 3), drawn(11, 3, 5), drawn(12, 2, 4)

STAY: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "detach": lambda x, y: x.detach(), "clone": lambda x, y: x.clone(), "complex": lambda x, y: x.to(torch.complex128),
    "view": lambda x, y: x.view(2, 6), "reshape": lambda x, y: x.reshape(3, 4),
    "reshape of a view": lambda x, y: x.t().reshape(-1), "t": lambda x, y: x.t(),
    "transpose": lambda x, y: x.transpose(0, 1), "permute": lambda x, y: x.permute(1, 0),
    "movedim": lambda x, y: x.movedim(0, 1), "unsqueeze": lambda x, y: x[None, :, None].squeeze(0),
    "expand": lambda x, y: x.expand(2, 4, 3), "slice": lambda x, y: x[1:, ::2], "select": lambda x, y: x[2],
    "narrow": lambda x, y: x.narrow(1, 1, 2), "chunk": lambda x, y: x.chunk(2), "split": lambda x, y: x.split([1, 3]),
    "unbind": lambda x, y: x.unbind(1), "flip": lambda x, y: x.flip(0), "roll": lambda x, y: x.roll(1, 0),
    "diagonal": lambda x, y: x.diagonal(), "unfold": lambda x, y: x.unfold(0, 2, 1),
    "as_strided": lambda x, y: x.as_strided((2, 2), (1, 3)), "contiguous": lambda x, y: x.t().contiguous(),
    "minus": lambda x, y: -x, "sum": lambda x, y: x.sum(), "sum of a dim": lambda x, y: x.sum(0, keepdim=True),
    "mean": lambda x, y: x.mean(1), "times a number": lambda x, y: x * 2.5, "a number times": lambda x, y: 2.5 * x,
    "over a number": lambda x, y: x / 3, "times plain": lambda x, y: x * P, "plain times": lambda x, y: P * x,
    "over plain": lambda x, y: x / P, "times a row": lambda x, y: x * P[:1], "mm": lambda x, y: x @ Q,
    "plain mm": lambda x, y: ROWS @ x, "mv": lambda x, y: x @ Q[:, 0], "dot": lambda x, y: x[:, 0].dot(P[:, 0]),
    "bmm": lambda x, y: x[None].bmm(Q[None]), "plus": lambda x, y: x + y, "minus another": lambda x, y: x - y,
    "plus a multiple": lambda x, y: x.add(y, alpha=2.5), "plus plain": lambda x, y: x + P,
    "plain minus": lambda x, y: P - x, "plus a number": lambda x, y: x + 1.5, "plus a row": lambda x, y: x + P[:1],
    "cat": lambda x, y: torch.cat([x, P, y]), "stack": lambda x, y: torch.stack([x, y], 1),
    "a layer's backward": lambda x, y: torch.ops.aten.threshold_backward(x, P, 0.0),
}  # fmt: skip
"""What is affine in x and y, of shape (4, 3)."""


def stays(name: str, mesh: Any) -> str | None:
    TRAFFIC.clear()
    found = STAY[name](gradient(mesh), gradient(mesh, 1))
    sent = TRAFFIC.sum_messages
    if sent or any(type(leaf) is not PartialGradient for leaf in tree_leaves(found)):
        return f"{sent} messages for a {type(found).__name__}"
    return difference(found, STAY[name](value(), value(1)))


def test_what_is_affine_in_parts_stays_a_part_and_sends_nothing():
    assert on_ranks(2, problems, stays, sorted(STAY), plan=TWO) == [[], []]


# ---------------------------------------------------------------------------------------------- what wants the value


SETTLE: dict[str, tuple[Callable[[Tensor, Tensor], Any], int]] = {
    "abs": (lambda x, y: x.abs(), 1), "norm": (lambda x, y: x.norm(), 1), "square": (lambda x, y: x.square(), 1),
    "a product of two": (lambda x, y: x * y, 2), "a quotient": (lambda x, y: P / x, 1),
    "a quotient of two": (lambda x, y: x / y, 2), "mm of two": (lambda x, y: x @ y.t(), 2),
    "times itself": (lambda x, y: x * x, 1), "clamp": (lambda x, y: x.clamp(-0.2, 0.2), 1),
    "amax": (lambda x, y: x.amax(0), 1), "softmax": (lambda x, y: x.softmax(1), 1), "comparison": (lambda x, y: x > 0, 1),
    "where": (lambda x, y: torch.where(P > 0, x, y), 2), "item": (lambda x, y: x.sum().item(), 1),
    "a branch": (lambda x, y: 1 if x[0, 0] > 0 else 2, 1), "isfinite": (lambda x, y: x.isfinite().all(), 1),
    "svd": (lambda x, y: torch.linalg.svdvals(x), 1), "rounded": (lambda x, y: x.div(0.5, rounding_mode="floor"), 1),
    "sort": (lambda x, y: x.sort(0)[0], 1), "index": (lambda x, y: x[torch.tensor([2, 0])], 1),
    "var": (lambda x, y: x.var(), 1), "twice": (lambda x, y: x.norm() + x.abs().sum(), 1),
    "sum and value": (lambda x, y: (x + y).abs() + x, 1), "into a plain one": (lambda x, y: P.clone().copy_(x), 1),
    "plain times, in place": (lambda x, y: P.clone().mul_(x), 1),
    "plain plus, in place": (lambda x, y: P.clone().add_(x, alpha=0.5), 1),
    "by the name of a result": (lambda x, y: torch.mul(x, 2.0, out=torch.empty(4, 3, dtype=torch.float64)), 1),
    "all of them": (lambda x, y: torch._foreach_norm([x, y]), 2), "bits": (lambda x, y: x.view(torch.int64), 1),
}  # fmt: skip
"""What looks at values, and how many messages that takes: one for each tensor that is looked at."""


def settles(name: str, mesh: Any) -> str | None:
    body, expected = SETTLE[name]
    TRAFFIC.clear()
    found = body(gradient(mesh), gradient(mesh, 1))
    sent = TRAFFIC.sum_messages
    return f"{sent} messages, not {expected}" if sent != expected else difference(found, body(value(), value(1)))


def test_whatever_else_looks_at_it_gets_the_value_for_one_message():
    assert on_ranks(2, problems, settles, sorted(SETTLE), plan=TWO) == [[], []]


def settled_kinds(mesh: Any) -> list[Any]:
    """Of a value, of a number; on a grid of one rank there are no parts."""
    alone = partial_of(P, type(mesh.grid)((1, 1)))
    x = gradient(mesh)
    return [
        type(full_value(x)),
        full_value(x).tile_layout.is_cut,
        type(full_value(x.sum())),
        alone is P,
        full_value(P) is P,
        repr(x)[:32],
    ]


def test_a_value_is_tiled_without_cuts_and_a_number_plain():
    expected = [TiledTensor, False, Tensor, True, True]
    assert [kinds[:5] for kinds in on_ranks(2, settled_kinds, plan=TWO)] == [expected] * 2
    assert on_ranks(2, settled_kinds, plan=TWO)[1][5] == "PartialGradient(rank 1 of 2, par"


def of_one_row(mesh: Any) -> tuple[int, int]:
    """Bytes that are sent for a row that is repeated, and for what is written out."""
    TRAFFIC.clear()
    row = gradient(mesh)[:1].expand(4, 3)
    assert difference(row.abs(), value()[:1].expand(4, 3).abs()) is None
    repeated = TRAFFIC.sum_bytes
    row.clone(memory_format=torch.contiguous_format).abs()
    return repeated, TRAFFIC.sum_bytes - repeated


def test_of_a_value_that_repeats_one_is_sent():
    assert on_ranks(2, of_one_row, plan=TWO) == [(3 * 8, 4 * 3 * 8)] * 2


# ---------------------------------------------------------------------------------------------- writes


WRITES: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "times a number": lambda x, y: x.mul_(2), "times plain": lambda x, y: x.mul_(P), "over": lambda x, y: x.div_(3),
    "minus": lambda x, y: x.neg_(), "plus another": lambda x, y: x.add_(y),
    "minus a multiple": lambda x, y: x.sub_(y, alpha=2), "plus plain": lambda x, y: x.add_(P),
    "plus a number": lambda x, y: x.add_(1.5), "plus a row": lambda x, y: x.add_(P[:1]),
    "times another": lambda x, y: x.mul_(y), "clamp": lambda x, y: x.clamp_(-0.2, 0.2), "zero": lambda x, y: x.zero_(),
    "copy": lambda x, y: x.copy_(P), "copy of another": lambda x, y: x.copy_(y),
    "masked": lambda x, y: x.masked_fill_(P > 0, 3.0), "through a view": lambda x, y: x[1].mul_(3),
    "through a view of a view": lambda x, y: x.t()[0].copy_(y[:, 1]),
    "through the diagonal": lambda x, y: x.diagonal().zero_(), "through windows": lambda x, y: x.unfold(0, 2, 2).abs_(),
    "of itself": lambda x, y: x.mul_(x), "of its view": lambda x, y: x[0].copy_(x[1]),
    "detached": lambda x, y: x.detach().mul_(2), "of all": lambda x, y: torch._foreach_mul_([x, y], 2.0),
    "index": lambda x, y: x.index_fill_(0, torch.tensor([1]), 7.0), "addcmul": lambda x, y: x.addcmul_(P, P),
    "an entry": lambda x, y: x.__setitem__((0, 1), 5.0), "lerp": lambda x, y: x.lerp_(P, 0.3),
    "as a result": lambda x, y: torch.sub(x, P, out=x), "as a result of others": lambda x, y: torch.mul(y, P, out=x),
}  # fmt: skip


def writes(name: str, mesh: Any) -> str | None:
    """What is seen before and after a write, through the tensor and its views, each of which was looked at before."""
    x, y, right, other = gradient(mesh), gradient(mesh, 1), value(), value(1)
    seen, expected = [x, x[1], x.t(), x.detach()], [right, right[1], right.t(), right.detach()]
    wrong = difference([view.abs() for view in seen], [view.abs() for view in expected])
    for _ in range(2):
        WRITES[name](x, y), WRITES[name](right, other)
        wrong = wrong or difference([view.abs() for view in seen], [view.abs() for view in expected])
        wrong = wrong or difference(y, other)
    return wrong


@pytest.mark.long
def test_writes_are_seen_by_whoever_looks_next():
    assert on_ranks(2, problems, writes, sorted(WRITES), plan=TWO) == [[], []]


def sent_by_writes(mesh: Any) -> dict[str, int]:
    sent = {}
    for name in WRITES:
        x, y = gradient(mesh), gradient(mesh, 1)
        TRAFFIC.clear()
        WRITES[name](x, y)
        sent[name] = TRAFFIC.sum_messages
    return sent


def test_a_write_that_is_affine_sends_nothing():
    first, second = on_ranks(2, sent_by_writes, plan=TWO)
    assert first == second and {name for name, messages in first.items() if messages} == {
        "times another", "clamp", "masked", "through windows", "of itself", "as a result", "as a result of others", "lerp",
        "index", "addcmul",
    }  # fmt: skip


def on_repeated_places(mesh: Any) -> str | None:
    """An expanded gradient, which torch lets nobody write to, is one that autograd made; it gets memory of its own."""
    x, right = gradient(mesh).mul_(2)[:1].expand(4, 3), value()[:1].expand(4, 3) * 2
    x.abs()
    for _ in range(3):
        x.mul_(P), right.mul_(P)
        wrong = difference(x.abs(), right.abs())
        if wrong:
            return wrong
    return None


def test_one_value_at_many_places_gets_memory_before_it_is_written():
    assert on_ranks(2, on_repeated_places, plan=TWO) == [None, None]


# ---------------------------------------------------------------------------------------------- leaves


def _loss(linear: nn.Linear, mesh: Any, *, cut: bool = True) -> Tensor:
    """Of a layer over the channels of an image; or of the image's mean, of which every rank has all."""
    image = drawn(20, 2, 3, 9, 7)
    image = image if mesh is None else wf.tile(image, mesh)
    return F.linear(image.permute(0, 2, 3, 1) if cut else image.mean((2, 3)), linear.weight).square().sum()


def _linear() -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(3, 4, bias=False, dtype=torch.float64)


def into_leaves(mesh: Any, is_managed: bool, cut: bool) -> tuple[bool, int, bool]:
    """Whether the gradient's mean over ranks is one device's, sums sent, whether ranks differ; after two backwards."""
    expected, linear = _linear(), _linear()
    if is_managed:
        manage([linear.weight])
    TRAFFIC.clear()
    for _ in range(2):  # the second adds to what is there
        _loss(expected, None, cut=cut).backward(), _loss(linear, mesh, cut=cut).backward()
    sums, grad = TRAFFIC.sum_messages - 2, linear.weight.grad  # each forward adds something up
    assert type(grad) is (PartialGradient if is_managed and cut else Tensor)
    grad = part_of_mean(grad)
    mean = mesh.sum_(grad.clone()) / mesh.size
    return difference(mean, expected.weight.grad) is None, sums, not torch.allclose(grad, mean)


def test_a_managed_leaf_takes_the_part_and_any_other_the_value():
    assert on_ranks(2, into_leaves, True, True, plan=TWO) == [(True, 0, True)] * 2
    assert on_ranks(2, into_leaves, False, True, plan=TWO) == [(True, 2, False)] * 2


def test_a_gradient_behind_a_mean_is_every_ranks_and_sends_nothing():
    assert on_ranks(2, into_leaves, True, False, plan=TWO) == [(True, 0, False)] * 2


def looked_at_between(mesh: Any) -> str | None:
    """A leaf's part that was added to after somebody has seen its value."""
    expected, linear = _linear(), _linear()
    manage([linear.weight])
    for _ in range(2):
        _loss(expected, None).backward(), _loss(linear, mesh).backward()
        wrong = difference(linear.weight.grad.abs(), expected.weight.grad.abs())
        if wrong:
            return wrong
    return None


def test_a_leafs_value_is_that_of_all_backwards_so_far():
    assert on_ranks(2, looked_at_between, plan=TWO) == [None, None]


def managed_twice(mesh: Any) -> list[bool]:
    """Whether ranks differ while two, one and none promise the mean."""
    linear, differ = _linear(), []
    manage([linear.weight]), manage([linear.weight])
    for _ in range(3):
        linear.weight.grad = None
        _loss(linear, mesh).backward()
        grad = part_of_mean(linear.weight.grad)
        differ.append(difference(mesh.sum_(grad.clone()) / 2, grad) is not None)
        release([linear.weight])
    release([linear.weight])  # nobody's
    return differ


def test_a_promise_holds_until_the_last_takes_it_back():
    assert on_ranks(2, managed_twice, plan=TWO) == [[True, True, False]] * 2


# ---------------------------------------------------------------------------------------------- whoever else meets it


def hooked(mesh: Any, is_managed: bool) -> list[str | None]:
    """Hooks of a leaf that look, that change, and that come afterwards; and a tensor on the way that keeps its gradient."""
    found: dict[bool, dict[str, Any]] = {}
    for where in (None, mesh):
        linear, seen = _linear(), found.setdefault(where is None, {})
        if is_managed and where is not None:
            manage([linear.weight])
        linear.weight.register_hook(lambda g, seen=seen: seen.update(norm=g.norm(), shape=list(g.shape)))
        linear.weight.register_hook(lambda g: g / (1 + g.abs()))
        linear.weight.register_hook(lambda g: g * 2 if g.sum() > 0 else g * 3)
        linear.weight.register_post_accumulate_grad_hook(lambda p, seen=seen: seen.update(after=p.grad.sum()))
        doubled = linear.weight * 2
        doubled.retain_grad()
        image = drawn(20, 2, 3, 9, 7)
        F.linear((image if where is None else wf.tile(image, where)).permute(0, 2, 3, 1), doubled).square().sum().backward()
        grad = part_of_mean(linear.weight.grad)
        seen.update(on_the_way=doubled.grad, of_the_leaf=grad if where is None else mesh.sum_(grad.clone()) / mesh.size)
    return [difference(found[False][name], found[True][name]) for name in found[True]]


def test_hooks_and_kept_gradients_see_one_devices_numbers():
    for is_managed in (True, False):
        assert on_ranks(2, hooked, is_managed, plan=TWO) == [[None] * 5] * 2


def penalty(mesh: Any) -> list[str | None]:
    """Gradients of gradients: through the value of a part, by autograd.grad, backward and the function by itself."""
    found = []
    for where in (None, mesh):
        linear = _linear()
        (slope,) = torch.autograd.grad(_loss(linear, where), [linear.weight], create_graph=True)
        other = slope.norm() + slope.abs().sum() * slope[0, 0]
        loss = wf.whole(other + (full_value_with_grad(slope) if type(slope) is PartialGradient else slope).pow(3).sum())
        loss.backward()
        found.append([loss.detach(), linear.weight.grad])
        linear.weight.grad = None
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Using backward.. with create_graph=True")
            _loss(linear, where).backward(create_graph=True)
        (again,) = torch.autograd.grad(wf.whole(linear.weight.grad.square().sum()), [linear.weight])
        found[-1] += [linear.weight.grad, again]
        linear.weight.grad = None
    return [difference(ours, right) for ours, right in zip(found[1], found[0], strict=True)]


def test_gradients_of_gradients_go_through_the_value():
    assert on_ranks(2, penalty, plan=TWO) == [[None] * 4] * 2


def _context(mesh: Any) -> list[str | None]:
    """Pixels that meet a summary of the image, and weights that are made of it."""
    found = []
    for where in (None, mesh):
        image = drawn(20, 2, 3, 9, 7).requires_grad_()
        x = image if where is None else wf.tile(image, where)
        context = x.mean((2, 3)).tanh()
        context.retain_grad()
        y = x.permute(0, 2, 3, 1).reshape(-1, 3) @ context.t()
        (y.square().sum() + F.conv2d(x, P[:, :, None, None] * x.std()).sin().sum()).backward()
        found.append([context.grad, image.grad])
    return [difference(ours, right) for ours, right in zip(found[1], found[0], strict=True)]


def test_what_was_computed_from_the_image_gets_the_value():
    assert on_ranks(2, _context, plan=TWO) == [[None, None]] * 2


# ---------------------------------------------------------------------------------------------- what is refused


def refused(mesh: Any) -> list[str]:
    said = []
    x = gradient(mesh)
    for save in (pickle.dumps, lambda x: torch.save({"gradient": x}, io.BytesIO()), copy.copy):
        try:
            save(x)
        except NotImplementedError as error:
            said.append(str(error))
    close(torch.load(io.BytesIO(_saved(wf.whole(x))), weights_only=True), value())
    return said


def _saved(tensor: Tensor) -> bytes:
    file = io.BytesIO()
    torch.save(tensor, file)
    return file.getvalue()


def test_a_part_is_not_saved_and_its_value_is():
    expected = (
        "a gradient of shape [4, 3] of which each of 2 ranks has a part cannot be pickled or saved; save widefield.whole(it), "
        "on every rank"
    )
    assert on_ranks(2, refused, plan=TWO) == [[expected] * 3] * 2
