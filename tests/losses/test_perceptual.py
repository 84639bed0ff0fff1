"""Is a perceptual loss the distance of the named layers' features, on whole images and on tiles, of a frozen network?"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from devices import on_gpu_too
from marks import LONG_ON_CPU
from ranks import on_ranks
from safetensors.torch import save_file
from small_recipe import ALONE, SmallRecipe
from torch import nn
from torchvision.models import squeezenet1_1

from widefield.comm.mesh import Mesh, World
from widefield.config import StreamConfig
from widefield.losses import Targets, build
from widefield.plans import Plan
from widefield.training.assemble import assemble, learner_of
from widefield.training.example_pass import trial_step

SMALL = [
    "data.options.size=[47, 36]", "data.options.pages=[6, 5]", "data.workers=0", "data.batch_size=3", "precision=float64",
    "data.evaluate_batch_size=2", "model.options={width: 4, blocks: 1}", "mesh.space=[]",
]  # fmt: skip
RECIPE = SmallRecipe("page_restoration", SMALL)
LAYERS = {"features.1": 0.5, "features.4": 2.0}


@pytest.fixture(scope="module")
def weights(tmp_path_factory) -> Path:
    """Of a network of torchvision's that is small; random ones."""
    torch.manual_seed(0)
    file = tmp_path_factory.mktemp("weights") / "squeezenet.pth"
    torch.save(squeezenet1_1(weights=None).state_dict(), file)
    return file


def asked(weights: Path, terms: str = "") -> list[str]:
    options = f"network: torchvision/squeezenet1_1, weights: '{weights}', layers: {{features.1: 0.5, features.4: 2}}"
    return ["task.loss=weighted", f"task.loss_options={{terms: {{l1: 1, perceptual: {{weight: 0.3, {options}}}}}}}"]


def by_hand(weights: Path, output: torch.Tensor, target: torch.Tensor, distance: str) -> torch.Tensor:
    """The mean over images and layers' values, from the plain network."""
    net = squeezenet1_1(weights=None).double().eval()
    net.load_state_dict(torch.load(weights, weights_only=True))
    of_imagenet = torch.tensor([[0.485, 0.456, 0.406], [0.229, 0.224, 0.225]], dtype=torch.float64)
    mean, std = of_imagenet.view(2, 1, 3, 1, 1)
    total = torch.zeros(()).double()
    for name, weight in LAYERS.items():
        layers = net.features[: int(name.partition(".")[2]) + 1]
        one, other = (layers((image.expand(-1, 3, -1, -1) - mean) / std) for image in (output, target))
        total = total + weight * ((one - other).abs() if distance == "l1" else (one - other) ** 2).mean()
    return total


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("distance", ["l1", "mse"])
def test_the_loss_and_its_gradient_are_those_of_the_plain_network(weights, channels, distance):
    generator = torch.Generator().manual_seed(1)
    output, target = (torch.rand(2, channels, 33, 41, dtype=torch.float64, generator=generator) for _ in range(2))
    output.requires_grad_()
    options = {"network": "torchvision/squeezenet1_1", "weights": str(weights), "layers": LAYERS, "distance": distance}
    loss = build("perceptual", Targets("image", channels), options)
    found, wanted = loss.loss_sum(output, target) / loss.count(target), by_hand(weights, output, target, distance)
    torch.testing.assert_close(found, wanted, rtol=1e-12, atol=0)
    slopes = [torch.autograd.grad(value, output)[0] for value in (found, wanted)]
    torch.testing.assert_close(*slopes, rtol=1e-10, atol=1e-14)


@LONG_ON_CPU
@on_gpu_too
@pytest.mark.parametrize("plan", [Plan(replicate=2), Plan(space=[2, 1]), Plan(shard=2)], ids=str)
def test_steps_with_a_perceptual_loss_are_those_of_one_rank(weights, plan):
    """Three samples, in passes of two and one too, so that a copy has none."""
    uneven = [*asked(weights), "gradient.accumulate=2"]
    wanted, of_uneven = RECIPE.alone(3, *asked(weights)), RECIPE.alone(2, *uneven)
    assert wanted != pytest.approx(RECIPE.alone(3), rel=1e-3)
    for found in on_ranks(plan.ranks, twice, asked(weights), uneven, plan=plan):
        assert found == pytest.approx([*wanted, *of_uneven], rel=1e-8)


