"""Operations that give each pixel from the same pixel, with all that torch.nn.functional has of them."""

from __future__ import annotations

from .workbench import Draw, Workbench

SAFE = {"any": "{}", "positive": "({}.abs() + 0.3)", "inside": "({}.tanh() * 0.9)", "small": "{}.clamp(-3, 3)"}
"""How an operand is brought to where a function is smooth and finite."""
UNARY = {
    "any": """torch.relu torch.sigmoid torch.tanh torch.sin torch.cos torch.atan torch.abs torch.neg torch.square torch.erf
        torch.asinh torch.sign torch.floor torch.ceil torch.round torch.trunc torch.frac torch.positive torch.sgn torch.deg2rad
        torch.nan_to_num torch.relu_clone F.relu F.relu6 F.silu F.mish F.gelu F.elu F.selu F.celu F.leaky_relu F.softplus
        F.softsign F.tanhshrink F.hardtanh F.hardswish F.hardsigmoid F.hardshrink F.softshrink F.logsigmoid F.sigmoid
        torch.logit_of torch.special.expit torch.sinc torch.heaviside_of torch.clone torch.detach torch.special.erfcx_of
        torch.special.i0e torch.special.ndtr torch.special.bessel_j0""",
    "positive": """torch.log torch.log2 torch.log10 torch.log1p torch.sqrt torch.rsqrt torch.reciprocal torch.lgamma
        torch.digamma torch.special.entr torch.erfinv_of""",
    "inside": "torch.asin torch.acos torch.atanh torch.erfinv",
    "small": "torch.exp torch.expm1 torch.exp2 torch.sinh torch.cosh torch.erfc torch.tan_of",
}  # fmt: skip
_WORDS = {
    "torch.relu_clone": "{}.relu().clone()", "torch.logit_of": "torch.logit(torch.sigmoid({}), eps=1e-3)",
    "torch.heaviside_of": "torch.heaviside({}, torch.tensor(0.5, dtype=torch.float64))",
    "torch.special.erfcx_of": "torch.special.erfcx({}.abs())", "torch.erfinv_of": "torch.erfinv(torch.tanh({}) * 0.8)",
    "torch.tan_of": "torch.tan({} / 3)",
}  # fmt: skip
WITH_NUMBERS = [
    "F.elu({x}, alpha={n})", "F.celu({x}, alpha=0.7)", "F.leaky_relu({x}, 0.2)", "F.softplus({x}, beta=2, threshold=3)",
    "F.hardtanh({x}, -0.5, 0.8)", "F.hardshrink({x}, 0.3)", "F.softshrink({x}, 0.3)", "F.threshold({x}, 0.1, -0.4)",
    "F.gelu({x}, approximate='tanh')", "F.rrelu({x}, training=False)", "torch.clamp({x}, -0.6, 0.9)",
    "torch.clamp({x}, min=-0.2)",
    "torch.clamp({x}, max=0.4)", "{x} + {n}", "{n} - {x}", "{x} * {n}", "{x} / 1.7", "1.3 / ({x}.abs() + 0.5)",
    "torch.pow({x}, 2)", "torch.pow({x}.abs() + 0.2, {n})", "{x} ** 3", "2 ** {x}.clamp(-3, 3)", "torch.remainder({x}, 1.3)",
    "torch.fmod({x}, 0.9)", "torch.floor_divide({x}, 0.7)", "{x} // 0.6", "{x} % 0.8", "torch.add({x}, {x}, alpha={n})",
    "torch.rsub({x}, {n}, alpha=2)", "torch.mul({x}, {n})", "torch.true_divide({x}, 2)", "torch.special.xlog1py({x}, 0.7)",
    "torch.nn.functional.glu(torch.cat([{x}, {x}], 0), 0)", "torch.special.polygamma(1, {x}.abs() + 1)",
    "torch.where({x} > 0.1, {x}, {n})", "{x}.masked_fill({x} > 0.5, {n})", "torch.full_like({x}, {n}) * {x}",
    "torch.zeros_like({x}) + {x}", "torch.ones_like({x}) * {x}", "({x} > 0).to(torch.float64) * {x}",
    "{x}.ge(0.2).double() + {x}",
    "torch.bucketize({x}.detach(), torch.tensor([-1.0, 0.0, 1.0], dtype=torch.float64)).double() + {x}",
    "torch.isfinite({x}).double() * {x}", "{x}.to(torch.float32).to(torch.float64)", "{x}.float().double()",
    "F.prelu({x}, torch.tensor([0.3], dtype=torch.float64))", "torch.lerp({x}, {x}.sin(), 0.3)", "torch.nan_to_num({x}, 0.5)",
    "F.dropout({x}, 0.3, self.training)", "F.alpha_dropout({x}, 0.2, self.training)", "{x}.clamp_min(0.1).clamp_max(0.9)",
]  # fmt: skip
BINARY = [
    "{x} + {y}", "{x} - {y}", "{x} * {y}", "{x} / ({y}.abs() + 0.5)", "torch.add({x}, {y}, alpha={n})",
    "torch.sub({x}, {y}, alpha=2)",
    "torch.maximum({x}, {y})", "torch.minimum({x}, {y})", "torch.fmax({x}, {y})", "torch.fmin({x}, {y})",
    "torch.atan2({x}, {y})",
    "torch.hypot({x}, {y})", "torch.pow({x}.abs() + 0.3, {y}.clamp(-2, 2))", "torch.where({y} > 0, {x}, {y})",
    "torch.lerp({x}, {y}, 0.4)", "torch.addcmul({x}, {y}, {x}, value=0.3)",
    "torch.addcdiv({x}, {y}, {x}.abs() + 1, value=-0.4)",
    "torch.copysign({x}, {y})", "torch.fmod({x}, {y}.abs() + 0.6)", "torch.remainder({x}, {y}.abs() + 0.7)",
    "torch.xlogy({x}, {y}.abs() + 0.2)", "torch.logaddexp({x}, {y})", "torch.logaddexp2({x}, {y})",
    "torch.special.xlog1py({x}, {y}.abs())",
    "F.mse_loss({x}, {y}.expand_as({x}), reduction='none')",
    "F.smooth_l1_loss({x}, {y}.expand_as({x}), reduction='none', beta=0.5)",
    "F.huber_loss({x}, {y}.expand_as({x}), reduction='none')",
    "F.binary_cross_entropy_with_logits({x}, {y}.expand_as({x}).sigmoid(), reduction='none')",
    "F.l1_loss({x}, {y}.expand_as({x}), reduction='none')",
    "F.soft_margin_loss({x}, {y}.expand_as({x}).sign(), reduction='none')",
    "F.kl_div({x}, {y}.expand_as({x}).sigmoid(), reduction='none')",
    "F.poisson_nll_loss({x}.clamp(-3, 3), {y}.expand_as({x}).abs(), reduction='none')",
    "F.gaussian_nll_loss({x}, {y}.expand_as({x}), {y}.expand_as({x}).abs() + 0.5, reduction='none')",
    "torch.where({x} > {y}, {x}.sin(), {y}.cos())",
    "({x} > {y}).double() - {x}", "torch.eq({x}, {y}).double() + {y}", "{x}.masked_fill({y} < -0.4, 0.25)",
    "torch.special.zeta({y}.abs() + 2, {x}.abs() + 1)",
    "torch.nextafter({x}, {y}).detach() + {x}", "torch.ldexp({x}, {y}.sign())",
    "torch.float_power({x}.abs() + 0.4, {y}.clamp(-1, 1))",
    "torch.div({x}, {y}.abs() + 0.8, rounding_mode='floor') + {x}",
    "torch.div({x}, {y}.abs() + 0.8, rounding_mode='trunc') - {x}",
]  # fmt: skip
IN_PLACE = [
    "{x}.mul_({n})", "{x}.add_({y})", "{x}.sub_({y}, alpha=0.5)", "{x}.div_(1.5)", "{x}.relu_()", "{x}.clamp_(-0.7, 0.7)",
    "{x}.tanh_()",
    "{x}.sigmoid_()", "{x}.addcmul_({y}, {y}, value=0.2)", "{x}.copy_({y})", "{x}.masked_fill_({x} > 0.3, 0.1)",
    "{x}.fill_({n})", "{x}.zero_()",
    "F.leaky_relu_({x}, 0.1)", "F.elu_({x})", "{x}.neg_()", "{x}.sin_()", "{x}.square_()", "{x}.lerp_({y}, 0.3)",
    "{x}.exp_().clamp_(max=5)",
    "F.hardtanh_({x})", "{x}.mul_({y})", "{x}.abs_()", "{x}.floor_()", "{x}.pow_(2)",
    "{x}.detach_()", "{x}.normal_()", "{x}.bernoulli_(0.6)", "{x}.uniform_(-1, 1)",
]  # fmt: skip
BROADCAST = ("same", "channel", "scalar", "row", "column", "reduced", "image", "number")


