"""Arithmetic on plain tensors that torch does not offer: moments that can be merged, and attention in blocks of keys.

Imports torch alone.
"""
