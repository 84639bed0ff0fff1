"""What does it take to predict a large GeoTIFF by window?  Memory of each rank, seconds, and whether labels are the whole's.

A satellite scene of SIDE x SIDE pixels, four bands of 16 bits, is written by window, and a run of the recipe `scene` predicts
it on 1 rank and on 2, which share the image.  The labels of a scene of 4,096 pixels a side are compared with those of the
whole image in one piece, all of them, and so are those of 1 and 2 ranks.

  python benchmarks/predict_wide.py [--side 16384] [--save]
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import rasterio
import torch
from rasterio.windows import Window

from widefield.config import DataConfig
from widefield.data import open_dataset
from widefield.geometry import Interval
from widefield.image_files import open_image
from widefield.inference import single_rank

RESULT = Path(__file__).parent / "results" / "predict_wide.json"
STEP = 1024


def write_scene(path: Path, side: int) -> None:
    """By window, in deflated blocks."""
    images = open_dataset(DataConfig(name="scene", options={"size": [side, side], "slant": 0.05})).evaluate
    place = rasterio.Affine(10.0, 0.0, 500_000.0, 0.0, -10.0, 4_600_000.0)
    about = {"driver": "GTiff", "width": side, "height": side, "count": 4, "dtype": "uint16", "crs": "EPSG:32632", "nodata": 0}
    kind = {"tiled": True, "blockxsize": 512, "blockysize": 512, "compress": "deflate", "zlevel": 1, "BIGTIFF": "YES"}
    with rasterio.open(path, "w", transform=place, **about, **kind) as file:
        for top in range(0, side, STEP):
            for left in range(0, side, STEP):
                rows, columns = Interval(top, min(side, top + STEP)), Interval(left, min(side, left + STEP))
                pixels, _ = images.read_window(0, (rows, columns))
                file.write(pixels.numpy(), window=Window(left, top, len(columns), len(rows)))


def predicted(run: Path, scene: Path, output: Path, ranks: int) -> dict[str, float]:
    """Seconds, and the largest memory of a rank in MiB, as the kernel has counted it."""
    words = ["predict", str(run), str(scene), "--output", str(output), *(["mesh.space=[2,1]"] if ranks == 2 else [])]
    began = time.perf_counter()
    command = subprocess.Popen([sys.executable, "-m", "widefield", *words], stdout=subprocess.DEVNULL)
    most: dict[int, int] = {}
    while command.poll() is None:
        for pid in _processes_below(command.pid):
            most[pid] = max(most.get(pid, 0), _peak_kib(pid))
        time.sleep(0.2)
    assert command.returncode == 0, f"{' '.join(words)} ended with {command.returncode}"
    return {"seconds": round(time.perf_counter() - began, 1), "MiB": round(max(most.values()) / 1024)}


def _processes_below(root: int) -> list[int]:
    found = [root]
    for pid in found:
        for children in Path(f"/proc/{pid}/task").glob("*/children"):
            try:
                found += [int(one) for one in children.read_text().split()]
            except OSError:
                continue
    return found


def _peak_kib(pid: int) -> int:
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.startswith("VmHWM")), 0)


def labels_in(path: Path) -> np.ndarray:
    with open_image(path) as image:
        return image.read()[0]


@torch.no_grad()
def whole_labels(run: Path, scene: Path) -> np.ndarray:
    """Of the model in plain PyTorch on the whole image at once."""
    parts, _ = single_rank(run, None)
    with open_image(scene) as image:
        pixels = torch.from_numpy(image.read())[None]
    return parts.model.eval()(parts.preparation(train=False).scaled(pixels)).argmax(1)[0].to(torch.uint8).numpy()


def check_whole(run: Path, place: Path) -> dict[str, int]:
    """How many of the labels of a scene of 4,096 pixels a side differ from the whole's, and how many there are."""
    scene = place / "small.tif"
    write_scene(scene, 4096)
    predicted(run, scene, place / "small", 1)
    found, expected = labels_in(place / "small" / "small.tif"), whole_labels(run, scene)
    counted = found != 255
    return {"labels": int(counted.sum()), "different": int((found != expected)[counted].sum())}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--side", type=int, default=16384)
    parser.add_argument("--save", action="store_true", help=f"write {RESULT.name} into results/")
    options = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        recipe = Path(__file__).parents[1] / "recipes" / "scene.yaml"
        words = ["train", str(recipe), "--run", str(place / "run"), "schedule.length=2ep", "log.tensorboard=false"]
        subprocess.run([sys.executable, "-m", "widefield", *words], check=True, stdout=subprocess.DEVNULL)
        result = {"side": options.side, "against the whole of 4,096 x 4,096": check_whole(place / "run", place)}
        scene = place / "scene.tif"
        write_scene(scene, options.side)
        for ranks in (1, 2):
            result[f"{ranks} rank{'s' * (ranks > 1)}"] = predicted(place / "run", scene, place / f"out{ranks}", ranks)
        one, two = (labels_in(place / f"out{ranks}" / "scene.tif") for ranks in (1, 2))
        result["labels that differ between 1 and 2 ranks"] = int((one != two).sum())
    result |= {
        "cores": os.cpu_count(), "threads per rank": os.environ["OMP_NUM_THREADS"], "torch": torch.__version__,
        "rasterio": rasterio.__version__, "processor": platform.machine(), "date": time.strftime("%Y-%m-%d"),
    }  # fmt: skip
    print(json.dumps(result, indent=1))
    if options.save:
        RESULT.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
