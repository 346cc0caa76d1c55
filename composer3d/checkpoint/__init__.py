"""Checkpoints: what one is (``manifest``), and how it is saved and loaded (``store``).

What a stranger may have made is read by ``metadata`` (torch's), ``torchfile`` (of ``torch.save``) and ``pickles``.
"""

from composer3d.checkpoint.store import Store

__all__ = ["Store"]
