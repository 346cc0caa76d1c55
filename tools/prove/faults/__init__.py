"""Faults that are planted in the composition, one function each: ``verify`` must see every one of them.

Each is called in a worker before anything is built, and changes what this process runs from then on. ``table`` says
which layouts each of them harms, and what the verdict must say of it.
"""