def _unary(kind: str, function: str) -> Draw:
    words = _WORDS.get(function, f"{function}({{}})")

    def draw(w: Workbench) -> str:
        return words.format(SAFE[kind].format(w.value()))

    return draw


def other(w: Workbench, x: str) -> str:
    """A second operand, of the shape of x or one that broadcasts against it."""
    t, kind = w.tensor(x), w.pick(*BROADCAST)
    if kind == "channel" and t.ndim > 1:
        return w.parameter(t.shape[1], *[1] * (t.ndim - 2))
    if kind == "scalar":
        return w.parameter(*w.pick((), (1,)))
    if kind == "row" and t.ndim:
        return w.parameter(t.shape[-1])
    if kind == "column" and t.ndim > 1:
        return w.parameter(t.shape[-2], 1)
    if kind == "reduced" and t.ndim:
        return f"{x}.{w.pick('mean', 'sum', 'amax')}({w.dims(x)}, keepdim=True)"
    if kind == "image" and t.ndim > 1:
        return w.parameter(*t.shape[1:])
    if kind == "number":
        return f"torch.tensor({w.number()}, dtype=torch.float64)"
    return w.value(lambda o: o.shape == t.shape)


def _with_numbers(words: str) -> Draw:
    return lambda w: words.format(x=w.value(), n=w.number())


