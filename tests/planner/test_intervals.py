"""Intervals are wider where less is known, and what layouts have in common cancels between them."""

import pytest

from composer3d.planner.intervals import (
    MEANING,
    SHIPPED_SPREADS,
    Candidate,
    around,
    close_probability,
    fits_probability,
    shares,
    spread,
)
from composer3d.planner.predict import predict
from tests.planner.setups import setup_on

RECIPE = "llama3-8b-8-fsdp"


def test_every_spread_is_within_its_range() -> None:
    values = SHIPPED_SPREADS.as_dict()
    assert values.keys() == MEANING.keys()
    for name, meaning in MEANING.items():
        assert meaning.low <= values[name] <= meaning.high, name


def test_a_device_is_surer_the_more_runs_were_seen() -> None:
    seen, kin, unseen = (
        predict(setup_on(gpu, RECIPE)).time_spread for gpu in ("H100", "B200", "MI300X")
    )
    assert seen < kin < unseen
    assert seen < 0.06
    assert unseen > 0.15


def test_an_interval_is_as_far_to_both_sides() -> None:
    low, high = around(100.0, 0.1, 1.45)
    assert low * high == pytest.approx(100.0**2)
    assert high == pytest.approx(115.6, abs=0.1)


def test_a_layout_that_just_fits_is_as_likely_not_to() -> None:
    assert fits_probability(79.0, 79.0) == pytest.approx(0.5)
    assert fits_probability(70.0, 79.0) > 0.95
    assert fits_probability(88.0, 79.0) < 0.05


def candidate(tokens_s: float, **parts: float) -> Candidate:
    setup = setup_on("H100", RECIPE)
    nothing = dict.fromkeys(shares(setup, predict(setup).time), 0.0)
    return Candidate(tokens_s, {**nothing, **parts})


def test_the_first_is_surer_the_more_the_others_are_behind() -> None:
    probabilities = [
        close_probability([candidate(100.0), candidate(100.0 * behind)])
        for behind in (1.0, 0.97, 0.9, 0.8)
    ]
    assert probabilities == sorted(probabilities)
    assert 0.6 < probabilities[0] < 0.9
    assert probabilities[-1] > 0.99
    assert close_probability([candidate(100.0)]) == 1.0


def test_what_layouts_have_in_common_cancels() -> None:
    alone = close_probability([candidate(100.0), candidate(95.0)])
    on_unknown = [candidate(speed, source=1.0, unseen=1.0, nodes=1.0) for speed in (100.0, 95.0)]
    assert close_probability(on_unknown) == alone
    # Both wait equally long for tp: its spread makes no difference. If only one does, it does.
    both = close_probability([candidate(100.0, tp=0.4), candidate(95.0, tp=0.4)])
    one = close_probability([candidate(100.0, tp=0.4), candidate(95.0)])
    assert both == pytest.approx(alone, abs=0.04)
    assert one < alone - 0.1


def test_the_spread_has_all_parts() -> None:
    values = SHIPPED_SPREADS.as_dict()
    assert spread({"source": 1.0, "tp": 0.5}) == pytest.approx(
        (values["source"] ** 2 + (0.5 * values["collectives"]) ** 2) ** 0.5
    )
