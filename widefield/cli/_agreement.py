"""`widefield plan --agreement`: its options, and what it prints."""

from __future__ import annotations

import json
from argparse import ArgumentParser, ArgumentTypeError, Namespace
from collections.abc import Callable

from widefield.cli._arguments import given_text, number

_OWN = ("workers", "straggler", "step_seconds", "model_size", "link", "loss", "jitter", "seed")
_OF_PLANS = ("largest", "fewest", "price", "out", "calibrate")


def add_agreement(parser: ArgumentParser) -> None:
    group = parser.add_argument_group("ways to agree, in place of plans")
    group.add_argument("--agreement", type=given_text, metavar="WAY", help="all, or one, as local_sgd: simulated and compared")
    group.add_argument("--workers", type=number, metavar="N", help="that agree; the cluster's devices if left out")
    group.add_argument(
        "--straggler", action="append", type=given_text, metavar="3x", help="a worker so many times slower; 4:3x are four"
    )
    group.add_argument("--step-seconds", type=_real, metavar="S", help="of a worker's step; the planner's if left out")
    group.add_argument(
        "--model-size", type=given_text, metavar="SIZE", help="of the weights, as 90MiB; the model's if left out"
    )
    group.add_argument(
        "--link", type=given_text, metavar="LINK", help="of each worker, as 50us,10Gbit/s; the cluster's if left out"
    )
    group.add_argument("--loss", type=_real, metavar="LOSS", help="of the small problem, to which time is told (0.6)")
    group.add_argument("--jitter", type=_real, metavar="SPREAD", help="of the logarithm of a step's time (0)")
    group.add_argument("--seed", type=number, metavar="N", help="of the simulation (0)")


def _real(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise ArgumentTypeError(f"{text!r} is no number; write one, as 0.05") from None


def refuse_without_agreement(options: Namespace) -> None:
    """ValueError: options that are about ways to agree, and none is asked for."""
    found = [name for name in _OWN if getattr(options, name) is not None]
    if found and options.agreement is None:
        raise ValueError(
            f"--{found[0].replace('_', '-')} is about ways to agree; give --agreement with it, as --agreement all --workers 256"
        )


def run_agreement(options: Namespace, say: Callable[[str], None]) -> int:
    """Simulate, and print.  ValueError: options of plans, or no recipe."""
    odd = [name for name in _OF_PLANS if getattr(options, name)]
    if odd:
        raise ValueError(f"--{odd[0]} is about plans, and --agreement compares ways to agree; leave one out")
    if options.recipe is None:
        raise ValueError("name a recipe or a model, as: widefield plan digits --agreement all --workers 256")
    from widefield.planner.agreeing.ask import AgreementRequest, ask_agreement
    from widefield.quantity import read_memory
    from widefield.report.agreement_words import agreement_headline, agreement_sentences, agreement_table

    chosen = {name: getattr(options, name) for name in ("loss", "jitter", "seed") if getattr(options, name) is not None}
    request = AgreementRequest(
        options.recipe, options.agreement, options.workers, options.cluster, options.overrides, options.straggler or (),
        options.step_seconds, None if options.model_size is None else read_memory(options.model_size), options.link,
        options.network, image=None if options.image is None else tuple(options.image), classes=options.classes,
        batch=options.batch, task=options.task, trust=options.trust, **chosen,
    )  # fmt: skip
    tree = ask_agreement(request, lambda text: say(f"  {text}")).to_tree()
    if options.json:
        print(json.dumps(tree, indent=1))
    else:
        print(f"\n{agreement_headline(tree)}\n\n{agreement_table(tree)}\n")
        print("\n".join(agreement_sentences(tree)))
    return 0
