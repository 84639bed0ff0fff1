"""Operations that move values: views, permutations, parts, joins, padding, indices, windows, and writes to parts."""

from __future__ import annotations

import math

from .workbench import Draw, Workbench

ALONG_ONE = [
    "{x}.flip({d})", "{x}.roll({n}, {d})", "{x}.narrow({d}, {i}, 1)", "{x}.select({d}, {i})", "{x}.chunk(2, {d})[-1]",
    "torch.tensor_split({x}, 2, {d})[0]", "{x}.split(2, {d})[-1]", "torch.cat([{x}, {x}.sin()], {d})",
    "torch.stack([{x}, {x} * 0.5], {d})", "torch.cat([{x}.narrow({d}, {i}, 1), {x}], {d})", "{x}.unbind({d})[{i}]",
    "{x}.repeat_interleave(2, {d})", "{x}.movedim({d}, 0)", "{x}.swapaxes({d}, -1)", "{x}.transpose({d}, 0)",
    "{x}.unsqueeze({d})",
    "{x}.narrow({d}, {i}, 1).squeeze({d})", "{x}.narrow({d}, {i}, 1).expand({x}.shape)", "{x}.unfold({d}, {w}, {s})",
    "{x}.index_select({d}, torch.tensor([{i}, {i}]))", "{x}.index_select({d}, torch.arange({size} - 1, -1, -1))",
    "torch.take_along_dim({x}, {x}.argsort({d}), {d})", "{x}.gather({d}, {x}.detach().argsort({d}))",
    "torch.scatter({x}, {d}, {x}.detach().argsort({d}), {x}.sin())",
    "{x}.scatter_add({d}, {x}.detach().argsort({d}), {x}.cos())",
    "{x}.index_add({d}, torch.tensor([{i}]), {x}.narrow({d}, {i}, 1).sin())", "{x}.index_fill({d}, torch.tensor([{i}]), 0.3)",
    "{x}.index_copy({d}, torch.tensor([{i}]), {x}.narrow({d}, 0, 1).cos())",
    "{x}.select_scatter({x}.select({d}, 0).sin(), {d}, {i})",
    "{x}.slice_scatter({x}.narrow({d}, 0, 1).tanh(), {d}, {i}, {i} + 1)", "torch.cat({x}.split(1, {d})[::-1], {d})",
    "torch.stack({x}.unbind({d})[::-1], {d})", "{x}.scatter_reduce({d}, {x}.detach().argsort({d}), {x}.sin(), 'amax')",
    "sum({x}.unbind({d}))", "torch.hstack([{x}, {x}])", "torch.vstack([{x}, -{x}])", "torch.dstack([{x}, {x}.sin()])",
    "torch.repeat_interleave({x}, torch.arange({size}) % 2 + 1, {d}, output_size={size} + {size} // 2)",
]  # fmt: skip
ALONG_SOME = ["{x}.flip({ds})", "torch.roll({x}, {ns}, {ds})", "{x}.sum({ds}, keepdim=True).expand({x}.shape)"]
OF_ANY = [
    "{x}.contiguous()", "{x}.clone().contiguous()", "{x}.flatten()", "{x}.flatten(1)", "{x}.flatten(-2)", "{x}.squeeze()",
    "{x}.mT + 0",
    "{x}.adjoint()", "{x}.reshape(-1)", "{x}.reshape({x}.shape[0], -1)", "{x}.view({x}.shape)", "{x}.view(-1, {x}.shape[-1])",
    "{x}.fliplr()", "{x}.flipud()", "torch.rot90({x}, {k}, (-2, -1))", "{x}.tril({k})", "{x}.triu({k})",
    "torch.diagonal({x}, {k}, -2, -1)", "torch.atleast_3d({x})", "torch.broadcast_to({x}, (2, *{x}.shape))",
    "{x}[None]", "{x}[..., None]", "{x}[..., ::2]", "{x}[..., 1:]", "{x}[..., :-1, :]", "{x}[:, -1:]", "{x}[..., 1::2, :]",
    "{x}[-1]",
    "{x}[:, 0]", "{x}[..., [0, -1]]", "{x}[:, [0, 0]]", "{x}[torch.tensor([0])]",
    "{x}[..., torch.arange({x}.shape[-1]).flip(0)]",
    "{x}[:, torch.tensor([[0]])]", "{x}.unflatten(1, (1, -1))", "{x}.repeat(*[1] * ({x}.ndim - 1), 2)",
    "{x}.tile(2)", "{x}.expand(2, *{x}.shape)", "torch.masked_select({x}, {x} > 9e9).sum() + {x}",
    "torch.stack(torch.meshgrid({x}.flatten()[:3], {x}.flatten()[:4], indexing='ij'))",
    "{x}.as_strided({x}.shape, {x}.stride())",
    "{x}.ravel()[:{n2}]", "torch.where({x} > 0, {x}, 0.0)", "torch.tensor_split({x}, ({x}.shape[-1] // 2,), -1)[1]",
    "{x}.flatten()[torch.tensor([0, -1, 1])]", "torch.block_diag({x}.flatten(1), {x}.flatten(1).sin())",
    "torch.cartesian_prod({x}.flatten()[:4], {x}.flatten()[:3])", "torch.combinations({x}.flatten()[:4])", "{x}.T.contiguous()",
    "torch.diag_embed({x}.flatten(1)[:, :4])", "torch.outer({x}.flatten()[:9], {x}.flatten()[-7:])", "{x}.flatten(1).cov()",
    "torch.cdist({x}.flatten(1), {x}.flatten(1).sin())", "torch.tensordot({x}, {x}, {x}.ndim - 1)",
    "torch.einsum('b...,b...->b...', {x}, {x}.sin())", "torch.einsum('bc...,bd...->bcd', {x}, {x})",
    "F.pdist({x}.flatten(1) * 1.0)",
    "torch.take({x}, torch.tensor([0, 3, 1]))", "{x}.put(torch.tensor([1]), {x}.flatten()[:1])",
    "torch.kron({x}[0, :1], {x}[0, :1])",
    "{x}.new_zeros(()) + {x}", "{x}.new_full((1,), 0.3) * {x}", "torch.stack([{x}.sum(), {x}.max(), {x}.mean()])",
    "{x}.view_as({x}) * 1", "{x}.reshape_as({x}.flatten().view_as({x}))",
    "torch.index_put({x}, (torch.tensor([0]),), {x}[:1].sin())",
    "torch.index_put({x}, (torch.tensor([0]),), {x}[:1].sin(), accumulate=True)",
    "{x}.fill_diagonal_(0.2) + 0 if {x}.ndim == 0 else {x}",
    "torch.tril_indices(3, 3).double().sum() * {x}", "{x} * torch.linspace(-1, 1, {x}.shape[-1], dtype=torch.float64)",
    "{x} + torch.arange({x}.shape[-1], dtype=torch.float64)", "torch.roll({x}, ({n}, 1), (-1, 0))", "torch.roll({x}, {n})",
    "torch.flatten({x}, 0, 1)", "torch.unflatten({x}, 0, ({x}.shape[0], 1))", "{x}.permute(*range({x}.ndim)[::-1])",
]  # fmt: skip
OF_IMAGES = [
    "F.channel_shuffle({x}, {c})", "torch.cat([{x}, {x}[:, :1]], 1)", "{x}.permute(0, *range(2, {x}.ndim), 1)",
    "{x}.flatten(2).transpose(1, 2)",
    "{x}.movedim(1, -1).contiguous().movedim(-1, 1)", "F.pixel_shuffle({x}.repeat_interleave(4, 1), 2)",
    "F.pixel_unshuffle({x}[..., :{e0}, :{e1}], 2)",
    "F.unfold({x}, {w}, padding=1, stride={s})", "F.fold(F.unfold({x}, 3, padding=1), {x}.shape[-2:], 3, padding=1)",
    "F.unfold({x}, ({w}, 1), dilation=(2, 1))", "torch.cat([{x}, {x}.mean((-1, -2), keepdim=True).expand({x}.shape)], 1)",
    "{x}.unfold(-1, 2, {s}).unfold(-3, 2, 1).sum((-1, -2))", "{x}.unflatten(-1, (-1, 1)).flatten(-2)",
    "{x}.split([1, {x}.shape[1] - 1], 1)[1]",
    "F.one_hot({x}.detach().argmax(1), {x}.shape[1]).movedim(-1, 1).double() * {x}", "{x}.roll((1, -1), (-2, -1)) - {x}",
    "{x}.gather(1, {x}.detach().argmax(1, keepdim=True))", "torch.take_along_dim({x}, {x}.argmin(-1, keepdim=True), -1)",
    "{x}[..., :{x}.shape[-1] // 2] + {x}[..., {x}.shape[-1] - {x}.shape[-1] // 2:]", "{x}[:, :, ::2] * {x}[:, :, ::2].sin()",
    "torch.cat([{x}[..., ::2, :], {x}[..., 1::2, :]], -2)", "{x}.reshape(*{x}.shape[:2], -1).softmax(-1).reshape({x}.shape)",
    "{x}.transpose(-1, -2)", "{x}.to(memory_format=torch.channels_last) * 1.1", "torch.stack([{x}, {x}], -1).flatten(-2)",
    "{x}[..., [2, 0, 1], :]", "{x}[:, :, torch.arange({x}.shape[2])[:, None], torch.arange({x}.shape[-1])]",
    "{x}[:, 0][{x}[:, 0] > 99].sum() + {x}", "{x}.unsqueeze(2).expand(-1, -1, 2, *[-1] * ({x}.ndim - 2)).flatten(1, 2)",
]  # fmt: skip
WRITES = [
    "{v}[..., 1:] = {y}[..., :-1]", "{v}[..., ::2] = 0.3", "{v}[:, :1] *= 2", "{v}[..., -1] = {y}[..., 0]",
    "{v}[{y} > 0.5] = 0.1",
    "{v}[:, 0] += {y}[:, 0].mean()", "{v}[0] = {y}[-1].sin()", "{v}.narrow(-1, 0, 1).zero_()",
    "{v}.select(-1, 0).copy_({y}.select(-1, 1))",
    "{v}.transpose(-1, 0)[0].mul_(0.5)", "{v}[..., 0, :] = 1.5", "{v}.index_add_(-1, torch.tensor([0]), {y}[..., :1])",
    "{v}.index_fill_(-1, torch.tensor([1]), 0.2)", "{v}.scatter_(-1, {y}.detach().argmax(-1, keepdim=True), 0.7)",
    "{v}.scatter_add_(1, {y}.detach().argsort(1), {y})", "{v}[..., [0, 1]] = {y}[..., [1, 0]]", "{v}.unsqueeze_(0).squeeze_(0)",
    "{v}.t_() if {v}.ndim == 2 else {v}.transpose_(-1, -2)", "{v}.flatten()[:3].add_(0.1)", "{v}.diagonal(0, -2, -1).mul_(0.1)",
    "{v}.view(-1)[::3].neg_()", "{v}[..., 1:] += {v}[..., :-1].clone()", "{v}[:, :, 1:].copy_({y}[:, :, :-1])",
    "{v}.cumsum_(-1)",
    "torch.mul({y}, 2, out={v}.detach())", "{v}.index_copy_(-1, torch.tensor([0]), {y}[..., -1:])",
    "{v}.masked_fill_({y} > 0, 0.4)",
    "{v}.swapaxes_(0, -1)", "{v}.resize_as_({y})", "{v}.put_(torch.tensor([0]), torch.tensor([0.5], dtype=torch.float64))",
    "{v}.index_put_((torch.tensor([0]),), {y}[:1], accumulate=True)", "{v}.masked_scatter_({y} > 0, {y}.flatten())",
    "{v}.squeeze_()",
]  # fmt: skip
PAD_MODES = ("constant", "constant", "reflect", "replicate", "circular")


