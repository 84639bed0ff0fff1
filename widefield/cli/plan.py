"""`widefield plan`: which plan fits and how fast it is, before anything is rented."""

from __future__ import annotations

import json
from argparse import ArgumentParser, ArgumentTypeError, Namespace
from pathlib import Path
from typing import Any

from widefield.cli._agreement import add_agreement, refuse_without_agreement, run_agreement
from widefield.cli._arguments import add_trust, count, given_text, sizes

ORDER = 55
SUMMARY = "does it fit, which plan, how fast: before anything is rented"
HELP = """\
Which plan fits these machines, and how fast is it?  Runs the training step of single ranks without
tensors and without machines, so that memory, messages and operations are those of the real step, prices
them for the machines, and says why the other plans lost.

  widefield plan digits --cluster cpu:2
  widefield plan recipes/page.yaml --cluster 8xA100-80G
  widefield plan my.yaml optimizer.name=adamw --cluster 4x8xH100-80G

A model's name and the size of an image stand in for a recipe and its data:

  widefield plan timm/resnet50 --image 3x8192x8192 --classes 10 --batch 8 --cluster 8xH100
  widefield plan unet --image 1x512x512x512 --batch 2 --cluster 128x8xH100-80G

Machines are written as nodes x GPUs x kind, as 4x8xH100-80G; 2xRTX4090 is one node; cpu:2 is two ranks
on the CPU here; measured is this machine as --calibrate has measured it, in two minutes at most.  With
a recipe, --calibrate takes another minute for the kernels of its own plans: times are best then.

The same asked backwards: the largest image or batch that fits, the fewest devices, the cheapest plan:

  widefield plan unet --image 1x512x512 --batch 1 --cluster 1xA100-80G --largest image
  widefield plan timm/resnet50 --image 3x224x224 --batch 256 --cluster 8xL4 --fewest --price 0.8

Which way should many workers agree, where some are slow?  Simulated in virtual time, on a small problem:

  widefield plan recipes/page.yaml --agreement all --workers 256 --straggler 3x

Prints a table and writes plan.json and plan.html where --out names a folder; --json prints the same as
data.  Exits with 0, or with 1 where no plan fits, and says which comes nearest and what is missing.
"""

KERNEL_SECONDS = 60.0


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("recipe", nargs="?", help="a YAML file, the name of a packaged recipe, or with --image of a model")
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="what to change in the recipe")
    parser.add_argument("--cluster", type=given_text, metavar="MACHINES", help="as 4x8xH100-80G, 8xA100-40G, cpu:2, measured")
    parser.add_argument(
        "--network", type=given_text, metavar="NAME", help="between nodes, as ib-ndr; the usual one if left out"
    )
    parser.add_argument("--image", type=sizes, metavar="CxHxW", help="plan for images of this size, without data")
    parser.add_argument("--classes", type=count, metavar="N", help="classes of such images (10)")
    parser.add_argument("--task", choices=("classification", "segmentation"), help="of such images; the model's if left out")
    parser.add_argument(
        "--batch", type=count, metavar="N", help="samples of a step, all ranks together; the recipe's if left out"
    )
    parser.add_argument(
        "--largest", action="append", choices=("image", "batch"), default=[], help="that fits; may be given twice"
    )
    parser.add_argument("--fewest", action="store_true", help="the fewest devices of these machines that do")
    parser.add_argument("--price", type=_dollars, metavar="DOLLARS", help="of a device and hour: the cheapest plan")
    parser.add_argument("--top", type=count, default=8, metavar="N", help="rows of the table (8)")
    parser.add_argument("--seconds", type=count, default=30, metavar="N", help="how long to search (30)")
    parser.add_argument("--out", type=given_text, metavar="DIR", help="folder for plan.json and plan.html")
    parser.add_argument("--json", action="store_true", help="print all of it as JSON, and nothing else")
    parser.add_argument(
        "--calibrate", action="store_true", help="measure this machine first, and then the kernels of the plans"
    )
    add_agreement(parser)
    add_trust(parser)


