"""A step of a recipe on tensors without data, in a world of any size, on one machine.

Begin with ``run``. ``stage`` runs the step of one pipeline rank in a process of its own;
``collectives`` counts what it sends, and ``memory`` what it allocates.
"""
