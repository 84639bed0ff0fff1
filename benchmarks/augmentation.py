"""How long moving an image and its mask takes here, as a ratio to torchvision: `python benchmarks/augmentation.py`.

Processor time of one thread, the best of 3, for one image of 1,536 x 1,536 pixels.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from torchvision import tv_tensors
from torchvision.transforms import InterpolationMode, v2

from widefield.data.spatial.coordinate_map import composed
from widefield.data.spatial.moves import drawn
from widefield.data.spatial.warp import Warp
from widefield.geometry.box import full_box

SIZE = (1536, 1536)
TRANSFORMS = [
    v2.RandomHorizontalFlip(1.0),
    v2.RandomAffine(20, (0.1, 0.1), (0.9, 1.1), interpolation=InterpolationMode.BILINEAR),
    v2.ElasticTransform(50.0, 5.0),
    v2.Resize((1920, 1920)),
]


def seconds(work: Callable[[], Any]) -> float:
    work()
    times = []
    for _ in range(3):
        start = time.process_time()
        work()
        times.append(time.process_time() - start)
    return min(times)


def main() -> None:
    torch.set_num_threads(1)
    labels = torch.zeros(SIZE, dtype=torch.uint8)
    for channels, dtype in ((1, torch.uint8), (3, torch.uint8), (1, torch.float32), (3, torch.float32)):
        image = torch.randint(0, 256, (channels, *SIZE), dtype=torch.uint8).to(dtype)
        for transform in TRANSFORMS:
            move = drawn(transform, SIZE, 0)
            assert move is not None
            warp, window = Warp(composed(SIZE, [move])), full_box(move.size)
            ours = seconds(lambda: warp.view(image, labels, full_box(SIZE), window, outside=255))  # noqa: B023
            theirs = seconds(lambda: transform(tv_tensors.Image(image), tv_tensors.Mask(labels)))  # noqa: B023
            name = f"{type(transform).__name__}, {channels} x {str(dtype).removeprefix('torch.')}"
            print(f"{name:40} {ours:.3f} s, {ours / theirs:.2f} of torchvision's {theirs:.3f} s", flush=True)


if __name__ == "__main__":
    main()
