"""Random tokens have the probabilities that temperature, top-k and top-p give them."""

from collections import Counter

import pytest
import torch

from composer3d.generate import sampling as module
from composer3d.generate.sampling import Sampler, Sampling

PROBABILITIES = torch.tensor([0.1, 0.5, 0.05, 0.3, 0.05])


def shares(temperature: float, top_p: float, top_k: int = 0, draws: int = 1500) -> list[float]:
    sampling = Sampling(temperature=temperature, top_p=top_p, top_k=top_k, seed=7)
    sampler = Sampler(sampling, [1, 2])
    counts = Counter(sampler.choose(PROBABILITIES.log()) for _ in range(draws))
    return [counts[token] / draws for token in range(len(PROBABILITIES))]


@pytest.mark.parametrize(
    ("top_k", "top_p", "kept"),
    [
        (0, 1.0, [0, 1, 2, 3, 4]),
        (0, 0.85, [0, 1, 3]),
        (0, 0.75, [1, 3]),
        (0, 0.3, [1]),
        (0, 1e-9, [1]),
        (9, 1.0, [0, 1, 2, 3, 4]),
        (3, 1.0, [0, 1, 3]),
        (1, 1.0, [1]),
        (3, 0.85, [1, 3]),  # they have 0.8 of the 0.9 that three tokens have
        (3, 0.9, [0, 1, 3]),
    ],
)
def test_shares_are_the_probabilities_of_the_kept_tokens(
    top_k: int, top_p: float, kept: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    # Two of the most likely tokens are enough for some of these, and not for others.
    monkeypatch.setattr(module, "_LIKELY", 2)
    expected = torch.zeros(5)
    expected[kept] = PROBABILITIES[kept]
    expected /= expected.sum()
    # Five standard deviations of the largest share.
    assert shares(1.0, top_p, top_k) == pytest.approx(expected.tolist(), abs=5 * 0.5 / 1500**0.5)


def test_temperature_divides_the_logits() -> None:
    squared = PROBABILITIES.square() / PROBABILITIES.square().sum()
    assert shares(0.5, 1.0) == pytest.approx(squared.tolist(), abs=0.06)


@pytest.mark.parametrize("temperature", [1e-30, 1e-40, 5e-324])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_the_lowest_temperatures_choose_the_most_likely_token(
    temperature: float, dtype: torch.dtype
) -> None:
    # 5 / 1e-40 is infinite in float32, and 5e-324 is 0.
    sampler = Sampler(Sampling(temperature=temperature), [1])
    logits = torch.tensor([-2.0, 1e30, 5.0, 3.0], dtype=dtype)
    assert sampler.choose(logits) == 1
    assert sampler.choose(logits.clamp(max=5.0)) in (1, 2)
    assert sampler.choose(-logits) == 0


def test_samplers_of_other_prompts_and_seeds_are_independent() -> None:
    def draws(seed: int, prompt: list[int]) -> list[int]:
        sampler = Sampler(Sampling(temperature=1.0, seed=seed), prompt)
        return [sampler.choose(torch.zeros(1000)) for _ in range(8)]

    assert draws(1, [1, 2]) == draws(1, [1, 2])
    found = [draws(1, [1, 2]), draws(2, [1, 2]), draws(1, [12]), draws(1, [2, 1])]
    assert len(set(map(tuple, found))) == 4
