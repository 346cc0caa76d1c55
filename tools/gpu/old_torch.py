"""Lets a single process train on torch 2.11, which lacks names that composer3d takes from 2.13.

A machine with a GPU may have no newer torch. What is measured of one GPU does not depend on these
names: no collective has more than one rank. Nothing else may import this module.
"""

import torch
import torch.distributed as dist

# The names of 2.13, and what does the same before.
_BEFORE_2_13 = {
    "all_gather_single": "all_gather_into_tensor",
    "reduce_scatter_single": "reduce_scatter_tensor",
}


def add_missing_names() -> list[str]:
    """Give ``torch.distributed`` the names that it lacks, and return them."""
    missing = [name for name in _BEFORE_2_13 if not hasattr(dist, name)]
    for name in missing:
        setattr(dist, name, getattr(dist, _BEFORE_2_13[name]))
    return missing


def version() -> tuple[int, int]:
    """Return the version of torch."""
    major, minor = torch.__version__.split(".")[:2]
    return int(major), int(minor)
