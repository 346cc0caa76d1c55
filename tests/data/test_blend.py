"""A blend has exact shares, on every layout and after every restart."""

import logging
from dataclasses import replace
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
import torch

from composer3d.data import Blend, Corpus
from composer3d.data.blend import whole_weights
from composer3d.data.order import samples_before, sources_of
from composer3d.recipe.resolve import load
from composer3d.training.batches import open_data
from composer3d.training.observers.epochs import log_epochs
from tests.data.samples import corpus_of, loader_of, rows
from tests.data.token_folders import refuses, write_tokens

WEIGHTS = [
    (1.0, 1.0),
    (0.7, 0.2, 0.1),
    (3.0, 1e-3),
    (1.0, 2.0, 3.0, 4.0, 5.0, 0.013),
    (1e6, 1e-6),
]


@pytest.mark.parametrize("weights", WEIGHTS, ids=str)
def test_shares_are_exact_at_any_time(weights: tuple[float, ...]) -> None:
    whole = whole_weights(weights)
    total, sources = sum(whole), len(whole)
    owners = sources_of(whole, 0, 1_000)
    counts = [0] * sources
    for number in range(980):
        if number < 40 or number % 37 == 0:  # the state is computed, not remembered
            assert samples_before(whole, number) == counts
            assert np.array_equal(sources_of(whole, number, 20), owners[number : number + 20])
        for share, count in zip(whole, counts, strict=True):
            error = abs(Fraction(share * number, total) - count)
            assert error <= Fraction(1, 2) + Fraction(share * sources, 2 * total)
        counts[owners[number]] += 1


def test_a_far_sample_is_found_at_once() -> None:
    whole = whole_weights((0.7, 0.2, 0.1))
    assert whole == (7, 2, 1)
    assert samples_before(whole, 10**15) == [7 * 10**14, 2 * 10**14, 10**14]
    # The pattern has a period of 10 samples.
    assert sources_of(whole, 10**15, 30).tolist() == sources_of(whole, 0, 30).tolist()


A = corpus_of(np.arange(1, 402), name="a")
B = corpus_of(np.arange(1_000, 1_081), name="b", dtype="<u4")
C = corpus_of(np.arange(2_000, 2_041), name="c")
BLEND = Blend((A, B, C), (0.5, 0.3, 0.2))


def test_each_part_has_its_own_order_and_epochs() -> None:
    loader = loader_of(BLEND)
    firsts = torch.cat([loader[step].tokens_BT[:, 0] for step in range(50)])  # 400 samples
    for corpus, share in zip(BLEND.corpora, (200, 120, 80), strict=True):
        first_token, n_samples = int(corpus.tokens[0]), (len(corpus.tokens) - 1) // 4
        own = firsts[(firsts >= first_token) & (firsts < first_token + len(corpus.tokens))]
        assert len(own) == share
        alone = loader_of(corpus, global_batch=share)[0].tokens_BT[:, 0]
        assert torch.equal(own, alone)
        for epoch in own.split(n_samples)[: share // n_samples]:
            assert len(set(epoch.tolist())) == n_samples


@pytest.mark.parametrize(
    "other", [Blend((A, B, C), (0.5, 0.3, 0.3)), Blend((B, A, C), (0.5, 0.3, 0.2)), A], ids=str
)
def test_another_blend_is_refused(other: Blend | Corpus) -> None:
    state = loader_of(BLEND).state_dict()
    loader_of(Blend((A, B, C), (5, 3, 2))).load_state_dict(state)  # the same shares
    with refuses(r"or the weights or order of data\.sources; restore"):
        loader_of(other).load_state_dict(state)


def test_a_blend_of_one_is_its_corpus() -> None:
    one, alone = loader_of(Blend((A,), (0.3,))), loader_of(A)
    assert all(torch.equal(rows([one[step]]), rows([alone[step]])) for step in range(30))


def test_what_does_not_fit_together_is_refused() -> None:
    other = replace(A, end_of_document=7, name="other")
    with refuses("other ends documents with token 7, but a with 0"):
        Blend((A, other), (1, 1))
    with refuses(r"corpus c has 41 tokens: too few for data\.seq_len = 41"):
        loader_of(BLEND, seq_len=41)


def test_epochs_are_told() -> None:
    loader = loader_of(BLEND)
    # a has 100 samples, and gets 4 in each step of 8.
    told = [(epoch.name, epoch.n_samples, epoch.epochs) for epoch in loader.epochs_in(100)]
    assert told == [("a", 100, 4.0), ("b", 20, 12.0), ("c", 10, 16.0)]
    begun = {step: loader.epochs_begun(step) for step in range(80)}
    # Epochs of b and c have less than ten steps.
    assert {step: names for step, names in begun.items() if names} == {
        25: [("a", 1)],
        50: [("a", 2)],
        75: [("a", 3)],
    }


def test_a_run_blends_token_files(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name, size in (("web", 4_000), ("code", 900)):
        ids = np.frombuffer((name * size)[:size].encode() + b"\0", np.uint8)
        write_tokens(tmp_path / name, ids.astype("<u2"))
    (tmp_path / "r.toml").write_text(
        """\
[run]
steps = 30
[model]
preset = "debug-tiny"
[data]
source = "tokens"
seq_len = 32
global_batch = 2
[[data.sources]]
path = "web"
weight = 3
[[data.sources]]
path = "code"
weight = 1
"""
    )
    recipe = load("r.toml").recipe
    corpus, _ = open_data(recipe)
    caplog.set_level(logging.INFO, logger="composer3d")
    log_epochs(recipe, loader_of(corpus, seq_len=32, global_batch=2))
    assert caplog.messages == [
        "data: web (train) has 125 samples of 32 tokens; 30 steps see it 0.36 times",
        "data: code (train) has 28 samples of 32 tokens; 30 steps see it 0.54 times",
    ]
    # Two digits of a small share; the one step takes no sample of "code".
    caplog.clear()
    log_epochs(
        replace(recipe, run=replace(recipe.run, steps=1)),
        loader_of(corpus, seq_len=32, global_batch=2),
    )
    assert [line.rpartition(" see it ")[2] for line in caplog.messages] == [
        "0.016 times",
        "0 times",
    ]
