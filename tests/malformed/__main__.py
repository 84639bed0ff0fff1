"""`python -m tests.malformed --seed 7 --count 1000`: damages inputs and reads each; prints what ends otherwise than it should.

Each input ends in a clear error of widefield's or is read right, within a minute, and no file changes.  The inputs run in a
process of their own, which is started again behind an input that it dies of.
"""

from __future__ import annotations

import argparse
import faulthandler
import logging
import os
import random
import resource
import subprocess
import sys
import tempfile
import time
import warnings
from collections import Counter
from pathlib import Path

ADDRESS_BYTES = 16 * 2**30
"""What a header may ask for before it is refused memory."""


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.malformed", description=__doc__)
    parser.add_argument("--seed", type=int, default=0, help="of the first input; each has the next")
    parser.add_argument("--count", type=int, default=1000)
    parser.add_argument("--only", default="", help="subjects whose name has this in it")
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.inside:
        return _read_all(options)
    began, counts, wrong, first = time.monotonic(), Counter[str](), [], options.seed
    while first < options.seed + options.count:
        for number, name, became in _inside(first, options):
            kind = became.split(":")[0]
            counts[f"{name}: {kind}"] += 1
            if kind == "wrong":
                wrong.append(f"{number} {name}: {became}")
                print(f"FOUND  {wrong[-1]}", flush=True)
            first = number + 1
    for text, number in sorted(counts.items()):
        print(f"{number:6}  {text}")
    print(f"{sum(counts.values())} malformed inputs in {time.monotonic() - began:.0f} s, {len(wrong)} of them end wrongly")
    return 1 if wrong else 0


def _inside(first: int, options: argparse.Namespace):
    """(seed, subject, what became of it) of each input from `first` on; a death is the last one."""
    command = [sys.executable, "-m", __spec__.name.removesuffix(".__main__"), "--inside", "--seed", str(first)]
    command += ["--count", str(options.seed + options.count - first), "--only", options.only]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    begun = None
    for line in process.stdout:
        word, number, name, rest = line.rstrip("\n").split("\t")
        if word == "begin":
            begun = (int(number), name)
        else:
            yield int(number), name, rest
            begun = None
    status = process.wait()
    if begun is not None:
        yield (*begun, f"wrong: the process died with {status}")
    elif status:
        raise SystemExit(f"no input was read; the process ended with {status}")


def _read_all(options: argparse.Namespace) -> int:
    said = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    import torch

    from .subjects import subjects
    from .trial import outcome_of

    faulthandler.enable()
    logging.disable(logging.CRITICAL)
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="widefield_malformed_") as place:
        every = [one for one in subjects(Path(place)) if options.only in one.name]
        resource.setrlimit(resource.RLIMIT_AS, (ADDRESS_BYTES, ADDRESS_BYTES))
        for seed in range(options.seed, options.seed + options.count):
            subject = random.Random(seed).choices(every, [one.weight for one in every])[0]
            print("begin", seed, subject.name, "", sep="\t", file=said)
            print("end", seed, subject.name, outcome_of(subject, seed), sep="\t", file=said)
    return 0


if __name__ == "__main__":
    sys.exit(main())
