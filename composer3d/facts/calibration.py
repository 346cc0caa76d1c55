"""What one run measured on a machine, beside what the planner predicted of it. No torch here.

A row of hardware keeps such observations (``[[calibration]]``), and ``planner.calibrate`` learns
from them.
"""

from collections.abc import Mapping
from math import isfinite
from typing import Any, NamedTuple

from composer3d.facts.errors import DeviceError
from composer3d.facts.text import in_quotes, short_json

# The parts of a prediction whose errors have spreads of their own (``planner.intervals``): the
# visible collectives of each axis, waiting for the pipeline, the host, and what is all or nothing.
PARTS = ("tp", "cp", "ep", "dp", "bubble", "host", "source", "layout", "nodes", "experts", "kin",
         "unseen")  # fmt: skip
MOST_OBSERVATIONS = 16
MOST_ERROR = 2.4  # a factor of 11: more is another unit, or another recipe


class Observation(NamedTuple):
    """One run.

    Attributes:
        error: log(predicted tokens/s / measured tokens/s).
        shares: how much of each of ``PARTS`` the prediction had.
    """

    error: float
    shares: Mapping[str, float]


def observations(value: Any, path: str) -> tuple[Observation, ...]:
    """Check the value of ``calibration`` of a TOML file, an array of tables.

    Raises:
        DeviceError: it is something else, or a number is out of range.
    """
    if not isinstance(value, list) or len(value) > MOST_OBSERVATIONS:
        raise DeviceError(f"{path}: calibration must be at most {MOST_OBSERVATIONS} tables")
    return tuple(_observation(one, path) for one in value)


def _observation(value: Any, path: str) -> Observation:
    if not isinstance(value, Mapping) or value.keys() != {"error", "shares"}:
        raise DeviceError(f"{path}: each calibration must have the keys error and shares, no other")
    found = value["shares"]
    if not isinstance(found, Mapping):
        raise DeviceError(f"{path}: calibration.shares must be a table of numbers")
    for part in found:
        if part not in PARTS:
            parts = ", ".join(PARTS)
            words = f"unknown part {in_quotes(part, 80)} in calibration.shares; use {parts}"
            raise DeviceError(f"{path}: {words}")
    error = _number(value["error"], "calibration.error", path, -MOST_ERROR, MOST_ERROR)
    given = {
        part: _number(share, f"calibration.shares.{part}", path, 0.0, 1.0)
        for part, share in found.items()
    }
    return Observation(error, {**dict.fromkeys(PARTS, 0.0), **given})


def _number(value: Any, key: str, path: str, low: float, high: float) -> float:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not isfinite(value) or not low <= value <= high:
        raise DeviceError(
            f"{path}: {key} = {short_json(value)} must be a number from {low:g} to {high:g}"
        )
    return float(value)


def toml_of(observation: Observation) -> str:
    """Return the table of an observation, for the end of a row's file."""
    shares = ", ".join(f"{part} = {share!r}" for part, share in observation.shares.items() if share)
    error = f"error = {observation.error!r}  # log(predicted / measured tokens per second)"
    return f"\n[[calibration]]  # a run on this machine\n{error}\nshares = {{ {shares} }}\n"
