"""Measured bubbles: what does not depend on how busy this machine is.

``tools/prove/run timeline`` compares measured shares with simulated ones.
"""

import pytest

from composer3d.recipe.resolve import load
from composer3d.runtime.launch import Pool
from tools.prove import timeline
from tools.prove.paths import ROOT


def test_a_pipeline_whose_layers_sleep_is_traced_and_simulated(pool: Pool) -> None:
    shares = timeline.compare(pool, timeline.of_equal_layers("1F1B", 0.02), steps=2)
    assert shares.closed_form == pytest.approx(3 / 11)
    assert shares.simulated == pytest.approx(3 / 11)
    # 8 micro-batches and 3 hops, each with a forward and a backward of two layers.
    assert shares.expected_s == pytest.approx(11 * 3 * 2 * 0.02)
    # Sleeps last at least as long as they should, so ranks cannot wait all the time.
    assert shares.step_s >= shares.expected_s
    assert 0 < shares.measured < 1


def test_a_pipeline_cut_by_time_sleeps_as_long_as_its_stages_take(pool: Pool) -> None:
    recipe = load(ROOT / "recipes" / "qwen3-30b-a3b-16-ep-pp.toml", check_files=False).recipe
    own, by_time = timeline.of_cuts(recipe, 0.03)
    assert (own.cut, by_time.cut) == ((6,) * 8, (7, 6, 6, 6, 6, 6, 6, 5))
    assert max(stage.forward_s for stage in own.times) == pytest.approx(0.03)
    shares = timeline.compare(pool, by_time, steps=2)
    assert shares.closed_form is None
    # The busiest rank has all its work to do, however long the others wait for it.
    ranks_s = [
        sum(stage.forward_s + stage.backward_s for stage in by_time.times[r::2]) for r in (0, 1)
    ]
    assert shares.step_s >= shares.expected_s >= by_time.micro_batches * max(ranks_s)


def test_a_step_that_became_shorter_by_less_is_reported(capsys: pytest.CaptureFixture[str]) -> None:
    """The pipelines are not run: each has a step that is 10 points away from the simulated one."""
    lengths = iter((10.0, 9.0))

    def compare(name: str, pipeline: timeline.Pipeline) -> timeline.Shares:
        return timeline.Shares(None, 0.2, 0.2, 0.2, next(lengths), 10.0)

    assert not timeline.compare_cuts("deepseek-v3-1024", compare)
    assert "simulated +0.0%, measured -10.0%, more than 2 points" in capsys.readouterr().out
