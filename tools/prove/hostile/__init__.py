"""Hostile input: files and folders from a stranger, and a runner that finds the harm that they do.

``case`` defines a case and runs it. ``checkpoints``, ``exports`` and ``recipes_data`` hold the
cases.
"""
