"""Does it fit, which plan, how fast: answered for a model, an image size and machines, before anything is rented.

emulation/   runs a real training step of one rank on tensors without data, with process groups that send nothing, and records
             its operations, messages and allocations
machines/    machines as data: a catalogue, and what was measured on the user's
cost/        the seconds of a recorded step on a machine
search/      which plans there are for a number of ranks, and which is best
agreeing/    which way of agreeing is fast where some of many workers are slow
"""
