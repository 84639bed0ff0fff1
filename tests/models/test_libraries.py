"""Are models of other libraries built for any channels and classes, and do pretrained weights come from the cache alone?"""

import hashlib
import sys

import pytest
import timm
import torch
from safetensors.torch import save_file
from timm.models import adapt_input_conv
from torch import nn
from torchvision import models as vision

from widefield.config import ModelConfig
from widefield.models import build, libraries
from widefield.models._first_convolution import first_convolution
from widefield.models._libraries import _cached
from widefield.models._output import outputs_of
from widefield.naming import load

FILES = {library: load("widefield.models._libraries", library) for library in libraries()}
CASES = [(f"{library}/{case[0]}", *case[1:]) for library, file in FILES.items() for case in file.CASES]


def made(name: str, channels: int = 3, classes: int = 5, *, load: bool = False, reasons=None, **keys) -> nn.Module:
    config = ModelConfig(name=name, **keys)
    return build(config, in_channels=channels, num_classes=classes, pretrained=load, reasons=reasons)


def refusal(name: str, channels: int = 3, **keys) -> str:
    with pytest.raises((ValueError, NotImplementedError)) as caught:
        made(name, channels, load=True, **keys)
    return str(caught.value)


@pytest.mark.parametrize(("name", "options", "shape", "wanted"), CASES, ids=[f"{case[0]}-{case[2][1]}" for case in CASES])
def test_every_library_builds_models_for_any_channels_and_classes(name, options, shape, wanted):
    assert made(name, shape[1], 10, options=options).eval()(torch.zeros(shape)).shape == wanted


# ---------------------------------------------------------------------------------------------- channels


def test_a_replaced_first_convolution_gives_sums_as_large_as_before():
    """Noise through 64 filters over 12 channels varies as through those of 3: within a tenth, of 64 x 37 x 37 values."""
    torch.manual_seed(0)
    stds = [first_convolution(made("torchvision/resnet18", n))[1](torch.randn(2, n, 64, 64)).std() for n in (3, 12)]
    assert stds[1].item() == pytest.approx(stds[0].item(), rel=0.1)


# ---------------------------------------------------------------------------------------------- pretrained weights


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """An empty cache of torch's hub; `cache(kind, model)` puts a model's state into it, as the weights of an enumeration."""
    monkeypatch.setenv("TORCH_HOME", str(tmp_path))
    folder = tmp_path / "hub" / "checkpoints"
    folder.mkdir(parents=True)

    def put(kind, model: nn.Module):
        torch.save(model.state_dict(), folder / "made.pth")
        digest = hashlib.sha256((folder / "made.pth").read_bytes()).hexdigest()[:8]
        monkeypatch.setattr(kind, "url", property(lambda self: f"https://nowhere.example/net-{digest}.pth"))
        return (folder / "made.pth").rename(folder / f"net-{digest}.pth")

    return put


def changed(net: nn.Module, wanted: dict) -> list[str]:
    """The tensors of a net that are not those wanted."""
    return [name for name, value in net.state_dict().items() if not value.equal(wanted[name])]


def test_pretrained_weights_of_torchvision_keep_all_but_the_head(cache):
    torch.manual_seed(0)
    whole, reasons = vision.resnet18(), []
    cache(vision.ResNet18_Weights, whole)
    net = made("torchvision/resnet18", pretrained=True, load=True, reasons=reasons)
    assert changed(net, whole.state_dict()) == ["fc.weight", "fc.bias"]
    assert reasons[0].endswith("; its own start keep fc (2), of another number of classes")
    assert changed(made("torchvision/resnet18", 3, 1000, pretrained=True, load=True), whole.state_dict()) == []


@pytest.mark.parametrize("channels", [1, 2, 5])
def test_the_first_convolution_is_adapted_as_timm_does(cache, channels):
    torch.manual_seed(0)
    whole = vision.resnet18()
    cache(vision.ResNet18_Weights, whole)
    net = made("torchvision/resnet18", channels, pretrained=True, load=True)
    torch.testing.assert_close(net.conv1.weight, adapt_input_conv(channels, whole.conv1.weight), rtol=1e-6, atol=1e-7)
    assert [name for name in changed(net, whole.state_dict()) if not name.startswith(("fc.", "conv1"))] == []


def test_the_backbone_of_a_segmentation_net_starts_from_weights_of_its_own(cache):
    torch.manual_seed(0)
    whole = vision.mobilenet_v3_large()
    cache(vision.MobileNet_V3_Large_Weights, whole)
    net = made("torchvision/lraspp_mobilenet_v3_large", pretrained="IMAGENET1K_V1", load=True)
    backbone = net.backbone.state_dict()
    assert backbone and all(value.equal(whole.state_dict()[f"features.{name}"]) for name, value in backbone.items())


