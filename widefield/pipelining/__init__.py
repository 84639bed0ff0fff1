"""Pipeline parallelism: a model is cut into stages, and each rank of the axis `stage` has one stage, or several.

    partition.py       where a captured model is cut
    stage_parts.py     the part of the graph that a stage runs
    stage.py           a stage as a module for torch.distributed.pipelining
    runtime.py         runs a model in stages, by torch's schedules
    schedule_view.py   schedules as data, for reports
    split_backward.py  a backward in two halves, for the zero-bubble schedule
    losses.py          the loss of each micro-batch
    stage_state.py     the weights of a rank's own stages
    sample_mixing.py   whether a batch may be divided into micro-batches
    wire.py            how a value is packed to be sent to another stage

Imports tensor_parallel (a stage's channels may be sharded), capture, tiled and comm.
"""
