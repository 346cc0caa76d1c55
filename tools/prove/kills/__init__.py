"""Kill trainings and jobs, and check that they resume bitwise: ``run`` in a save, ``jobs`` as a
whole."""