def _along_one(words: str) -> Draw:
    def draw(w: Workbench) -> str:
        x = w.value()
        d = w.dim(x)
        size = w.tensor(x).shape[d]
        i = w.rng.randrange(size)
        reach = w.pick(1, 2, 3)
        return words.format(x=x, d=d, i=i, size=size, n=w.pick(-4, -1, 1, 2, 5), w=reach, s=w.pick(1, 2, 3))

    return draw


def _along_some(words: str) -> Draw:
    def draw(w: Workbench) -> str:
        x = w.value()
        dims = w.dims(x)
        return words.format(x=x, ds=dims, ns=[w.pick(-3, -1, 1, 2) for _ in dims])

    return draw


def _any(words: str) -> Draw:
    return lambda w: words.format(x=w.value(), k=w.pick(-1, 0, 1, 2), n=w.pick(-3, 1, 2, 7), n2=w.pick(1, 5, 8))


def _image(words: str) -> Draw:
    def draw(w: Workbench) -> str:
        x = w.image()
        shape = w.tensor(x).shape
        divisors = [c for c in range(1, shape[1] + 1) if shape[1] % c == 0]
        even = [size - size % 2 for size in shape[-2:]]
        return words.format(x=x, c=w.pick(*divisors), w=w.pick(1, 2, 3), s=w.pick(1, 2, 3), e0=even[0], e1=even[1])

    return draw


