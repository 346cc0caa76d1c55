"""Plant a fault and look for it: by ``verify`` of a layout, its dtypes, or one of ``checks``."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from composer3d.runtime.launch import Pool, WorkerError
from composer3d.verify.judge import Verdict
from composer3d.verify.proof import verify_layout
from tools.prove.dtypes import Job, findings_of
from tools.prove.faults.checks import RANKS
from tools.prove.faults.table import Fault

STEPS = 2  # one with a batch of the corpus, one with a random batch, and a validation between them


class Catch(NamedTuple):
    """What became of a planted fault: whether ``Fault.message`` was found, and what was found."""

    is_caught: bool
    finding: str


def catch(pool: Pool, folder: Path, fault: Fault, dtype: str = "float64") -> Catch:
    """Plant a fault and look for it; ``folder`` keeps the references of ``verify``."""
    if fault.check == "verify":
        verdict = verify_layout(
            pool,
            folder,
            str(fault.recipe),
            fault.layout.split(),
            dtype=dtype,
            steps=STEPS,
            fault=fault.plant,
        )
        is_wrong = not (verdict.passed or verdict.refused or verdict.undecided)
        matches = re.search(fault.message, verdict.error or "") is not None
        return Catch(is_wrong and matches, _summary(verdict))

    task: str | Callable[..., list[str]] = f"tools.prove.faults.checks:{fault.check}"
    arguments: dict[str, Any] = {"plant": fault.plant}
    if fault.check == "dtypes":
        task = findings_of
        sets = fault.layout.split()
        # One rank alone: of a pipeline, the last one, which has the loss.
        arguments = {"job": Job(fault.recipe, sets, pp_rank=int("mesh.pp=2" in sets), **arguments)}
    try:
        findings, *_ = pool.run(task, arguments, world_size=RANKS.get(fault.check, 1))
    except WorkerError as error:
        findings = [f"error raised: {_last_line(str(error))}"]
    matches = re.search(fault.message, "\n".join(findings)) is not None
    return Catch(matches, "; ".join(findings[:3]) or "nothing")


def _summary(verdict: Verdict) -> str:
    """What caught a fault, and the axes or ranks that the verdict suspects, without numbers."""
    error = verdict.error or "nothing"
    if verdict.refused:
        return f"the layout is refused: {error}"
    if verdict.worst_parameter is None and not verdict.passed:
        return f"error raised: {_last_line(error)}"
    subject, *hints = error.split("; ")
    subject = re.sub(r" (at step \d+ )?(is off|while).*", "", subject)
    return "; ".join([subject, *hints])


def _last_line(text: str) -> str:
    return text.strip().splitlines()[-1]
