"""Two layouts differ by the sum of what their terms differ, and err alike as far as they agree."""

import pytest

from composer3d.facts.calibration import PARTS, Observation
from composer3d.planner.calibrate import Calibration
from composer3d.planner.compare import compare
from composer3d.planner.intervals import SHIPPED_SPREADS, around
from composer3d.planner.search import Device, price
from composer3d.recipe.values import variant
from tests.planner.setups import device, recipe_of

PAIRS = [
    ("llama3-70b-64-fsdp-tp", "parallel.zero=2", "mesh.tp=4 mesh.dp_shard=16"),
    ("llama3-405b-16384-4d", "memory.activation_checkpoint=none", "parallel.zero=3"),
    ("deepseek-v3-1024", "data.micro_batch=1", "mesh.ep=32"),
    (
        "llama-175b-1024-3d",
        "parallel.virtual_stages=12",
        "parallel.virtual_stages=1 parallel.schedule=1F1B",
    ),
    ("llama3-8b-8-fsdp", "memory.loss_chunks=4", "mesh.dp_replicate=2 mesh.dp_shard=4"),
]
SLOW = Observation(-0.1, {**dict.fromkeys(PARTS, 0.0), "source": 1.0, "tp": 0.2, "host": 0.1})


@pytest.mark.parametrize("runs", [(), (SLOW,)], ids=["as shipped", "calibrated"])
@pytest.mark.parametrize(("name", "first", "second"), PAIRS, ids=[pair[0] for pair in PAIRS])
def test_the_terms_add_up_to_the_difference(
    name: str, first: str, second: str, runs: tuple[Observation, ...]
) -> None:
    place = Device(hardware=device("H100")._replace(calibration=runs))
    plans = [price(recipe_of(name, *sets.split()), place) for sets in (first, second)]
    found = compare(plans[0], plans[1], place)
    for plan, which in zip(plans, (0, 1), strict=True):
        terms = [both[which] for both in found.terms.values()]
        assert min(terms) > -1e-9
        assert sum(terms) == pytest.approx(plan.prediction.time.step_s)
        kinds = sum(both[which] for both in found.bytes.values())
        most = max(rank.allocated_bytes for rank in plan.prediction.memory)
        assert kinds == pytest.approx(most, rel=1e-12)
    differences = [b - a for a, b in found.terms.values()]
    assert sum(differences) == pytest.approx(found.more_s)
    a, b = found.terms[found.decisive]
    assert (b - a) * found.more_s > 0

    low, high = found.more_s_80
    assert low < found.more_s < high
    assert (found.first_is_faster > 0.5) == (found.more_s > 0)


@pytest.mark.parametrize(
    ("sets", "changed"),
    [
        ("memory.loss_chunks=4", {"head and loss"}),
        ("memory.activation_checkpoint=full", {"recomputed"}),
        ("run.deterministic=true", {"attention"}),
        ("parallel.zero=1", {"FSDP and replicas", "other kernels of blocks", "optimizer"}),
    ],
)
def test_a_change_is_in_its_own_terms(sets: str, changed: set[str]) -> None:
    place = Device(hardware=device("H100"))
    plans = [price(recipe_of("llama3-8b-8-fsdp", *one.split()), place) for one in ("", sets)]
    terms = compare(plans[0], plans[1], place).terms
    found = {name for name, (a, b) in terms.items() if abs(b - a) > 1e-9 + 0.003 * max(a, b)}
    assert found == changed


def test_uneven_stages_are_a_term() -> None:
    """With about as many parameters as the others, its first stage has six blocks."""
    place = Device(hardware=device("H100")._replace(calibration=(SLOW,)))
    of_v3 = recipe_of("deepseek-v3-1024")
    cuts = ((4,) * 13 + (3,) * 3, None)
    plans = [
        price(variant(of_v3, {"parallel.schedule": "1F1B", "parallel.stages": cut}), place)
        for cut in cuts
    ]
    found = compare(plans[0], plans[1], place)
    assert found.decisive == "uneven stages"
    for name in ("products of blocks", "attention", "other kernels of blocks", "head and loss"):
        a, b = found.terms[name]
        assert a == pytest.approx(b)


def test_a_layout_is_as_fast_as_itself() -> None:
    place = Device(hardware=device("H100"))
    plan = price(recipe_of("llama3-70b-64-fsdp-tp"), place)
    found = compare(plan, plan, place)
    assert found.more_s_80 == (0.0, 0.0)
    assert found.first_is_faster == 0.5


def test_what_two_layouts_have_in_common_cancels() -> None:
    values = SHIPPED_SPREADS.as_dict()
    shared = {**dict.fromkeys(PARTS, 0.0), "source": 1.0, "layout": 1.0, "unseen": 1.0, "tp": 0.2}
    own = 2 * values["layout"] ** 2
    for tp, apart in ((0.2, 0.0), (0.5, 0.3)):
        spread = Calibration(()).spread_between(shared, {**shared, "tp": tp})
        assert spread**2 == pytest.approx(own + (apart * values["collectives"]) ** 2)
    # A run says what the collectives of tp take, and so how far apart the two are.
    after = Calibration((Observation(0.1, {**shared, "tp": 0.9}),))
    assert own < after.spread_between(shared, {**shared, "tp": 0.5}) ** 2 < spread**2
    # As an interval, it is narrower than that of each of the two.
    one, both = (around(1.0, found, 1.0) for found in (Calibration(()).spread(shared), spread))
    assert both.high < one.high
