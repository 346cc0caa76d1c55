"""The long proofs. ``bash tools/prove/run NAME``, or ``python -m tools.prove NAME``; see ``__main__``.

The tests run a fixed slice of each.
"""
