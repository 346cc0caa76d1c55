"""The score of the last tokens of passages, against the model on one passage alone, in float64."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from composer3d.facts.errors import CheckpointError
from composer3d.generate.generator import Generator
from composer3d.generate.scores import Passage, score
from composer3d.models.contract import Decoder, SequenceInfo
from composer3d.models.llama.plan import sharding_plan
from composer3d.models.llama.shape import ModelShape
from composer3d.models.moe.shape import MoeShape
from composer3d.models.registry import architecture, resolve
from composer3d.models.shape import DecoderShape
from tests.generate.jobs import random_model

CPU = torch.device("cpu")
SHAPE = ModelShape(dim=64, n_layers=2, n_heads=4, n_kv_heads=2, ffn=96, vocab=131, rope_theta=1e4)
EXPERTS = {"experts": 6, "experts_per_token": 2, "moe_every": 1}


def passages() -> list[Passage]:
    """Of many lengths, some of which differ in their last token alone, or in what is scored."""
    numbers = torch.Generator().manual_seed(5)

    def draw(length: int) -> tuple[int, ...]:
        return tuple(torch.randint(131, (length,), generator=numbers).tolist())

    question, text = draw(17), draw(40)
    drawn = [Passage(draw(length), scored) for length, scored in ((9, 3), (2, 1), (30, 29))]
    answers = [Passage((*question, token), 1) for token in (3, 99, 3)]
    return [*answers, *drawn, Passage(text, 39), Passage(text, 1), Passage((*question, 3), 4)]


@torch.no_grad()
def score_alone(model: Decoder, passage: Passage) -> tuple[float, bool]:
    """Score a passage by the logits of the whole model."""
    tokens, scored = passage
    inputs_1T = torch.tensor([tokens[:-1]])
    seq = SequenceInfo(torch.arange(len(tokens) - 1)[None])
    logits_TV = model.logits(inputs_1T, seq)[0, -scored:]
    targets_T = torch.tensor(tokens[-scored:])
    log_probability_T = torch.log_softmax(logits_TV, -1)[range(scored), targets_T]
    return float(log_probability_T.sum()), bool((logits_TV.argmax(-1) == targets_T).all())


def generator_of(name: str, shape: DecoderShape) -> Generator:
    plan = resolve(architecture(name).plan)(shape)
    return Generator(random_model(name, shape, torch.float64), plan, device=CPU)


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("llama", SHAPE),
        ("llama", replace(SHAPE, window=4)),
        ("moe", MoeShape(**{**vars(SHAPE), **EXPERTS})),
    ],
    ids=["whole", "window 4", "experts"],
)
@pytest.mark.parametrize(("batch", "prefill_tokens"), [(1, 2048), (4, 2048), (4, 7), (3, 64)])
def test_scores_are_those_of_each_passage_alone(
    name: str, shape: DecoderShape, batch: int, prefill_tokens: int
) -> None:
    """Together and filled up, also in parts that are shorter than a passage."""
    model = random_model(name, shape, torch.float64)
    expected = [score_alone(model, passage) for passage in passages()]
    done: list[int] = []
    found = score(
        generator_of(name, shape),
        passages(),
        device=CPU,
        batch=batch,
        prefill_tokens=prefill_tokens,
        on_done=done.append,
    )
    for one, (log_likelihood, is_greedy) in zip(found, expected, strict=True):
        assert one.log_likelihood == pytest.approx(log_likelihood, rel=1e-12)
        assert one.is_greedy == is_greedy
    assert sum(done) == len(expected)


def test_the_most_likely_tokens_are_greedy_and_others_are_not() -> None:
    free = generator_of("llama", SHAPE).generate([[5, 6, 7]], max_tokens=6)[0].tokens
    best = (5, 6, 7, *free)
    others = [(*best[:-1], (best[-1] + 1) % 131), (*best[:4], (best[4] + 1) % 131, *best[5:])]
    found = score(
        generator_of("llama", SHAPE),
        [Passage(tokens, 6) for tokens in (best, *others)],
        device=CPU,
        batch=8,
    )
    assert [one.is_greedy for one in found] == [True, False, False]


def test_equal_beginnings_are_read_once() -> None:
    """The answers that differ in their last token alone, whatever is scored of them."""
    generator = generator_of("llama", SHAPE)
    shapes: list[tuple[int, ...]] = []
    first: Any = generator._model.first
    first.register_forward_pre_hook(lambda _, inputs: shapes.append(tuple(inputs[0].shape)))
    score(generator, passages(), device=CPU, batch=2)
    assert shapes == [(2, 39), (2, 17), (1, 1)]


def test_logits_are_computed_for_a_bounded_number_of_positions() -> None:
    generator = generator_of("llama", SHAPE)
    counts: list[int] = []
    right = generator.logits

    def watched(h_BTC: torch.Tensor, *arguments: Any) -> torch.Tensor:
        counts.append(h_BTC.shape[0] * h_BTC.shape[1])
        return right(h_BTC, *arguments)

    generator.logits = watched  # type: ignore[method-assign]
    text = Passage(tuple(number % 131 for number in range(301)), 300)
    expected = score_alone(random_model("llama", SHAPE, torch.float64), text)[0]
    (found,) = score(generator, [text], device=CPU, batch=2)
    assert counts == [256, 44]
    assert found.log_likelihood == pytest.approx(expected, rel=1e-12)


def test_wrong_passages_and_weights_are_refused() -> None:
    for tokens, scored in (((1,), 1), ((1, 2), 0), ((1, 2), 2)):
        with pytest.raises(ValueError, match="passage 0 has"):
            score(generator_of("llama", SHAPE), [Passage(tokens, scored)], device=CPU, batch=1)
    model = random_model("llama", SHAPE)
    with torch.no_grad():
        model.last.norm.weight[3] = torch.nan  # type: ignore[union-attr]
    generator = Generator(model, sharding_plan(SHAPE), device=CPU)
    with pytest.raises(CheckpointError, match="a logit that is not finite"):
        score(generator, [Passage((1, 2), 1)], device=CPU, batch=1)
