"""A recipe at a size of tests: its numbers under a plan, and runs of it, trained, cut short and evaluated again."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from command import RECIPES, fingerprint, forget_after, losses
from devices import here

from widefield import inference
from widefield.comm.mesh import Mesh, World
from widefield.config import RunConfig, read_config
from widefield.plans import Plan, plan_of
from widefield.run import train
from widefield.training.assemble import assemble, evaluate_parts, learner_of, training_batches
from widefield.training.evaluation import Evaluation

ALONE = Plan()


def its_loss(found: Evaluation) -> list[float]:
    return [found.loss]


@dataclass(frozen=True)
class SmallRecipe:
    """scores: the numbers of an evaluation that plans are compared by."""

    name: str
    settings: Sequence[str]
    scores: Callable[[Evaluation], list[float]] = its_loss

    @property
    def path(self) -> str:
        return str(RECIPES / f"{self.name}.yaml")

    def config(self, *settings: str) -> RunConfig:
        return read_config(self.path, [*self.settings, *settings])

    def numbers(self, mesh: Mesh, steps: int, *settings: str) -> list[float]:
        """The losses of some steps, those of each turn too, then the scores of an evaluation of the averaged model, if any."""
        parts = assemble(self.config(*settings), mesh)
        learner, _ = learner_of(parts)
        batches = training_batches(parts, first=0, last=steps)
        numbers = list[float]()
        for _ in range(steps):
            passes = [next(batches) for _ in range(parts.config.gradient.accumulate)]
            loss, _ = learner.learn(passes, stop=False)
            numbers += [loss, *learner.losses.values()]
        found = evaluate_parts(parts, learner.model if learner.ema is None else learner.ema.module)
        assert (found.images, found.duplicates) == (len(parts.dataset.evaluate), 0)
        return numbers + self.scores(found)

    def alone(self, steps: int, *settings: str, plan: Plan = ALONE) -> list[float]:
        """Those of one rank, on the device of the test that runs."""
        return self.numbers(Mesh(plan, World(), here()), steps, *settings)

    # ------------------------------------------------------------------------------------------ runs

    def go(self, folder: Path, *settings: str):
        return train(self.config(*settings), folder, World())

    def trained(self, folder: Path, *settings: str) -> Path:
        assert self.go(folder, *settings).reason == "complete"
        return folder

    def check_space_of_two_ranks(self) -> None:
        """As it is shipped, the recipe cuts each image in two."""
        plan = plan_of(read_config(self.path), 2)
        assert plan.ranks == 2 and plan.space == [2, 1]

    def check_resume(self, whole: Path, folder: Path, *, after: int) -> None:
        """A run that goes on after a step leaves what `whole` left, byte for byte."""
        self.go(folder, "checkpoint.every=1step", "checkpoint.keep_last=100")
        forget_after(folder, after)
        assert self.go(folder).reason == "complete"
        assert losses(folder) == losses(whole) and fingerprint(folder, ranks=1) == fingerprint(whole, ranks=1)

    def check_quality(self, folder: Path, least: dict[str, float], most: dict[str, float] | None = None) -> None:
        """Train as it is shipped, on one rank, whose numbers are those of two; compare the metrics of its evaluation."""
        train(
            read_config(self.path, ["mesh.space=[]", "mesh.replicate=1", "log.tensorboard=false", "log.every=100"]),
            folder,
            World(),
        )
        metrics = json.loads((folder / "evaluation.json").read_text())["metrics"]
        assert all(metrics[name] > value for name, value in least.items()), metrics
        assert all(metrics[name] < value for name, value in (most or {}).items()), metrics


def check_evaluated_again(run: Path) -> None:
    """The evaluation of a run says what its training said at the end."""
    again = inference.evaluate_run(run, [], World())
    told = json.loads((run / "evaluation.json").read_text())
    assert again.sentence == told["sentence"] and again.confusion == told.get("confusion")
