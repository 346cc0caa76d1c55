"""Ranks the layouts of a recipe, and says what bounds each. No torch here."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

from composer3d.facts.hardware import Hardware
from composer3d.planner.calibrate import Calibration
from composer3d.planner.collectives import GroupShape
from composer3d.planner.intervals import close_probability
from composer3d.planner.layouts import Choices, layouts
from composer3d.planner.levers import Levers, Timed
from composer3d.planner.memory import memory_of_ranks, predict_memory
from composer3d.planner.predict import (
    Prediction,
    mfu,
    model_flops_per_token,
    needed_share,
    of_recipe,
    predict,
    predict_speed,
)
from composer3d.planner.setup import Setup
from composer3d.planner.time import groups
from composer3d.recipe.schema import Recipe

CLOSE = 0.03
# With more layouts than this, those that fit and have the fewest ranks in tp, pp and cp are timed.
_MOST_TIMED = 4000
# Layouts that need less than this share of their device may fit with further keys. At most this
# many, those that need least, are timed.
_NEAR = 1.3
_MOST_NEAR = 1000


@dataclass(frozen=True, kw_only=True)
class Device:
    """Where a plan runs.

    Attributes:
        hardware: the row of the device.
        per_node: devices that share a node.
        nic_bytes_s: network bytes per second of each device, in one direction; None: the row's.
    """

    hardware: Hardware
    per_node: int = 8
    nic_bytes_s: float | None = None

    def setup(self, recipe: Recipe) -> Setup:
        """Return the setup of a resolved recipe on this device.

        Raises:
            DeviceError: the links of the device are unknown.
        """
        return of_recipe(recipe, self.hardware, self.per_node, self.nic_bytes_s)


class Plan(NamedTuple):
    """A layout of a recipe, and its prediction.

    Attributes:
        recipe: the recipe in this layout.
        prediction: its predicted time and memory.
        mfu: model FLOPs utilization with causal attention; None: the device's peak is unknown.
        bound_by: what costs most besides the products, in words.
        lever: what would help most, in words.
    """

    recipe: Recipe
    prediction: Prediction
    mfu: float | None
    bound_by: str
    lever: str


def price(recipe: Recipe, device: Device) -> Plan:
    """Predict one recipe as it is."""
    setup = device.setup(recipe)
    prediction = predict(setup)
    flops = model_flops_per_token(recipe)
    return Plan(
        recipe,
        prediction,
        mfu(setup, flops, prediction.tokens_s),
        _bound_by(setup, prediction),
        _lever(setup, prediction),
    )


class Search(NamedTuple):
    """The result of a search.

    Attributes:
        plans: those that fit, the fastest first; if none fits, those that come closest.
        legal: the number of legal layouts.
        fitting: how many of these fit.
        by_keys: how many more layouts, with further keys, were found to fit.
        close: the probability that the first one is at most ``CLOSE`` slower than the best that
            fits; None: none fits.
    """

    plans: list[Plan]
    legal: int
    fitting: int
    by_keys: int
    close: float | None


def search(
    recipe: Recipe,
    gpus: int,
    device: Device,
    top: int,
    choices: Choices | None = None,
    *,
    improved: int = 1,
    report: Callable[[str], None] = lambda phase: None,
) -> Search:
    """Return the fastest layouts of a recipe on ``gpus`` devices.

    Fast layouts, and those that need slightly too much memory, are tried with further keys and with
    stages cut by time (``levers``).

    Args:
        recipe: the recipe.
        gpus: the number of devices.
        device: where it runs.
        top: the number of layouts to return.
        choices: the values to try.
        improved: how many of the fastest layouts are as fast as further keys make them, if more
            than ``top``. How close the first one is to the best depends on it.
        report: is called for each layout or family before it is predicted, with the phase:
            "memory", "time" or "further keys".
    """
    choices = choices or Choices()
    legal = 0
    fitting: list[tuple[Recipe, Setup]] = []
    too_large: list[tuple[Recipe, Setup]] = []
    near: list[tuple[float, int]] = []
    for variant in layouts(recipe, gpus, device.per_node, choices):
        legal += 1
        report("memory")
        setup = device.setup(variant)
        # Most layouts of a large model do not fit, and usually not even their first rank does.
        share = needed_share(setup, memory_of_ranks(setup))
        if 1 < share < _NEAR:
            near.append((share, len(too_large)))
        (fitting if share <= 1 else too_large).append((variant, setup))

    def timed(chosen: Iterable[tuple[Recipe, Setup]]) -> Iterator[Timed]:
        for variant, setup in chosen:
            report("time")
            yield Timed(variant, setup, predict_speed(setup))

    fitting.sort(key=lambda item: item[1].layout.tp * item[1].layout.pp * item[1].layout.cp)
    as_they_are = fitting[:_MOST_TIMED]
    nearest = [too_large[index] for _, index in sorted(near)[:_MOST_NEAR]]
    levers = Levers(device.setup, max(top, improved), choices, lambda: report("further keys"))
    best = levers.improve(timed(as_they_are), timed(nearest))
    if not best:
        too_large.sort(key=lambda item: _largest_bytes(item[1]))
        return Search([price(variant, device) for variant, _ in too_large[:top]], legal, 0, 0, None)
    plans = [price(one.recipe, device) for one in best[:top]]
    runs = device.hardware.calibration
    draw_errors = Calibration(runs).draw_errors if runs else None
    close = close_probability([one.speed for one in best], CLOSE, draw_errors=draw_errors)
    return Search(plans, legal, len(fitting), len(best) - len(as_they_are), close)


def _largest_bytes(setup: Setup) -> float:
    """Return the bytes that the pipeline rank with the largest need allocates."""
    return max(rank.allocated_bytes for rank in predict_memory(setup))


class ScalePoint(NamedTuple):
    """The prediction for a recipe on a number of devices.

    Attributes:
        gpus: the number of devices.
        plan: the fastest layout, or the closest one if none fits; None: none is legal.
        efficiency: tokens per second per device, relative to the fewest devices that the recipe
            fits; None: it does not fit this number.
    """

    gpus: int
    plan: Plan | None
    efficiency: float | None


def scaling(
    recipe: Recipe,
    device: Device,
    sizes: Sequence[int],
    choices: Choices | None = None,
    *,
    report: Callable[[str], None] = lambda phase: None,
) -> list[ScalePoint]:
    """Return the fastest layout for each number of devices, in ascending order.

    The global batch stays, unless it does not divide evenly over the devices: then each has one
    sample. ``report`` is called as in ``search``, with the number of devices as well.
    """
    found: list[ScalePoint] = []
    base_tokens_s: float | None = None
    for gpus in sizes:
        scaled = recipe
        if recipe.data.global_batch % gpus:
            scaled = replace(recipe, data=replace(recipe.data, global_batch=max(gpus, 8)))
        say = partial(_say_gpus, report, gpus)
        plans = search(scaled, gpus, device, 1, choices, report=say).plans
        plan = plans[0] if plans else None
        efficiency = None
        if plan is not None and plan.prediction.fits:
            base_tokens_s = base_tokens_s or plan.prediction.tokens_s
            efficiency = plan.prediction.tokens_s / base_tokens_s
        found.append(ScalePoint(gpus, plan, efficiency))
    return found


def _say_gpus(report: Callable[[str], None], gpus: int, phase: str) -> None:
    report(f"{phase} on {gpus:,} devices")


def work_share(prediction: Prediction) -> float:
    """Return the share of a step that is the model's own work, which no layout can avoid.

    The rest is recomputation, what the slowest pipeline rank computes beyond the mean, waiting for
    collectives or the pipeline, the optimizer, and the host.
    """
    time = prediction.time
    return (time.compute_s - time.recompute_s - time.uneven_s) / time.step_s


_AXIS_WORDS = {
    "tp": "tp collectives",
    "cp": "exchange of keys and values (cp)",
    "ep": "all-to-all of experts",
    "dp": "gathers and reductions of FSDP",
}
_LEVERS = {
    "tp": "less tp, or sequences of more tokens a rank",
    "cp": "less cp, or ulysses",
    "ep": "less ep",
    "dp": "more tokens in a step",
    "bubble": "more micro-batches, more stages a rank, or a zero-bubble schedule",
    "recompute": "less checkpointing, if memory allows it",
    "optimizer": "more tokens in a step",
    "overhead": "more tokens in a step",
}


def _shares(prediction: Prediction) -> dict[str, float]:
    """Return each overhead's share of the step."""
    time = prediction.time
    parts = {
        **time.exposed_s,
        "bubble": time.bubble_s,
        "recompute": time.recompute_s,
        "optimizer": time.optimizer_s,
        "overhead": time.overhead_s,
    }
    return {name: seconds / time.step_s for name, seconds in parts.items()}


