"""The rules of operations on cut images: one file per family of operations.

A file registers its rules by being here: all are imported when the first operation on tiles is looked up.  Each defines
`CASES`, which the tests run.  A rule returns one of the descriptions in `widefield/rules.py`.

Imports the descriptions, and tiled tensors for operations that are made of others.
"""
