"""Is a model what its name and options say, and is a name that is none refused with the nearest?"""

import re
import sys

import pytest
import torch
from torch import nn

from widefield.config import ModelConfig
from widefield.models import build
from widefield.naming import load, names_in
from widefield.tasks._adversarial import answers_of

CASES = [(name, *case) for name in names_in("widefield.models") for case in load("widefield.models", name).CASES]


def made(name: str, channels: int = 3, classes: int = 10, **options) -> nn.Module:
    return build(ModelConfig(name=name, options=options), in_channels=channels, num_classes=classes)


def tensors_of(output) -> list[torch.Tensor]:
    """Of an output, or of all levels of a detector's."""
    return [output] if isinstance(output, torch.Tensor) else [one for level in output for one in level]


def refusal(name: str, channels: int = 3, **options) -> str:
    with pytest.raises(ValueError) as caught:
        made(name, channels, **options)
    return str(caught.value)


# ---------------------------------------------------------------------------------------------- ours


@pytest.mark.parametrize(("name", "options", "shape", "wanted"), CASES, ids=[case[0] for case in CASES])
def test_every_model_answers_in_the_shape_it_states(name, options, shape, wanted):
    model = made(name, shape[1], **options)
    found = [one.shape for one in tensors_of(model(torch.zeros(shape)))]
    assert found == (wanted if isinstance(wanted, list) else [wanted])


@pytest.mark.parametrize(("name", "options", "shape", "wanted"), CASES, ids=[case[0] for case in CASES])
def test_every_parameter_of_a_model_learns(name, options, shape, wanted):
    """In float64; a parameter without gradient is one that the forward pass forgot."""
    torch.manual_seed(0)
    model = made(name, shape[1], **options).double()
    image = torch.randn(shape, dtype=torch.float64)
    found = tensors_of(model(image))
    if name == "gan":
        found += [features[-1] for features in answers_of(model.discriminator(image, *found))]
    if name == "faster_rcnn":
        found += model.roi_heads(torch.randn(2, options["features"], 7, 7, dtype=torch.float64))
    sum(one.square().sum() for one in found).backward()
    assert [name for name, p in model.named_parameters() if p.grad is None or not p.grad.any()] == []


@pytest.mark.parametrize(("name", "options", "shape", "wanted"), CASES, ids=[case[0] for case in CASES])
def test_the_seed_decides_the_weights_of_a_model(name, options, shape, wanted):
    weights = []
    for seed in (3, 3, 4):
        torch.manual_seed(seed)
        weights.append(torch.cat([p.flatten() for p in made(name, shape[1], **options).parameters()]))
    assert torch.equal(weights[0], weights[1]) and not torch.equal(weights[0], weights[2])


def test_a_residual_block_is_its_formula():
    """ReLU(norm(conv(ReLU(norm(conv x)))) + x), written out with the weights of the block."""
    torch.manual_seed(0)
    model = made("resnet", widths=[4], blocks=1).double().eval()
    block, x = model.stages[0], torch.randn(2, 4, 7, 5, dtype=torch.float64)
    scale = (1 + 1e-5) ** -0.5  # fresh running statistics: mean 0, variance 1
    conv = torch.nn.functional.conv2d
    y = (conv(x, block.conv1.weight, padding=1) * scale).relu()
    wanted = (conv(y, block.conv2.weight, padding=1) * scale + x).relu()
    torch.testing.assert_close(block(x), wanted, rtol=1e-12, atol=1e-12)


def test_a_unet_is_its_formula():
    """One level down and up again: what the skip carries stands beside what came from below, resized to its odd size."""
    torch.manual_seed(0)
    model = made("unet", widths=[4, 8]).double().eval()
    x = torch.randn(2, 3, 7, 5, dtype=torch.float64)
    top = model.down[0](x)
    below = model.narrow[0](model.down[1](torch.nn.functional.max_pool2d(top, 2)))
    resized = torch.nn.functional.interpolate(below, size=(7, 5), mode="bilinear", align_corners=False)
    wanted = model.head(model.up[0](torch.cat([top, resized], dim=1)))
    torch.testing.assert_close(model(x), wanted, rtol=1e-12, atol=1e-12)


def test_the_norm_of_a_unet_changes_no_name_of_a_parameter():
    names = [[name for name, _ in made("unet", widths=[4, 6], norm=norm).named_parameters()] for norm in ("batch", "group")]
    assert names[0] == names[1]


def test_a_unet_with_group_norm_answers_for_an_image_without_looking_at_others():
    torch.manual_seed(0)
    model, x = made("unet", widths=[8, 12], norm="group").double(), torch.randn(3, 3, 9, 8, dtype=torch.float64)
    assert [layer.num_groups for layer in model.modules() if isinstance(layer, nn.GroupNorm)][:4] == [8, 8, 4, 4]
    torch.testing.assert_close(model(x)[1:2], model(x[1:2]), rtol=1e-12, atol=1e-12)


def test_dropout_is_where_the_option_says():
    assert made("resnet", dropout=0.25).dropout.p == 0.25


# ---------------------------------------------------------------------------------------------- others'


def test_torchvisions_models_come_by_name_with_options():
    model = made("torchvision/resnet18", classes=7, zero_init_residual=True)
    assert model.fc.out_features == 7 and not model.layer1[0].bn2.weight.any()


def test_timms_models_come_by_name_with_options_and_any_channels():
    model = made("timm/resnet18", channels=1, classes=7, drop_rate=0.1)
    assert model.conv1.in_channels == 1 and model.fc.out_features == 7 and model.drop_rate == 0.1


