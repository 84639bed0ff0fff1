"""A model cut into stages, one after another, each on a rank of its own: where it is cut, in what order ranks work on it, and
what they hand on.

    partition.py       where a captured model is cut
    stage_parts.py     the part of a graph that a stage runs
    stage.py           a stage as torch's pipelining wants it
    runtime.py         runs a model so: schedules of torch.distributed.pipelining on our stages
    schedule_view.py   schedules as grids and figures
    split_backward.py  a backward in two halves, for the zero bubble
    losses.py          what a pass is to learn
    stage_state.py     the weights that a rank holds
    sample_mixing.py   whether micro-batches may be cut at all
    wire.py            values that are handed on, tiled ones too

Imports tensor_parallel (a stage may be cut by channels), captures, tiled tensors and messages.
"""
