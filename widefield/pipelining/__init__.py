"""A model cut into stages, one after another, each on a rank of its own: where it is cut, in what order ranks work on it,
and what they hand on.
"""
