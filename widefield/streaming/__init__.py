"""Tiles in time: a module run tile after tile on one device, with the numbers of the whole run."""
