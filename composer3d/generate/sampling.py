"""Choose the next token of a sequence: the most likely one, or a random one.

A random choice depends on the seed, on the prompt and on the tokens before it, and on nothing else:
not on the other prompts of a batch, nor on the order of prompts.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import xxhash
from torch import Tensor

# Most often the tokens of ``top_p`` are among this many of the most likely ones, which are found
# faster than all tokens are sorted.
_LIKELY = 1024

# A lower temperature chooses as this one does. As float32 it could be 0, or the quotients infinite.
_LEAST_TEMPERATURE = 1e-30


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How tokens are chosen.

    Attributes:
        temperature: divides the logits; 0 chooses the most likely token.
        top_k: random tokens are chosen among this many of the most likely ones (Fan et al. 2018,
            arXiv 1805.04833); 0: among all.
        top_p: of these, among the most likely ones whose probabilities together reach this share of
            theirs, after the temperature (Holtzman et al. 2019, arXiv 1904.09751).
        seed: of the random choices.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0


class Sampler:
    """Chooses the tokens of one sequence, one after another.

    Args:
        sampling: how.
        prompt: the tokens of the prompt. With the seed, they decide all random choices.
    """

    def __init__(self, sampling: Sampling, prompt: Sequence[int]) -> None:
        self._sampling = sampling
        text = f"{sampling.seed}:{','.join(map(str, prompt))}"
        seed = xxhash.xxh3_64_intdigest(text.encode()) >> 1  # torch takes an int64
        self._generator = torch.Generator().manual_seed(seed)

    def choose(self, logits_V: Tensor) -> int:
        """Choose a random token by its logits, which must be on the CPU."""
        wide_V = logits_V.to(torch.promote_types(logits_V.dtype, torch.float32))
        # No quotient is above 0, so none becomes infinite but those of probability 0.
        below_V = wide_V - wide_V.max()
        temperature = max(self._sampling.temperature, _LEAST_TEMPERATURE)
        probability_V = torch.softmax(below_V / temperature, dim=-1).double()
        tokens = None
        top_k, top_p = self._sampling.top_k, self._sampling.top_p
        if top_k or top_p < 1:
            probability_V, tokens = _most_likely(probability_V, top_k, top_p)
        sums_V = probability_V.cumsum(0)
        drawn = torch.rand((), generator=self._generator, dtype=torch.float64) * sums_V[-1]
        place = int(torch.searchsorted(sums_V, drawn, right=True))
        # ``drawn`` may be rounded up to the last sum.
        place = min(place, len(sums_V) - 1)
        return place if tokens is None else int(tokens[place])


def _most_likely(probability_V: Tensor, top_k: int, top_p: float) -> tuple[Tensor, Tensor]:
    """Return the tokens that ``Sampling`` leaves by ``top_k`` and ``top_p``, the likeliest first.

    Returns:
        Their probabilities and the tokens.
    """
    count = min(top_k or _LIKELY, len(probability_V))
    likely, tokens = probability_V.topk(count)
    if top_k:
        top_p = top_p * float(likely.sum())
    elif likely.sum() < top_p:
        likely, tokens = probability_V.sort(descending=True, stable=True)
    before = likely.cumsum(0) - likely
    kept = max(1, int((before < top_p).sum()))
    return likely[:kept], tokens[:kept]