def _binary(words: str) -> Draw:
    def draw(w: Workbench) -> str:
        x = w.value(lambda t: t.ndim >= 0)
        pair = x, other(w, x)
        if w.chance(0.2) and "expand_as" not in words:
            pair = pair[::-1]
        return words.format(x=pair[0], y=pair[1], n=w.number())

    return draw


def _in_place(words: str) -> Draw:
    """A write to a copy, to a view of one, or to a value itself."""

    def draw(w: Workbench) -> str:
        x = w.value(lambda t: t.ndim > 0)
        made = w.new()
        y = w.value(lambda t: t.shape == w.tensor(x).shape)
        if w.chance(0.25):
            return f"!{words.format(x=x, y=y, n=w.number())}"
        unseen = "with torch.no_grad():\n!    " if w.chance(0.2) else ""  # autograd does not see the write then
        if w.chance(0.5):
            return f"!{made} = {x}.clone()\n!{unseen}{words.format(x=made, y=y, n=w.number())}\n{made} * 1.0"
        view = w.pick(
            "[:1]", "[..., ::2]", "[:, -1:]", ".flatten(1)", ".transpose(0, -1)", "[..., 1:]", ".unsqueeze(0)", ".select(-1, 0)"
        )
        inner = words.format(x=f"{made}{view}", y=f"{y}{view}", n=w.number())
        return f"!{made} = {x} + 0\n!{unseen}{inner}\n{made} * 1.0"

    return draw


DRAWS: list[tuple[float, Draw]] = [
    *((0.35, _unary(kind, function)) for kind, functions in UNARY.items() for function in functions.split()),
    *((0.4, _with_numbers(words)) for words in WITH_NUMBERS),
    *((0.6, _binary(words)) for words in BINARY),
    *((0.4, _in_place(words)) for words in IN_PLACE),
]