def test_a_run_that_loads_weights_of_its_own_needs_no_cache(cache):
    """As in evaluation: the model is built as the weights want it, and nothing is looked for."""
    assert made("torchvision/resnet18", pretrained=True).fc.out_features == 5


def test_weights_that_are_not_in_the_cache_say_how_to_get_them(cache, tmp_path):
    path = tmp_path / "hub" / "checkpoints" / "resnet18-f37072fd.pth"
    assert refusal("torchvision/resnet18", pretrained=True) == (
        f"model.pretrained=true of torchvision/resnet18 is {path.name}, which is not in {path.parent}; get it once, where "
        f"there is a network: curl --create-dirs -o {path} https://download.pytorch.org/models/{path.name}"
    )
    told = refusal("timm/resnet18", pretrained="a1_in1k")
    assert told.startswith(
        "model.pretrained=a1_in1k of timm/resnet18 is model.safetensors of timm/resnet18.a1_in1k, which is not"
    )
    assert "get('timm/resnet18.a1_in1k', 'model.safetensors')" in told
    assert "model.pretrained=true of smp/Unet is model.safetensors of smp-hub/resnet34.imagenet" in refusal(
        "smp/Unet", pretrained=True
    )


def test_a_damaged_file_of_the_cache_is_refused(cache):
    path = cache(vision.ResNet18_Weights, nn.Linear(2, 2))
    path.write_bytes(path.read_bytes()[:-1] + b"x")
    assert refusal("torchvision/resnet18", pretrained=True).startswith(f"{path} is damaged: its SHA-256 does not begin with")


def test_weights_of_another_network_are_refused(cache):
    cache(vision.ResNet18_Weights, nn.Linear(2, 2))
    assert "is of another network: it does not fit 'conv1.weight' and" in refusal("torchvision/resnet18", pretrained=True)


def test_timm_and_smp_load_what_is_in_the_cache_of_hugging_face(tmp_path, monkeypatch):
    """The file's place in the cache is Hugging Face's business; its contents and what is made of them are ours."""
    torch.manual_seed(0)
    whole, encoder = timm.create_model("resnet18"), made("smp/Unet", options={"encoder_name": "resnet18"}).encoder
    kept = {"timm/resnet18.a1_in1k": whole, "smp-hub/resnet18.imagenet": encoder}

    def found(repository, name, revision=None):
        save_file(kept[repository].state_dict(), tmp_path / name)
        return str(tmp_path / name)

    monkeypatch.setattr(_cached, "try_to_load_from_cache", found)
    net = made("timm/resnet18", 1, pretrained=True, load=True)
    torch.testing.assert_close(net.conv1.weight, whole.conv1.weight.sum(1, keepdim=True))
    assert net.layer4[1].conv2.weight.equal(whole.layer4[1].conv2.weight) and net.fc.out_features == 5
    assert net.pretrained_cfg["state_dict"] is None
    net = made("smp/Unet", 4, options={"encoder_name": "resnet18"}, pretrained=True, load=True)
    assert net.encoder.layer4[1].conv2.weight.equal(encoder.layer4[1].conv2.weight)
    torch.testing.assert_close(net.encoder.conv1.weight, adapt_input_conv(4, encoder.conv1.weight))


# ---------------------------------------------------------------------------------------------- outputs


@pytest.mark.long
def test_a_net_with_several_outputs_gives_the_main_one_and_in_training_those_that_are_asked_for():
    image = torch.zeros(2, 3, 32, 32)
    plain = made("torchvision/fcn_resnet50")
    both = made("torchvision/fcn_resnet50", auxiliary=0.4)
    assert not any("aux" in name for name in plain.state_dict()) and plain(image).shape == (2, 5, 32, 32)
    assert [part.shape for part in both(image)] == [(2, 5, 32, 32)] * 2 and both.eval()(image).shape == (2, 5, 32, 32)
    assert list(both.state_dict()) == list(
        vision.segmentation.fcn_resnet50(weights_backbone=None, num_classes=5, aux_loss=True).state_dict()
    )


def test_the_main_output_is_out_or_the_first():
    a, b = torch.zeros(1), torch.ones(1)
    assert [outputs_of(given)[0] is a for given in (a, {"aux": b, "out": a}, {"x": a}, [a, b], (a, None))] == [True] * 5
    with pytest.raises(ValueError, match="the model gives a dict of str; a tensor is wanted"):
        outputs_of({"out": "a"})


