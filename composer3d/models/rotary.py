"""How rotary positions are stretched over longer contexts. No torch here.

A pair of numbers of a head turns by a fixed angle at each token. A model that has learned a context
length L takes a longer one if its pairs turn more slowly. There are four ways, named as the
``rope_type`` of Hugging Face.

- "llama3": pairs that turn seldom in L tokens turn slower, as in Llama 3.1.
- "linear": all pairs turn slower (Chen et al. 2023, arXiv 2306.15595).
- "yarn": pairs that turn seldom in L tokens turn slower, and all scores grow a little (Peng et al.
  2023, arXiv 2309.00071).
- "dynamic": nothing changes up to L tokens. Beyond, the angles would depend on the length of the
  sequence; no sequence here is longer.
"""

import math
from typing import Literal, NamedTuple

RopeScaling = Literal["llama3", "linear", "dynamic", "yarn"]


class YarnRamp(NamedTuple):
    """Which pairs YaRN slows down, by the index of a pair in its head.

    Pairs up to ``first`` keep their speed, and those from ``last`` on turn ``factor`` times slower.
    In between, the speed is interpolated linearly in the index, as in the code of YaRN's authors;
    the formula of the paper is linear in the number of turns.
    """

    first: float
    last: float


def yarn_ramp(
    *,
    head_dim: int,
    theta: float,
    context: int,
    beta_fast: float,
    beta_slow: float,
    truncate: bool,
) -> YarnRamp | None:
    """Return which pairs YaRN slows down, or None if these settings leave no order of pairs.

    Args:
        head_dim: the number of rotated elements of a head; pairs are half as many.
        theta: the base of the rotary embedding.
        context: the context length before the stretch.
        beta_fast: a pair that turns so often in ``context`` tokens keeps its speed.
        beta_slow: a pair that turns so often is slowed down in full.
        truncate: round the ends of the ramp to whole indices, outwards.
    """
    if theta == 1:
        return None  # all pairs turn alike

    def index_of(turns: float) -> float:
        return head_dim * math.log(context / (turns * 2 * math.pi)) / (2 * math.log(theta))

    first, last = index_of(beta_fast), index_of(beta_slow)
    if truncate:
        first, last = math.floor(first), math.ceil(last)
    # The bounds, and a ramp that is never quite a step, are those of the authors' code. The last
    # index of a pair would be head_dim / 2 - 1.
    first, last = max(first, 0), min(last, head_dim - 1)
    if first > last:
        return None
    return YarnRamp(first, last + 0.001 if first == last else last)


def yarn_attention_factor(factor: float, mscale: float = 1.0) -> float:
    """Return the factor of YaRN for rotated queries and for rotated keys.

    DeepSeek's configurations scale its distance from 1 by ``mscale``.
    """
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0


def yarn_mscale(factor: float, attention_factor: float) -> float:
    """Return the ``mscale`` with which YaRN has ``attention_factor``, up to rounding.

    ``factor`` must be above 1.
    """
    return (attention_factor - 1.0) / (0.1 * math.log(factor))
