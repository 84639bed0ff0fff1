"""The ranks of a copy of the model agree on which images of a batch all of them could read.

Where a copy has several ranks, each reads the images, or its window of them, and reading may fail on one rank only.  Without
agreement its batch would have other samples than those of its peers, and the messages of a pass other sizes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from widefield.comm.mesh import AgreedError, Mesh
from widefield.data.batch import Batch
from widefield.data.loader import SampleReader, close
from widefield.data.order import Key
from widefield.data.transforms import seed_of

_NO_SHAPE = 2**63 - 1


class Agreed:
    """An iterator over a loader's batches, with only the images that every rank of this copy of the model could read.

    dummy_batch: replaces a batch with no such image; None where such a batch is not run.
    Cost per batch: one message of a few numbers over the ranks of the copy; none where the copy is one rank.
    """

    def __init__(
        self, batches: Iterator[Batch], mesh: Mesh, *, dummy_batch: Batch | None, name_of: Callable[[int], str]
    ) -> None:
        self._batches, self._mesh, self._dummy_batch, self._name_of = batches, mesh, dummy_batch, name_of

    def __iter__(self) -> Agreed:
        return self

    def __next__(self) -> Batch:
        batch = next(self._batches)
        return batch if batch.idle else self._agreed(batch)

    def _shutdown_workers(self) -> None:  # as torch's own iterator has it, see loader.close
        close(self._batches)

    def _agreed(self, batch: Batch) -> Batch:
        fine = batch.problem is None and not self._mesh.is_called_to_agree
        shape = seed_of(*batch.shape) if batch.problem is None and any(batch.readable) else None
        numbers = [int(fine), *([_NO_SHAPE] * 2 if shape is None else [shape, -shape]), *map(int, batch.readable)]
        all_fine, least, most, *readable = self._mesh.least_of_copy(numbers)
        if least not in (_NO_SHAPE, -most):
            problem = f"this rank read images of {batch.shape} (C, H, W) and another rank the same images of another size"
            return self._dummy(replace(batch, problem=batch.problem or f"{problem}; let all machines see the same files"))
        return self._readable_everywhere(batch, readable) if all_fine else self._dummy(batch)

    def _dummy(self, batch: Batch) -> Batch:
        errors = {"problem": batch.problem, "skipped": batch.skipped, "asked": batch.asked, "read": batch.read}
        return replace(self._dummy_batch or batch, samples=0, refused=True, **errors)

    def _readable_everywhere(self, batch: Batch, readable: list[int]) -> Batch:
        """The batch with the images that all ranks could read."""
        if all(readable):
            return batch
        is_real = batch.samples > 0 or bool(batch.skipped)  # of a dummy batch, an unreadable image is not skipped
        lost = [self._name_of(index) for index, could in zip(batch.asked, readable, strict=True) if not could and is_real]
        here = [number for number, could in enumerate(batch.readable) if could]
        rows = [row for row, number in enumerate(here) if readable[number]]
        found = (
            batch if rows == list(range(batch.samples)) and rows else batch.only(rows) if rows else self._dummy_batch or batch
        )
        return replace(found, samples=len(rows), skipped=lost, asked=batch.asked, read=batch.read)


def dummy_batch_of(reader: SampleReader, mesh: Mesh) -> Batch:
    """A batch of the first image that every rank can read, the same on all ranks.  Every rank calls it.

    AgreedError on every rank: there is no such image, or, unless data.bad_images=skip, a rank cannot read the first one.
    """
    first, count = 0, len(reader)
    while first < count:
        batch = reader.__getitems__([Key(0, 0, first, real=False)])
        mesh.agree(batch.problem)
        found = mesh.gather_objects((int(batch.index[0]) - first) % count)
        if not any(found):
            return batch
        first += max(found)
    raise AgreedError(f"none of the {count} images can be read on every rank; the first is {reader.images.name_of(0)}")
