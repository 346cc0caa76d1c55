"""Checkpoints in the words of others: their names and files, conversion both ways, and a start from them."""
