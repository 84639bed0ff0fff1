"""Tensor parallelism: the channels of a captured model are sharded over ranks, for any model.

A convolution or linear layer is sharded by its outputs (each rank computes some output channels from all inputs) or by its
inputs (each rank computes partial sums of all output channels from some inputs, and the sums are all-reduced).  A layer sharded
by outputs followed by one sharded by inputs needs no message in between: norms and activations run on each rank's channels.

    placement.py       which indices of a dim each rank has; through views, slices and concatenations
    op_strategy.py     OpStrategy: how one operation runs on shards
    rule_strategies.py the strategies that follow from the tile rules in `ops/`
    sharding_rules.py  the other strategies: layers with weights, pointwise operations; views.py: views, slices, concatenations
    lookahead.py       into which heads or groups later operations split a dim
    search.py          chooses a strategy for each operation, by bytes sent, replicated weights and replicated work
    collectives.py     the messages, each with its adjoint
    runtime.py         runs a model on its shards

Imports capture, tiled and comm.
"""
