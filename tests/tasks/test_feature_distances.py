"""Are FID and KID their definitions on all images at once, on any ranks, with the features of a network that is given?"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from backbones import features_of_three_channels
from ranks import on_ranks
from scipy.linalg import sqrtm
from small_recipe import SmallRecipe
from torch import Tensor
from torch.nn import functional as F
from torchvision.models import squeezenet1_1

from widefield.plans import Plan
from widefield.tasks._cases import CaseSizes
from widefield.tasks._feature_distances import FrechetDistance, KernelDistance
from widefield.training.evaluation import Evaluation

NETWORK = {"network": "backbones:features_of_three_channels", "mean": [0.5] * 3, "std": [0.25] * 3}
REAL, NOISE = torch.rand(2, 21, 3, 17, 14, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
MADE = 0.6 * REAL + 0.5 * NOISE  # above 1 in places, where it is clipped


def sizes(cases: int = len(REAL)) -> CaseSizes:
    return CaseSizes(3, cases, None, False)


def value_of(metric: FrechetDistance | KernelDistance, made: Tensor = MADE, real: Tensor = REAL) -> dict[str, float]:
    for rows in torch.arange(len(real)).split(8):
        metric.update(rows, made[rows], real[rows])
    return {name: float(value) for name, value in metric.columns().items()}


def features(images: Tensor) -> Tensor:
    return features_of_three_channels().double().eval()((images.clamp(0, 1) - 0.5) / 0.25)


def test_fid_is_its_definition_on_all_images_at_once():
    one, other = (features(images).detach().numpy() for images in (MADE, REAL))
    root = sqrtm(np.cov(one.T) @ np.cov(other.T)).real
    wanted = ((one.mean(0) - other.mean(0)) ** 2).sum() + np.trace(np.cov(one.T) + np.cov(other.T) - 2 * root)
    assert value_of(FrechetDistance(sizes(), size=None, **NETWORK)) == {"fid": pytest.approx(wanted, rel=1e-10)}
    assert value_of(FrechetDistance(sizes(), size=None, **NETWORK), REAL)["fid"] == pytest.approx(0, abs=1e-10)


def test_kid_is_its_definition_on_the_subsets_that_are_drawn():
    one, other = (features(images).detach() for images in (MADE, REAL))
    generator, wanted = torch.Generator().manual_seed(0), []
    for _ in range(3):
        x, y = (rows[torch.randperm(21, generator=generator)[:6]] for rows in (one, other))
        pairs = [(i, j) for i in range(6) for j in range(6)]
        within = sum(float((z[i] @ z[j] / 5 + 1) ** 3) for z in (x, y) for i, j in pairs if i != j) / 30
        wanted.append(within - 2 * sum(float((x[i] @ y[j] / 5 + 1) ** 3) for i, j in pairs) / 36)
    found = value_of(KernelDistance(sizes(), subsets=3, subset_size=6, size=None, **NETWORK))
    assert found == {"kid": pytest.approx(np.mean(wanted), rel=1e-10), "kid_std": pytest.approx(np.std(wanted), rel=1e-9)}


@pytest.mark.parametrize("kind", [FrechetDistance, KernelDistance])
def test_images_may_come_in_any_order_and_on_any_rank_and_some_may_be_missing(kind):
    whole, first, second = (kind(sizes(), size=None, **NETWORK) for _ in range(3))
    for metric, rows in ((first, [20, 3, 0]), (second, [1, 7]), (whole, [0, 1, 3, 7, 20])):
        metric.update(torch.tensor(rows), MADE[rows], REAL[rows])
    first.table += second.table
    found, wanted = first.columns(), whole.columns()
    assert found and all(float(found[name]) == pytest.approx(float(wanted[name]), rel=1e-10) for name in wanted)
    alone = kind(sizes(), size=None, **NETWORK)
    alone.update(torch.tensor([2]), MADE[2:3], REAL[2:3])
    assert all(value.isnan() for value in alone.columns().values())


@pytest.mark.long
def test_features_are_of_a_layer_whose_pixels_are_averaged_after_a_resize(tmp_path):
    torch.manual_seed(3)
    plain = squeezenet1_1(weights=None)
    torch.save(plain.state_dict(), tmp_path / "net.pth")
    asked = {"network": "torchvision/squeezenet1_1", "weights": str(tmp_path / "net.pth"), "layer": "features.3"}
    metric = KernelDistance(sizes(), size=40, **asked)
    mean, std = torch.tensor([[0.485, 0.456, 0.406], [0.229, 0.224, 0.225]], dtype=torch.float64).view(2, 1, 3, 1, 1)
    resized = F.interpolate(REAL[:2], (40, 40), mode="bilinear", antialias=True)
    wanted = plain.double().eval().features[:4]((resized - mean) / std).mean((2, 3))
    torch.testing.assert_close(metric.features(REAL[:2].float().double()), wanted, rtol=1e-6, atol=1e-9)
    assert metric.features.width == 128


# ---------------------------------------------------------------------------------------------- runs


METRICS = "{{network: 'backbones:features_of_three_channels', size: {size}{more}}}"
SMALL = [
    "data.options.size=[32, 24]", "data.options.scenes=[6, 5]", "data.workers=0", "data.batch_size=2", "precision=float64",
    "data.evaluate_batch_size=2", "mesh.space=[]",
    f"task.metrics=[{{fid: {METRICS.format(size='null', more='')}}}, {{kid: {METRICS.format(size=20, more=', subsets: 4')}}}]",
    "model.options.generator_options={width: 4, blocks: 1, strides: 2}",
    "model.options.discriminator_options={width: 4, strides: 2, spectral: false, normalized: true}",
]  # fmt: skip


def scores(found: Evaluation) -> list[float]:
    return [found.metrics[name] for name in ("fid", "kid", "kid_std")]


RECIPE = SmallRecipe("scene_gan", SMALL, scores)


@pytest.mark.long
@pytest.mark.parametrize("plan", [Plan(replicate=2), Plan(space=[2, 1]), Plan(shard=2)], ids=str)
def test_the_distances_of_a_trained_pair_are_those_of_one_rank(plan):
    """Five images on two copies are 3 and 2."""
    wanted = RECIPE.alone(2)
    for found in on_ranks(plan.ranks, RECIPE.numbers, 2, plan=plan):
        assert found == pytest.approx(wanted, rel=1e-8)


# ---------------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (
            {},
            r"fid compares features of a network, of which none is shipped here, and nothing is downloaded; name",
        ),
        ({"network": "torchvision/inception_v3"}, r"fid has no layer; name that of torchvision/inception_v3 whose features"),
        ({"network": "torchvision/inception_v3", "layer": "avgpool"}, r"whose weights are not shipped here, and nothing is"),
        (NETWORK | {"size": 0}, r"fid has size=0; a whole number of pixels is wanted, or null for no resizing"),
        (NETWORK | {"network": "backbones:sum_of_all"}, r"backbones:sum_of_all gives \(\) for 1 images; \(1, F\) is wanted"),
    ],
)
def test_what_does_not_fit_is_refused(options, told):
    with pytest.raises(ValueError, match=told):
        FrechetDistance(sizes(), **options)


def test_a_recipe_without_a_network_volumes_and_wrong_subsets_are_refused():
    with pytest.raises(ValueError, match=r"task.metrics: kid compares features of a network, of which none is shipped here"):
        RECIPE.alone(1, "task.metrics=[kid]")
    with pytest.raises(ValueError, match=r"task.metrics: fid cannot be made: .*unexpected keyword argument 'netwrok'"):
        RECIPE.alone(1, "task.metrics=[{fid: {netwrok: a}}]")
    with pytest.raises(ValueError, match=r"kid has subset_size=1; a whole number of 2 or more is wanted"):
        KernelDistance(sizes(), subset_size=1, **NETWORK)
    with pytest.raises(ValueError, match=r"takes images \(C, H, W\) of 3 channels"):
        FrechetDistance(sizes(), **NETWORK).update(torch.tensor([0]), MADE[:1, :, None], REAL[:1, :, None])


def test_a_file_that_is_written_anew_is_read_anew(tmp_path: Path):
    file, found = tmp_path / "own.pth", []
    for seed in (1, 2):
        torch.manual_seed(seed)
        net = features_of_three_channels()
        torch.save({name: torch.randn_like(value) for name, value in net.state_dict().items()}, file)
        found.append(value_of(FrechetDistance(sizes(), size=None, weights=str(file), **NETWORK))["fid"])
    assert found[0] != pytest.approx(found[1], rel=1e-3)