def twice(mesh: Mesh, settings: list[str], uneven: list[str]) -> list[float]:
    return RECIPE.numbers(mesh, 3, *settings) + RECIPE.numbers(mesh, 2, *uneven)


def test_the_network_is_no_part_of_the_model_and_stays_as_it_is(weights):
    parts = assemble(RECIPE.config(*asked(weights)), Mesh(ALONE, World(), torch.device("cpu")))
    learner, _ = learner_of(parts)
    assert not any("features" in name for name in learner.model.state_dict())
    trial_step(learner).backward()
    own = {"network": "backbones:features_of_one_channel", "mean": [0.0], "std": [1.0]}
    loss = build("perceptual", Targets("image", 1), own)
    of_loss = next(cell.cell_contents for cell in loss.each.__closure__ if hasattr(cell.cell_contents, "module"))
    assert not of_loss.module.training and not any(one.requires_grad for one in of_loss.module.parameters())


def test_a_network_of_ones_own_gives_its_features_itself_and_may_get_weights_of_a_file(tmp_path):
    torch.manual_seed(2)
    plain = nn.Sequential(nn.Conv2d(1, 3, 3), nn.ReLU()).double()
    save_file(plain.state_dict(), tmp_path / "own.safetensors")
    options = {"network": "backbones:features_of_one_channel", "weights": str(tmp_path / "own.safetensors")}
    loss = build("perceptual", Targets("image", 1), options | {"mean": [0.5], "std": [0.5]})
    output, target = torch.rand(2, 2, 1, 9, 7, dtype=torch.float64)
    wanted = (plain(2 * output - 1) - plain(2 * target - 1)).abs().mean()
    torch.testing.assert_close(loss.loss_sum(output, target) / 2, wanted, rtol=1e-12, atol=0)


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({}, r"features of torchvision/vgg19, whose weights are not shipped here, and nothing is downloaded; set weights to a"),
        ({"network": "torchvision/vgg"}, r"layers is empty and torchvision/vgg has no layers that are usual; name them"),
        (
            {"network": "torchvision/vgg", "layers": {"a": 1}},
            r"names the network 'torchvision/vgg'; torchvision/NAME is wanted",
        ),
        ({"network": "torchvision/resnet18", "weights": "FILE", "layers": {"layer1": 1}}, r"FILE is of another network than"),
        ({"network": "torchvision/squeezenet1_1", "weights": "FILE", "layers": {"layer1": 1}}, r"names the layer 'layer1' and"),
        ({"weights": "nowhere.pth"}, r"there are no weights at nowhere.pth"),
        ({"layers": {"features.1": -1}}, r"layers is .*; names with weights of 0 or more are wanted"),
        ({"distance": "cosine"}, r"distance is 'cosine'; l1 or mse is wanted"),
        ({"mean": [0.5]}, r"has mean \[0.5\] and std \[.*\]; one number per channel is wanted"),
        ({"network": "backbones:nowhere"}, r"network is 'backbones:nowhere' and that cannot be imported"),
    ],
)
def test_what_does_not_fit_is_refused(weights, options, told):
    options = {key: str(weights) if value == "FILE" else value for key, value in options.items()}
    with pytest.raises(ValueError, match=told.replace("FILE", str(weights))):
        build("perceptual", Targets("image", 1), options)


def test_volumes_other_channels_labels_and_streams_are_refused(weights):
    own = {"network": "backbones:features_of_one_channel", "mean": [0.5], "std": [0.5]}
    loss = build("perceptual", Targets("image", 1), own)
    for shape in ((1, 1, 4, 4, 4), (1, 2, 4, 4)):
        with pytest.raises(
            ValueError, match=r"takes images \(C, H, W\) of 1 channels, or of one, which is repeated, and these"
        ):
            loss.loss_sum(torch.zeros(shape), torch.zeros(shape))
    with pytest.raises(ValueError, match=r"task.loss=perceptual is for targets of the kinds image and the task learns 'class'"):
        build("perceptual", Targets("class", 3), own)
    with pytest.raises(
        NotImplementedError, match=r"in a stream and task.loss=weighted runs a network of its own on what leaves"
    ):
        RECIPE.alone(1, *asked(weights), plan=Plan(stream=StreamConfig(tiles=[2, 2])))
