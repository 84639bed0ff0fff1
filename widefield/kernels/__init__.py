"""Arithmetic on plain tensors that torch's own operations lack: moments that can be merged, attention block by block.

Imports torch alone.
"""
