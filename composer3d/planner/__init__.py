"""Predictions of a recipe's cost: schedules and their simulation, and the bytes of collectives.

Nothing here imports torch, so that these predictions are made in a second on any machine.
"""
