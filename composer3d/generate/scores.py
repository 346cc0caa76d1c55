"""The log-likelihood that a model gives to the last tokens of passages, many passages at a time.

Passages of similar length are read together. The shorter ones are filled up behind their ends,
where no token of theirs looks: attention is causal, and no expert drops a token.

Shapes: B passages, T tokens, N positions, C model width, V vocabulary, Q pairs of a position and a
token.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from composer3d.generate.cache import CachedSequence, KeyValueCache
from composer3d.generate.generator import PREFILL_TOKENS, Generator, require_finite

# The most positions whose logits are in memory at a time.
_POSITIONS = 256


class Passage(NamedTuple):
    """Tokens of which the last ones are scored.

    Attributes:
        tokens: the context and, after it, the tokens that are scored.
        scored: the number of tokens that are scored, at least 1. One must stand before them.
    """

    tokens: tuple[int, ...]
    scored: int


class Score(NamedTuple):
    """What a model says about the scored tokens of a passage.

    Attributes:
        log_likelihood: the sum of the logarithms of their probabilities, each after all tokens
            before it.
        is_greedy: whether each of them is the most likely one.
    """

    log_likelihood: float
    is_greedy: bool


class _Row(NamedTuple):
    """A sequence that the model reads, for one passage or several.

    Attributes:
        tokens: those of the passages, without their last.
        passages: the numbers of the passages.
        first: the first position whose logits a passage asks for.
    """

    tokens: tuple[int, ...]
    passages: list[int]
    first: int


@torch.inference_mode()
def score(
    generator: Generator,
    passages: Sequence[Passage],
    *,
    device: torch.device,
    batch: int,
    prefill_tokens: int = PREFILL_TOKENS,
    on_done: Callable[[int], None] | None = None,
) -> list[Score]:
    """Compute the log-likelihood of the last tokens of each passage.

    Passages that differ only in their last token, as the answers A to D after a question do, are
    read once. As in ``Generator.generate``, the other passages change nothing but the rounding.

    Args:
        generator: has the model.
        passages: the passages, which must not be longer than the model's longest sequence and one
            token more.
        device: the device of the model.
        batch: the most passages that are read together.
        prefill_tokens: as in ``Generator.generate``.
        on_done: is called with a number of passages when they are done.

    Returns:
        The score of each passage. With a ``tp_group`` of the generator, they are the same on all
        ranks but for the last bits.

    Collectives, with a ``tp_group``: those of tensor parallelism in forward, and an all-gather of
    the logits of up to 256 positions at a time.

    Raises:
        CheckpointError: a logit is not finite.
    """
    sums = [0.0] * len(passages)
    are_greedy = [True] * len(passages)
    for rows in _batches(_rows_of(passages), batch, prefill_tokens):
        for found in _read(generator, rows, passages, device, prefill_tokens):
            sums[found.passage] += found.log_probability
            are_greedy[found.passage] &= found.is_best
        if on_done is not None:
            on_done(sum(len(row.passages) for row in rows))
    return [Score(*pair) for pair in zip(sums, are_greedy, strict=True)]


def _rows_of(passages: Sequence[Passage]) -> list[_Row]:
    """Return what the model is to read, the longest first."""
    numbers: dict[tuple[int, ...], list[int]] = {}
    for number, passage in enumerate(passages):
        if not 1 <= passage.scored < len(passage.tokens):
            raise ValueError(
                f"passage {number} has {len(passage.tokens)} tokens and scores {passage.scored}"
            )
        numbers.setdefault(passage.tokens[:-1], []).append(number)
    rows = [
        _Row(tokens, same, len(tokens) - max(passages[number].scored for number in same))
        for tokens, same in numbers.items()
    ]
    return sorted(rows, key=lambda row: len(row.tokens), reverse=True)


def _batches(rows: Sequence[_Row], batch: int, prefill_tokens: int) -> Iterator[Sequence[_Row]]:
    """Yield the rows of each call: at most ``batch``, and ``prefill_tokens`` tokens if it can."""
    first = 0
    while first < len(rows):
        count = min(batch, max(1, prefill_tokens // len(rows[first].tokens)))
        yield rows[first : first + count]
        first += count


class _Found(NamedTuple):
    """What the model says about one scored token of a passage."""

    passage: int
    log_probability: float
    is_best: bool


def _read(
    generator: Generator,
    rows: Sequence[_Row],
    passages: Sequence[Passage],
    device: torch.device,
    prefill_tokens: int,
) -> Iterator[_Found]:
    """Read rows, the longest of which is the first, and yield each scored token."""
    longest = len(rows[0].tokens)
    tokens_BT = torch.zeros(len(rows), longest, dtype=torch.int64)
    for index, row in enumerate(rows):
        tokens_BT[index, : len(row.tokens)] = torch.tensor(row.tokens)

    cache = KeyValueCache(len(rows), longest=longest, longest_call=prefill_tokens)
    begin = 0
    for part_BT in tokens_BT.split(prefill_tokens, dim=1):
        end = begin + part_BT.shape[1]
        seq = CachedSequence(cache, 0, [begin] * len(rows), end - begin, device)
        h_BTC = generator.hidden(part_BT, seq)
        places = [
            (index, position)
            for index, row in enumerate(rows)
            for position in range(max(begin, row.first), min(end, len(row.tokens)))
        ]
        for first in range(0, len(places), _POSITIONS):
            some = places[first : first + _POSITIONS]
            h_1NC = h_BTC[[index for index, _ in some], [position - begin for _, position in some]][
                None
            ]
            yield from _look_up(generator.logits(h_1NC, seq), some, rows, passages)
        begin = end


def _look_up(
    logits_NV: Tensor,
    places: Sequence[tuple[int, int]],
    rows: Sequence[_Row],
    passages: Sequence[Passage],
) -> Iterator[_Found]:
    """Yield the scored tokens that follow some positions.

    Args:
        logits_NV: the logits at the positions.
        places: the row and the position in the row of each.
        rows, passages: as in ``_read``.
    """
    wide_NV = logits_NV.to(torch.promote_types(logits_NV.dtype, torch.float32))
    most_N, best_N = wide_NV.max(dim=-1)
    require_finite(most_N)

    numbers, places_Q, tokens_Q = [], [], []
    for place, (index, position) in enumerate(places):
        for number in rows[index].passages:
            tokens, scored = passages[number]
            if position + 1 >= len(tokens) - scored:
                numbers.append(number)
                places_Q.append(place)
                tokens_Q.append(tokens[position + 1])
    log_probability_Q = torch.log_softmax(wide_NV, dim=-1)[places_Q, tokens_Q].tolist()
    best = best_N.tolist()
    for number, place, token, log_probability in zip(
        numbers, places_Q, tokens_Q, log_probability_Q, strict=True
    ):
        yield _Found(number, log_probability, best[place] == token)
