"""Whole against parallel: forward.py compares one pass, layer by layer; training.py three training steps.

Behind `widefield verify`, `wf.verify`, the tests and the random programs.
"""
