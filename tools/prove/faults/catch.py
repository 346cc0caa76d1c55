"""What catches a planted fault: ``verify`` of a layout, or one of ``checks``. For tests and tools/mutate."""

import re
from pathlib import Path
from typing import NamedTuple

from composer3d.runtime.launch import Pool, WorkerError
from composer3d.verify.proof import Verdict, verify_layout
from tools.prove.faults.table import Fault
from tools.prove.paths import RECIPE

STEPS = 2  # one of the corpus and a random one, with a validation between them


class Caught(NamedTuple):
    """``seen``: whether the fault was found, and called what ``Fault.says``; ``told``: what was found, in one line."""

    seen: bool
    told: str


def catch(pool: Pool, folder: Path, fault: Fault, dtype: str = "float64") -> Caught:
    """Plant a fault and look for it. References of ``verify``, which compares in ``dtype``, are kept in ``folder``."""
    if fault.check == "verify":
        sets = fault.layout.split()
        verdict = verify_layout(
            pool, folder, str(RECIPE), sets, dtype=dtype, steps=STEPS, fault=fault.plant
        )
        error = verdict.error or ""
        seen = (
            not verdict.passed and not verdict.refused and re.search(fault.says, error) is not None
        )
        return Caught(seen, _told(verdict))
    try:
        task = f"tools.prove.faults.checks:{fault.check}"
        (found,) = pool.run(task, {"plant": fault.plant}, world_size=1)
    except WorkerError as error:
        found = [f"error raised: {str(error).strip().splitlines()[-1]}"]
    return Caught(
        re.search(fault.says, "\n".join(found)) is not None, "; ".join(found[:3]) or "nothing"
    )


def _told(verdict: Verdict) -> str:
    """What caught a fault, and whom the verdict suspects."""
    error = verdict.error or "nothing"
    if verdict.refused:
        return f"the layout is refused: {error}"
    if verdict.worst_parameter is None and not verdict.passed:
        return f"error raised: {error.strip().splitlines()[-1]}"
    what, *hints = error.split("; ")
    return "; ".join([re.sub(r" (at step \d+ )?(is off|while).*", "", what), *hints])
