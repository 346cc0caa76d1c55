"""The guards of a step report what a careless change would add to it."""

from collections import Counter
from pathlib import Path

import pytest

from composer3d.runtime.launch import Pool
from tests.dryrun.jobs import recipe_of
from tests.fake_cuda.test_steps import (
    BASE,
    LAUNCHED,
    LAYOUTS,
    SIZES,
    TO_DEVICE,
    TO_HOST,
    check_launched,
)
from tools.fake_cuda import counts, device
from tools.fake_cuda.counts import Job, Seen, with_more_blocks

pytestmark = pytest.mark.skipif(device.compiler() is None, reason="no C++ compiler here")

DOCUMENTS = "hsdp, window, documents"
ALLOWED = Counter({TO_DEVICE: 3, TO_HOST: 1})

# By plant: the operator, and the devices of what the guard counts.
COPIES = {
    "read_an_item": ("aten::_local_scalar_dense", "cuda", "host"),
    "read_a_list": ("aten::_to_copy", "cuda", "cpu"),
    "copy_from_the_host": ("aten::_to_copy", "cpu", "cuda"),
    "copy_to_the_host": ("aten::_to_copy", "cuda", "cpu"),
}


# By plant: the operator that is launched too often.
LAUNCHES = {
    "make_a_clone": "aten::clone",
    "call_a_kernel_for_each_document": "aten::_flash_attention_forward",
}


def job_of(layout: str, plant: str) -> Job:
    recipe = recipe_of(BASE, (*SIZES, *LAYOUTS[layout]))
    return Job(recipe, prepare=f"tests.fake_cuda.plants:{plant}")


@pytest.fixture(scope="module")
def planted(pool: Pool, library: Path) -> dict[str, list[Seen]]:
    """By plant: a rank of two blocks; and where operators are counted, one of three."""
    jobs = {plant: [job_of("fsdp", plant)] for plant in COPIES}
    for plant in LAUNCHES:
        job = job_of(DOCUMENTS, plant)
        jobs[plant] = [job, job._replace(recipe=with_more_blocks(job.recipe)[0])]
    in_order = [job for of_plant in jobs.values() for job in of_plant]
    arguments = {"jobs": in_order, "library": library}
    seen = iter(pool.run(counts.run_one_of, arguments, world_size=len(in_order)))
    return {plant: [next(seen) for _ in of_plant] for plant, of_plant in jobs.items()}


@pytest.mark.parametrize("plant", COPIES)
def test_a_planted_copy_is_reported(planted: dict[str, list[Seen]], plant: str) -> None:
    (seen,) = planted[plant]
    assert not ALLOWED - seen.step.copies
    ((copy, count),) = (seen.step.copies - ALLOWED).items()
    assert (copy.operator, copy.source, copy.target) == COPIES[plant]
    assert count == 2 * 2, "blocks, micro-batches"


@pytest.mark.parametrize("plant", LAUNCHES)
def test_planted_operators_are_reported(planted: dict[str, list[Seen]], plant: str) -> None:
    shallow, deep = planted[plant]
    assert shallow.step.copies == ALLOWED
    with pytest.raises(AssertionError, match=LAUNCHES[plant]):
        check_launched(shallow, deep, LAUNCHED[DOCUMENTS])


def test_an_operator_whose_shape_only_data_tells_fails(pool: Pool, library: Path) -> None:
    """Such as ``torch.nonzero``, for which the host waits."""
    arguments = {"jobs": [job_of("fsdp", "search_a_mask")], "library": library}
    with pytest.raises(Exception, match=r"aten\.nonzero"):
        pool.run(counts.run_one_of, arguments, world_size=1)
