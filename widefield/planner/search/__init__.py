"""Which plan?  Enumerates plans, emulates the few that may win, and says why the others lost.

layouts.py    every way of laying a run out on a number of ranks
worlds.py     which ranks of a world differ, and in how small a world they are emulated
bounds.py     what a layout costs at least, without emulating it
pricing.py    a layout's PlanEstimate, from emulated ranks and a cluster's prices
search.py     the search
reasons.py    sentences: why, and what would change the choice
scaling.py    the same plan on more and more devices
backwards.py  the largest image, the largest batch, the fewest devices, the cheapest
answer.py     all of it, as data
"""
