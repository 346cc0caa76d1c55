"""A program: run commands of composer3d one after the other, each in a new process of this rank.

All of them are forked from this process, which imports torch once. Its arguments are a folder, for
what the commands print, and the commands by name, as JSON. In those with "swapped" in their name,
rank 3 takes its groups of tp and fsdp for each other.
"""

import json
import os
import sys
import traceback
from pathlib import Path

from torch.distributed.device_mesh import DeviceMesh

import composer3d.training.loop  # noqa: F401
from composer3d import cli
from composer3d.doctor import measure
from composer3d.runtime.parent import die_with_agent, die_with_parent

SWAPPED = {"tp": "fsdp", "fsdp": "tp"}

# The largest messages of ``doctor`` have 4 MiB here, for the slow link.
measure._SIZES["cpu"] = (1 << 10, 1 << 20, 1 << 22)


def swap_groups() -> None:
    right = DeviceMesh.__getitem__

    def wrong(mesh: DeviceMesh, name: str) -> DeviceMesh:
        return right(mesh, SWAPPED.get(name, name))

    DeviceMesh.__getitem__ = wrong


def run(name: str, arguments: list[str], prefix: Path) -> int:
    for descriptor, kind in ((1, "out"), (2, "err")):
        os.dup2(os.open(f"{prefix}.{kind}", os.O_WRONLY | os.O_CREAT), descriptor)
    if "swapped" in name and os.environ["RANK"] == "3":
        swap_groups()
    try:
        return cli.main(arguments)
    except BaseException:
        traceback.print_exc()
        return 1


die_with_agent()
folder, commands = Path(sys.argv[1]), json.loads(sys.argv[2])
for name, arguments in commands.items():
    prefix = folder / f"{name}-{os.environ['RANK']}"
    this_process = os.getpid()
    child = os.fork()
    if child == 0:
        die_with_parent(this_process)
        status = run(name, arguments, prefix)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
    _, ended = os.waitpid(child, 0)
    prefix.with_suffix(".status").write_text(str(os.waitstatus_to_exitcode(ended)))
