"""Arguments that several verbs have, and their types."""

from __future__ import annotations

import os
from argparse import ArgumentParser, ArgumentTypeError, Namespace


def add_weights(parser: ArgumentParser, *, default: str) -> None:
    text = f"best, last, the step of a checkpoint, or a .safetensors file; {default} if left out"
    parser.add_argument("--weights", type=given_text, metavar="WHICH", help=text)
    add_trust(parser)


def add_trust(parser: ArgumentParser) -> None:
    text = "run the code that a run folder's config.yaml names (model.name=module:callable); without it, that is refused"
    parser.add_argument("--trust", action="store_true", help=text)


def add_place(parser: ArgumentParser) -> None:
    """Options of a start by hand, once per rank."""
    place = parser.add_argument_group("a start by hand, once per rank")
    place.add_argument("--rank", type=given_text, metavar="N", help="of this process, from 0 on")
    place.add_argument("--world-size", type=given_text, metavar="N", help="all ranks")
    text = "rank 0's host and a free port there, or file:///PATH that all hosts share"
    place.add_argument("--rendezvous", type=given_text, metavar="HOST:PORT", help=text)
    place.add_argument("--local-rank", type=given_text, metavar="N", help="on this machine; counted if left out")
    place.add_argument("--local-world-size", type=given_text, metavar="N", help="ranks on this machine; counted if left out")
    place.add_argument("--job", type=given_text, metavar="NAME", help="of the run; ranks of another one are refused")


def set_place(options: Namespace) -> None:
    """Put the options of `add_place` where launchers/by_hand.py reads them."""
    names = ("rank", "world_size", "rendezvous", "local_rank", "local_world_size", "job")
    given = {name: getattr(options, name) for name in names}
    os.environ.update({f"WIDEFIELD_{name.upper()}": text for name, text in given.items() if text is not None})


def given_text(text: str) -> str:
    """A text that is not empty, as it is where a variable of the shell is not set."""
    if not text.strip():
        raise ArgumentTypeError("it is empty; give it a value, or leave the option out")
    return text


def count(text: str) -> int:
    if not text.isdecimal() or not int(text):
        raise ArgumentTypeError(f"{text!r} is no count; write a whole number, 1 or more")
    return int(text)


def number(text: str) -> int:
    if not text.isdecimal():
        raise ArgumentTypeError(f"{text!r} is no number; write a whole number, 0 or more")
    return int(text)


def sizes(text: str) -> list[int]:
    """`3x97x101` as numbers."""
    if not all(part.isdecimal() and int(part) for part in text.split("x")):
        raise ArgumentTypeError(f"{text!r} is no size; write whole numbers with x between them, as 3x97x101")
    return [int(part) for part in text.split("x")]
