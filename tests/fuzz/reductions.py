"""Operations along dims: sums, extremes, order, running sums, softmax, statistics, norms."""

from __future__ import annotations

from .workbench import Draw, Workbench

ALONG_SOME = [
    "{x}.sum({d}, keepdim={k})", "{x}.mean({d}, keepdim={k})", "{x}.amax({d}, keepdim={k})", "{x}.amin({d}, keepdim={k})",
    "{x}.var({d}, keepdim={k})", "{x}.std({d}, keepdim={k})", "{x}.var({d}, correction=0, keepdim={k})",
    "torch.logsumexp({x}, {d}, keepdim={k})",
    "torch.nansum({x}, {d}, keepdim={k})", "torch.nanmean({x}, {d}, keepdim={k})",
    "torch.linalg.vector_norm({x}, 2, {d}, keepdim={k})",
    "torch.linalg.vector_norm({x}, 1, {d}, keepdim={k})", "torch.linalg.vector_norm({x}, 3, {d}, keepdim={k})",
    "torch.linalg.vector_norm({x}, float('inf'), {d}, keepdim={k})",
    "torch.count_nonzero({x} > 0, {d}).double() + {x}.sum({d})",
    "torch.norm({x}, dim={d}, keepdim={k})", "torch.var_mean({x}, {d}, keepdim={k})[1]",
    "torch.std_mean({x}, {d}, keepdim={k})[0]",
    "torch.aminmax({x}.sin())[1] * {x}", "({x} > 0).sum({d}, keepdim={k}).double() * 0.1 + {x}.mean({d}, keepdim={k})",
]  # fmt: skip
ALONG_ONE = [
    "{x}.max({d}, keepdim={k})[0]", "{x}.min({d}, keepdim={k})[0]", "{x}.median({d}, keepdim={k})[0]",
    "{x}.mode({d}, keepdim={k})[0]",
    "{x}.cummax({d})[0]", "{x}.cummin({d})[0]", "{x}.cumsum({d})", "({x} * 0.5).cumprod({d})", "torch.logcumsumexp({x}, {d})",
    "{x}.prod({d}, keepdim={k})", "{x}.softmax({d})", "{x}.log_softmax({d})", "F.softmin({x}, {d})", "{x}.sort({d})[0]",
    "{x}.sort({d}, descending=True, stable=True)[0]", "torch.msort({x})", "{x}.argsort({d}).double() * 0.1 + {x}",
    "{x}.argmax({d}, keepdim=True).double() * 0.1 + {x}", "{x}.argmin({d}, keepdim=True).double() + {x}", "{x}.diff(dim={d})",
    "{x}.diff(n=2, dim={d})", "torch.quantile({x}, 0.3, {d}, keepdim={k})", "torch.nanquantile({x}, 0.6, {d}, keepdim={k})",
    "{x}.kthvalue(1, {d}, keepdim={k})[0]", "{x}.topk(min(2, {x}.shape[{d}]), {d})[0]", "{x}.topk(1, {d}, largest=False)[0]",
    "F.normalize({x}, p=2, dim={d})", "F.normalize({x}, p=1, dim={d}, eps=0.1)", "F.gumbel_softmax({x}, tau=0.7, dim={d})",
    "F.glu({x}, {d})", "torch.renorm({x}, 2, {d}, 0.8)", "F.cosine_similarity({x}, {x}.sin(), {d})",
    "torch.trapezoid({x}, dim={d})",
    "torch.cumulative_trapezoid({x}, dim={d})", "({x} > 0).any({d}, keepdim=True).double() * {x}",
    "({x} < 2).all({d}, keepdim=True).double() + {x}",
    "torch.gradient({x}, dim={d})[0]", "torch.softmax({x}, {d}, dtype=torch.float64)", "F.log_softmax({x}, {d}) * {x}",
]  # fmt: skip
TO_ONE = [
    "{x}.sum() * {x}", "{x} / (1 + {x}.std())", "{x} - {x}.mean()", "{x}.max() - {x}", "{x} * {x}.norm() * 0.1",
    "{x} + {x}.min()",
    "{x} * {x}.var(correction=0)", "{x} / ({x}.abs().amax() + 0.1)", "{x} * torch.linalg.vector_norm({x}, 1) * 0.01",
    "{x} * ({x} > 0).double().mean()", "{x} + {x}.median()", "{x} * torch.logsumexp({x}.flatten(), 0)",
    "{x} - torch.dot({x}.flatten(), {x}.flatten()) * 0.01",
    "{x} * {x}.prod().tanh()", "{x} + torch.quantile({x}.flatten()[:500], 0.4)", "{x} * F.mse_loss({x}, {x}.sin())",
    "{x} + F.l1_loss({x}, {x}.cos(), reduction='sum') * 0.01",
    "{x} * F.smooth_l1_loss({x}, {x} * 0.5)", "{x} * F.binary_cross_entropy({x}.sigmoid(), {x}.cos().abs())",
    "{x} * F.kl_div({x}, {x}.sigmoid(), reduction='batchmean') * 0.1",
    "{x} * torch.count_nonzero({x} > 0.2) * 0.01", "{x} + ({x} > 1).any()", "{x} * F.huber_loss({x}, {x}.tanh())",
]  # fmt: skip
OF_IMAGES = [
    "{x} * F.cross_entropy({x}, {x}.detach().argmax(1))", "{x} * F.cross_entropy({x}, {x}.softmax(1)) * 0.2",
    "{x} * F.nll_loss({x}.log_softmax(1), {x}.detach().argmin(1)) * 0.1",
    "F.cross_entropy({x}, {x}.detach().argmin(1), reduction='none').unsqueeze(1) + {x}",
    "{x} * F.cross_entropy({x}, {x}.detach().argmax(1), label_smoothing=0.1) * 0.2",
    "{x} * F.cross_entropy({x}, {x}.detach().argmin(1), ignore_index=0) * 0.1",
    "{x} + F.multilabel_soft_margin_loss({x}, ({x} > 0).double(), reduction='none').unsqueeze(1)",
    "F.pairwise_distance({x}, {x}.sin(), keepdim=True) + {x}",
    "F.local_response_norm({x}, 3)", "F.local_response_norm({x}, 2, alpha=0.1, beta=0.6, k=1.5)",
    "F.triplet_margin_loss({x}, {x}.sin(), {x}.cos(), reduction='none').unsqueeze(-1) + {x}",
]  # fmt: skip


def _some(words: str) -> Draw:
    def draw(w: Workbench) -> str:
        x = w.value()
        return words.format(x=x, d=w.dims(x), k=w.chance(0.5))

    return draw


def _one(words: str) -> Draw:
    def draw(w: Workbench) -> str:
        x = w.value()
        return words.format(x=x, d=w.dim(x), k=w.chance(0.5))

    return draw


def _plain(words: str) -> Draw:
    return lambda w: words.format(x=w.value())


def _image(words: str) -> Draw:
    return lambda w: words.format(x=w.image())


DRAWS: list[tuple[float, Draw]] = [
    *((0.7, _some(words)) for words in ALONG_SOME),
    *((0.6, _one(words)) for words in ALONG_ONE),
    *((0.5, _plain(words)) for words in TO_ONE),
    *((0.5, _image(words)) for words in OF_IMAGES),
]
