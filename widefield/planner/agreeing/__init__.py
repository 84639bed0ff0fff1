"""Which way to agree?  `widefield plan --agreement`: so many workers, some of them slow, in virtual time on a small problem.

texts.py    stragglers and links as a user writes them
ways.py     the ways to agree that are compared, as recipes and the simulator have them
estimate.py one of them, simulated: the recipe's seconds and bytes, a small problem's losses
ask.py      from a recipe, its machines and its stragglers to a table of all
"""
