"""Whole models of the libraries that people use, small where they can be, and the images they are run on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import nn
from zoo import gans


@dataclass(frozen=True)
class Model:
    """One network: how to build it, the batch it reads, and what its refusal must say where it is known to refuse."""

    build: Callable[[], nn.Module]
    shape: tuple[int, ...]
    refuses: str | None = None

    def make(self) -> nn.Module:
        """The network, the same on every rank, with weights by which every layer matters."""
        torch.manual_seed(0)
        return _stirred(self.build())


def _stirred(net: nn.Module) -> nn.Module:
    """Give random values to weights that begin as constants.

    Many a residual branch begins with a scale of 0 or 1e-6: nothing that goes wrong inside of it would be seen.
    """
    for name, weight in net.named_parameters():
        if weight.numel() > 1 and bool((weight == weight.flatten()[0]).all()):
            low, high = (-0.2, 0.2) if name.endswith("bias") or weight.ndim > 3 else (0.5, 1.5)
            nn.init.uniform_(weight, low, high)
    return net


def _timm(name: str, **options) -> nn.Module:
    import timm

    return timm.create_model(name, num_classes=7, **options)


def _torchvision(name: str, **options) -> nn.Module:
    from torchvision import models

    return models.get_model(name, weights=None, num_classes=7, **options)


def _swin_v2(depths: list[int]) -> nn.Module:
    """torchvision's Swin V2, whose named sizes are all 12 blocks deep or more."""
    from torchvision.models import swin_transformer as swin

    parts = {"block": swin.SwinTransformerBlockV2, "downsample_layer": swin.PatchMergingV2}
    return swin.SwinTransformer([4, 4], 48, depths, [3, 6, 12], [8, 8], num_classes=7, **parts)


def _segmentation(name: str, encoder: str = "resnet18", **options) -> nn.Module:
    import segmentation_models_pytorch as smp

    return getattr(smp, name)(encoder, encoder_weights=None, classes=3, **options)


def _monai(name: str, *, dims: int, **options) -> nn.Module:
    from monai.networks import nets

    return getattr(nets, name)(spatial_dims=dims, **options)


def _vnet(width: int) -> nn.Module:
    """MONAI's V-Net with narrower parts: its own 16 channels, of 5 x 5 x 5 weights, come to 45 million."""
    from monai.networks.nets import vnet

    elu, net = ("elu", {"inplace": True}), vnet.VNet(out_channels=2)
    net.in_tr = vnet.InputTransition(3, 1, width, elu)
    for level, (name, convs) in enumerate({"down_tr32": 1, "down_tr64": 2, "down_tr128": 3, "down_tr256": 2}.items()):
        drop = 0.5 if level > 1 else None
        setattr(net, name, vnet.DownTransition(3, width * 2**level, convs, elu, dropout_prob=drop))
    net.up_tr256 = vnet.UpTransition(3, 16 * width, 16 * width, 2, elu, dropout_prob=(0.5, 0.5))
    net.up_tr128 = vnet.UpTransition(3, 16 * width, 8 * width, 2, elu, dropout_prob=(0.5, 0.5))
    net.up_tr64 = vnet.UpTransition(3, 8 * width, 4 * width, 1, elu)
    net.up_tr32 = vnet.UpTransition(3, 4 * width, 2 * width, 1, elu)
    net.out_tr = vnet.OutputTransition(3, 2 * width, 2, elu)
    return net


def _own(name: str, **options) -> nn.Module:
    from widefield.config import ModelConfig
    from widefield.models import build

    return build(ModelConfig(name=name, options=options), in_channels=3, num_classes=7)


def _detection_backbone() -> nn.Module:
    from torchvision.models.detection.backbone_utils import resnet_fpn_backbone

    return resnet_fpn_backbone(backbone_name="resnet18", weights=None, trainable_layers=5, norm_layer=nn.BatchNorm2d)


ODD = (2, 3, 97, 73)
EVEN = (2, 3, 64, 64)
SMALL = (2, 3, 65, 49)
VOLUME = (1, 1, 33, 32, 35)

TIMM = {
    "resnet18": ODD, "resnet50": ODD, "resnetv2_50": ODD, "resnext26ts": ODD, "seresnet33ts": ODD, "res2net50_14w_8s": ODD,
    "skresnet18": ODD, "resnest14d": ODD, "ecaresnet26t": ODD, "gcresnet33ts": ODD, "densenet121": ODD,
    "efficientnet_b0": ODD, "tf_efficientnet_lite0": ODD, "efficientnetv2_rw_t": ODD, "mobilenetv2_050": ODD,
    "mobilenetv3_small_050": ODD, "tf_mobilenetv3_large_minimal_100": ODD, "mobilenetv4_conv_small_035": EVEN,
    "lcnet_050": ODD, "ghostnet_050": ODD, "mnasnet_small": ODD, "mixnet_s": ODD, "regnetx_002": ODD, "regnety_002": ODD,
    "convnext_atto": ODD, "convnextv2_atto": ODD, "repvgg_a0": ODD, "hrnet_w18_small": EVEN, "dla34": EVEN,
    "cspresnet50": ODD, "darknet17": ODD, "ese_vovnet19b_dw": ODD, "xception41": EVEN, "inception_v3": (2, 3, 139, 107),
    "inception_v4": (2, 3, 171, 139), "nf_regnet_b0": ODD, "poolformer_s12": ODD, "mobilevit_xxs": EVEN, "dpn48b": ODD,
    "selecsls42b": ODD, "fbnetc_100": ODD, "hgnetv2_b0": EVEN, "pvt_v2_b0": EVEN, "edgenext_xx_small": EVEN,
}  # fmt: skip
TORCHVISION = {
    "resnet18": ODD, "alexnet": (2, 3, 97, 95), "squeezenet1_1": ODD, "shufflenet_v2_x0_5": ODD, "mobilenet_v3_small": ODD,
    "regnet_y_400mf": ODD, "r3d_18": (1, 3, 5, 33, 31),
}  # fmt: skip
SEGMENTATION = (
    "Unet", "UnetPlusPlus", "Linknet", "FPN", "PSPNet", "DeepLabV3", "DeepLabV3Plus", "MAnet", "UPerNet", "Segformer",
)  # fmt: skip

