"""Checks the structure of the full-size job for ``verify --full``, without computing a number.

Begin with ``check``. ``predicates`` compares the full recipe with the proofs that stand for it;
``places`` computes which ranks form a group; ``expected`` says what a step must send and sum;
``witness`` records what the real code sends and sums on tensors without data.
"""
