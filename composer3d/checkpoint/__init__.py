"""Checkpoints: their description (``manifest``), and how they are saved and loaded (``store``).

Files that a stranger may have made are read by ``metadata`` (torch's description of a checkpoint),
``torchfile`` (files of ``torch.save``) and ``pickles`` (pickles, as data).
"""

from composer3d.checkpoint.store import Store

__all__ = ["Store"]
