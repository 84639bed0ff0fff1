"""Compares a model under a plan with the same on one device: forward.py one pass, training.py three training steps.

Used by `widefield verify`, `wf.verify`, the tests and the fuzzer.
"""
