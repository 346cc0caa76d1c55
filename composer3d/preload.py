"""What the forkserver imports before it forks workers: the slow imports of a rank, paid once a node."""

import warnings

with warnings.catch_warnings():
    warnings.simplefilter("ignore")

    import composer3d.train  # noqa: F401

__all__: list[str] = []
