"""Faults that are planted in composer3d, one function each: the proof must find every one of them.

Each is called in a worker before anything is built, and changes what this process runs from then
on. Its docstring describes what is wrong then. Its decorators tell where it is planted and what the
proof must say (``places``), and which function of the package it takes the place of (``plant``).
"""
