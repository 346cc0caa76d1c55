"""``composer3d plan --why LAYOUT``: compares the first layout with another one, term by term."""

from collections.abc import Sequence
from typing import Any

from composer3d.facts.errors import UserError
from composer3d.facts.text import gib_form, one_line
from composer3d.planner.compare import Comparison, compare
from composer3d.planner.memory import GIB
from composer3d.planner.search import Device, Plan, price
from composer3d.recipe.draft import key_of_override, split_overrides
from composer3d.recipe.resolve import load
from composer3d.recipe.schema import Recipe

# Other keys would change the job, and steps of different jobs cannot be compared.
_OF_LAYOUT = ("mesh.", "parallel.", "memory.", "compile.", "data.micro_batch")

_LEAST_S = 5e-8  # a shorter term is left out

# The layout of the recipe as it is, in place of overrides.
AS_IT_IS = "recipe"

# A row of the table, counted from 1, or a layout.
Other = int | Recipe


def read_other(layout: str, recipe: str, sets: Sequence[str], gpus: int) -> Other:
    """Return the layout that ``--why`` names.

    Args:
        layout: the number of a row of the table, overrides of the recipe, or ``AS_IT_IS``.
        recipe: the file of the recipe.
        sets: its overrides.
        gpus: the number of devices; the layout must use all of them.

    Raises:
        UserError: it is not a layout of this job, or breaks a rule of recipes.
    """
    if layout.isdecimal():
        return int(layout[:10])
    overrides = [] if layout == AS_IT_IS else split_overrides(layout) or [layout]
    for override in overrides:
        if not key_of_override(override).startswith(_OF_LAYOUT):
            raise UserError(
                f"--why {one_line(override, 200)}: a layout has keys of [mesh], [parallel], "
                "[memory] and [compile], and data.micro_batch; give others with --set, which holds "
                "for both layouts"
            )
    every = [*sets, *overrides]
    try:
        return load(recipe, every, check_files=False, world_size=gpus, may_import=True).recipe
    except UserError as error:
        # The error calls each override --set, which the user did not write.
        raise UserError(f"--why {one_line(layout, 200)}: {error}") from None


def explain(plans: Sequence[Plan], other: Other, device: Device) -> Comparison:
    """Compare the first of the plans with another layout.

    Raises:
        UserError: the table has no such row.
        PlanError: a schedule cannot run with these numbers.
        DeviceError: the device has no rate for the type of the products.
    """
    if not isinstance(other, int):
        return compare(plans[0], price(other, device), device)
    if not 1 <= other <= len(plans):
        raise UserError(f"--why {other}: the table has the rows 1 to {len(plans)}")
    return compare(plans[0], plans[other - 1], device)


def as_json(found: Comparison) -> dict[str, Any]:
    """Return a comparison as ``plan --json`` has it; ``*_s`` are seconds, ``*gib`` GiB."""
    first, second = (plan.prediction for plan in found.plans)
    return {
        "step_time_s": [first.time.step_s, second.time.step_s],
        "more_s": found.more_s,
        "more_s_80": found.more_s_80,
        "first_is_faster_probability": found.first_is_faster,
        "decisive": found.decisive,
        "terms_s": found.terms,
        "gib": {kind: [count / GIB for count in both] for kind, both in found.bytes.items()},
        "peak_gib": [first.peak_gib, second.peak_gib],
        "fits": [first.fits, second.fits],
    }


def in_words(found: Comparison, layout: str, device: Device) -> list[str]:
    """Return a comparison as lines of text."""
    first, second = (plan.prediction for plan in found.plans)
    lines = [
        f"A: the first layout; B: {_name_of(layout)}",
        _line("ms of a step", "A", "B", "B - A"),
    ]
    for term, both in found.terms.items():
        if max(map(abs, both)) >= _LEAST_S:
            lines.append(_numbers(term, both, 1e3))
    lines.append(_numbers("step", (first.time.step_s, second.time.step_s), 1e3))
    lines.append(_line("GiB of the rank that needs most", "A", "B", "B - A"))
    form = gib_form(max(first.allocated_gib, second.allocated_gib))
    for kind, counts in found.bytes.items():
        if any(counts):
            lines.append(_numbers(kind, counts, 1 / GIB, form))
    needed = (first.peak_gib, second.peak_gib)
    is_on_gpus = first.memory[0].context > 0
    name = "needed, with the least CUDA takes" if is_on_gpus else "needed"
    lines.append(_numbers(name, needed, form=form))
    for name, plan in zip("AB", found.plans, strict=True):
        prediction = plan.prediction
        if not prediction.fits:
            lines.append(
                f"{name} does not fit: pipeline rank {prediction.largest_rank} needs "
                f"{prediction.peak_gib:{form}} of {device.hardware.memory_gib:.0f} GiB"
            )
    return [*lines, _verdict(found)]


def _name_of(layout: str) -> str:
    if layout.isdecimal():
        return f"row {layout} of the table"
    return "the recipe as it is" if layout == AS_IT_IS else f"the recipe with {one_line(layout)}"


def _line(name: str, *cells: str) -> str:
    return f"{name:<34}" + "".join(f"{cell:>14}" for cell in cells)


def _numbers(name: str, both: tuple[float, float], unit: float = 1.0, form: str = ".1f") -> str:
    first, second = (unit * value for value in both)
    return _line(f"  {name}", f"{first:,{form}}", f"{second:,{form}}", f"{second - first:+,{form}}")


def _verdict(found: Comparison) -> str:
    first = found.plans[0].prediction.time.step_s
    if found.more_s == 0:
        return "both take the same time"
    low, high = (share / first for share in found.more_s_80)
    of_term = found.terms[found.decisive]
    faster, sure = "AB" if found.more_s > 0 else "BA", found.first_is_faster
    sure = sure if found.more_s > 0 else 1 - sure
    return (
        f"{faster[0]} is faster with a probability of {min(0.99, sure):.0%}: a step of B takes "
        f"{found.more_s / first:+.1%} (80%: {low:+.1%} to {high:+.1%}), and what decides is "
        f"{found.decisive}, {(of_term[1] - of_term[0]) / first:+.1%}"
    )