def run(options: Namespace) -> int:
    refuse_without_agreement(options)
    if options.agreement is not None:
        return run_agreement(options, _quiet if options.json else _say)
    if options.recipe is None and not options.calibrate:
        raise ValueError("name a recipe or a model, as: widefield plan digits --cluster cpu:2")
    if options.recipe is not None and options.cluster is None and not options.calibrate:
        raise ValueError("name the machines, as --cluster 4x8xH100-80G, --cluster 2xRTX4090, or --cluster cpu:2 for CPUs")
    say = _quiet if options.json else _say
    if options.calibrate:
        import torch

        from widefield.planner.machines.calibrate import calibrate

        calibrate(device=torch.device("cuda" if torch.cuda.is_available() else "cpu"), say=say)
    if options.recipe is None:
        say("plans take it from there: widefield plan my.yaml --cluster measured")
        return 0
    from widefield.planner.search.ask import PlanRequest, ask

    found = ask(
        PlanRequest(
            recipe=options.recipe, cluster=options.cluster or "measured", overrides=options.overrides,
            image=None if options.image is None else tuple(options.image), classes=options.classes, batch=options.batch,
            task=options.task, network=options.network, largest=tuple(options.largest), fewest=options.fewest,
            dollars_per_hour=options.price, seconds=options.seconds, trust=options.trust,
            kernel_seconds=KERNEL_SECONDS if options.calibrate else 0.0,
        ),
        lambda text: say(f"  {text}"),
    )  # fmt: skip
    _show(found.to_tree(), options)
    return 0 if found.best is not None else 1


def _show(tree: dict[str, Any], options: Namespace) -> None:
    """Print the answer, and write the files."""
    from widefield.report.plan_words import headline, sentences, table_text

    if options.json:
        print(json.dumps(tree, indent=1))
    else:
        print(f"\n{headline(tree)}\n\n{table_text(tree, options.top)}\n")
        print("\n".join(sentences(tree)))
    if options.out is not None:
        from widefield.report.plan_page import write_plan

        page = write_plan(Path(options.out), tree)
        (_quiet if options.json else _say)(f"page: {page}")


def _say(text: str) -> None:
    print(text, flush=True)


def _quiet(text: str) -> None:
    """Standard output is JSON alone."""


def _dollars(text: str) -> float:
    try:
        price = float(text)
    except ValueError:
        price = 0.0
    if not 0 < price < float("inf"):
        raise ArgumentTypeError(f"{text!r} is no price; write the dollars per hour of one device, as 2.5")
    return price


CASES: list[tuple[list[str], dict[str, Any] | str]] = [
    (
        ["r.yaml", "--cluster", "4x8xH100-80G", "--json", "optimizer.name=adamw"],
        {"recipe": "r.yaml", "cluster": "4x8xH100-80G", "json": True, "overrides": ["optimizer.name=adamw"], "image": None},
    ),
    (
        ["timm/resnet50", "--image", "3x8192x8192", "--classes", "10", "--batch", "8", "--cluster", "8xH100", "--price", "2.5"],
        {"image": [3, 8192, 8192], "classes": 10, "batch": 8, "price": 2.5, "fewest": False, "largest": [], "top": 8},
    ),
    (["unet", "--largest", "image", "--largest", "batch", "--cluster", "cpu"], {"largest": ["image", "batch"]}),
    (["--calibrate"], {"calibrate": True, "recipe": None}),
    (["unet", "--largest", "model"], "argument --largest: invalid choice: 'model'"),
    (
        ["r.yaml", "--agreement", "all", "--workers", "256", "--straggler", "3x", "--straggler", "2:1.5x"],
        {"agreement": "all", "workers": 256, "straggler": ["3x", "2:1.5x"], "step_seconds": None, "link": None},
    ),
    (["r.yaml", "--agreement", "all", "--step-seconds", "soon"], "'soon' is no number; write one, as 0.05"),
    (["unet", "--image", "3xbig"], "'3xbig' is no size; write whole numbers with x between them, as 3x97x101"),
    (["unet", "--price", "free"], "'free' is no price; write the dollars per hour of one device, as 2.5"),
    (["unet", "--batch", "0"], "'0' is no count; write a whole number, 1 or more"),
]
