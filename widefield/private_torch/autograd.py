"""The backward that is running, and how autograd follows views."""

from __future__ import annotations

from collections.abc import Callable
from operator import methodcaller
from types import CodeType
from typing import Any

import torch
import torch.autograd.graph

current_graph_task_id: Callable[[], int] = torch._C._current_graph_task_id
"""The number of the backward that runs on this thread, -1 outside of one."""

current_autograd_node: Callable[[], Any] = torch._C._current_autograd_node
"""The node whose gradient is computed now, None outside of a backward: a leaf's node tells that a gradient has arrived."""

next_node_number: Callable[[], int] = torch._C._autograd._get_sequence_nr  # type: ignore[attr-defined]
"""The number that the next autograd node of this thread gets, by which a backward operation is known to be a forward one's."""

node_number_of: Callable[[Any], int] = methodcaller("_sequence_nr")
"""The number of an autograd node, see `next_node_number`."""

will_engine_execute_node: Callable[[Any], bool] = torch._C._will_engine_execute_node
"""Whether the running backward reaches a node; RuntimeError where `torch.autograd.grad` asks for the gradient of that leaf,
which is then not added to its `grad`."""

engine_run_backward_code: CodeType = torch.autograd.graph._engine_run_backward.__code__
"""The Python frame below which autograd itself calls operations: a hook of somebody's stands between."""

queue_callback: Callable[[Callable[[], None]], None] = torch.autograd.Variable._execution_engine.queue_callback
"""Has a function called once the running backward is over: what is left of the gradients is sent then."""

set_view_replay_enabled: Callable[[bool], None] = torch._C._set_view_replay_enabled
"""Has autograd repeat the operations of a view that was written to, on this thread, where it would go by strides in memory:
those say nothing of a whole that lies in tiles."""

profiler_enabled: Callable[[], bool] = torch.autograd._profiler_enabled
"""Whether one of torch's profilers runs on this thread: a second one inside of it is an error."""