@pytest.fixture
def own(tmp_path, monkeypatch):
    """A user's module `own_nets`."""
    text = (
        "from torch import nn\n"
        "def sized(in_channels, num_classes, width=4):\n"
        "    return nn.Sequential(nn.Conv2d(in_channels, width, 1), nn.Conv2d(width, num_classes, 1))\n"
        "def fixed():\n    return nn.Identity()\n"
        "def text():\n    return 'no module'\n"
        "class Net(nn.Module):\n    def __init__(self, num_classes):\n        super().__init__(); self.num = num_classes\n"
    )
    (tmp_path / "own_nets.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    yield
    sys.modules.pop("own_nets", None)


def test_a_users_callable_is_given_the_sizes_it_asks_for(own):
    model = made("own_nets:sized", channels=2, classes=7, width=5)
    assert [(conv.in_channels, conv.out_channels) for conv in model] == [(2, 5), (5, 7)]
    assert isinstance(made("own_nets:fixed"), nn.Identity) and made("own_nets:Net", classes=7).num == 7


# ---------------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("name", "told"),
    [
        (
            "resnt",
            "models/ has no resnt.py; did you mean 'resnet'? It has: faster_rcnn, fcos, gan, resnet, restorer, "
            "retinanet, self_supervised, ssd, unet.",
        ),
        ("torchvison/resnet18", "did you mean 'torchvision'? The part before / can be: monai, smp, timm, torchvision"),
        ("torchvision/resnet19", "torchvision has no model 'resnet19'; did you mean 'resnet1"),
        ("timm/resnet19", "timm has no model 'resnet19'; did you mean 'resnet1"),
        ("nowhere.at_all:net", "model.name is 'nowhere.at_all:net' and that cannot be imported: No module named 'nowhere'"),
        (
            "torch.nn:Idenity",
            "model.name is 'torch.nn:Idenity' and that cannot be imported: module 'torch.nn' has no attribute",
        ),
        (":net", "model.name is ':net' and that cannot be imported: "),
        ("torch.nn:functional", "model.name is 'torch.nn:functional' and that is a module, which cannot be called"),
    ],
)
def test_a_model_that_does_not_exist_is_refused_with_the_nearest(name, told):
    assert told in refusal(name)


@pytest.mark.parametrize("name", ["resnet", "torchvision/resnet18", "timm/resnet18"])
def test_options_that_a_model_does_not_take_are_refused(name):
    told = refusal(name, widht=3)
    assert told.startswith(f"{name} does not take model.options {{'widht': 3}}: ") and "unexpected keyword argument" in told


def test_a_norm_that_a_unet_does_not_have_is_refused():
    told = "model.options.norm is 'grup'; did you mean 'group'? It can be batch or group"
    assert refusal("unet", norm="grup") == told


def test_a_users_callable_must_take_the_options_and_give_a_module(own):
    assert refusal("own_nets:fixed", width=3).startswith("own_nets:fixed does not take model.options {'width': 3}: ")
    assert refusal("own_nets:text") == "own_nets:text gave a str; a torch.nn.Module is wanted"


def test_timm_that_is_not_installed_says_how_to_install_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "timm", None)
    assert re.search(r"needs timm, which is not installed; pip install 'widefield\[timm\]'", refusal("timm/resnet18"))


# ---------------------------------------------------------------------------------------------- volumes


def test_a_unet_of_volumes_is_that_of_images_plane_by_plane():
    """Where kernels see one plane alone and planes are not pooled; the weights are those of the images' network."""
    torch.manual_seed(0)
    flat = made("unet", widths=[4, 8]).double().eval()
    deep = made("unet", widths=[4, 8], dims=3, shrink=[[1, 2, 2]]).double().eval()
    weights = deep.state_dict()
    for name, weight in flat.state_dict().items():
        if weight.ndim == 4:
            weights[name] = torch.zeros_like(weights[name])
            weights[name][:, :, weights[name].shape[2] // 2] = weight
        else:
            weights[name] = weight
    deep.load_state_dict(weights)
    volume = torch.randn(1, 3, 5, 14, 11, dtype=torch.float64)
    wanted = torch.stack([flat(volume[:, :, plane]) for plane in range(5)], dim=2)
    torch.testing.assert_close(deep(volume), wanted, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"dims": 4}, "model.options.dims is 4; it is 2 for images, or 3 for volumes"),
        ({"shrink": [2]}, "model.options.shrink is [2]; for 3 further levels and 2 dims write 3 of a whole"),
        ({"widths": [4, 8], "shrink": [[2, 2, 2]]}, "for 1 further levels and 2 dims write 1"),
        ({"widths": [4, 8], "shrink": [0]}, "model.options.shrink is [0]; for 1 further levels"),
    ],
)  # fmt: skip
def test_dims_and_factors_that_no_unet_has_are_refused(options, told):
    assert told in refusal("unet", **options)


def test_the_dims_of_the_data_are_given_to_those_that_take_them():
    for name, size in (("unet", (2, 1, 5, 9, 7)), ("resnet", (2, 1, 5, 9, 7))):
        model = build(ModelConfig(name=name, options={"widths": [4, 6]}), in_channels=1, num_classes=3, dims=3)
        assert model(torch.zeros(size)).shape[:2] == (2, 3)
    assert refusal("resnet", dims=5) == "model.options.dims is 5; it is 2 for images, or 3 for volumes"
