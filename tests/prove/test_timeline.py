"""Measured bubbles: one schedule of the proof, which ``tools/prove/run timeline`` runs whole."""

import pytest

from composer3d.runtime.launch import Pool
from tools.prove import timeline

TRIES = 3  # other programs may take the cores for a while


def test_a_pipeline_whose_layers_sleep_has_the_simulated_bubble(pool: Pool) -> None:
    for _ in range(TRIES):
        shares = timeline.compare(pool, "1F1B", sleep_s=0.04, steps=3)
        if shares.is_close:
            break
    assert shares.closed_form == pytest.approx(3 / 11)
    assert shares.simulated == pytest.approx(3 / 11)
    assert shares.is_close, shares
    # 8 micro-batches and 3 hops, each with a forward and a backward of two layers.
    assert shares.step_s >= 11 * 3 * 2 * 0.04
