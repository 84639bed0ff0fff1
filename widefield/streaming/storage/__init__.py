"""Where tensors between segments are stored, in memory or in files, and images that are read by windows.

Imports only geometry and the wording of names.
"""
