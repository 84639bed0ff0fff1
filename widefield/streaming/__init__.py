"""Tiles in time: a module runs tile after tile on one device, with the numbers of a run on the whole image.

    api.py               stream(): makes a module's forward run so
    schedule.py          which operations run together, in what order, over which tiles
    tile_planner.py      along which dims each operation can be cut
    tile_ops.py          one operation on one tile
    fallbacks.py         which operations run on the whole image all the same
    sampling.py          a few tiles of a segment that represent all of them
    runner.py            runs a schedule forward and backward; fusion.py: compiles several operations of a tile into one
    run_state.py         the values and gradients that a run has in memory
    differentiable.py    a stream as a function of autograd
    tangents.py          the backward of a backward, for losses of gradients; derivatives.py: of one tile
    second_gradients.py  which operations have no second derivative
    progress.py          at which tile a stream is, for a long step to say
    spatial.py           tiles in time within a tile in space
    regions.py           tensors and the boxes of the whole that they cover
    saved_tensors.py     what autograd saves for an operation
    cost_model.py, memory_simulator.py, search.py, choice.py
                         what a schedule costs, and which one is chosen
    storage/             where tensors between segments are stored

Imports capture, the rules and tiled.
"""
