"""What a check may look at: the ranks, the recipe, the run folder, and the machines that were named."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from widefield.comm.mesh import Mesh, World
from widefield.config import RunConfig
from widefield.planner.machines import Cluster


@dataclass(frozen=True)
class Surroundings:
    """world: of the launcher.  folder: where runs are written; it need not be there yet.

    mesh: all ranks, once they have met; None before, and where they did not.
    problem: why they did not meet.  met_seconds: how long it took them.
    config, recipe: the recipe and its file, where one was named.  cluster: the machines that were named.
    """

    world: World
    folder: Path
    mesh: Mesh | None = None
    problem: str = ""
    met_seconds: float = 0.0
    config: RunConfig | None = None
    recipe: Path | None = None
    cluster: Cluster | None = None

    @property
    def workers(self) -> int:
        """Loader workers per rank, by the recipe; 4 where it leaves them to the program or there is none."""
        workers = None if self.config is None else self.config.data.workers
        return 4 if workers is None else workers

    @property
    def several(self) -> bool:
        """Whether ranks are on more than one host."""
        return 0 < self.world.local_size < self.world.size

    def existing_folder(self) -> Path:
        """The folder, or the nearest one above it that is there."""
        path = self.folder.resolve()
        return next(one for one in (path, *path.parents) if one.is_dir())
