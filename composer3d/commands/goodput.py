"""``composer3d plan --goodput``: the share of time spent training. No torch here."""

from dataclasses import dataclass
from typing import Any

from composer3d.facts.errors import UserError
from composer3d.facts.text import one_line
from composer3d.planner import goodput as model
from composer3d.planner.goodput import Costs, Goodput
from composer3d.planner.search import Device, Plan
from composer3d.runtime.launch import REPORT_S

PUBLISHED = "published"
LOSS = 0.001  # the share of time that ``longest`` may lose
_LEAST, _MOST = 1e-6, 1e9  # of hours, minutes and GB/s
_HOUR_S = 3600.0
_SHARES = Goodput._fields[1:]


@dataclass(frozen=True)
class Question:
    """What the user knows of failures, storage and restarts; None: published values are used.

    Attributes:
        mttf_hours: hours from one failure of the job to the next.
        storage_gb_s: GB/s that all ranks together write or read.
        restart_minutes: from the end of the job until its ranks load.
    """

    mttf_hours: float | None
    storage_gb_s: float | None
    restart_minutes: float | None


def read_question(
    hours: str | None, storage_gb_s: float | None, restart_minutes: float | None
) -> Question | None:
    """Check the values of ``--goodput``, ``--storage`` and ``--restart``.

    Returns:
        The question, or None without ``--goodput``.

    Raises:
        UserError: a value is not a number in its range.
    """
    others = {"--storage": storage_gb_s, "--restart": restart_minutes}
    for option, value in others.items():
        if value is not None and not _LEAST <= value <= _MOST:
            raise UserError(f"{option} {value:g}: give a number from {_LEAST:g} to {_MOST:g}")
    if hours is None:
        return None
    mttf_hours = None
    if hours != PUBLISHED:
        try:
            mttf_hours = float(hours)
        except ValueError:
            mttf_hours = 0.0
        if not _LEAST <= mttf_hours <= _MOST:
            raise UserError(
                f"--goodput {one_line(hours, 40)}: give the hours between two failures of the job, "
                f"from {_LEAST:g} to {_MOST:g}, or {PUBLISHED}"
            )
    return Question(mttf_hours, storage_gb_s, restart_minutes)


def predict_goodput(question: Question, plan: Plan, device: Device) -> dict[str, Any]:
    """Return the goodput of a layout as ``plan --json`` has it.

    Times in ``*_s`` are seconds. ``own`` is for the recipe's interval between checkpoints, ``best``
    for the best one, and ``longest`` for the longest one that loses at most ``LOSS``; each has
    ``every`` in steps, and shares of time. ``best_if_ranks_hang`` is the share spent training if
    each failure is noticed only after ``run.timeout_minutes``.

    Raises:
        UserError: no failure rate of the device is published, and the user gives none.
    """
    recipe, devices = plan.recipe, plan.recipe.world_size
    mttf_hours, source = _failures(question, device, devices)
    storage_gb_s = question.storage_gb_s or model.STORAGE_BYTES_S * devices / 1e9
    restart_s = 60.0 * (question.restart_minutes or model.RESTART_S / 60)
    saves = model.predict_saves(
        recipe, device.setup(recipe), plan.prediction.memory, 1e9 * storage_gb_s
    )

    def costs(notice_s: float) -> Costs:
        return Costs(
            mttf_s=_HOUR_S * mttf_hours,
            step_s=plan.prediction.time.step_s,
            stop_s=saves.stop_s,
            write_s=saves.write_s,
            notice_s=notice_s,
            restart_s=restart_s + saves.load_s,
        )

    dies, hangs = costs(REPORT_S), costs(60.0 * recipe.run.timeout_minutes)
    own = model.own_every(recipe.checkpoint, recipe.run.steps, dies.step_s)
    best = model.best_every(dies, recipe.run.steps)
    longest = model.longest_every(dies, best, recipe.run.steps, LOSS)
    return {
        "mttf_hours": mttf_hours,
        "mttf_source": source,
        "storage_gb_s": storage_gb_s,
        "run_steps": recipe.run.steps,
        "checkpoint_gb": saves.bytes / 1e9,
        "step_s": dies.step_s,
        "save_stops_s": saves.stop_s,
        "save_writes_s": saves.write_s,
        "load_s": saves.load_s,
        "notice_s": dies.notice_s,
        "hang_s": hangs.notice_s,
        "restart_s": dies.restart_s,
        "own": model.goodput(dies, own)._asdict(),
        "best": model.goodput(dies, best)._asdict(),
        "longest": model.goodput(dies, longest)._asdict(),
        "best_if_ranks_hang": model.goodput(hangs, best).trains,
    }


def _failures(question: Question, device: Device, devices: int) -> tuple[float, str | None]:
    """Return the hours between two failures of the job, and the source if they are published."""
    if question.mttf_hours is not None:
        return question.mttf_hours, None
    rate = model.published_failures(device.hardware)
    return rate.device_hours / devices, rate.source


def goodput_words(found: dict[str, Any]) -> list[str]:
    """Return the result of ``predict_goodput`` as lines of text."""
    best = found["best"]
    source = f" ({found['mttf_source']})" if found["mttf_source"] else ""
    steps = found["run_steps"]
    ends = f"  {steps:,} is run.steps: a longer run may do better with a save after more steps"
    beside = f", and is written {found['save_writes_s']:,.1f} s beside it"
    return [
        f"goodput of this layout: {best['trains']:.1%} of the time trains with checkpoint.every = "
        f"{best['every']:,} and checkpoint.every_minutes = 0",
        "  checkpoint.every          minutes" + "".join(f"{name:>10}" for name in _SHARES),
        _row("best", best, found["step_s"]),
        _row(f"-{LOSS:.1%}", found["longest"], found["step_s"]),
        _row("recipe", found["own"], found["step_s"]),
        *[ends] * (steps == best["every"]),
        f"  a failure after {found['mttf_hours']:,.1f} h on average{source}",
        f"  a checkpoint of {found['checkpoint_gb']:,.1f} GB at {found['storage_gb_s']:,.1f} GB/s "
        f"stops training for {found['save_stops_s']:,.1f} s"
        + (beside if found["save_writes_s"] else ""),
        f"  a rank that dies is noticed within {found['notice_s']:.0f} s; all train again after "
        f"{found['restart_s'] / 60:,.1f} minutes, {found['load_s'] / 60:,.1f} of them to check and "
        "load",
        f"  if ranks hang instead, for run.timeout_minutes = {found['hang_s'] / 60:g}: "
        f"{found['best_if_ranks_hang']:.1%} trains",
    ]


def _row(name: str, shares: dict[str, float], step_s: float) -> str:
    minutes = shares["every"] * step_s / 60
    begin = f"  {shares['every']:16,.0f}  {name:8}{minutes:8,.1f}"
    return begin + "".join(f"{shares[key]:10.1%}" for key in _SHARES)
