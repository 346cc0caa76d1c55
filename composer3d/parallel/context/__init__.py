"""Context parallelism: a sequence is cut over the ranks of ``mesh.cp``. Begin with ``api``."""
