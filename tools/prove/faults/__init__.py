"""Faults that are planted in composer3d, one function each: the proof must find every one of them.

Each function is called in a worker before anything is built, and changes what this process runs
from then on. Its docstring describes what is wrong then. ``table`` lists the layouts that each
fault harms, and what the verdict must say.
"""
