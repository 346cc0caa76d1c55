"""Kill trainings (``run``) and whole jobs (``trouble``), and check that they resume bitwise."""
