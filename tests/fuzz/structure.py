"""What a forward does around operations: weights that depend on the image, state, checkpoints, branches, loops, precision."""

from __future__ import annotations

from .workbench import Draw, Workbench

FROM_THE_IMAGE = [
    "F.conv{n}d({x}, {p} * {x}.mean())", "F.conv{n}d({x}, {p} / ({x}.std() + 1))", "F.conv{n}d({x}, {p} + {x}.amax())",
    "F.conv{n}d({x}, {p} * {x}.mean((0, *range(2, {x}.ndim)))[None, :{c1}].reshape(1, -1, *[1] * {n}))",
    "F.conv{n}d({x}, sum({x}.flatten(1).mean(0)[i] * {p} for i in range(2)))",
    "{x} * {q} + F.linear({x}.flatten(2).mean(2), {q}.reshape(1, -1))[:, 0].mean()",
    "F.linear({x}.movedim(1, -1), {l}).movedim(-1, 1) + {x} * {l}.sum()",
    "{x} * {l}.norm() + F.linear({x}.movedim(1, -1), {l}).sum()",
    "torch.einsum('bc...,dc->bd...', {x}, {l} * {x}.detach().sigmoid().mean())", "{x} * ({l} @ {l}).sum() + {l}.mean()",
    "F.conv{n}d({x}.reshape(1, -1, *{x}.shape[2:]), {x}.flatten(2).mean(2).reshape(-1, 1, *[1] * {n}), "
    "groups={x}.shape[0] * {x}.shape[1]).reshape({x}.shape)",
    "{x} + F.conv{n}d({x}.flatten(0, 1)[None], {x}.flatten(0, 1)[:, None, ..., :2], groups=len({x}) * {x}.shape[1]).mean()",
    "F.conv{n}d({x}, {x}[..., :2]).tanh().mean(1, keepdim=True)",
    "{x} * F.conv{n}d({x}, {x}, padding=1).tanh().mean(tuple(range(1, {x}.ndim)), keepdim=True)",
    "{x} * torch.sigmoid({q} * {x}.mean(tuple(range(2, {x}.ndim)), keepdim=True))",
    "F.conv{n}d({q}.expand({x}.shape).contiguous(), {p}) + {x}[:, :1] * 0.1",
    "{x} + F.avg_pool{n}d({i}.exp(), 1)", "{x} + F.conv{n}d({i}, {p})", "{x} + F.interpolate({i}[..., :1], size={x}.shape[2:])",
    "{x} * {i} + F.conv{n}d({x} * {i}, {p})", "{x} + F.linear({x}.movedim(1, -1), {l}).movedim(-1, 1) * {i}",
    "{x} * {i}.mean() + {i}",
    "F.batch_norm({x}, None, None, {q}.flatten(), {q}.flatten(), training=True, eps=0.01) * {q}",
    "F.layer_norm({x} * {i}[0], {x}.shape[1:], {i}[0], {i}[0])",
    "F.group_norm({x}, 1, {q}.flatten()) + F.conv{n}d({x}, {l}.reshape(*{l}.shape, *[1] * {n})) * {l}.std()",
    "F.prelu({x}, {q}.flatten()) * {q}",
    "{x} * {p}.sum()", "{x} * {p}.norm() + F.conv{n}d({x}, {p}, padding='same')", "F.conv{n}d({x}, {p} * {p}.softmax(1))",
    "{x} + {p}.flatten()[0]",
    "F.conv{n}d({x}, F.normalize({p}, dim=1))", "F.conv{n}d({x}, {p}.flip(-1)) + F.conv{n}d({x}, {p})",
    "F.conv{n}d({x}, {p}.detach()) * {p}.mean()",
    "{x} * F.softplus({q}) / (1 + F.softplus({q}).sum())", "torch.where({q} > 0, {x}, {x} * {q})",
    "{x}.lerp({x}.sin(), {q}.sigmoid())",
    "torch.addcmul({x}, {q}, {x}.cos())", "torch.addmm({l}[0], {x}.flatten(2).transpose(1, 2).flatten(0, 1), {l})",
    "{x} + {q} @ torch.ones(1, {x}.shape[-1], dtype=torch.float64)",
]  # fmt: skip
STATE = [
    "!self.{b} += 1\n{x} + self.{b} * 0.01", "!self.{m} = wf_whole(self.{m} * 0.9 + {x}.detach().mean() * 0.1)\n{x} - self.{m}",
    "!self.{m}.mul_(0.9).add_(wf_whole({x}.detach().mean((0, *range(2, {x}.ndim)))) * 0.1)\n{x} - "
    "self.{m}.reshape(-1, *[1] * ({x}.ndim - 2))",
]  # fmt: skip
AROUND = [
    "checkpoint({m}, {x}, use_reentrant=False)", "checkpoint(lambda t: {m}(t).sin() + t.mean(), {x}, use_reentrant=False)",
    "checkpoint({m}, {x}, use_reentrant=True)", "{m}({m}({x}).tanh())", "{m}({x}) + {m}({x}.flip(-1)).flip(-1)",
    "{m}({x}.detach())",
    "sum({m}({x} * k) for k in range(1, 3))", "{m}({x}) if {x}.shape[-1] % 2 else {m}({x}.sin())",
    "{m}({x}).detach() + {m}({x})[:, :1]",
    "torch.cat([{m}(part) for part in {x}.split(1)])", "torch.cat([{m}({x}[:1]), {m}({x}[1:])]) if len({x}) > 1 else {m}({x})",
    "{m}({x}).float().relu().double()", "{m}.{w}.sum() * {x} + {m}({x}).mean()", "{m}({x}) if self.training else {m}({x}) * 2",
]  # fmt: skip
BLOCKS = [
    "!{v} = wf_whole({x})\n{v} * 0.5 + {m}({v})", "!{v} = {m}({x})\nwf_whole({v}).tanh() * {x}.mean()",
    "!with torch.no_grad():\n!    {v} = {m}({x})\n{x}.mean() + {v}",
    "!with torch.no_grad():\n!    {v} = {x}.softmax(1)\n{v} * {x}",
    "!with torch.enable_grad():\n!    {v} = {x}.detach().requires_grad_()\n!    {u}, = "
    "torch.autograd.grad({m}({v}).square().sum(), {v})\n{x} + {u}",
    "!with torch.enable_grad():\n!    {v} = {x} * 1\n!    {u}, = torch.autograd.grad({m}({v}).sin().sum(), {v}, "
    "create_graph=True)\n{x} + {u}",
    "!{v} = {x}\n!for _ in range(2):\n!    {v} = {v} + {m}({x}).mean() * {v}\n{v} * 1",
    "!{v} = {m}({x})\n!if {v}.shape[-1] > 4:\n!    {v} = {v}[..., ::2]\n{v} * 1",
    "!with torch.autocast('cpu', torch.bfloat16):\n!    {v} = {x}.mean() * 2\n{v} * {x}",
    "!{v} = {x} * 0.5\n!{v}.register_hook(lambda g: g * 2)\n{v} + {x}",
    "!{v} = {x}.clone()\n!for k in range({x}.shape[-1]):\n!    {v}[..., k] = {v}[..., k - 1] * 0.5 + {x}[..., k]\n{v} * 1",
    "!{v} = {x}.sum()\n!{u} = {v} * {x}\n{u} / ({v}.abs() + 1)",
    "!{v} = [{x}]\n!for _ in range(2):\n!    {v}.append({m}({v}[-1].flip(-1)).mean() + {v}[-1])\ntorch.cat({v}, 1)",
    "!{v} = {x}.shape[2] // 2\n{x}[:, :, {v}:] + {x}[:, :, :1]",
    "!{v} = torch.zeros({x}.shape, dtype={x}.dtype)\n!{v}[:, :1] = {x}[:, -1:]\n{v}.cos()",
    "!{v} = {m}.weight.mean() * torch.ones({x}.shape, dtype={x}.dtype)\n!{v}.mul_({x})\n{v} * 1",
    "!{v} = torch.ones({x}.shape[0], {x}.shape[1], dtype={x}.dtype)\n!{v}.add_({x}.flatten(2).mean(2))\n{v}.tanh()",
    "!{v} = torch.zeros({x}.shape[0], *[k + 2 for k in {x}.shape[1:]], dtype={x}.dtype)\n"
    "!{u} = {v}[(slice(None), *[slice(1, -1)] * ({x}.ndim - 1))]\n!{u}.add_({m}({x}))\n{v} * 2",
    "!{v} = torch.zeros({x}.shape[0], dtype={x}.dtype)\n!for k in range({x}.shape[0]):\n!    {v}[k] = {x}[k].mean()\n"
    "{x} * {v}.reshape(-1, *[1] * ({x}.ndim - 1))",
]  # fmt: skip


