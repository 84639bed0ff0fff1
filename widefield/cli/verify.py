"""`widefield verify`: compare a model under a plan with the same on one device."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from pathlib import Path
from typing import Any

from widefield.cli._arguments import count, given_text, sizes

ORDER = 50
SUMMARY = "compare a model on tiles with the same on one device"
HELP = """\
Does a model give one device's numbers when its images are cut into tiles?  Runs it whole and cut, in
float64 on the CPU, and compares outputs, every gradient and the running statistics.

Tiles in space (--space), each on a rank of its own, started here; 2 if neither is given:

  widefield verify timm/resnet50 --image 3x97x101 --space 2x1
  widefield verify timm/vit_tiny_patch16_224 --image 3x96x96 --space 2x2 img_size=96
  widefield verify my_package.nets:build --image 1x32x33x34 --space 2x1x2 --batch 1 --eval

Tiles in time (--stream), one after another in this process; with both, each rank streams its tile:

  widefield verify timm/resnet50 --image 3x250x190 --stream 4x4
  widefield verify unet --image 1x250x190 --space 2x1 --stream 2x3

Any plan (--plan), three training steps on ranks started here against three on one device, the batch
shared out: losses, gradients, weights, statistics, outputs.  The file has a plan's keys:

  printf 'shard: 2\\nchannel: 2\\n' > plan.yaml
  widefield verify timm/resnet18 --image 3x65x65 --batch 4 --plan plan.yaml

Exits with 0 where everything agrees, with 1 where it does not (the layers that differ are listed, the
first one first), with 2 where the model cannot run so, in words.
"""


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("model", help="as model.name in a recipe: resnet, timm/NAME, torchvision/NAME, module:callable")
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="arguments of the model's constructor")
    parser.add_argument("--image", type=sizes, required=True, metavar="CxHxW", help="channels and size of an image")
    parser.add_argument("--space", type=sizes, metavar="TxT", help="tiles in space on each dim of an image (2x1)")
    parser.add_argument("--stream", type=sizes, default=[], metavar="TxT", help="tiles in time on each dim of an image")
    parser.add_argument("--batch", type=count, default=2, metavar="N", help="images in the batch (2)")
    parser.add_argument("--classes", type=count, default=10, metavar="N", help="classes the model is built for (10)")
    parser.add_argument(
        "--plan", type=given_text, metavar="PLAN.yaml", help="a plan of any strategies, verified over three training steps"
    )
    parser.add_argument("--eval", action="store_true", help="evaluation mode, forward alone")


def run(options: Namespace) -> int:
    from widefield.config import ModelConfig
    from widefield.models import build
    from widefield.plans import from_text
    from widefield.section import parse_section
    from widefield.verification.api import verify

    channels, *extents = options.image
    for name in ("space", "stream"):
        tiles = getattr(options, name) or []
        if len(tiles) > len(extents):
            raise ValueError(f"--{name} has {len(tiles)} sizes and an image of {options.image} has {len(extents)} dims to cut")
    overrides = [f"options.{override}" for override in options.overrides]
    config = parse_section(ModelConfig, f"name: {options.model}", overrides, name="the command line")
    dims = len(extents) if len(extents) in (2, 3) else None
    model = build(config, in_channels=channels, num_classes=options.classes, dims=dims)
    shape = (options.batch, channels, *extents)
    plan = None
    if options.plan is not None:
        plan = from_text(_text_of(options.plan), name=options.plan)
    verdict = verify(model, shape, space=options.space, stream=options.stream, train=not options.eval, plan=plan)
    for reason in verdict.reasons:
        print(f"  {reason}")
    print(verdict)
    return 0 if verdict.ok else 2 if verdict.refusal else 1


def _text_of(path: str) -> str:
    if not Path(path).is_file():
        raise ValueError(f"no plan at {path}; write one as 'shard: 2' and 'channel: 2', a key per line, or take a run's plan")
    return Path(path).read_text(encoding="utf-8")


CASES: list[tuple[list[str], dict[str, Any] | str]] = [
    (
        ["unet", "--image", "1x20x18", "--space", "2", "widths=[4,6]"],
        {"model": "unet", "image": [1, 20, 18], "space": [2], "stream": [], "batch": 2, "overrides": ["widths=[4,6]"]},
    ),
    (["unet", "--image", "1x20x18", "--stream", "2x3", "--eval"], {"space": None, "stream": [2, 3], "eval": True}),
    (["unet", "--image", "1x20x18", "--plan", "plan.yaml", "--batch", "4"], {"plan": "plan.yaml", "batch": 4}),
    (["unet", "--image", "3x97xwide"], "'3x97xwide' is no size; write whole numbers with x between them, as 3x97x101"),
    (["unet", "--image", "3x97x101", "--classes", "two"], "'two' is no count; write a whole number, 1 or more"),
    (["unet"], "the following arguments are required: --image"),
]
