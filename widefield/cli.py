"""The command `widefield`: parse, then call run.py or inference.py."""

from __future__ import annotations

import argparse
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from widefield import manual
from widefield.config import RunConfig, json_schema, read_config
from widefield.plan import check, plan_of, ranks_asked_for
from widefield.refusal import FOLLOWED, is_ours, printable
from widefield.section import to_yaml

if TYPE_CHECKING:
    from widefield.comm.mesh import World


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; the status for the shell: 0, 2 for what the user can mend, 3 where another rank failed, else 1."""
    options = _options(arguments)
    try:
        status = options.verb(options)
    except KeyboardInterrupt:
        print("widefield: ended at once; the newest checkpoint stands", file=sys.stderr)
        status = 130
    except Exception as error:
        told = _say(error, is_rank=options.is_rank)
        if told is None:
            raise
        status = told
    if options.is_rank:
        # Everything is closed by now.  Python's own way out lets gloo's threads abort one exit in ten, after all is done
        # (docs/log.md, 2026-11-21), which a launcher would take for a crash.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
    return status


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = _parser()
    options, rest = parser.parse_known_args(arguments)
    # argparse gives up on `train RECIPE --run DIR a.b=1`: positionals after an option are left over
    overrides = [word for word in rest if "=" in word and not word.startswith("-")]
    if overrides != rest or (rest and "overrides" not in options):
        parser.error(f"not understood: {' '.join(rest)}; see widefield VERB --help")
    if overrides:
        options.overrides = [*options.overrides, *overrides]
    return options


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "widefield", description=manual.MAIN, formatter_class=argparse.RawDescriptionHelpFormatter, usage="widefield VERB ..."
    )
    verbs = parser.add_subparsers(metavar="VERB", required=True)
    _add_train(_verb(verbs, "train", _train, "train as a recipe says, or go on with a run", manual.TRAIN))
    _add_evaluate(_verb(verbs, "evaluate", _evaluate, "evaluate a run's weights exactly", manual.EVALUATE))
    _add_predict(_verb(verbs, "predict", _predict, "ask a run's model about image files", manual.PREDICT))
    _add_export(_verb(verbs, "export", _export, "write a run's model for use elsewhere", manual.EXPORT))
    _add_verify(_verb(verbs, "verify", _verify, "compare a model on tiles with the same on one device", manual.VERIFY))
    _add_bench(_verb(verbs, "bench", _bench, "compare plans on this machine", manual.BENCH))
    _verb(verbs, "report", _report, "write a run's report", manual.REPORT).add_argument("run", metavar="RUN_DIR")
    return parser


def _add_train(train: argparse.ArgumentParser) -> None:
    train.add_argument("recipe", nargs="?", help="a YAML file, as recipes/digits.yaml")
    train.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="what to change in the recipe")
    train.add_argument(
        "--run",
        "--run-dir",
        dest="run",
        type=_text,
        metavar="DIR",
        help="run folder; a fresh numbered one under runs/ if left out",
    )
    train.add_argument("--print-config", action="store_true", help="print the whole config, defaults included, and stop")
    train.add_argument("--schema", action="store_true", help="print the JSON Schema of recipes, for editors, and stop")
    _add_trust(train)


def _add_evaluate(evaluate: argparse.ArgumentParser) -> None:
    evaluate.add_argument("run", metavar="RUN_DIR")
    evaluate.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="what to change in the run's config")
    _add_weights(evaluate)


def _add_predict(predict: argparse.ArgumentParser) -> None:
    predict.add_argument("run", metavar="RUN_DIR")
    predict.add_argument("images", nargs="+", metavar="IMAGE")
    predict.add_argument("--top", type=_count, default=3, metavar="K", help="how many classes to name (3)")
    _add_weights(predict)


def _add_export(export: argparse.ArgumentParser) -> None:
    export.add_argument("run", metavar="RUN_DIR")
    export.add_argument("--to", default="safetensors", metavar="FORMAT", help="safetensors, state_dict or onnx")
    export.add_argument("--output", type=_text, metavar="FILE", help="where to; model.* in the run folder if left out")
    _add_weights(export)


def _add_verify(verify: argparse.ArgumentParser) -> None:
    verify.add_argument("model", help="as model.name in a recipe: resnet, timm/NAME, torchvision/NAME, module:callable")
    verify.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="arguments of the model's constructor")
    verify.add_argument("--image", type=_sizes, required=True, metavar="CxHxW", help="channels and size of an image")
    verify.add_argument("--space", type=_sizes, metavar="TxT", help="tiles in space on each dim of an image (2x1)")
    verify.add_argument("--stream", type=_sizes, default=[], metavar="TxT", help="tiles in time on each dim of an image")
    verify.add_argument("--batch", type=_count, default=2, metavar="N", help="images in the batch (2)")
    verify.add_argument("--classes", type=_count, default=10, metavar="N", help="classes the model is built for (10)")
    verify.add_argument(
        "--plan", type=_text, metavar="PLAN.yaml", help="a plan of any strategies, verified over three training steps"
    )
    verify.add_argument("--eval", action="store_true", help="evaluation mode, forward alone")


def _add_bench(bench: argparse.ArgumentParser) -> None:
    bench.add_argument("recipe", help="a YAML file, as recipes/digits.yaml")
    bench.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="what to change in the recipe")
    bench.add_argument("--ranks", type=int, metavar="N", help="for plans of several; the GPUs, or cores up to 4, if left out")
    bench.add_argument("--steps", type=int, default=10, metavar="N", help="timed steps of each kind (10)")
    bench.add_argument("--warmup", type=int, default=3, metavar="N", help="steps before, or what the loader has ready (3)")
    bench.add_argument("--plans", type=_text, metavar="LIST", help="names or overrides with ; between them; all if left out")
    bench.add_argument("--out", type=_text, metavar="DIR", help="folder to write; a fresh runs/bench-... if left out")
    bench.add_argument("--trap", action="store_true", help="one plan with few and with many loader workers, besides")
    bench.add_argument("--timeline", action="store_true", help="keep a Chrome trace of every rank")
    _add_trust(bench)


def _verb(verbs, name: str, call, short: str, text: str) -> argparse.ArgumentParser:
    verb = verbs.add_parser(name, help=short, description=text, formatter_class=argparse.RawDescriptionHelpFormatter)
    verb.set_defaults(verb=call, is_rank=False)
    return verb


def _add_weights(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--weights", type=_text, metavar="FILE", help="a .safetensors file; the run's own if left out")
    _add_trust(parser)


def _add_trust(parser: argparse.ArgumentParser) -> None:
    text = "run the code that a run folder's config.yaml names (model.name=module:callable); without it, that is refused"
    parser.add_argument("--trust", action="store_true", help=text)


# ------------------------------------------------------------------------------------------------ verbs


def _train(options: argparse.Namespace) -> int:
    if options.schema:
        print(json_schema(), end="")
        return 0
    if options.recipe is None:
        raise ValueError("name a recipe, as: widefield train recipes/digits.yaml")
    trust = options.trust or options.print_config  # printed, it runs nothing
    config = read_config(options.recipe, options.overrides, run=options.run, trust=trust)
    if options.print_config:
        print(to_yaml(config), end="")
        return 0
    world, started = _world(config, options, lambda: _train_arguments(options))
    if world is None:
        return started
    from widefield.run import train

    folder = Path(options.run) if options.run else _shared_fresh_folder(world)
    return train(config, folder, world).status


def _train_arguments(options: argparse.Namespace) -> list[str]:
    return ["train", options.recipe, *options.overrides, "--run", options.run or str(_fresh()), *["--trust"] * options.trust]


def _evaluate(options: argparse.Namespace) -> int:
    from widefield.training.run_folder import existing_folder

    config = read_config(existing_folder(options.run) / "config.yaml", options.overrides, run=options.run, trust=options.trust)
    _refuse_unused(options.overrides)
    further = ["--weights", options.weights] * bool(options.weights) + ["--trust"] * options.trust
    world, started = _world(config, options, lambda: ["evaluate", options.run, *options.overrides, *further])
    if world is None:
        return started
    from widefield.inference import evaluate_run

    run, overrides = Path(options.run), options.overrides
    evaluation = evaluate_run(run, overrides, world, weights=options.weights, trust=options.trust)
    if world.rank == 0:
        print(f"{evaluation.sentence}  loss {evaluation.loss:.4g}")
    return 0


_OF_TRAINING = ("optimizer", "schedule", "ema", "evaluate", "checkpoint", "log")
"""Sections that no part of an evaluation, its plan included, looks at."""


def _refuse_unused(overrides: Sequence[str]) -> None:
    """ValueError where a key is set that an evaluation has no use for."""
    for override in overrides:
        if override.partition("=")[0].split(".")[0] in _OF_TRAINING:
            raise ValueError(f"{override} changes nothing in an evaluation, which does not train; leave it out")


def _predict(options: argparse.Namespace) -> int:
    from widefield.inference import predict

    answers = predict(Path(options.run), options.images, top=options.top, weights=options.weights, trust=options.trust)
    for answer in answers:
        shares = (f"{name} {100 * share:.1f} %" for name, share in zip(answer.classes, answer.probabilities, strict=True))
        written = "" if answer.labels is None else f"  -> {answer.labels}"
        print(printable(f"{answer.path}  {'  '.join(shares)}{written}"))
    return 0


def _export(options: argparse.Namespace) -> int:
    from widefield.inference import export

    output = Path(options.output) if options.output else None
    print(export(Path(options.run), options.to, output=output, weights=options.weights, trust=options.trust))
    return 0


def _text(text: str) -> str:
    """What follows an option, which an unset variable of a shell leaves empty."""
    if not text.strip():
        raise argparse.ArgumentTypeError("it is empty; give it a value, or leave the option out")
    return text


def _count(text: str) -> int:
    if not text.isdecimal() or not int(text):
        raise argparse.ArgumentTypeError(f"{text!r} is no count; write a whole number, 1 or more")
    return int(text)


def _sizes(text: str) -> list[int]:
    """`3x97x101` as numbers."""
    if not all(part.isdecimal() and int(part) for part in text.split("x")):
        raise argparse.ArgumentTypeError(f"{text!r} is no size; write whole numbers with x between them, as 3x97x101")
    return [int(part) for part in text.split("x")]


def _verify(options: argparse.Namespace) -> int:
    from widefield.config import ModelConfig
    from widefield.models import build
    from widefield.plan import from_text
    from widefield.section import parse_section
    from widefield.verification.api import verify

    channels, *extents = options.image
    for name in ("space", "stream"):
        sizes = getattr(options, name) or []
        if len(sizes) > len(extents):
            raise ValueError(f"--{name} has {len(sizes)} sizes and an image of {options.image} has {len(extents)} dims to cut")
    overrides = [f"options.{override}" for override in options.overrides]
    config = parse_section(ModelConfig, f"name: {options.model}", overrides, name="the command line")
    model = build(config, in_channels=channels, num_classes=options.classes)
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


def _bench(options: argparse.Namespace) -> int:
    from widefield.bench import BenchRequest, bench

    names = ("recipe", "overrides", "ranks", "steps", "warmup", "plans", "trap", "timeline", "trust")
    out = Path(options.out) if options.out else None
    return bench(
        BenchRequest(**{name: getattr(options, name) for name in names}, out=out), lambda text: print(text, flush=True)
    )


def _report(options: argparse.Namespace) -> int:
    from widefield.report import write_bench, write_report
    from widefield.training.run_folder import existing_folder

    if (Path(options.run) / "bench.json").is_file():
        print(write_bench(options.run))
        return 0

    print(write_report(existing_folder(options.run)))
    return 0


# ------------------------------------------------------------------------------------------------ ranks


def _world(config: RunConfig, options: argparse.Namespace, arguments: Callable[[], list[str]]) -> tuple[World | None, int]:
    """This process's place among the ranks; or, where it has started ranks and seen them end, None and their status."""
    from widefield.launchers import world_from
    from widefield.launchers.local import local_ranks, start

    world = world_from(os.environ)
    if world is not None:
        options.is_rank = world.size > 1
        return world, 0
    import torch

    from widefield.comm.devices import ranks_per_gpu
    from widefield.comm.mesh import World

    ranks, reason = local_ranks(ranks_asked_for(config), torch.cuda.device_count(), ranks_per_gpu())
    check(plan_of(config, ranks), ranks=ranks, samples_per_step=config.data.batch_size)
    if ranks == 1:
        return World(), 0
    print(reason, flush=True)
    return None, start(ranks, arguments())


