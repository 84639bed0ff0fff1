"""A first recipe for a folder of images: look.py finds what is in the folder, choices.py chooses, text.py writes it.

Every choice has a reason, which is a comment in the recipe.
"""

from widefield.first_recipe.text import recipe_for, write_recipe

__all__ = ["recipe_for", "write_recipe"]
