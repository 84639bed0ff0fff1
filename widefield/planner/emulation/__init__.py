"""A training step of one rank, run on tensors without data and recorded: operations, messages, allocations.

The trainer's own code runs: the plan's strategies, tiles, streams, the optimizer.  So nothing is a formula that could differ
from the program.  Only three things are put in its place.

values.py   tensors without data for all that is large.  Small tensors that are made without large ones are real: counters, the
            marks by which ranks compare themselves
comm/planned_groups.py   process groups that record messages and send none.  Other ranks are taken to do what this one does
recording.py  what is written down, and how long each allocation lives

kernel_memory.py says what kernels allocate for themselves while they run, which no operation shows.
"""

from widefield.planner.emulation.stand_in import stand_in_data
from widefield.planner.emulation.step import emulated_step
from widefield.planner.emulation.values import CannotEmulate

__all__ = ["CannotEmulate", "emulated_step", "stand_in_data"]
