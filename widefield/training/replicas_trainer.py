"""The training loop of replicas that take steps of their own: what a step's line says of all is told some steps later."""

from __future__ import annotations

from dataclasses import asdict, dataclass

from widefield.data.batch import Batch
from widefield.training.guard import RefusedStepError
from widefield.training.memory import peak_memory_bytes
from widefield.training.passes import Passes
from widefield.training.run_events import StepFacts
from widefield.training.step_reports import StepLine, StepReports, tells_later
from widefield.training.trainer import Trainer
from widefield.training.turns import turns_of


@dataclass
class ReplicasTrainer(Trainer):
    """Of a learner with replicas.  Where the guard goes back or skips a batch, all replicas count each step together."""

    def __post_init__(self) -> None:
        replicas = self.learner.replicas
        assert replicas is not None, "the plan has replicas"
        if tells_later(self.config.guard):
            self.learner.reports = StepReports(self.mesh, replicas.replica, replicas.number)

    def _learn(self, batches: list[Batch], passes: Passes, *, stop: bool) -> bool:
        learner, reports = self.learner, self.learner.reports
        if reports is None:
            stopped = super()._learn(batches, passes, stop=stop)
            self._record_averages()
            return stopped
        lr, samples, turns = learner.lr_now(), len(learner.steps.positions(learner.step)), turns_of(learner.task, learner.step)
        loss, _ = learner.learn(batches, stop=False)
        times = passes.lap()
        self._record_saves()
        memory = peak_memory_bytes(self.mesh.device)
        line = StepLine(learner.step, learner.epoch, loss, lr, samples, times.seconds, times.data_seconds, memory, {})
        reports.add(line, turns)
        stands = learner.step == self._next_stand(learner.step - 1)
        return self._exchange(batches, stop=stop) if reports.are_due or stands else False

    def _exchange(self, batches: list[Batch], *, stop: bool) -> bool:
        """Write the lines that wait.  Returns whether any rank asked to stop."""
        reports = self.learner.reports
        assert reports is not None
        try:
            lines, seconds, stopped = reports.exchange(stop=stop)
        except RefusedStepError:
            batches[:] = reports.kept()  # what is written for a replay
            raise
        for line in lines:
            if self.record is not None:
                self.record.step(**asdict(line))
            facts = StepFacts(line.step, line.epoch, line.loss, line.lr, line.samples, line.seconds, self.mesh.rank)
            self._call("on_step", facts)
        self.abandonable.end_on_average(seconds)
        self._record_averages()
        return stopped

    def _evaluate(self) -> None:
        super()._evaluate()
        self._record_averages()

    def _record_averages(self) -> None:
        """Write when replicas averaged their weights, and how far apart they were."""
        assert self.learner.replicas is not None
        for one in self.learner.replicas.averages():
            if self.record is not None:
                self.record.note("average", **asdict(one))
