"""TiledTensor: a tensor whose pixels are cut into tiles, one per rank, and the operations on it.

    tensor.py            the tensor
    api.py               conversions from and to plain tensors: tile, from_tile, window, whole
    dispatch.py          finds what runs an operation: a rule, a pointwise operation, torch's decomposition, or a refusal
    executors/           execute what a rule describes
    redistribute.py      changes of layout
    gather_watch.py      records which operations gather whole tensors
    replicated_ops.py    operations on tensors that are the same on every rank
    single_rank.py       the fast path on a grid of one rank
    in_place.py          in-place operations and `out=`
    view_writeback.py    views that are copies, because their pixels had to move
    partial_gradient.py  gradients of which every rank has a part
    rng.py               random numbers of the whole
    memory_format.py     the order of a result's dims in memory
    sample_mixing.py     finds operations that mix the samples of a batch
    overrides.py         operators that are caught before torch decomposes them
    schemas.py           what an operation writes into, by its schema
    pointwise.py         which operations are pointwise
    batch_statistics.py, sync_batch_norm.py
                         BatchNorm over tiles and replicas

Imports the descriptions of rules, kernels and communication.  It knows ops/, the room of rules, by name alone.
"""

from widefield.tiled import dispatch, redistribute, single_rank, tensor

tensor.install(
    handler_of=dispatch.handler_of, run_single_rank=single_rank.run_single_rank, redistribute=redistribute.redistribute
)
