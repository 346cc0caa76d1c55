"""Tensor parallelism: layers are cut over the ranks of ``mesh.tp``. Begin with ``styles``."""
