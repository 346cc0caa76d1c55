"""``verify --here``: prove the recipe's own mesh on the devices and the network of this job.

Each rank of the job is a rank of the mesh. The model is shrunk, and nothing else: groups, backend,
devices and links are those of the training that follows. Rank 0 also trains on one process, and
sends the result to all ranks, which compare their shards with it.
"""

import io
import tempfile
from pathlib import Path
from typing import Any

import torch

from composer3d.recipe.schema import Recipe
from composer3d.runtime import process_group
from composer3d.runtime.agreement import check_agreement
from composer3d.runtime.exchanges import all_collectives, check_exchanges, groups_of
from composer3d.runtime.launch import usable_cores
from composer3d.runtime.mesh import Mesh
from composer3d.spec.errors import ExchangeError
from composer3d.verify.judge import ReferenceStats, Verdict, judge
from composer3d.verify.proof import choose_seed, describe, require_provable
from composer3d.verify.shrink import shrink_on_own_mesh
from composer3d.verify.worker import ProofDtype, compare_steps, run_reference


def prove_here(full: Recipe, device: torch.device, dtype: ProofDtype, steps: int) -> Verdict | None:
    """Prove the layout of a recipe on the ranks of this job. Collective over all ranks.

    First all groups and their collectives are checked (``exchanges.check_exchanges``), so that a
    wrong group is named as such, and no rank waits for one that does not come.

    Args:
        full: the recipe; its mesh has as many ranks as the job.
        device: the device of this rank.
        dtype: the dtype in which the layout computes.
        steps: the number of training steps.

    Returns:
        The verdict on rank 0, and None on the others.

    Raises:
        UserError: the recipe differs between ranks, is too large, cannot be composed, or cannot be
            proven in ``dtype``.
    """
    check_agreement(full)
    small = shrink_on_own_mesh(full)
    require_provable(small, dtype)
    verdict = Verdict(
        passed=False,
        world_size=small.world_size,
        layout=f"here: {describe(small)}",
        dtype=dtype,
    )
    mesh = Mesh.build(small.mesh, device)
    try:
        groups = groups_of(mesh, has_experts=small.model.experts > 0)
        check_exchanges(mesh, groups, lambda axis: all_collectives(axis, small.parallel))
    except ExchangeError as error:
        verdict.error = " | ".join(error.lines)
        return verdict if mesh.rank == 0 else None

    made = process_group.on_main("the reference", lambda: _make_reference(small, dtype, steps))
    small, stats, content = made
    expected: dict[str, Any] = torch.load(io.BytesIO(content), weights_only=True)
    errors = compare_steps(small, mesh, dtype, steps, expected)
    of_ranks = process_group.gather_objects(errors)
    return None if of_ranks is None else judge(verdict, of_ranks, small, stats)


def _make_reference(
    small: Recipe, dtype: ProofDtype, steps: int
) -> tuple[Recipe, ReferenceStats, bytes]:
    """Train on this process alone; return the recipe with its seed, statistics and the result."""
    threads = torch.get_num_threads()
    with tempfile.TemporaryDirectory(prefix="composer3d-verify-") as folder:
        path = Path(folder, "reference.pt")

        def make(seeded: Recipe) -> tuple[str, ReferenceStats]:
            # The other ranks of this node wait, so their cores are free.
            fields = run_reference(seeded, dtype, steps, str(path), threads=usable_cores())
            return str(path), ReferenceStats(**fields)

        seeded, _, stats = choose_seed(small, dtype, make)
        torch.set_num_threads(threads)
        return seeded, stats, path.read_bytes()
