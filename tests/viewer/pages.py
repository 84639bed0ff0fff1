"""Small viewers for tests, and their tiles read back."""

from __future__ import annotations

import base64
import json
import re
import zlib
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from widefield.data.image import colours
from widefield.viewer import Settings, Viewer, open_scene


def write(
    folder: Path, image: np.ndarray, *, settings: Settings | None = None, probabilities=None, **labels: np.ndarray
) -> Path:
    """The folder of a viewer of an array, (C, H, W) or (C, D, H, W), with labels."""
    folder.mkdir(exist_ok=True)
    paths = {}
    for name, array in {"image": image, "probabilities": probabilities, **labels}.items():
        if array is not None:
            paths[name] = folder / f"{name}.npy"
            np.save(paths[name], array)
    scene = open_scene("scene", paths["image"], {name: paths[name] for name in labels}, paths.get("probabilities"))
    Viewer([scene], settings or shown()).write(folder / "page")
    return folder / "page"


def shown(**settings: Any) -> Settings:
    return Settings(colours(256), **settings)


def data(page: Path) -> dict[str, Any]:
    """What the page knows."""
    return json.loads(re.search(r"const WIDEFIELD = (.*);\n$", (page / "data.js").read_text(), re.DOTALL)[1])


def level(page: Path, layer: str, number: int, size: tuple[int, int], *, at: str = "0-0", scene: int = 0) -> np.ndarray:
    """A level of a layer, put together from its tiles: (H, W) numbers, or (H, W, channels) of a picture."""
    height, width = (-(-extent // 2**number) for extent in size)
    rows = []
    for top in range(0, height, 512):
        sizes = [(min(512, height - top), min(512, width - left)) for left in range(0, width, 512)]
        keys = [f"{scene}/{layer}/{at}/{number}/{top // 512}_{column}" for column in range(len(sizes))]
        rows.append(np.concatenate([_tile(page, *one) for one in zip(keys, sizes, strict=True)], axis=1))
    return np.concatenate(rows)


def _tile(page: Path, key: str, size: tuple[int, int]) -> np.ndarray:
    if key in data(page)["same"]:
        return np.full(size, data(page)["same"][key])
    (path,) = (page / "tiles" / key).parent.glob(Path(key).name + ".*")
    if path.suffix != ".js":
        with Image.open(path) as image:
            return np.asarray(image)
    own, text = re.fullmatch(r'widefieldTile\("(.*)","(.*)"\)\n', path.read_text()).groups()
    assert own == key
    plain = zlib.decompress(base64.b64decode(text))
    dtype = "<u2" if len(plain) == 2 * size[0] * size[1] else "u1"
    return np.frombuffer(plain, dtype).reshape(size)
