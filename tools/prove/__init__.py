"""The long proofs: ``bash tools/prove/run NAME`` runs one; ``__main__`` lists them.

The tests import these modules and run a fixed slice of each proof. No module here imports a test.
"""
