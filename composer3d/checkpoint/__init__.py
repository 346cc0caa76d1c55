"""Checkpoints: what one is (``manifest``), how it is saved and loaded (``store``), and unpickled (``pickles``)."""

from composer3d.checkpoint.store import Store

__all__ = ["Store"]