# ---------------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("name", "keys", "told"),
    [
        ("torchvision/fasterrcnn_resnet50_fpn", {}, "torchvision/fasterrcnn_resnet50_fpn resizes and normalizes"),
        ("torchvision/raft_small", {}, "finds the movement between two images"),
        ("torchvision/resnet18", {"auxiliary": 0.4}, "torchvision/resnet18 has no auxiliary heads and model.auxiliary=0.4;"),
        ("torchvision/fcn_resnet50", {"options": {"aux_loss": True}}, "set model.auxiliary to the weight of their loss"),
        ("torchvision/resnet18", {"options": {"weights": "DEFAULT"}}, "gets from elsewhere; set model.pretrained"),
        ("torchvision/resnet18", {"pretrained": "IMAGENET1K_V2"}, "did you mean 'IMAGENET1K_V1'? torchvision/resnet18 has:"),
        ("timm/resnet18", {"pretrained": "a1"}, "timm has no weights 'a1' of resnet18. It can be a1_in1k,"),
        ("timm/resnet18", {"auxiliary": 0.4}, "timm/resnet18 has no auxiliary heads"),
        ("smp/Unets", {}, "smp has no model 'Unets'; did you mean 'Unet'? It has: Unet,"),
        ("smp/Unet", {"options": {"encoder_weights": "imagenet"}}, "gets from elsewhere; set model.pretrained"),
        ("smp/Unet", {"options": {"aux_params": {"classes": 2}}}, "its second output is a class of the image"),
        ("smp/Unet", {"pretrained": "imagnet"}, "no weights 'imagnet' of the encoder resnet34; did you mean 'imagenet'?"),
        ("smp/Unet", {"options": {"encoder_name": "resnt"}}, "cannot be built with model.options {'encoder_name': 'resnt'}"),
        ("monai/UNetX", {}, "monai has no model 'UNetX' for images; did you mean 'UNet'?"),
        ("monai/UNet", {"pretrained": True}, "monai/UNet has no weights in a cache; set model.weights to a file"),
        ("monai/UNet", {"auxiliary": 0.4}, "monai/UNet has no auxiliary heads"),
        ("unet", {"pretrained": True}, "model.pretrained is true and unet is of no library with weights of its own"),
        ("unet", {"auxiliary": 0.4}, "unet has no auxiliary heads and model.auxiliary=0.4; leave it out"),
    ],
)  # fmt: skip
def test_what_a_library_does_not_have_is_refused(name, keys, told):
    assert told in refusal(name, **keys)


@pytest.mark.parametrize(("library", "module"), [("smp", "segmentation_models_pytorch"), ("monai", "monai.networks")])
def test_a_library_that_is_not_installed_says_how_to_install_it(monkeypatch, library, module):
    monkeypatch.setitem(sys.modules, module, None)
    assert f"which is not installed; pip install 'widefield[{library}]'" in refusal(f"{library}/UNet")


# ---------------------------------------------------------------------------------------------- volumes


@pytest.mark.parametrize(
    ("name", "options", "channels"),
    [("monai/UNet", {}, 2), ("monai/SegResNet", {"init_filters": 8}, 1), ("torchvision/r3d_18", {}, 1)],
)
def test_networks_of_libraries_are_built_for_volumes_where_the_data_has_them(name, options, channels):
    config = ModelConfig(name=name, options=options)
    model = build(config, in_channels=channels, num_classes=4, dims=3).eval()
    found = model(torch.zeros(1, channels, 8, 32, 16))
    assert found.shape == ((1, 4) if "torchvision" in name else (1, 4, 8, 32, 16))


@pytest.mark.parametrize("name", ["timm/resnet18", "torchvision/resnet18", "smp/Unet"])
def test_networks_for_images_are_refused_for_volumes_in_words(name):
    with pytest.raises(ValueError, match=f"model.name={name} convolves over 2 dims and the data has volumes .*, as monai/UNet"):
        build(ModelConfig(name=name), in_channels=1, num_classes=4, dims=3)


@pytest.mark.parametrize("name", ["monai/UNet", "unet", "torchvision/r3d_18"])
def test_networks_for_volumes_are_refused_for_images_in_words(name):
    options = {"monai/UNet": {"spatial_dims": 3}, "unet": {"dims": 3}}.get(name, {})
    with pytest.raises(ValueError, match=r"convolves over 3 dims and the data has images \(C, H, W\); set model.options.dims"):
        build(ModelConfig(name=name, options=options), in_channels=1, num_classes=4, dims=2)
