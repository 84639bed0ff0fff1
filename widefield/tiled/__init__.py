"""TiledTensor: a whole tensor whose pixels live in tiles, one per rank, and what operations on it do.

    tensor.py            the tensor
    api.py               makes them, and wholes of them: tile, from_tile, window, whole
    dispatch.py          what runs an operation on them: a rule, a pointwise operation, torch's decomposition, or a refusal
    executors/           carries out what a rule describes
    redistribute.py      from one layout to another
    replicated_ops.py    operations on what every rank has alike; single_rank.py: on a grid of one rank
    in_place.py, view_writeback.py
                         writes, and views whose pixels had to move
    partial_gradient.py  gradients of which every rank has a part
    rng.py               random numbers of the whole
    memory_format.py     in which order the dims of a result lie in memory
    sample_mixing.py     which operations tell samples of one batch apart
    overrides.py         operators of torch that tiled tensors take before torch takes them apart
    schemas.py, pointwise.py
                         what torch says of an operation
    batch_statistics.py, sync_batch_norm.py
                         BatchNorm over tiles and copies

Imports the descriptions of rules, kernels and messages.  It knows the room of rules, ops/, by name alone.
"""

from widefield.tiled import dispatch, redistribute, single_rank, tensor

tensor.install(handler_of=dispatch.handler_of, run_alone=single_rank.run_alone, redistribute=redistribute.redistribute)
