"""One model of each of timm's families, the smallest, on images of odd sizes where it takes them, with what chance it has."""

from __future__ import annotations

from functools import partial
from typing import Any

import timm
from torch import nn
from zoo.models import Model

ODD, EVEN = (65, 97), (64, 96)
TRANSFORMER = {"depth": 3, "embed_dim": 96, "num_heads": 4}
CHANCE = ({"drop_rate": 0.1, "drop_path_rate": 0.1}, {"drop_rate": 0.1})
"""Dropout and drop path, or what a model has of them."""

OF_ANY_SIZE = {
    "byobnet": "test_byobnet", "convmixer": "convmixer_768_32", "convnext": "test_convnext", "cpubone": "cpubone_nano",
    "crossvit": "crossvit_tiny_240", "cspnet": "cs3darknet_focus_s", "cspnext": "cspnext_tiny", "davit": "davit_tiny",
    "densenet": "densenet121", "dpn": "dpn48b", "edgenext": "edgenext_xx_small", "efficientnet": "test_efficientnet",
    "efficientvim": "efficientvim_m1", "efficientvit_mit": "efficientvit_b0", "efficientvit_msra": "efficientvit_m0",
    "fasternet": "fasternet_t0", "fastvit": "fastvit_t8", "focalnet": "focalnet_tiny_srf", "ghostnet": "ghostnet_050",
    "hardcorenas": "hardcorenas_b", "hgnet": "hgnetv2_b0", "iformer": "iformer_t", "inception_next":
    "inception_next_atto", "lcnetv2": "lcnetv2_small", "lowformer": "lowformer_b0", "mambaout": "test_mambaout",
    "metaformer": "poolformerv2_s12", "mobilenetv3": "mobilenetv3_small_050", "mobilenetv5": "mobilenetv5_base",
    "mobilevit": "mobilevit_xxs", "mvitv2": "mvitv2_tiny", "nasnet": "nasnetalarge", "nextvit": "nextvit_small", "nfnet":
    "test_nfnet", "pnasnet": "pnasnet5large", "pvt_v2": "pvt_v2_b0", "rdnet": "rdnet_tiny", "regnet": "regnetx_002",
    "repghost": "repghostnet_050", "repvit": "repvit_m1", "res2net": "res2next50", "resnest": "resnest14d", "resnet":
    "test_resnet", "resnetv2": "resnetv2_18", "rexnet": "rexnet_100", "selecsls": "selecsls42", "senet":
    "legacy_seresnet18", "sequencer": "sequencer2d_s", "shvit": "shvit_s1", "sknet": "skresnet18", "starnet":
    "starnet_s050", "swiftformer": "swiftformer_xs", "tiny_vit": "tiny_vit_5m_224", "twins": "twins_svt_small", "vgg":
    "vgg11", "vovnet": "ese_vovnet19b_slim_dw", "xception": "legacy_xception", "xception_aligned": "xception41p", "xcit":
    "xcit_nano_12_p8_224",
}  # fmt: skip
OF_EVEN_SIZES = {
    "csatv2": "csatv2", "dla": "dla46x_c", "eva": "vit_tiny_patch16_dinov3_qkvb", "gemma4_vit": "gemma4_vit_167m",
    "hieradet_sam2": "sam2_hiera_tiny", "hrnet": "hrnet_w18_small", "naflexvit": "naflexvit_base_patch16_parfac_gap",
    "qwen3_vit": "qwen3_vit_88m", "tresnet": "tresnet_m", "vision_transformer": "test_vit", "vision_transformer_sam":
    "samvit_base_patch16_224",
}  # fmt: skip
TOLD_ODD_SIZES = {
    "beit": "beit_base_patch16_224", "cait": "cait_xxs24_224", "coat": "coat_tiny", "deit": "deit_tiny_patch16_224",
    "maxxvit": "test_coatnet", "mlp_mixer": "gmlp_ti16_224", "pit": "pit_ti_224", "swin_transformer":
    "swin_tiny_patch4_window7_224", "swin_transformer_v2": "swinv2_tiny_window8_256", "swin_transformer_v2_cr":
    "swinv2_cr_tiny_224", "tnt": "tnt_s_legacy_patch16_224", "vision_transformer_relpos": "test_vit_relpos", "vitamin":
    "vitamin_small_224", "volo": "volo_d1_224",
}  # fmt: skip
TOLD_EVEN_SIZES = {
    "efficientformer_v2": "efficientformerv2_s0", "gcvit": "gcvit_xxtiny", "hiera": "hiera_tiny_224", "levit":
    "levit_128s", "visformer": "visformer_tiny", "vision_transformer_hybrid": "vit_tiny_r_s16_p8_224",
}  # fmt: skip
OTHERS = {
    "byoanet": ("halonet_h1", (256, 256)),
    "convit": ("convit_tiny", (224, 224)),
    "efficientformer": ("efficientformer_l1", (224, 224)),
    "nest": ("nest_tiny", (224, 224)),
    "deepseek_vit": ("deepseek_vit_412m", (112, 168)),
    "inception_resnet_v2": ("inception_resnet_v2", (97, 129)),
    "inception_v3": ("inception_v3", (97, 129)),
    "inception_v4": ("inception_v4", (97, 129)),
}
"""Which want larger images, or none but those of one size."""
OPTIONS: dict[str, dict[str, Any]] = {
    **dict.fromkeys(["beit", "deepseek_vit", "gemma4_vit", "naflexvit", "qwen3_vit", "vision_transformer_sam"], TRANSFORMER),
    "mobilenetv5": {"channel_multiplier": 0.25},
    "vgg": {"mlp_ratio": 1 / 16},
}
"""Which make small what is large in every size."""


def _family(name: str, **options: Any) -> nn.Module:
    *more, least = CHANCE
    for chance in more:
        try:
            return timm.create_model(name, num_classes=7, **chance, **options)
        except TypeError:  # it takes no such option
            continue
    return timm.create_model(name, num_classes=7, **least, **options)


def _model(module: str, name: str, pixels: tuple[int, int], **options: Any) -> Model:
    return Model(partial(_family, name, **OPTIONS.get(module, {}), **options), (2, 3, *pixels))


FAMILIES: dict[str, Model] = {
    **{module: _model(module, name, ODD) for module, name in OF_ANY_SIZE.items()},
    **{module: _model(module, name, EVEN) for module, name in OF_EVEN_SIZES.items()},
    **{module: _model(module, name, ODD, img_size=ODD) for module, name in TOLD_ODD_SIZES.items()},
    **{module: _model(module, name, EVEN, img_size=EVEN) for module, name in TOLD_EVEN_SIZES.items()},
    **{module: _model(module, name, pixels) for module, (name, pixels) in OTHERS.items()},
}
"""By the module of `timm.models` that defines it."""
