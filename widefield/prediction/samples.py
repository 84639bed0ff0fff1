"""Images that a run's generator makes of noise, each from a seed and its number alone, so that any ranks make the same."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from widefield.comm.mesh import World
from widefield.data.device import noise_of_seed
from widefield.data.transforms import seed_of
from widefield.inference import loaded_on_ranks
from widefield.parallel.parallelize import evaluates_together
from widefield.prediction.inputs import Input
from widefield.prediction.restored import RestoredFiles, pixels_of, suffix_of_restored
from widefield.tasks import labels_of, noise_of
from widefield.tiled.api import tile, whole
from widefield.training.assemble import Parts


@dataclass(frozen=True)
class MadeOfNoise:
    """output: the folder of the images.  files: those that this rank wrote.  weights: in words."""

    output: Path
    files: list[Path]
    weights: str


def sample_images(
    run: Path,
    overrides: Sequence[str],
    world: World,
    *,
    number: int,
    seed: int = 0,
    batch_size: int = 16,
    output: Path | None = None,
    weights: str | None = None,
    trust: bool = False,
) -> MadeOfNoise:
    """Write images 0 to number - 1 of a seed, on the ranks of `world`.  Every rank calls it.

    output: the folder; None: predictions/seed_S of the run folder.  weights: None: the best, where the run has them.
    ValueError: the run's model makes images of images, the folder cannot be used, or it has images already.
    """
    with loaded_on_ranks(run, overrides, world, weights=weights, trust=trust) as (parts, chosen):
        mesh, folder = parts.mesh, output or run / "predictions" / f"seed_{seed}"
        mesh.together(lambda: _check(parts, folder) if mesh.is_main else _check_task(parts))
        files = RestoredFiles()
        suffix = suffix_of_restored(Path("made.png"), parts.dataset, channels=parts.dataset.channels)
        written = [
            files.write(folder, Input(Path(name), Path(name), suffix), pixels)
            for name, pixels in _named(parts, number, seed, batch_size)
        ]
        mesh.barrier()
        return MadeOfNoise(folder, written, chosen.text)


def _check(parts: Parts, folder: Path) -> None:
    """ValueError: see `sample_images`."""
    _check_task(parts)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        taken = next(folder.iterdir(), None)
    except OSError as error:
        raise ValueError(f"{folder} cannot be a folder of images ({error}); name another --output") from None
    if taken is not None:
        raise ValueError(f"{folder} has {taken.name} already; name another --output, or remove what is there")


def _check_task(parts: Parts) -> None:
    if labels_of(parts.task) != "noise":
        raise ValueError("this run's model reads images and makes none of noise; ask it by widefield predict RUN IMAGE")


def _named(parts: Parts, number: int, seed: int, batch_size: int) -> Iterator[tuple[str, Tensor]]:
    """The name and pixels of those images that this rank writes.  Where ranks share weights, all run equally many batches."""
    mesh, is_shared = parts.mesh, evaluates_together(parts.model)
    mine = range(mesh.copy, number, mesh.copies)
    most = -(-number // mesh.copies) if is_shared else len(mine)
    for first in range(0, most, batch_size):
        numbers = mine[first : first + batch_size]
        made = _made(parts, [seed_of(seed, "sample", one) for one in numbers] or [0])
        for one, image in zip(numbers, made, strict=False):
            if mesh.is_first_of_copy:
                yield f"{one:06}", image


@torch.no_grad()
def _made(parts: Parts, seeds: Sequence[int]) -> Tensor:
    """(B, C, *pixels) of the dataset's dtype, whole on every rank of a copy."""
    mesh, prepare = parts.mesh, parts.preparation(train=False)
    shape = noise_of(parts.task, dims=parts.dataset.dims)
    noise = torch.stack([noise_of_seed(seed, shape) for seed in seeds]).to(mesh.device, parts.arithmetic.dtype)
    parts.model.eval()
    with parts.arithmetic.autocast():
        made = whole(parts.model(tile(noise, mesh)))
    dtype = parts.dataset.dtype
    return pixels_of(made.cpu(), prepare.range_of(dtype), dtype)