def _write(words: str) -> Draw:
    def draw(w: Workbench) -> str:
        y = w.value(lambda t: t.ndim > 1)
        made = w.new()
        source = w.pick(
            f"{y}.clone()",
            f"{y} * 0.7",
            f"torch.zeros_like({y})",
            f"torch.empty_like({y}).fill_(0.2)",
            f"{y}.new_ones({y}.shape)",
        )
        return f"!{made} = {source}\n!{words.format(v=made, y=y)}\n{made} * 1.0"

    return draw


def pad(w: Workbench) -> str:
    x = w.value(lambda t: t.ndim > 0)
    t, mode = w.tensor(x), w.pick(*PAD_MODES)
    if mode == "constant":
        dims = w.rng.randint(1, t.ndim)
        least = -1
    else:
        x = w.image()
        t = w.tensor(x)
        dims, least = t.ndim - 2, 0 if w.chance(0.7) else -1
    sizes = [w.rng.randint(least, 3) for _ in range(2 * dims)]
    value = f", value={w.number()}" if mode == "constant" and w.chance(0.5) else ""
    return f"F.pad({x}, {sizes}, mode={mode!r}{value})"


def view(w: Workbench) -> str:
    """A view to a shape that splits or joins some dims."""
    x = w.value()
    shape = list(w.tensor(x).shape)
    for _ in range(w.rng.randint(1, 3)):
        at = w.rng.randrange(len(shape))
        factors = [f for f in range(1, shape[at] + 1) if shape[at] % f == 0]
        if w.chance(0.5) and len(shape) < 5:
            first = w.pick(*factors)
            shape[at : at + 1] = [first, shape[at] // first]
        elif at + 1 < len(shape):
            shape[at : at + 2] = [shape[at] * shape[at + 1]]
    if w.chance(0.4):
        shape[w.rng.randrange(len(shape))] = -1
    return f"{x}.{w.pick('reshape', 'view')}({shape})"


def permute(w: Workbench) -> str:
    x = w.value()
    order = list(range(w.tensor(x).ndim))
    w.rng.shuffle(order)
    return w.pick("{x}.permute({o})", "{x}.permute({o}).contiguous()", "torch.permute({x}, {o})").format(x=x, o=tuple(order))


def part(w: Workbench) -> str:
    """A slice in every dim, with steps and ends counted from either side."""
    x = w.value()
    words = []
    for size in w.tensor(x).shape:
        start = w.rng.randrange(-size, size)
        words.append(w.pick(":", f"{start}:", f":{w.rng.randint(1, size)}", f"::{w.pick(1, 2, 3)}", f"{start}::2", str(start)))
    if w.chance(0.3):
        words[w.rng.randrange(len(words))] = w.pick("...", "None", "[0, -1]", "[True]" if len(words) == 1 else "...")
    return f"{x}[{', '.join(words)}]"


def join(w: Workbench) -> str:
    """Values that differ along one dim, as decoders meet them, cut to the smaller size."""
    x = w.image()
    y = w.value(lambda t: t.ndim == w.tensor(x).ndim and t.shape[0] == w.tensor(x).shape[0])
    ends = ", ".join(f":{min(a, b)}" for a, b in zip(w.tensor(x).shape[2:], w.tensor(y).shape[2:], strict=True))
    return w.pick("torch.cat([{x}[:, :, {e}], {y}[:, :, {e}]], 1)", "{x}[:, :1, {e}] * {y}[:, :1, {e}]").format(
        x=x, y=y, e=ends
    )


def product(w: Workbench) -> str:
    """Matrix products of values with themselves and with parameters."""
    x = w.value(lambda t: t.ndim >= 2)
    t = w.tensor(x)
    last, rows = t.shape[-1], t.shape[-2]
    kind = w.pick("right", "left", "gram", "attention", "vector", "addmm", "einsum", "outer", "linear_of_all", "tensordot")
    if kind == "right":
        return f"{x} @ {w.parameter(last, w.pick(1, 2, 3))}"
    if kind == "left":
        return f"{w.parameter(w.pick(1, 2, 3), rows)} @ {x}"
    if kind == "gram":
        return f"{x} @ {x}.mT * 0.1"
    if kind == "attention":
        return f"({x} @ {x}.mT * 0.3).softmax(-1) @ {x}"
    if kind == "vector":
        return f"torch.matmul({x}, {w.parameter(last)})"
    if kind == "addmm":
        flat = f"{x}.flatten(0, -2)"
        return f"torch.addmm({w.parameter(3)}, {flat}, {w.parameter(last, 3)}, beta=0.7, alpha=1.2)"
    if kind == "einsum":
        return f"torch.einsum('...i,ij->...j', {x}, {w.parameter(last, 2)})"
    if kind == "outer":
        return f"torch.einsum('...ij,...ik->...jk', {x}, {x}.sin()) * 0.1"
    if kind == "linear_of_all" and math.prod(t.shape[1:]) < 600:
        return f"F.linear({x}.flatten(1), {w.parameter(3, math.prod(t.shape[1:]))}, {w.parameter(3)})"
    return f"torch.tensordot({x}, {w.parameter(last, 2)}, ([-1], [0]))"


DRAWS: list[tuple[float, Draw]] = [
    *((0.5, _along_one(words)) for words in ALONG_ONE),
    *((0.5, _along_some(words)) for words in ALONG_SOME),
    *((0.4, _any(words)) for words in OF_ANY),
    *((0.6, _image(words)) for words in OF_IMAGES),
    *((0.5, _write(words)) for words in WRITES),
    (5, pad), (4, view), (3, permute), (4, part), (3, join), (6, product),
]  # fmt: skip