def from_the_image(words: str) -> Draw:
    def draw(w: Workbench) -> str:
        x = w.image()
        t = w.tensor(x)
        dims, channels = t.ndim - 2, t.shape[1]
        named = {"x": x, "n": dims, "c1": channels}
        if "{p}" in words:
            named["p"] = w.parameter(w.pick(1, channels), channels, *[w.pick(1, 2, 3) for _ in range(dims)])
        if "{q}" in words:
            named["q"] = w.parameter(channels, *[1] * dims)
        if "{l}" in words:
            named["l"] = w.parameter(channels, channels)
        if "{i}" in words:
            named["i"] = w.parameter(1, channels, *t.shape[2:])
        return words.format(**named)

    return draw


def state(w: Workbench) -> str:
    x = w.image()
    words = w.pick(*STATE)
    counts = w.buffer("torch.zeros(())").removeprefix("self.") if "{b}" in words else ""
    shape = "()" if "wf_whole(self" in words else w.tensor(x).shape[1]
    mean = w.buffer(f"torch.zeros({shape})").removeprefix("self.") if "{m}" in words else ""
    return words.format(x=x, b=counts, m=mean)


def _layer_that_keeps(w: Workbench, x: str) -> str:
    t = w.tensor(x)
    dims, channels = t.ndim - 2, t.shape[1]
    kernel = w.pick(1, 3)
    return w.layer(f"nn.Conv{dims}d({channels}, {channels}, {kernel}, padding={kernel // 2})")


