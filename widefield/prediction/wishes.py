"""What is asked for besides the answers themselves, from the options of a command or the keywords of a call."""

from __future__ import annotations

from dataclasses import dataclass

from widefield.prediction.labels import Probabilities
from widefield.tasks import labels_of
from widefield.training.assemble import Parts


@dataclass(frozen=True)
class Wishes:
    """How to predict.  top: how many classes to name.  batch_size: the most images per pass, of one size each.

    flips: the mean over mirror images.  probabilities, overlays, outlines: further files, where pixels have labels.
    overwrite: replace the answers of an earlier command in the same folder.
    sliding: blend the answers of windows of so many pixels, on every dim or on all alike.  overlap: the share of a window that
    the next one covers too.  compare: say where labels are others than those of the whole image.
    """

    top: int = 3
    batch_size: int = 1
    flips: bool = False
    probabilities: Probabilities | None = None
    overlays: bool = False
    overwrite: bool = False
    outlines: bool = False
    sliding: tuple[int, ...] | None = None
    overlap: float = 0.5
    compare: bool = False

    def __post_init__(self) -> None:
        if self.top < 1:
            raise ValueError(f"--top is {self.top}; write how many classes to name, 1 or more")
        if self.batch_size < 1:
            raise ValueError(f"--batch-size is {self.batch_size}; write how many images to predict at once, 1 or more")
        if self.probabilities not in (None, "npy", "png"):
            raise ValueError(f"--probabilities is {self.probabilities}; write npy, or png for files of 16 bits")

        if not 0 <= self.overlap < 1:
            raise ValueError(
                f"--overlap is {self.overlap:g}; write the share of a window that the next one covers too, 0 to 0.9"
            )
        if self.compare and self.sliding is None:
            raise ValueError("--compare says how far --sliding is from the whole image's labels; give both, or leave it out")
        if self.flips and self.sliding is not None:
            raise ValueError("--flips takes the mean of the whole image's mirrors, and --sliding its windows; give one of them")

    def _check_sliding(self, parts: Parts) -> None:
        dims = parts.dataset.dims
        if self.sliding is None:
            return
        if labels_of(parts.task) != "pixels":
            raise ValueError(
                "--sliding is for images in which each pixel has one class, and in this run it has not; leave it out"
            )
        if len(self.sliding) not in (1, dims):
            raise ValueError(
                f"--sliding has {len(self.sliding)} sizes and this run's images have {dims} dims; write one, or {dims} with x "
                "between them"
            )

    def check(self, parts: Parts) -> None:
        """ValueError: files of pixels are asked for where images have labels, or mirror images of values; or there is nothing
        to predict, since the run learned without labels.
        """
        if labels_of(parts.task) == "views":
            raise ValueError(
                "this run learned embeddings of views without labels, and answers nothing; export its backbone (widefield "
                "export), and train a network that starts from it: model.weights, with model.weights_strict=false"
            )
        if labels_of(parts.task) == "noise":
            raise ValueError(
                "this run's generator makes images of noise and reads none; let it make some by widefield sample RUN"
            )
        asked = [name for name in ("probabilities", "overlays", "outlines") if getattr(self, name)]
        if asked and not parts.dataset.pixels:
            raise ValueError(
                f"--{asked[0]} writes what the model says of every pixel, and this run's task has labels of images; leave it "
                f"out. --top {len(parts.dataset.classes)} names all classes"
            )
        if asked and parts.dataset.labels == "image":
            raise ValueError(f"--{asked[0]} writes where classes are, and this run's answers are images; leave it out")
        if parts.dataset.dims == 3 and (self.overlays or self.probabilities == "png"):
            asked = ["overlays" if self.overlays else "probabilities png"]
            raise ValueError(
                f"--{asked[0]} writes pictures, and this run was trained on volumes; leave it out, or take --probabilities npy"
            )
        if parts.dataset.dims == 3 and self.outlines:
            raise ValueError("--outlines writes polygons, which are flat, and this run was trained on volumes; leave it out")
        if self.outlines and labels_of(parts.task) == "layers":
            raise ValueError(
                "--outlines writes where each class is, and in this run a pixel may have several; leave it out, and take the "
                "files of each class"
            )
        self._check_sliding(parts)
        if self.flips and labels_of(parts.task) == "boxes":
            raise ValueError("--flips takes the mean over mirror images, and boxes of several have none; leave it out")
        if self.flips and labels_of(parts.task) == "values":
            raise ValueError("--flips takes the mean over mirror images, whose values may be others; leave it out")


PLAIN = Wishes()
"""Nothing besides the answers."""
