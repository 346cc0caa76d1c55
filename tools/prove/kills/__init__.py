"""Trainings and jobs that are killed and must resume bitwise: at points of a save, and whole jobs."""
