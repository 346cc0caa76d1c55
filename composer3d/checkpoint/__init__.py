"""Save, describe and load checkpoints.

``store`` saves and loads the checkpoints of a run, and ``manifest`` describes each of them. Three
modules read untrusted files as data: ``metadata`` reads torch's description of a checkpoint,
``torchfile`` reads files of ``torch.save``, and ``pickles`` parses pickles.

``Store`` is imported when it is first used: ``manifest`` needs no torch, and ``train`` reads a
manifest to see that a run is finished before it starts any rank.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from composer3d.checkpoint.store import Store

__all__ = ["Store"]


def __getattr__(name: str) -> Any:
    """Import ``Store`` when it is first used."""
    if name != "Store":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from composer3d.checkpoint.store import Store

    globals()[name] = Store  # the next use finds it without this function
    return Store
