"""A program: ``composer3d``, but rank 3 takes its groups of tp and fsdp for each other."""

import os
import sys

from torch.distributed.device_mesh import DeviceMesh

from composer3d.cli import enter

SWAPPED = {"tp": "fsdp", "fsdp": "tp"}

if os.environ["RANK"] == "3":
    right = DeviceMesh.__getitem__

    def wrong(mesh: DeviceMesh, name: str) -> DeviceMesh:
        return right(mesh, SWAPPED.get(name, name))

    DeviceMesh.__getitem__ = wrong

sys.exit(enter())