FLAT = {"dims": 2, "in_channels": 3, "out_channels": 3}
DEEP = {"dims": 3, "in_channels": 1, "out_channels": 2}
STEPS = {"channels": (8, 16, 32), "strides": (2, 2)}
LEVELS = {"kernel_size": [3, 3, 3], "strides": [1, 2, 2], "upsample_kernel_size": [2, 2]}
SUPERVISED = {"res_block": True, "deep_supervision": True, "deep_supr_num": 1}
BLOCKS = {"init_features": 8, "growth_rate": 8, "block_config": (2, 2, 2)}
MONAI = {
    "UNet 2-D": (partial(_monai, "UNet", num_res_units=2, **FLAT, **STEPS), EVEN),
    "UNet 3-D": (partial(_monai, "UNet", num_res_units=2, **DEEP, **STEPS), (1, 1, 32, 36, 28)),
    "BasicUNet 2-D": (partial(_monai, "BasicUNet", features=(8, 8, 16, 16, 32, 8), **FLAT), EVEN),
    "BasicUNet 3-D": (partial(_monai, "BasicUNet", features=(4, 4, 8, 8, 16, 4), **DEEP), VOLUME),
    "SegResNet 2-D": (partial(_monai, "SegResNet", init_filters=8, **FLAT), EVEN),
    "SegResNet 3-D": (partial(_monai, "SegResNet", init_filters=8, dropout_prob=0.2, **DEEP), (1, 1, 32, 40, 24)),
    "SegResNetDS 3-D": (partial(_monai, "SegResNetDS", init_filters=8, blocks_down=(1, 1, 1), **DEEP), (1, 1, 16, 16, 24)),
    "VNet 3-D": (partial(_vnet, 4), (1, 1, 32, 32, 32)),
    "DynUNet 2-D": (partial(_monai, "DynUNet", filters=[8, 16, 32], **LEVELS, **FLAT), EVEN),
    "DynUNet 3-D": (partial(_monai, "DynUNet", filters=[4, 8, 16], **LEVELS, **SUPERVISED, **DEEP), (1, 1, 32, 24, 28)),
    "AttentionUnet": (partial(_monai, "AttentionUnet", **FLAT, **STEPS), EVEN),
    "HighResNet 3-D": (partial(_monai, "HighResNet", **DEEP), (1, 1, 17, 15, 16)),
    "DenseNet 3-D": (partial(_monai, "DenseNet", **BLOCKS, **DEEP), VOLUME),
    "ResNet 3-D": (partial(_monai, "resnet10", dims=3, n_input_channels=1, num_classes=3), VOLUME),
}

MODELS: dict[str, Model] = {
    **{f"timm/{name}": Model(partial(_timm, name), shape) for name, shape in TIMM.items()},
    "timm/vgg11_bn": Model(partial(_timm, "vgg11_bn", mlp_ratio=1 / 16), EVEN),
    "timm/vit_tiny": Model(partial(_timm, "vit_tiny_patch16_224", img_size=64, depth=3), EVEN),
    "timm/swin_tiny": Model(partial(_timm, "swin_tiny_patch4_window7_224", img_size=112, depths=(2, 2, 2)), (1, 3, 112, 112)),
    "timm/maxvit_pico": Model(partial(_timm, "maxvit_rmlp_pico_rw_256", img_size=64), EVEN),
    **{f"torchvision/{name}": Model(partial(_torchvision, name), shape) for name, shape in TORCHVISION.items()},
    **{
        f"torchvision/{name}": Model(partial(_torchvision, name, weights_backbone=None), SMALL)
        for name in ("fcn_resnet50", "deeplabv3_mobilenet_v3_large", "lraspp_mobilenet_v3_large")
    },
    "torchvision/swin_v2": Model(partial(_swin_v2, [2, 2, 2]), EVEN),
    "torchvision/googlenet": Model(partial(_torchvision, "googlenet", init_weights=False), ODD),
    "torchvision/fasterrcnn backbone": Model(_detection_backbone, ODD),
    **{f"smp/{name}": Model(partial(_segmentation, name), EVEN) for name in SEGMENTATION},
    "smp/PAN": Model(partial(_segmentation, "PAN"), (2, 3, 128, 128)),
    "smp/Unet efficientnet": Model(partial(_segmentation, "Unet", "efficientnet-b0", decoder_attention_type="scse"), EVEN),
    **{f"monai/{name}": Model(*built) for name, built in MONAI.items()},
    "widefield/resnet": Model(partial(_own, "resnet"), ODD),
    "widefield/unet batch": Model(partial(_own, "unet", widths=[8, 16, 32]), ODD),
    "widefield/unet group": Model(partial(_own, "unet", widths=[8, 16, 32], norm="group"), ODD),
    "DCGAN generator": Model(gans.dcgan_generator, (3, 100, 1, 1)),
    "DCGAN discriminator": Model(gans.dcgan_discriminator, EVEN),
    "pix2pixHD generator": Model(gans.pix2pixhd_generator, (2, 3, 88, 72)),
    "pix2pixHD discriminator": Model(gans.MultiscaleDiscriminator, ODD),
}
