"""A module as a graph: what operations it runs, on what, and whether the graph still holds at the next call.

    trace.py            runs a module once on fake tensors and writes down its operations
    recorder.py         the dispatch mode that writes them down
    ir.py               the graph: operations, values, where each value is used last
    decompositions.py   operations that are taken apart into simpler ones on the way
    fake_parameters.py  fake tensors in place of a module's own, and back
    containers.py       arguments and results that are containers of tensors
    autograd_gaps.py    which values have a gradient, where autograd knows and a graph does not
    side_effects.py     what a forward leaves behind: buffers, attributes, the state of generators
    python_state.py, objects.py, python_watch.py
                        what Python state a graph depends on, and whether it changed since
    program_cache.py    the programs of a module that were captured before, and which of them a call may use
    interpreter.py      puts a program in place of a module's forward

Imports rules, tiled tensors (whose operations it records) and what lies below them.
"""
