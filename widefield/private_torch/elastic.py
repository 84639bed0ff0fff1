"""Torch's elastic agent with public names for what widefield puts in place of its own: import this file where ranks start."""

from __future__ import annotations

from typing import Any

from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent


class WorkerAgent(LocalElasticAgent):
    """Torch's agent for the ranks of one machine; a subclass puts `start_workers` and `monitor_workers` in place of its own."""

    def start_workers(self, worker_group: Any) -> Any:
        """Start the ranks of a group; gives their process numbers by rank."""
        return super()._start_workers(worker_group)

    def monitor_workers(self, worker_group: Any) -> Any:
        """How the ranks of a group are, as a RunResult."""
        return super()._monitor_workers(worker_group)

    def worker_processes(self) -> dict[int, Any]:
        """The processes of a command, by rank, once they were started."""
        context: Any = self._pcontext  # a SubprocessContext, for a command is no Python function
        return {rank: handler.proc for rank, handler in context.subprocess_handlers.items()}

    def _start_workers(self, worker_group: Any) -> Any:
        return self.start_workers(worker_group)

    def _monitor_workers(self, worker_group: Any) -> Any:
        return self.monitor_workers(worker_group)
