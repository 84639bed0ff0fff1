"""Memory and time of a step of a pair of networks shaped as pix2pixHD's, on one pair of large images, in a stream.

    python benchmarks/gan.py --size 8192 --tiles 8 --keep file --save
    python benchmarks/gan.py --size 1024 --whole         without a stream, to compare
    python benchmarks/gan.py --size 2048 --tiles 4 --keep file --r1 10         with a penalty on gradients at real images

Two steps in tiles in time; the largest resident memory of the process, imports and images included.

The generator has 7 x 7 kernels at the ends, four strides and residual blocks, with instance norms and reflection; the
discriminator judges patches at two resolutions.  Widths are given: at 64, as in the paper, weights alone are 0.7 GiB and a
step of this size takes a CPU days.  Feature matching compares maps of all layers of made and real images, which leave the
stream whole: 4.4 GiB at 8,192 pixels.  Unless --matching is given it is off, and the discriminator gives scores alone.
"""

from __future__ import annotations

import argparse
import json
import platform
import resource
import time
from pathlib import Path

import torch

from widefield.comm.mesh import Mesh, World
from widefield.config import RunConfig, StreamConfig, parse_config
from widefield.plans import Plan
from widefield.training.assemble import assemble, learner_of, training_batches

RESULTS = Path(__file__).parent / "results/gan.json"
GIB = 2**30


def config_of(options: argparse.Namespace) -> RunConfig:
    return parse_config(
        f"""
model:
  name: gan
  options:
    generator: pix2pixhd
    generator_options: {{width: {options.width}, blocks: {options.blocks}, strides: 4}}
    discriminator: multiscale
    discriminator_options: {{width: {options.width}, strides: 3, features: {str(options.matching > 0).lower()}}}
data:
  name: scene
  options: {{size: [{options.size}, {options.size}], scenes: [1, 1], slant: 0, pairs: true, feature_px: 256}}
  batch_size: 1
  workers: 0
task: {{name: gan, options: {{adversarial: lsgan, reconstruction: 0, feature_matching: {options.matching}, r1: {options.r1}}}}}
optimizer: {{name: adamw, lr: 2.0e-4, betas: [0.5, 0.999]}}
precision: float32
""",
        [],
    )


def measured(options: argparse.Namespace) -> dict:
    """Two steps; the largest resident memory of this process, imports and images included."""
    plan = (
        Plan()
        if options.whole
        else Plan(
            stream=StreamConfig(
                tiles=None if options.tiles is None else [options.tiles] * 2, memory=options.memory, keep=options.keep
            )
        )
    )
    parts = assemble(config_of(options), Mesh(plan, World(), torch.device("cpu")))
    learner, reasons = learner_of(parts)
    print(*(reason for reason in reasons if "stream" in reason), sep="\n", flush=True)
    batches = training_batches(parts, first=0, last=options.steps, dummy_batch=learner.dummy_batch)
    seconds, losses = [], []
    for _ in range(options.steps):
        batch, began = next(batches), time.perf_counter()
        losses.append(learner.learn([batch], stop=False)[0])
        seconds.append(time.perf_counter() - began)
        print(f"step {len(losses)}: loss {losses[-1]:.9g}, {seconds[-1]:.0f} s, peak {_peak() / GIB:.2f} GiB", flush=True)
    parameters = sum(parameter.numel() for parameter in learner.model.parameters())
    return {
        "size": options.size, "width": options.width, "blocks": options.blocks, "matching": options.matching, "r1": options.r1,
        "parameters": parameters, "whole": options.whole, "tiles": options.tiles, "memory": options.memory,
        "keep": options.keep, "losses": losses, "seconds": seconds, "peak_bytes": _peak(),
        "threads": torch.get_num_threads(), "torch": torch.__version__, "machine": platform.machine(),
    }  # fmt: skip


def _peak() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", type=int, default=8192, help="pixels along each side")
    parser.add_argument("--width", type=int, default=4, help="channels of the first layers")
    parser.add_argument("--blocks", type=int, default=3, help="residual blocks")
    parser.add_argument("--matching", type=float, default=0.0, help="task.options.feature_matching; 10 in pix2pixHD")
    parser.add_argument("--r1", type=float, default=0.0, help="task.options.r1, in each step")
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--tiles", type=int, default=None, help="tiles in time along each side")
    parser.add_argument("--memory", default=None, help="of a step of either network, as 3GiB, in place of tiles or with them")
    parser.add_argument("--keep", default=None, help="where tensors are kept between segments: device, host or file")
    parser.add_argument("--whole", action="store_true", help="without a stream")
    parser.add_argument("--save", action="store_true", help=f"add the result to {RESULTS.name}")
    options = parser.parse_args()
    found = measured(options)
    print(json.dumps(found, indent=1))
    if options.save:
        before = json.loads(RESULTS.read_text()) if RESULTS.exists() else []
        RESULTS.write_text(json.dumps([*before, found], indent=1) + "\n")


if __name__ == "__main__":
    main()
