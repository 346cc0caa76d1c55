"""Let the ranks of a job meet in its store, before they are connected with each other."""

import torch.distributed as dist


def wait_in_store(store: dist.Store, name: str, size: int) -> None:
    """Wait until all ranks have called this function with ``name``. Collective over all ranks.

    It communicates through the store: two or three requests of each rank.

    Args:
        store: the store of the job. Its time-out limits the wait.
        name: the beginning of the two keys that only this meeting uses.
        size: the number of ranks.

    Raises:
        RuntimeError: ranks are missing after the time-out. ``peers.is_lost_peer`` knows the error.
    """
    if store.add(f"{name}/ranks", 1) == size:
        store.set(f"{name}/all", "1")
    store.wait([f"{name}/all"])
