"""Moving the pixels of an image and their labels as one, in coordinates of the whole image.

`moves.py` draws what a transform does to an image of some size; `coordinate_map.py` composes moves to one function of
positions; `elastic.py` has its displacements; `warp.py` reads the source pixels that a window of the output needs, and
interpolates them once; `boxes.py` follows points and boxes; `class_pixels.py` draws pixels of a class, to crop around them.
"""
