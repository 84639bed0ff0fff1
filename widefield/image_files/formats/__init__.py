"""Formats of image files, one per file; what each has is in opening.py.  Libraries are imported inside of functions."""
