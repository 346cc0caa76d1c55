"""The guards of a step report what a careless change would add to it."""

from collections import Counter
from pathlib import Path

import pytest

from composer3d.runtime.launch import Pool
from tests.dryrun.jobs import recipe_of
from tests.fake_cuda.test_steps import (
    BASE,
    FSDP,
    LAYOUTS,
    SIZES,
    TO_DEVICE,
    TO_HOST,
    check_launched,
)
from tools.fake_cuda import counts, device
from tools.fake_cuda.counts import Job, Seen, with_more_blocks

pytestmark = pytest.mark.skipif(device.compiler() is None, reason="no C++ compiler here")

DOCUMENTS = LAYOUTS["hsdp, window, documents, selective"]
ALLOWED = Counter({TO_DEVICE: 3, TO_HOST: 1})

# By plant: the operator that is launched too often.
LAUNCHES = {
    "make_a_clone": "aten::clone",
    "call_a_kernel_for_each_document": "aten::_flash_attention_forward",
}


def job_of(overrides: tuple[str, ...], plant: str) -> Job:
    recipe = recipe_of(BASE, (*SIZES, *overrides))
    return Job(recipe, prepare=f"tests.fake_cuda.plants:{plant}")


def run(pool: Pool, library: Path, jobs: list[Job]) -> list[Seen]:
    arguments = {"jobs": jobs, "library": library}
    return pool.run(counts.run_one_of, arguments, world_size=len(jobs))


def test_planted_copies_are_reported(pool: Pool, library: Path) -> None:
    (seen,) = run(pool, library, [job_of(FSDP, "copy_and_read")])
    assert not ALLOWED - seen.step.copies
    found: Counter[tuple[str, str, str]] = Counter()
    for copy, count in (seen.step.copies - ALLOWED).items():
        found[copy.operator, copy.source, copy.target] += count
    each = 2 * 2  # blocks, micro-batches
    assert found == {
        ("aten::_local_scalar_dense", "cuda", "host"): each,
        # Of a list, and of a tensor.
        ("aten::_to_copy", "cuda", "cpu"): 2 * each,
        ("aten::_to_copy", "cpu", "cuda"): each,
    }


@pytest.mark.parametrize("plant", LAUNCHES)
def test_planted_operators_are_reported(pool: Pool, library: Path, plant: str) -> None:
    job = job_of(DOCUMENTS.overrides, plant)
    deeper = job._replace(recipe=with_more_blocks(job.recipe)[0])
    shallow, deep = run(pool, library, [job, deeper])
    assert shallow.step.copies == ALLOWED
    with pytest.raises(AssertionError, match=LAUNCHES[plant]):
        check_launched(shallow, deep, DOCUMENTS)


def test_an_operator_whose_shape_only_data_tells_fails(pool: Pool, library: Path) -> None:
    """Such as ``torch.nonzero``, for which the host waits."""
    with pytest.raises(Exception, match=r"aten\.nonzero"):
        run(pool, library, [job_of(FSDP, "search_a_mask")])
