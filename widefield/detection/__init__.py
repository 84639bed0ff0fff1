"""Boxes: targets, anchors, matching, losses, what is found, and how it scores.

Coordinates are edges, in pixels of the whole image: x is 0 at its left side and W at its right one, so a box of one pixel is
(x, y, x + 1, y + 1).  Everything here sees whole images and knows nothing of ranks, tiles or tasks.
"""
