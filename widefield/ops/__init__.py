"""What each operation means where its image is cut: a file per family of operations.

The file is the registration: every file here is imported once an operation on tiles is looked up, and brings its `CASES`.
A rule returns one of the descriptions of `widefield/rules.py`.  Tiles in space, tiles in time, and captures read them.

Imports the descriptions, and tiled tensors for operations that are made of others.
"""
