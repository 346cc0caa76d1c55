"""Hostile input: files and folders that a stranger could hand to a user, and the runner that shows what each does.

``case`` says what a case is and runs one. ``checkpoints``, ``exports`` and ``recipes_data`` hold the cases.
"""
