"""Translate configurations of other programs into recipes. No torch here.

Nothing of such a file is executed, and no other file that it names is read. ``words`` holds the
words of each program beside ours, ``source`` reads a file, one module for each program translates
it, and ``result`` writes the recipe.
"""