def _fresh() -> Path:
    from widefield.training.run_folder import fresh_folder

    return fresh_folder()


def _shared_fresh_folder(world: World) -> Path:
    """A fresh folder where one process runs; ranks that others started cannot agree on one before they have met."""
    if world.size > 1:
        raise ValueError(
            f"{world.size} ranks were started by {world.launcher} without --run, and each would make a folder of its own; "
            "add --run-dir DIR"
        )
    return _fresh()


# ------------------------------------------------------------------------------------------------ errors


def _say(error: Exception, *, is_rank: bool) -> int | None:
    """Say what an error is; the status for the shell.  None, and not a word, where Python's own traceback says it best."""
    told = os.environ.get("RANK") or os.environ.get("SLURM_PROCID") or "0"
    rank = int(told) if told.isdecimal() else 0
    if isinstance(error, (ValueError, NotImplementedError)) and is_ours(error):
        return _refuse(error, rank)
    if not is_rank:
        return None
    from widefield.comm.failure import PeerFailedError, in_words

    if isinstance(error, PeerFailedError):
        _print_error(f"rank {rank}: {error}")
        return FOLLOWED
    traceback.print_exception(error)
    _print_error(f"rank {rank} {in_words(error)}")
    return 1


def _refuse(error: Exception, rank: int) -> int:
    """Say what is wrong, once: of an error that all ranks raise together, rank 0 speaks."""
    if rank == 0:
        _print_error(str(error))
        return 2
    from widefield.comm.mesh import AgreedError

    if not isinstance(error, AgreedError):
        _print_error(f"rank {rank}: {error}")
    return 2


def _print_error(text: str) -> None:
    print(printable(f"widefield: {text}"), file=sys.stderr, flush=True)
