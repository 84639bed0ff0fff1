"""Is pooling over what counts its formula, and the same on tiles and in a stream, where a tile or all of it has nothing?"""

from __future__ import annotations

import math

import pytest
import torch
from ranks import on_ranks
from torch import Tensor, nn

import widefield as wf
from widefield.models._pooling import AveragePooling, GatedAttentionPooling, counts_on
from widefield.models.resnet import build
from widefield.plans import Plan
from widefield.tiled.api import tile, whole

POOLINGS = ("average", "attention")
SHAPE = (2, 4, 37, 23)
"""Of slides with a channel of tissue: odd sizes, and the map of features is 19 x 12."""
COUNTS = ("some", "none above", "none in one image", "none", "all")


def map_of(count: str) -> tuple[Tensor, Tensor]:
    """Features (2, 5, 6, 7), and how much each position counts."""
    generator = torch.Generator().manual_seed(0)
    features = 40 * torch.randn(2, 5, 6, 7, dtype=torch.float64, generator=generator)
    counts = torch.rand(2, 1, 6, 7, dtype=torch.float64, generator=generator) * torch.randint(
        2, (2, 1, 6, 7), generator=generator
    )
    if count == "none in one image":
        counts[1] = 0
    return features, torch.ones_like(counts) if count == "all" else 0 * counts if count == "none" else counts


@pytest.mark.parametrize("count", ["some", "none in one image", "none", "all"])
def test_average_pooling_is_the_mean_of_what_counts(count):
    features, counts = map_of(count)
    for image, weights, found in zip(features, counts, AveragePooling()(features, counts), strict=True):
        total = float(weights.sum())
        wanted = (image * weights).sum((1, 2)) / total if total else torch.zeros(5, dtype=torch.float64)
        torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)
    if count == "all":
        torch.testing.assert_close(AveragePooling()(features), features.mean((2, 3)), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("count", ["some", "none in one image", "none", "all"])
def test_attention_pooling_is_its_formula_position_by_position(count):
    """Equation 9 of Ilse et al. 2018 with the instances h of one bag, each in an own product; scores may be far apart."""
    torch.manual_seed(0)
    pooling = GatedAttentionPooling(5, 3).double()
    features, counts = map_of(count)
    pooling.requires_grad_(False)
    v, u, w = (layer.weight.flatten(1) for layer in (pooling.content, pooling.gate, pooling.score))
    for image, weights, found in zip(features, counts, pooling(features, counts), strict=True):
        bag = [(image[:, r, c], float(weights[0, r, c])) for r in range(6) for c in range(7) if weights[0, r, c] > 0]
        scores = [
            float(w @ (torch.tanh(v @ h + pooling.content.bias) * torch.sigmoid(u @ h + pooling.gate.bias))) for h, _ in bag
        ]
        shares = [count * math.exp(score) for score, (_, count) in zip(scores, bag, strict=True)]
        wanted = sum((s / sum(shares) * h for s, (h, _) in zip(shares, bag, strict=True)), torch.zeros(5, dtype=torch.float64))
        torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)
    if count == "all":
        torch.testing.assert_close(pooling(features), pooling(features, counts), rtol=1e-12, atol=1e-12)


def test_a_position_counts_by_the_share_of_its_pixels():
    counts = torch.zeros(1, 1, 4, 6)
    counts[..., :2, :3] = 1
    assert counts_on(counts, torch.Size((2, 2))).flatten().tolist() == [1, 0, 0, 0]
    assert counts_on(counts, torch.Size((2, 3))).flatten().tolist() == [1, 0.5, 0, 0, 0, 0]


def test_what_does_not_count_changes_nothing_and_gets_no_gradient():
    """Where no convolution mixes the two; a score of glass above all others must not push those out of the exponent."""
    torch.manual_seed(0)
    pooling = GatedAttentionPooling(5, 3).double()
    features, counts = map_of("some")
    changed = torch.where(counts > 0, features, 1e6 * features.sign()).requires_grad_()
    found = pooling(changed, counts)
    torch.testing.assert_close(found, pooling(features, counts), rtol=1e-12, atol=1e-12)
    found.sum().backward()
    assert not changed.grad[(counts == 0).expand_as(changed)].any() and changed.grad.isfinite().all()


def slides(count: str) -> Tensor:
    image = torch.randn(SHAPE, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    mask = torch.zeros(SHAPE[0], *SHAPE[2:], dtype=torch.float64)
    if count != "none":
        mask[:, 25:33, 3:20] = 1
    if count == "some":
        mask[:, 2:9, 1:9] = 1
    if count == "all":
        mask[:] = 1
    if count == "none in one image":
        mask[0] = 0
    image[:, 3] = mask
    return image


def net(pooling: str) -> nn.Module:
    torch.manual_seed(0)
    return build(4, 3, widths=(4, 6), pooling=pooling, attention=5, tissue=True).double()


def results(model: nn.Module, image: Tensor, mesh=None) -> dict[str, Tensor]:
    """Output and gradients, these averaged over ranks as data parallelism would."""
    image = image.clone().requires_grad_()
    output = whole(model(image if mesh is None else tile(image, mesh)))
    output.backward(torch.linspace(-1, 2, output.numel(), dtype=torch.float64).view_as(output))
    found = {name: whole(p.grad) for name, p in model.named_parameters()}
    if mesh is not None:
        found = {name: mesh.sum_(gradient.clone()) / mesh.size for name, gradient in found.items()}
    return {**found, "the output": output.detach(), "the image": image.grad}


def check(found: dict[str, Tensor], pooling: str, count: str) -> None:
    for name, wanted in results(net(pooling), slides(count)).items():
        assert found[name].isfinite().all()
        torch.testing.assert_close(found[name], wanted, rtol=1e-10, atol=1e-11, msg=lambda text, name=name: f"{name}: {text}")


def on_tiles(mesh) -> None:
    for pooling, count in [("average", "none above"), *(("attention", count) for count in COUNTS)]:
        check(results(net(pooling), slides(count), mesh), pooling, count)


def streamed_tiles(mesh) -> None:
    for count in ("none above", "none in one image"):
        check(results(wf.stream(net("attention"), tiles=(2, 2)), slides(count), mesh), "attention", count)


def test_tiles_in_space_pool_as_the_whole_whatever_counts_in_them():
    on_ranks(2, on_tiles, plan=Plan(space=[2, 1]))


def test_tiles_in_space_and_time_pool_as_the_whole():
    on_ranks(2, streamed_tiles, plan=Plan(space=[2, 1]))


@pytest.mark.parametrize("pooling", POOLINGS)
@pytest.mark.parametrize("tiles", [(3, 1), (2, 3)], ids=str)
def test_tiles_in_time_pool_as_the_whole_whatever_counts_in_them(pooling, tiles):
    for count in COUNTS if pooling == "attention" else ("none above", "none"):
        check(results(wf.stream(net(pooling), tiles=tiles, strict=True), slides(count)), pooling, count)


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"pooling": "median"}, "model.options.pooling is 'median'; it is one of average, attention"),
        ({"tissue": 1}, "model.options.tissue is 1 with 3 channels"),
        ({"attention": 0}, "model.options.attention is 0"),
    ],
)
def test_what_is_no_pooling_is_refused(options, told):
    with pytest.raises(ValueError) as caught:
        build(3, 2, **options)
    assert told in str(caught.value)


def test_a_channel_of_tissue_alone_is_no_image():
    with pytest.raises(ValueError, match="with 1 channels"):
        build(1, 2, tissue=True)
