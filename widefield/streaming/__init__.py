"""Tiles in time: a module run tile after tile on one device, with the numbers of the whole run.

    api.py               stream(): the module's forward, run so
    schedule.py          which operations run together, in what order, over which tiles
    tile_planner.py      along which dims each operation can be cut, and what it then reads
    tile_ops.py          one operation on one tile
    fallbacks.py         what runs on the whole image all the same
    sampling.py          what a few tiles tell of all
    runner.py            runs a schedule forward and backward; fusion.py: several operations of a tile at once
    spatial.py           tiles in time within a tile in space
    saved_tensors.py     what autograd saves of an operation
    cost_model.py, memory_simulator.py, search.py, choice.py
                         what a schedule costs, and which one is taken
    storage/             where kept tensors lie

Imports captures, the rules they are run by, and tiled tensors.
"""
