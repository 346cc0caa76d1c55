"""``verify --here``: prove the recipe's own mesh on the devices and the network of this job.

Each rank of the job is a rank of the mesh. The model is shrunk, and nothing else: groups, backend,
devices and links are those of the training that follows. Rank 0 also trains on one process, and
sends each rank the parts of the result that the rank compares its shards with.
"""

import math
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

from composer3d.facts.errors import ExchangeError
from composer3d.parallel import Stages, init
from composer3d.recipe.schema import Recipe
from composer3d.runtime import process_group
from composer3d.runtime.agreement import check_agreement
from composer3d.runtime.exchanges import all_collectives, check_exchanges, groups_of
from composer3d.runtime.launch import usable_cores
from composer3d.runtime.mesh import Mesh
from composer3d.verify.judge import ReferenceStats, Verdict, judge
from composer3d.verify.proof import choose_seed, describe, require_provable
from composer3d.verify.shrink import shrink_on_own_mesh
from composer3d.verify.worker import Part, ProofDtype, compare_steps, run_reference

Shape = tuple[int, ...]


class _Box(NamedTuple):
    """The place of a rank's shard in a whole tensor."""

    offset: Shape
    sizes: Shape

    def is_in(self, shape: Shape) -> bool:
        return len(shape) == len(self.offset) and all(
            size == 0 or begin + size <= whole
            for begin, size, whole in zip(self.offset, self.sizes, shape, strict=True)
        )


class _Description(NamedTuple):
    """What every rank knows of the reference.

    Attributes:
        numbers: the lists of ``run_reference`` without tensors, such as the losses.
        shapes: the shapes of the whole tensors, for each kind and step, by name.
    """

    numbers: dict[str, Any]
    shapes: dict[str, list[dict[str, Shape]]]


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

    whole: Mapping[str, Any] | None = None  # on rank 0

    def make() -> tuple[Recipe, ReferenceStats, _Description]:
        nonlocal whole
        seeded, stats, whole = _make_reference(small, dtype, steps)
        return seeded, stats, _describe_reference(whole)

    small, stats, description = process_group.on_main("the reference", make)
    find_reference = partial(_receive_own_parts, whole, description)
    errors = compare_steps(small, mesh, dtype, steps, find_reference)
    of_ranks = process_group.gather_objects(errors)
    return None if of_ranks is None else judge(verdict, of_ranks, small, stats)


def _make_reference(
    small: Recipe, dtype: ProofDtype, steps: int
) -> tuple[Recipe, ReferenceStats, Mapping[str, Any]]:
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
        return seeded, stats, torch.load(path, weights_only=True)


def _describe_reference(whole: Mapping[str, Any]) -> _Description:
    tensors = _tensors_of(whole)
    shapes = {
        kind: [{name: tuple(tensor.shape) for name, tensor in of_step.items()} for of_step in steps]
        for kind, steps in tensors.items()
    }
    return _Description({key: whole[key] for key in whole if key not in tensors}, shapes)


def _tensors_of(whole: Mapping[str, Any]) -> dict[str, list[Mapping[str, torch.Tensor]]]:
    """Return the tensors of the reference by kind, step and name."""
    tensors = {kind: whole[kind] for kind in ("gradient", "weight")}
    tensors["initial"] = [whole["initial"]]
    return tensors


def _receive_own_parts(
    whole: Mapping[str, Any] | None, description: _Description, stages: Stages
) -> dict[str, Any]:
    """Return the reference with this rank's parts of its tensors. Collective over all ranks.

    Rank 0 gathers the boxes of all shards. It sends each rank one tensor with its parts, one after
    another, in the order of ``_own_entries``.

    Args:
        whole: the reference, on rank 0; None on the others.
        description: of the reference.
        stages: the stages of this rank.

    Returns:
        What ``run_reference`` wrote, with a ``Part`` for each tensor of a parameter of ``stages``.
    """
    boxes = {}
    for name, parameter in stages.named_parameters():
        local, offset = init.local_part(parameter)
        boxes[name] = _Box(offset, tuple(local.shape))
    of_ranks = process_group.gather_objects(boxes)

    shapes = description.shapes
    sizes = [math.prod(boxes[name].sizes) for _, _, name in _own_entries(shapes, boxes)]
    own = torch.empty(sum(sizes), dtype=torch.float64)
    make_parts = None
    if whole is not None and of_ranks is not None:  # on rank 0
        make_parts = partial(_cut, _tensors_of(whole), shapes, of_ranks)
    process_group.send_to_each(make_parts, own)

    parts: dict[str, Any] = {
        kind: [
            {
                name: Part(shape, boxes[name].offset, None)
                for name, shape in of_step.items()
                if name in boxes
            }
            for of_step in steps
        ]
        for kind, steps in shapes.items()
    }
    entries = _own_entries(shapes, boxes)
    for (kind, step, name), values in zip(entries, own.split(sizes), strict=True):
        box = boxes[name]
        parts[kind][step][name] = Part(shapes[kind][step][name], box.offset, values.view(box.sizes))
    (parts["initial"],) = parts["initial"]
    return {**description.numbers, **parts}


def _own_entries(
    shapes: Mapping[str, list[dict[str, Shape]]], boxes: Mapping[str, _Box]
) -> Iterator[tuple[str, int, str]]:
    """Yield the kind, step and name of each tensor of which a rank with ``boxes`` gets a part."""
    for kind, steps in shapes.items():
        for step, of_step in enumerate(steps):
            for name, shape in of_step.items():
                if name in boxes and boxes[name].is_in(shape):
                    yield kind, step, name


def _cut(
    tensors: Mapping[str, list[Mapping[str, torch.Tensor]]],
    shapes: Mapping[str, list[dict[str, Shape]]],
    boxes_of_ranks: Sequence[Mapping[str, _Box]],
    rank: int,
) -> torch.Tensor:
    """Return the parts of a rank, one after another: float64 (elements)."""
    boxes = boxes_of_ranks[rank]
    parts = [torch.empty(0, dtype=torch.float64)]
    for kind, step, name in _own_entries(shapes, boxes):
        box = boxes[name]
        place = tuple(
            slice(begin, begin + size) for begin, size in zip(box.offset, box.sizes, strict=True)
        )
        # The reference computes in float64, and every narrower number is one of float64.
        parts.append(tensors[kind][step][name][place].reshape(-1).to(torch.float64))
    return torch.cat(parts)
