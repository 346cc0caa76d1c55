"""Save, describe and load checkpoints.

``store`` saves and loads the checkpoints of a run, and ``manifest`` describes each of them. Three
modules read untrusted files as data: ``metadata`` reads torch's description of a checkpoint,
``torchfile`` reads files of ``torch.save``, and ``pickles`` parses pickles.
"""

from composer3d.checkpoint.store import Store

__all__ = ["Store"]