def around(words: str) -> Draw:
    def draw(w: Workbench) -> str:
        x = w.image()
        return words.format(x=x, m=_layer_that_keeps(w, x), w=w.pick("weight", "bias"))

    return draw


def block(words: str) -> Draw:
    def draw(w: Workbench) -> str:
        x = w.image()
        return words.format(x=x, m=_layer_that_keeps(w, x), v=w.new(), u=w.new())

    return draw


def sequence(w: Workbench) -> str:
    """Layers in a row, as models hold them; stages of a pipeline are cut between them."""
    x = w.image()
    t = w.tensor(x)
    dims, channels = t.ndim - 2, t.shape[1]
    layers = [f"nn.Conv{dims}d({channels}, {channels}, 3, padding=1)"]
    for _ in range(w.rng.randint(1, 3)):
        layers.append(
            w.pick(
                "nn.ReLU()", "nn.ReLU(inplace=True)", "nn.SiLU()", f"nn.BatchNorm{dims}d({channels})",
                f"nn.Conv{dims}d({channels}, {channels}, 1)",
                f"nn.GroupNorm(1, {channels})", "nn.Dropout(0.3)", "nn.Identity()", "nn.LeakyReLU(0.1, inplace=True)",
            )
        )  # fmt: skip
    words = ", ".join(layers)
    return f"{w.layer(f'nn.Sequential({words})')}({x})"


DRAWS: list[tuple[float, Draw]] = [
    *((0.4, from_the_image(words)) for words in FROM_THE_IMAGE),
    (0.8, state),
    *((0.4, around(words)) for words in AROUND),
    *((0.4, block(words)) for words in BLOCKS),
    (4, sequence),
]
