"""Channels cut over ranks: tensor parallelism for any model, found by following its data from layer to layer.

A convolution or a linear layer is cut by its outputs (every rank computes some channels from all inputs) or by its inputs
(every rank computes all channels from some inputs, and what they have is added up).  One after the other they need no message
between them: what lies there, norms and activations among it, runs on each rank's channels alone.

    placement.py       which part of a whole's dim each rank holds, and what views, slices and joins make of it
    op_strategy.py     what it takes to say how an operation runs on parts
    rule_strategies.py what the rules of `ops/` say of a tensor that is cut along one dim
    sharding_rules.py  how layers with weights can be cut; views.py: views, slices, joins of any set of indices
    lookahead.py       what lies behind a layer that might give a part
    search.py          which strategy each operation of a model takes, by bytes sent, weights left whole and work done twice
    collectives.py     the messages, each with its adjoint
    runtime.py         runs a model so

Imports captures, tiled tensors and messages.
"""
