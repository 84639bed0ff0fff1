"""Layers with weights or windows: convolutions, pooling, resizing, normalization, attention, chance."""

from __future__ import annotations

from .workbench import Draw, Unfit, Workbench

PADDINGS = ("zeros", "zeros", "zeros", "reflect", "replicate", "circular")


def _each(w: Workbench, dims: int, *values: int) -> int | tuple[int, ...]:
    """One number for all dims, or one for each."""
    return w.pick(*values) if w.chance(0.5) else tuple(w.pick(*values) for _ in range(dims))


def _sizes(w: Workbench, x: str) -> tuple[int, int, list[int]]:
    """Pixel dims, channels and the sizes of a value (B, C, ...)."""
    t = w.tensor(x)
    return t.ndim - 2, t.shape[1], list(t.shape[2:])


def _groups(w: Workbench, *channels: int) -> int:
    shared = [g for g in range(1, min(channels) + 1) if all(c % g == 0 for c in channels)]
    return w.pick(1, 1, *shared)


def convolution(w: Workbench) -> str:
    x = w.image()
    dims, channels, _ = _sizes(w, x)
    out = w.pick(1, 2, 3, 4, channels)
    groups, mode = _groups(w, channels, out), w.pick(*PADDINGS)
    kernel, dilation = _each(w, dims, 1, 2, 3, 3, 5), _each(w, dims, 1, 1, 1, 2)
    padding: object = w.pick(_each(w, dims, 0, 1, 1, 2, 3), "same", "valid")
    stride = _each(w, dims, 1, 1, 2, 3) if padding != "same" else 1
    if w.chance(0.3):
        sizes = [kernel] * dims if isinstance(kernel, int) else list(kernel)
        bias = w.parameter(out) if w.chance(0.5) else None
        weight = w.parameter(out, channels // groups, *sizes)
        return f"F.conv{dims}d({x}, {weight}, {bias}, {stride}, {padding!r}, {dilation}, {groups})"
    words = (
        f"nn.Conv{dims}d({channels}, {out}, {kernel}, {stride}, {padding!r}, {dilation}, {groups}, {w.chance(0.7)}, {mode!r})"
    )
    if w.chance(0.1):
        words = f"parametrizations.{w.pick('weight_norm', 'spectral_norm', 'orthogonal')}({words})"
    return f"{w.layer(words)}({x})"


def transposed(w: Workbench) -> str:
    x = w.image()
    dims, channels, sizes = _sizes(w, x)
    out = w.pick(1, 2, 3, channels)
    stride, dilation = _each(w, dims, 1, 2, 3), _each(w, dims, 1, 1, 2)
    more = _each(w, dims, 0, 0, 1)
    words = (
        f"nn.ConvTranspose{dims}d({channels}, {out}, {_each(w, dims, 1, 2, 3, 4)}, {stride}, "
        f"{_each(w, dims, 0, 1, 2)}, {more}, "
        f"{_groups(w, channels, out)}, {w.chance(0.7)}, {dilation})"
    )
    size = f", output_size={[s * 2 for s in sizes]}" if w.chance(0.2) else ""
    return f"{w.layer(words)}({x}{size})"


def pool(w: Workbench) -> str:
    x = w.image()
    dims, _, sizes = _sizes(w, x)
    kernel, stride = _each(w, dims, 1, 2, 3, 3, 4), w.pick(None, _each(w, dims, 1, 2, 3))
    padding, ceil = _each(w, dims, 0, 0, 1), w.chance(0.4)
    kind = w.pick(
        "avg", "avg", "max", "max", "max indices", "lp", "adaptive avg", "adaptive max", "unpool", "fractional", "all"
    )
    if kind == "avg":
        divisor = f", divisor_override={w.pick(None, None, 3)}" if dims > 1 else ""
        return f"F.avg_pool{dims}d({x}, {kernel}, {stride}, {padding}, {ceil}, {w.chance(0.5)}{divisor})"
    if kind.startswith("max"):
        dilation = _each(w, dims, 1, 1, 2)
        words = f"F.max_pool{dims}d({x}, {kernel}, {stride}, {padding}, {dilation}, {ceil}"
        if kind == "max":
            return f"{words})"
        index = w.new()
        made = w.new()
        return f"!{made}, {index} = {words}, return_indices=True)\n{made} + {index} * 0.01"
    if kind == "lp":
        return f"F.lp_pool{dims}d({x}, {w.pick(1, 2, 3)}, {kernel}, {stride}, {ceil})"
    if kind.startswith("adaptive"):
        wanted = tuple(w.pick(1, 2, 3, size, None) for size in sizes) if w.chance(0.6) else w.pick(1, 2, 3, 5)
        return f"F.adaptive_{kind.split()[1]}_pool{dims}d({x}, {wanted})"
    if kind == "unpool":
        made, index = w.new(), w.new()
        again = f"F.max_unpool{dims}d({made}, {index}, 2, 2, output_size={sizes})"
        return f"!{made}, {index} = F.max_pool{dims}d({x}, 2, 2, return_indices=True)\n{again}"
    if kind == "fractional" and dims > 1:
        return f"F.fractional_max_pool{dims}d({x}, 2, output_ratio={tuple([0.6] * dims)})"
    return f"F.{w.pick('avg', 'max')}_pool{dims}d({x}, {tuple(sizes)})"


def resize(w: Workbench) -> str:
    x = w.image()
    dims, _, sizes = _sizes(w, x)
    modes = {1: ["nearest", "linear", "area", "nearest-exact"], 3: ["nearest", "trilinear", "area", "nearest-exact"]}
    mode = w.pick(*modes.get(dims, ["nearest", "bilinear", "bicubic", "area", "nearest-exact"]))
    if w.chance(0.5):
        where = f"scale_factor={w.pick(0.5, 0.6, 1, 1.5, 2, 2.3, tuple(w.pick(0.5, 1.0, 2.0, 1.7) for _ in range(dims)))}"
        where += f", recompute_scale_factor={w.pick(True, False, None)}" if w.chance(0.4) else ""
    else:
        where = f"size={tuple(max(1, size + w.pick(-3, -1, 0, 1, 4, size)) for size in sizes)}"
    corners = f", align_corners={w.chance(0.5)}" if mode in ("linear", "bilinear", "bicubic", "trilinear") else ""
    smooth = ", antialias=True" if mode in ("bilinear", "bicubic") and w.chance(0.3) else ""
    return f"F.interpolate({x}, {where}, mode={mode!r}{corners}{smooth})"


def normalization(w: Workbench) -> str:
    x = w.image()
    dims, channels, sizes = _sizes(w, x)
    kind = w.pick(
        "batch", "batch", "instance", "group", "layer", "layer of all", "rms", "functional", "local", "standard", "sync"
    )
    affine = w.chance(0.7)
    if kind == "sync":
        return f"{w.layer(f'nn.SyncBatchNorm({channels})')}({x})"
    if kind == "batch":
        momentum = w.pick(0.1, 0.3, None)
        return f"{w.layer(f'nn.BatchNorm{dims}d({channels}, 1e-2, {momentum}, {affine}, {w.chance(0.8)})')}({x})"
    if kind == "instance":
        return f"{w.layer(f'nn.InstanceNorm{dims}d({channels}, 1e-2, 0.1, {affine}, {w.chance(0.3)})')}({x})"
    if kind == "group":
        return f"{w.layer(f'nn.GroupNorm({_groups(w, channels)}, {channels}, 1e-2, {affine})')}({x})"
    if kind == "layer":
        moved = f"{x}.movedim(1, -1)"
        return f"{w.layer(f'nn.LayerNorm({channels}, 1e-2, {affine})')}({moved}).movedim(-1, 1)"
    if kind == "layer of all":
        return f"{w.layer(f'nn.LayerNorm({[channels, *sizes]}, 1e-2, {affine})')}({x})"
    if kind == "rms":
        return f"F.rms_norm({x}, {tuple(sizes)}, eps=1e-2)"
    if kind == "functional":
        mean, var = w.buffer(f"torch.zeros({channels})"), w.buffer(f"torch.ones({channels})")
        return f"F.batch_norm({x}, {mean}, {var}, training=self.training, eps=1e-2, momentum=0.2)"
    if kind == "local":
        return f"F.instance_norm({x}, eps=1e-2)"
    axes = tuple(range(2, dims + 2))
    weight = w.parameter(2, channels, *[3] * dims)
    standardized = f"({weight} - {weight}.mean({tuple(range(1, dims + 2))}, keepdim=True))"
    return f"F.conv{dims}d({x}, {standardized}, padding=1) / ({x}.std({axes}).mean() + 1)"


def attention(w: Workbench) -> str:
    x = w.image()
    _, channels, _ = _sizes(w, x)
    tokens = f"{x}.flatten(2).transpose(1, 2)"
    kind = w.pick("functional", "module", "pooled", "channel", "windows", "encoder", "mask")
    if kind == "functional":
        found = f"F.scaled_dot_product_attention({tokens}, {tokens}, {tokens}, is_causal={w.chance(0.3)})"
        return f"{found}.mT.contiguous().view({x}.shape)"
    if kind == "module":
        heads = _groups(w, channels)
        made = w.layer(f"nn.MultiheadAttention({channels}, {heads}, batch_first=True)")
        return f"{made}({tokens}, {tokens}, {tokens}, need_weights={w.chance(0.4)})[0]"
    if kind == "pooled":
        return f"{x} * F.linear({x}.flatten(2).mean(2), {w.parameter(channels, channels)}).sigmoid()[:, :, None, None]"
    if kind == "channel":
        return f"({x}.flatten(2) @ {tokens} * 0.05).softmax(-1) @ {x}.flatten(2)"
    if kind == "windows":
        return f"F.scaled_dot_product_attention({x}, {x}.sin(), {x}, scale=0.3)"
    if kind == "encoder":
        return f"{w.layer(f'nn.TransformerEncoderLayer({channels}, 1, 5, 0.0, batch_first=True)')}({tokens})"
    mask = w.parameter(1, 1)
    return f"F.scaled_dot_product_attention({tokens}, {tokens}, {tokens}, attn_mask={mask})"


def recurrent(w: Workbench) -> str:
    """A value's rows, one after another."""
    x = w.value(lambda t: t.ndim in (3, 4) and 1 < t.shape[-2] < 9)
    first, numbers, layers = w.chance(0.6), w.tensor(x).shape[-1], w.pick(1, 1, 2)
    words = f"{numbers}, {w.pick(1, 3)}, {layers}, batch_first={first}, bidirectional={w.chance(0.3)}"
    layer, rows = w.layer(f"nn.{w.pick('LSTM', 'GRU', 'RNN')}({words})"), f"{x}.flatten(1, -2)"
    return f"{layer}({rows})[0]" if first else f"{layer}({rows}.transpose(0, 1))[0].transpose(0, 1)"


def linear(w: Workbench) -> str:
    x = w.value(lambda t: t.ndim >= 1 and t.shape[-1] < 200)
    size, kind = w.tensor(x).shape[-1], w.pick("linear", "linear", "bilinear", "embedding", "prelu", "lazy")
    if kind == "linear":
        return f"{w.layer(f'nn.Linear({size}, {w.pick(1, 2, 3)}, {w.chance(0.7)})')}({x})"
    if kind == "bilinear" and size < 12:
        return f"{w.layer(f'nn.Bilinear({size}, {size}, 2)')}({x}, {x}.sin())"
    if kind == "embedding":
        return f"{w.layer('nn.Embedding(5, 2)')}(({x}.detach() > 0).long())"
    if w.tensor(x).ndim < 2:
        raise Unfit
    return f"{w.layer(f'nn.PReLU({w.pick(1, w.tensor(x).shape[1])})')}({x})"


def sampling(w: Workbench) -> str:
    x = w.image((4, 5))
    dims, _, sizes = _sizes(w, x)
    theta = w.parameter(dims, dims + 1)
    batch = w.tensor(x).shape[0]
    grid = f"F.affine_grid({theta}.expand({batch}, -1, -1) * 0.5, {[batch, 1, *sizes]}, align_corners={w.chance(0.5)})"
    if w.chance(0.3):
        grid = f"torch.tanh({x}[:, :{dims}].movedim(1, -1))"
    mode = w.pick("bilinear", "nearest", "bicubic") if dims == 2 else w.pick("bilinear", "nearest")
    padding = w.pick("zeros", "border", "reflection")
    return f"F.grid_sample({x}, {grid}, mode={mode!r}, padding_mode={padding!r}, align_corners={w.chance(0.5)})"


CHANCE = [
    "F.dropout({x}, {p}, self.training)", "F.dropout{n}d({x}, {p}, self.training)", "F.alpha_dropout({x}, {p}, self.training)",
    "F.feature_alpha_dropout({x}, {p}, self.training)", "{x} * (torch.rand_like({x}) < 0.7)",
    "{x} + torch.randn_like({x}) * 0.1",
    "{x} + torch.randn({x}.shape, dtype=torch.float64) * 0.1", "{x} * torch.empty_like({x}).bernoulli_(0.8)",
    "{x} * torch.bernoulli(torch.full_like({x}, 0.6))",
    "{x} * {x}.new_empty({x}.shape[0], *[1] * ({x}.ndim - 1)).bernoulli_(0.7)",
    "{x}[:, torch.randperm({x}.shape[1])]", "F.rrelu({x}, 0.1, 0.3, self.training)", "torch.normal({x}, 0.1)",
    "torch._standard_gamma({x}.abs() + 0.5)",
    "{x} + torch.rand({x}.shape[1], *[1] * ({x}.ndim - 2), dtype=torch.float64)", "{x} * torch.rand((), dtype=torch.float64)",
    "{x} + torch.empty({x}.shape, dtype=torch.float64).uniform_(-0.1, 0.1)", "{x} + torch.randint_like({x}, 3) * 0.1",
    "torch.poisson({x}.abs()) * 0.1 + {x}", "F.dropout({x}, {p}, True)", "{x} + torch.randint(0, 3, {x}.shape) * 0.1",
    "{x} * torch.empty({x}.shape[0], *[1] * ({x}.ndim - 1)).bernoulli_(0.6) / 0.6",
    "{x} + torch.empty_like({x}).exponential_() * 0.1",
    "{x}.roll(int(torch.randint(0, 3, ())), -1)", "{x} if torch.rand(()) < 0.5 else {x}.flip(-1)",
    "F.gumbel_softmax({x}, dim=1)",
]  # fmt: skip


def chance(w: Workbench) -> str:
    x = w.image()
    return w.pick(*CHANCE).format(x=x, p=w.pick(0.2, 0.5, 0.0), n=w.tensor(x).ndim - 2)


def chance_layer(w: Workbench) -> str:
    x = w.image()
    kind = w.pick("Dropout", f"Dropout{w.tensor(x).ndim - 2}d", "AlphaDropout", "FeatureAlphaDropout")
    return f"{w.layer(f'nn.{kind}({w.pick(0.1, 0.5)})')}({x})"


DRAWS: list[tuple[float, Draw]] = [
    (26, convolution), (8, transposed), (14, pool), (10, resize), (14, normalization), (3, recurrent),
    (6, attention), (7, linear), (4, sampling),
    (3, chance), (2, chance_layer),
]  # fmt: skip
