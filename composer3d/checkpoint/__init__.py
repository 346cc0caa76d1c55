"""Checkpoints: what is saved (``state``) and where and how (``store``)."""

from composer3d.checkpoint.store import Store

__all__ = ["Store"]
