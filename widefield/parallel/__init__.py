"""A model over a mesh: `parallelize`, a file per strategy in strategies/, and what a training loop does with such a model.

Imports the rooms that run a model (tiled, streaming, tensor_parallel, pipelining) and what lies below them.
"""
