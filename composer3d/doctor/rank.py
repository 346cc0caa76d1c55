"""What one rank of ``composer3d doctor`` does: check, measure, and report to rank 0."""

import os
import platform
import shutil
import socket
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist

from composer3d.checkpoint.steps import published
from composer3d.doctor import measure
from composer3d.doctor.advice import advise
from composer3d.doctor.facts import RankFacts
from composer3d.doctor.links import find_links
from composer3d.doctor.report import Disk, DoctorReport, make_report
from composer3d.facts import hardware
from composer3d.facts.errors import ExchangeError
from composer3d.parallel.context import implementation
from composer3d.planner.goodput import checkpoint_bytes
from composer3d.planner.memory import GIB
from composer3d.recipe.schema import Recipe
from composer3d.runtime import environment, process_group
from composer3d.runtime.agreement import check_agreement, versions
from composer3d.runtime.exchanges import all_collectives, check_exchanges, groups_of
from composer3d.runtime.launch import usable_cores
from composer3d.runtime.mesh import Mesh


def examine(recipe: Recipe, device: torch.device, store: dist.Store) -> DoctorReport | None:
    """Check the groups of the recipe's mesh, and measure devices and links.

    Collective over all ranks. Nothing is written, and no data is read.

    Args:
        recipe: the whole recipe.
        device: the device of this rank.
        store: the store of the job.

    Returns:
        The report on rank 0, and None on the others.

    Raises:
        MeshError: the recipe or the software differs between ranks.
        UserError: rank 0 cannot read the folder of the checkpoints. Every rank raises it.
    """
    check_agreement(recipe)
    # First: a folder that cannot be read must not show after the minutes of measuring.
    disk = process_group.on_main("run.out_dir", partial(disk_of, recipe))
    mesh = Mesh.build(recipe.mesh, device)
    nodes = _number_nodes()
    groups = groups_of(mesh, has_experts=recipe.model.experts > 0)
    problems: tuple[str, ...] = ()
    matrix_flops: dict[str, float] = {}
    memory_bytes_s, speeds, clock = 0.0, [], None
    try:
        check_exchanges(mesh, groups, lambda axis: all_collectives(axis, recipe.parallel))
    except ExchangeError as error:
        # Such a network is not worth measuring, and may not end a collective.
        problems = error.lines
    else:
        groups += measure.node_groups(mesh.rank, nodes)
        process_group.max_over_ranks([0.0])  # products of all ranks begin together
        matrix_flops = measure.measure_matrix(_dtypes(recipe, device), device)
        memory_bytes_s = measure.measure_memory(device)
        speeds = measure.measure_collectives(groups, recipe.parallel, device)
        leaders = [nodes.index(node) for node in dict.fromkeys(nodes)][1:]
        if mesh.rank in (0, *leaders):
            clock = measure.measure_clock(store, mesh.rank, leaders)

    ranks_of_node = nodes.count(nodes[mesh.rank])
    facts = RankFacts(
        name=f"{mesh.identity} on {socket.gethostname()}",
        node=nodes[mesh.rank],
        host=socket.gethostname(),
        device=_device_name(device),
        generation=_generation(device),
        memory_gib=_memory_gib(device, ranks_of_node),
        matrix_flops=matrix_flops,
        memory_bytes_s=memory_bytes_s,
        first_ranks={entry.axis: entry.ranks[0] for entry in groups},
        speeds=speeds,
        clock_s=None if clock is None else clock.ahead_s,
        clock_error_s=0.0 if clock is None else clock.error_s,
        driver=driver_version() if device.type == "cuda" else "",
        python=platform.python_version(),
        is_crowded=device.type == "cpu" and ranks_of_node > usable_cores(),
    )
    of_ranks = process_group.gather_objects(facts)
    if of_ranks is None:
        return None
    sizes = {entry.axis: len(entry.ranks) for entry in groups}
    software = versions() | dict.fromkeys(implementation.installed(), "found")
    report = make_report(recipe, of_ranks, sizes, problems, software, disk)
    report.links = find_links()
    report.advice = advise(
        report.links,
        os.environ,
        has_gpus=device.type == "cuda",
        ranks=recipe.world_size,
        is_alone=environment.has_launcher() or not environment.is_rank(),
    )
    return report


def _number_nodes() -> list[int]:
    """Return the number of each rank's node. Collective over all ranks.

    A node is an agent of torchrun on a host; without torchrun it is a host.
    """
    own = (environment.node(), socket.gethostname())
    names = process_group.gather_objects(own)
    numbers = None
    if names is not None:
        order = list(dict.fromkeys(names))
        numbers = [order.index(name) for name in names]
    return process_group.broadcast_object(numbers) or []


def _dtypes(recipe: Recipe, device: torch.device) -> list[str]:
    """Return the dtypes whose products are measured: a usual one, and that of the recipe."""
    usual = "float32" if device.type == "cpu" else "bfloat16"
    own = recipe.precision.computes_in
    return list(dict.fromkeys((usual, "float32" if own == "float64" else own)))


def _device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"CPU ({platform.machine()})"


def _generation(device: torch.device) -> hardware.Generation:
    if device.type == "cpu":
        return "cpu"
    row = hardware.find(torch.cuda.get_device_name(device))
    if row is not None:
        return row.generation
    if torch.version.hip is not None:
        return "cdna3"
    major, minor = torch.cuda.get_device_capability(device)
    if major == 8:
        return "ada" if minor == 9 else "ampere"
    return "hopper" if major == 9 else "blackwell" if major > 9 else "ampere"


def _memory_gib(device: torch.device, ranks: int) -> float:
    """Return the memory of a GPU, or the share of a host's memory for each of its ``ranks``."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory / GIB
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / GIB / ranks


def driver_version() -> str:
    """Return the version of the GPUs' driver, or "unknown"."""
    try:
        text = Path("/proc/driver/nvidia/version").read_text()
    except OSError:
        return "unknown"
    return next((word for word in text.split() if word[0].isdigit() and "." in word), "unknown")


def disk_of(recipe: Recipe) -> Disk:
    """Return the place of the run's checkpoints, as this rank sees it. Raises OSError."""
    place = recipe.checkpoint_folder
    size_gib = checkpoint_bytes(recipe) / GIB
    # A new checkpoint is complete before the oldest one is removed.
    most = recipe.checkpoint.keep + 1
    folder = place.absolute() if isinstance(place, Path) else place.mounted
    if folder is None:
        return Disk(str(place), None, size_gib, most)
    while not folder.exists():
        folder = folder.parent
    free_gib = shutil.disk_usage(folder).free / GIB
    return Disk(str(folder), free_gib, size_gib, most, len(published(place)))
