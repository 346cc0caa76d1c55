"""``composer3d launch``: list, show and copy the scripts that start jobs on several machines."""

import json
import os
from pathlib import Path
from typing import NamedTuple

from composer3d.commands import shipped
from composer3d.commands.parser import Parser, did_you_mean
from composer3d.commands.shipped import Options, make_files
from composer3d.facts.errors import UserError
from composer3d.facts.text import one_line

__all__ = ["Options"]

FOLDER = Path(__file__).parent.with_name("launch_scripts")


class LaunchScript(NamedTuple):
    """A script that comes with composer3d.

    Attributes:
        file: its name in ``FOLDER``, and that of its copy.
        purpose: what it is for.
        use: the command line that uses a copy.
    """

    file: str
    purpose: str
    use: str


SCRIPTS = {
    "slurm": LaunchScript(
        "train.sbatch",
        "a job under Slurm, which goes back into the queue when its time is over",
        "sbatch {copy} RECIPE",
    ),
    "node": LaunchScript(
        "node",
        "this machine's part of a job on plain machines: run it on each of them",
        "bash {copy} HOST:PORT NODES PROCESSES RECIPE",
    ),
    "rendezvous": LaunchScript(
        "rendezvous.py",
        "where the machines of node meet, if any of them may be lost",
        "python {copy} HOST:PORT",
    ),
    "k8s": LaunchScript(
        "k8s.yaml",
        "a job under Kubernetes, as a JobSet; put your image, volume and recipe into it",
        "kubectl apply -f {copy}",
    ),
    "docker": LaunchScript(
        "Dockerfile",
        "an image with composer3d, for Kubernetes, Slurm's pyxis or Apptainer",
        "docker build -f {copy} DIST",
    ),
}

EXAMPLES = (
    "composer3d launch ls",
    "composer3d launch show node",
    "composer3d launch cp slurm",
)


def add_arguments(command: Parser) -> None:
    """Add the arguments, whose names are those of ``Options``."""
    shipped.add_actions(
        command,
        ls="list the scripts",
        show="print a script",
        cp="copy a script, to change it; overwrites nothing",
        name="a script, as ls lists it",
        dest="a file, or a folder that exists; default: the script's own name in this folder",
    )


def run(options: Options) -> int:
    """List, show or copy scripts.

    Raises:
        UserError: there is no such script, or the copy cannot be made.
    """
    if options.action == "ls":
        _list(as_json=options.as_json)
        return 0
    script = find(options.name or "")
    content = (FOLDER / script.file).read_bytes()
    if options.action == "show":
        print(content.decode(), end="")
        return 0
    target = Path(options.dest or script.file)
    if os.path.isdir(target):
        target /= script.file
    make_files({target: content})
    print(f"made {one_line(target)}\nuse it: {script.use.format(copy=one_line(target))}")
    return 0


def find(name: str) -> LaunchScript:
    """Return a script by its name in the list, or by that of its file.

    Raises:
        UserError: there is no such script.
    """
    for known, script in SCRIPTS.items():
        if name in (known, script.file):
            return script
    hint = did_you_mean(name, [*SCRIPTS]) or f"; its scripts are {', '.join(SCRIPTS)}"
    raise UserError(f"{one_line(name, 200)}: composer3d has no such script{hint}")


def _list(*, as_json: bool) -> None:
    if as_json:
        rows = [{"name": name, **script._asdict()} for name, script in SCRIPTS.items()]
        print(json.dumps({"ok": True, "scripts": rows}))
        return
    width = max(map(len, SCRIPTS))
    for name, script in SCRIPTS.items():
        print(f"{name:<{width}}  {script.purpose}")
