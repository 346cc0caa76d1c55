"""Bad input, made at random: recipes, token files, checkpoints, Hugging Face folders, tokenizers.

``mutate`` changes bytes, texts, JSON and files. ``child`` runs a case in a process of its own, with
limits and traps. The other modules make the cases of one kind each, and decide with oracles of
their own whether an accepted value is right. ``tools/prove/hostile`` holds the cases that were
written by hand.
"""
