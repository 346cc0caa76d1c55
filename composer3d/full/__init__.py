"""What ``verify --full`` checks beside the shrunk proof: the full-size job, without a number.

Begin with ``check``. ``predicates`` compares the full recipe with the proofs that stand for it;
``places`` says by arithmetic which ranks form a group; ``expected`` says what a step must send and
sum; ``witness`` sees what the real code sends and sums on tensors without data.
"""
