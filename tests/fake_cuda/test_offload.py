"""Copies between host and device with ``memory.cpu_offload``: as many as the model has parameters.

Shards are copied to the device whenever they are gathered, and gradients back whenever they are
reduced. Each parameter is one copy.
"""

from collections import Counter
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

from composer3d.models.registry import architecture
from composer3d.recipe.schema import Recipe
from composer3d.runtime.launch import Pool
from tests.dryrun.jobs import recipe_of
from tests.fake_cuda.test_steps import BASE, BF16, SIZES
from tests.long import some_of
from tools.fake_cuda import counts, device
from tools.fake_cuda.counts import OF_HOST_COPY, Counts, Job, Seen

pytestmark = pytest.mark.skipif(device.compiler() is None, reason="no C++ compiler here")

OFFLOAD = "memory.cpu_offload=true"


class Layout(NamedTuple):
    """How often a step gathers and reduces.

    Attributes:
        overrides: of the recipe.
        gathers: of each parameter of a block.
        gathers_of_ends: of each other parameter.
        reductions: of each gradient.
    """

    overrides: tuple[str, ...]
    gathers: int
    gathers_of_ends: int
    reductions: int


# Two micro-batches, or one.
LAYOUTS = {
    # Blocks are gathered in forward and in backward.
    "zero 3": Layout(("mesh.dp_shard=2", BF16), 2 * 2, 2, 2),
    "zero 2": Layout(("mesh.dp_shard=2", "parallel.zero=2", BF16), 1, 1, 2),
    "zero 1": Layout(("mesh.dp_shard=2", "parallel.zero=1"), 1, 1, 1),
    "hsdp": Layout(("mesh.dp_shard=2", "mesh.dp_replicate=2", BF16), 2, 1, 1),
}

# Beside parameters, a step copies its batch, and the squared norm, which all ranks sum on devices.
TO_DEVICE = Counter({"batches.py:move_to_device": 3, "grad_norm.py:local_grad_norm_sq": 1})
# The values of the step; and for the update on the host, the divisor and whether all is finite.
TO_HOST = Counter({OF_HOST_COPY: 1, "adamw.py:apply_gradients": 2})


@some_of(2, "name", LAYOUTS)
def test_a_step_copies_what_it_gathers_and_reduces(name: str, pool: Pool, library: Path) -> None:
    layout = LAYOUTS[name]
    recipe = recipe_of(BASE, (*SIZES, OFFLOAD, *layout.overrides))
    jobs = [Job(recipe), Job(recipe, on_gpu=False)]
    arguments = {"jobs": jobs, "library": library}
    seen: list[Seen] = pool.run(counts.run_one_of, arguments, world_size=2)
    on_gpu, on_cpu = seen
    assert on_gpu.step.collectives == on_cpu.step.collectives
    of_blocks, of_ends = count_parameters(recipe)

    to_device = copies_of(on_gpu.step, "cpu", "cuda")
    assert to_device & TO_DEVICE == TO_DEVICE
    gathered = layout.gathers * of_blocks + layout.gathers_of_ends * of_ends
    assert (to_device - TO_DEVICE).total() == gathered

    to_host = copies_of(on_gpu.step, "cuda", "cpu")
    assert to_host & TO_HOST == TO_HOST
    assert (to_host - TO_HOST).total() == layout.reductions * (of_blocks + of_ends)


def copies_of(step: Counts, source: str, target: str) -> Counter[str]:
    """Return by place how often a step copies from ``source`` to ``target``."""
    found: Counter[str] = Counter()
    for copy, count in step.copies.items():
        assert copy.operator == "aten::_to_copy", copy
        if (copy.source, copy.target) == (source, target):
            found[copy.place] += count
    return found


def count_parameters(recipe: Recipe) -> tuple[int, int]:
    """Return the number of parameters of all blocks, and that of all others."""
    model = architecture(recipe.model.architecture).build(
        recipe.model, dtype=torch.float32, device="meta"
    )
    of_blocks = len(list(model.blocks.parameters()))
    return of_blocks, len(list(model.parameters())) - of_blocks
