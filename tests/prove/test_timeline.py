"""Measured bubbles: what does not depend on how busy this machine is.

``tools/prove/run timeline`` compares measured shares with simulated ones.
"""

import pytest

from composer3d.runtime.launch import Pool
from tools.prove import timeline


def test_a_pipeline_whose_layers_sleep_is_traced_and_simulated(pool: Pool) -> None:
    shares = timeline.compare(pool, "1F1B", sleep_s=0.02, steps=2)
    assert shares.closed_form == pytest.approx(3 / 11)
    assert shares.simulated == pytest.approx(3 / 11)
    # 8 micro-batches and 3 hops, each with a forward and a backward of two layers.
    assert shares.step_s >= 11 * 3 * 2 * 0.02
    # Sleeps last at least as long as they should, so ranks cannot wait all the time.
    assert 0 < shares.measured < 1
