"""Captures a module's forward as a graph of operations, and checks whether a captured graph is still valid at a call.

    trace.py            runs a module once on fake tensors and records its operations
    recorder.py         the dispatch mode that records them
    ir.py               the graph: operations and values
    decompositions.py   operations that are recorded as several simpler ones
    fake_parameters.py  fake tensors in place of a module's parameters and buffers
    containers.py       refuses tensors in containers that torch's pytrees do not know
    autograd_gaps.py    gradients where autograd and the recorded operations differ
    side_effects.py     what a forward changes besides buffers: attributes, caches, generators
    python_state.py, objects.py, python_watch.py
                        the Python state that a graph depends on, and whether it has changed
    program_cache.py    the captured programs of a module, and which of them a call may use
    interpreter.py      runs a graph in place of a module's forward

Imports rules, tiled (whose operators it records) and the rooms below.
"""