def _bound_by(setup: Setup, prediction: Prediction) -> str:
    """Say what costs most besides the work itself, such as "bubble 18%"."""
    name, share = max(_shares(prediction).items(), key=lambda item: item[1])
    if share < 0.05:
        return "products and attention"
    if name not in _AXIS_WORDS:
        return f"{name} {share:.0%}"
    if name == "dp":
        return f"{_data_parallel_words(setup)} {share:.0%}"
    return f"{_AXIS_WORDS[name]} over {_link(setup, groups(setup)[name])} {share:.0%}"


def _data_parallel_words(setup: Setup) -> str:
    """Say what the ranks of data parallelism send, and over which links."""
    layout, of_axis = setup.layout, groups(setup)
    shards, replicas = of_axis["fsdp"], of_axis["dp_replicate"]
    if layout.zero == 0:
        everyone = GroupShape(shards.ranks * replicas.ranks, shards.stride)
        return f"reductions of replicas over {_link(setup, everyone)}"
    of_replicas = f"of replicas over {_link(setup, replicas)}"
    # The shards of experts are in another group.
    of_experts = of_axis["efsdp"] if setup.sizes.expert_blocks else shards
    if shards.ranks == of_experts.ranks == 1:
        return f"reductions {of_replicas}"
    widest = max(shards, of_experts, key=lambda group: group.crosses_nodes(setup.machine))
    words = f"{_AXIS_WORDS['dp']} over {_link(setup, widest)}"
    if replicas.ranks == 1 or _link(setup, replicas) == _link(setup, widest):
        return words
    return f"{words} and {of_replicas}"


def _link(setup: Setup, group: GroupShape) -> str:
    """Name the slowest link that a group sends over."""
    crosses = group.crosses_nodes(setup.machine)
    return "network" if crosses else setup.machine.hardware.node_link


def _lever(setup: Setup, prediction: Prediction) -> str:
    """Say what would help most."""
    shares = _shares(prediction)
    if not prediction.fits:
        return "more devices, more checkpointing, or zero = 3"
    if setup.recompute == "none":
        shares.pop("recompute")
    name, share = max(shares.items(), key=lambda item: item[1])
    if share < 0.02:
        return "none: products take almost all of the step"
    of_axis = groups(setup)
    if name == "ep" and of_axis["ep"].crosses_nodes(setup.machine):
        return "ep inside a node"
    if name == "dp" and setup.layout.zero and of_axis["fsdp"].ranks > 1:
        return "more tokens in a micro-batch, or shards over fewer ranks (dp_replicate)"
    return _LEVERS[name]
