"""``composer3d doctor``: check and measure the devices and the network of a job."""

import json
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial

from composer3d.commands import job
from composer3d.commands.arguments import (
    argument,
    json_option,
    recipe_argument,
    set_option,
)
from composer3d.doctor.report import DoctorReport, as_json_of, text_of
from composer3d.doctor.row import row_of, toml_of
from composer3d.facts.errors import UserError
from composer3d.facts.hardware import read_row
from composer3d.facts.text import one_line, printable_lines
from composer3d.recipe.resolve import Resolved, load
from composer3d.runtime import environment, launch

# Messages take seconds at most; ranks may take minutes to import torch and to meet.
_TIMEOUT_S = 300.0

EXAMPLES = (
    "composer3d doctor debug-2-dp",
    "torchrun --nproc-per-node 8 -m composer3d doctor llama3-8b-8-fsdp --write own.toml",
)


@dataclass(frozen=True)
class Options:
    """The arguments of the command."""

    recipe: str = recipe_argument()
    sets: Sequence[str] = set_option()
    as_json: bool = json_option()
    write: str | None = argument(
        "--write",
        metavar="FILE.toml",
        help="make FILE.toml, a row of hardware with the measured rates, for plan --gpu FILE.toml",
    )


def run(options: Options) -> int:
    """Examine: as one rank under torchrun, else with all ranks of the mesh on this machine.

    Returns:
        The exit status: 0 if nothing is wrong, 1 if a group or a value is wrong, a rank is lost or
        checkpoints do not fit the disk, 2 if the recipe cannot be used.

    Raises:
        UserError: the recipe or this machine cannot be used, or the file ``write`` exists or cannot
            be made.
    """
    if options.write is not None and os.path.lexists(options.write):
        raise UserError(f"--write {options.write}: the file exists; name another one")
    if options.write is not None and environment.rank() == 0:
        # Before the minutes of measuring. Rank 0 alone writes the file.
        folder = os.path.dirname(options.write) or "."
        if not os.path.isdir(folder):
            raise UserError(f"--write {options.write}: there is no folder {folder}; make it first")
    arguments = asdict(options)
    if environment.is_rank():
        return examine_rank(**arguments)
    resolved = load(options.recipe, options.sets, check_files=False, may_import=True)
    resolved, processes = job.count_processes(
        resolved, partial(_load, options.recipe, options.sets)
    )
    if processes == 1:
        return examine_rank(**arguments)
    result = launch.run_ranks(examine_rank, arguments, processes=processes)
    job.print_lost_ranks(result, resolved.recipe.mesh)
    return result.status


def examine_rank(recipe: str, sets: Sequence[str], write: str | None, as_json: bool) -> int:
    """Examine as one rank of a job, and return its exit status. Rank 0 prints the report."""
    function = partial(_examine, write=write, as_json=as_json)

    def report(error: UserError) -> None:
        if as_json:
            print(json.dumps({"passed": False, "problems": error.lines}), flush=True)

    return job.run_rank(function, partial(_load, recipe, sets), report=report)


def _load(recipe: str, sets: Sequence[str], world_size: int) -> Resolved:
    return load(recipe, sets, world_size=world_size, check_files=False, may_import=True)


def _examine(resolved: Resolved, rank: int, *, write: str | None, as_json: bool) -> int:
    # Imported here because these modules import torch.
    from composer3d.doctor.rank import examine
    from composer3d.runtime.process_group import on_main

    joined = job.join(
        resolved, rank, timeout_s=_TIMEOUT_S, advice=lambda: "look at that machine and its network"
    )
    with joined as world:
        report = examine(resolved.recipe, world.device, world.store)

        def publish() -> bool:
            assert report is not None
            return _publish(report, write, as_json)

        passed = on_main("--write", publish)
    return 0 if passed else 1


def _publish(report: DoctorReport, write: str | None, as_json: bool) -> bool:
    """Print the report and write the row of hardware. Return whether nothing is wrong."""
    row = row_of(report) if report.is_measured else None
    print(printable_lines(text_of(report)))
    if write is not None and row is None:
        print(f"{one_line(write)} is not made: no rates were measured")
    if write is not None and row is not None:
        with open(write, "x", encoding="utf-8") as file:
            file.write(toml_of(row))
        # A file that plan refuses must show here.
        read_row(write)
        name = one_line(write)
        print(f"the row of hardware is written to {name}: composer3d plan RECIPE --gpu {name}")
    if as_json:
        answer = as_json_of(report)
        answer["hardware"] = None if row is None else row.as_json()
        print(json.dumps(answer))
    sys.stdout.flush()
    return not report.problems
