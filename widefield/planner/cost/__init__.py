"""The seconds and the memory of recorded steps on a cluster.  Arithmetic on records: nothing runs, nothing is sent.

op_time.py        seconds of one operation: as measured, from its nearest measured neighbours, or by the roofline
message_time.py   seconds of one message: as measured, or by latency and bandwidth
simulation.py     the events of one or several ranks on a clock: queues, overlap, waiting
step_time.py      the seconds of a step, with parts, timeline, uncertainty and what was extrapolated
device_memory.py  what a rank's allocations take on a device, allocated and reserved
"""

from widefield.planner.cost.device_memory import DeviceMemory, device_memory
from widefield.planner.cost.simulation import Span
from widefield.planner.cost.step_time import StepTime, step_time

__all__ = ["DeviceMemory", "Span", "StepTime", "device_memory", "step_time"]
