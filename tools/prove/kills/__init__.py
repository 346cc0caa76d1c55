"""Kill trainings (``run``) and whole jobs (``jobs``), and check that they resume bitwise."""
