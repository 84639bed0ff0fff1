"""Files the answers for images: label images, the journal and, at the end, the tables."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import Tensor

from widefield.comm.mesh import Mesh
from widefield.prediction import journal as journals
from widefield.prediction.answers import Answer
from widefield.prediction.boxes import BoxFiles, write_coco_results
from widefield.prediction.inputs import Input
from widefield.prediction.labels import Kinds
from widefield.prediction.restored import RestoredFiles
from widefield.prediction.table import write_tables
from widefield.training.assemble import Parts

FURTHER = ("labels", "values", "boxes", "left_out", "apart")
"""What of an answer is noted besides its classes and probabilities, where there is any."""


@dataclass
class Filing:
    """The folder of the answers, with its journal.  kinds: the files per image; None where images have classes alone."""

    folder: Path
    kinds: Kinds | RestoredFiles | BoxFiles | None
    journal: journals.Journal
    rank: int

    @classmethod
    def begin(
        cls,
        folder: Path,
        kinds: Kinds | RestoredFiles | BoxFiles | None,
        about: dict[str, Any],
        images: Sequence[Input],
        mesh: Mesh,
        *,
        overwrite: bool,
    ) -> tuple[Filing, list[Input]]:
        """Open the folder; returns it, and the images with their final names.  Every rank calls it.

        about: what all answers in the folder share.  ValueError: see `journal.begin`.
        """
        files_of: journals.FilesOf = (lambda name, suffix: []) if kinds is None else kinds.files_of
        found = mesh.together(
            lambda: journals.begin(folder, about, images, files_of=files_of, overwrite=overwrite) if mesh.is_main else None
        )
        found = mesh.gather_objects(found)[0]
        assert found is not None
        return cls(folder, kinds, found[0], mesh.rank), found[1]

    def earlier(self, image: Input) -> Answer | None:
        """The answer that an earlier command gave for the same file; None where it did not, or its files are gone."""
        if not self.journal.is_done(image) or not all((self.folder / file).exists() for file in self.files_of(image)):
            return None
        tree = self.journal.done[journals.key_of(image.path)]["answer"]
        further = {key: tree[key] for key in FURTHER if key in tree}
        return Answer(str(image.path), tree["classes"], tree["probabilities"], **further)

    def files_of(self, image: Input) -> list[Path]:
        """The paths, below the folder, of an image's files."""
        return [] if self.kinds is None else self.kinds.files_of(image.name, image.suffix)

    def add(self, image: Input, answer: Answer, shown: Tensor | None) -> Answer:
        """Write the files of an answer, and note it; returns it with a path in place of pixels.

        shown: the image, (C, H, W); None where the answer's files are written already.

        ValueError: the disk refuses a file.
        """
        try:
            if answer.boxes is not None and isinstance(self.kinds, BoxFiles):
                path = self.kinds.write(self.folder, image, answer.boxes, answer.classes, answer.probabilities)
                answer = replace(answer, labels=str(path))
            elif answer.pixels is not None and isinstance(self.kinds, RestoredFiles):
                answer = replace(answer, labels=str(self.kinds.write(self.folder, image, answer.pixels)), pixels=None)
            elif answer.pixels is not None and self.kinds is not None and shown is not None:
                path = self.kinds.write(self.folder, image.name, answer.pixels, answer.probabilities_of_pixels, shown)
                answer = replace(answer, labels=str(path), pixels=None, probabilities_of_pixels=None)
            tree = {"classes": answer.classes, "probabilities": answer.probabilities}
            tree |= {key: getattr(answer, key) for key in FURTHER if getattr(answer, key)}
            self.journal.add(image, tree, rank=self.rank)
        except OSError as error:
            raise ValueError(
                f"the answer for {image.path} cannot be written ({error}); free some space, or see to the disk, and give the "
                "same command again: it goes on from there"
            ) from None
        return answer

    def end(self, parts: Parts, about: dict[str, Any]) -> None:
        """Write the tables of all that is done.  Every rank calls it, after its last image."""
        mesh, dataset = parts.mesh, parts.dataset

        def write() -> Path:
            done = journals.read_journal(self.folder).in_order()
            if dataset.labels == "boxes":
                ids = dataset.class_ids or range(len(dataset.classes))
                write_coco_results(self.folder, done, dict(zip(dataset.classes, ids, strict=True)))
            return write_tables(self.folder, done, about, labels=dataset.labels, classes=dataset.classes)

        mesh.together(lambda: None)  # all ranks have noted all of theirs
        mesh.together(lambda: write() if mesh.is_main else None)
