"""``python -m tools.prove full``: faults of communication, found without computing a number."""
