"""Thousands of malformed inputs: recipes, overrides, plans, run folders, checkpoints, images, masks, calibrations, records.

mutation.py  how bytes, trees and texts are damaged
subjects.py  what is read, with a sound example of each
images.py    images and masks of every format that can be written
trial.py     one input: damaged, read, and what became of it
__main__.py  many, each with the next seed
"""
