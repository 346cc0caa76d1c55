"""The sizes that every architecture has. No torch here."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import MISSING, dataclass
from typing import Self

from composer3d.facts.ranges import MOST_HEADS, MOST_LAYERS, MOST_VOCAB, MOST_WIDTH, between, key


def is_nth(block: int, every: int) -> bool:
    """Return whether a block, counted from 0, is one of the blocks N, 2N, 3N ... counted from 1.

    ``every`` is N; with 0, no block is one of them.
    """
    return every > 0 and (block + 1) % every == 0


def period_of(chosen: Sequence[bool]) -> int | None:
    """Return the N for which ``is_nth`` chooses the blocks that ``chosen`` does.

    0: it chooses none. None: there is no such N.
    """
    every = chosen.index(True) + 1 if True in chosen else 0
    is_period = list(chosen) == [is_nth(block, every) for block in range(len(chosen))]
    return every if is_period else None


@dataclass(frozen=True)
class DecoderShape:
    """The sizes of a whole decoder, before anything is cut.

    The rules of recipes and ``verify`` read them. An architecture derives its own shape from this
    class and adds fields. Each field is a key of ``[model]`` in a recipe. A derived shape may
    replace the properties below by fields that have a default.
    """

    dim: int = key(MISSING, "width of the residual stream", between(1, MOST_WIDTH))
    n_layers: int = key(MISSING, "number of blocks", between(1, MOST_LAYERS))
    n_heads: int = key(MISSING, "query heads", between(1, MOST_HEADS))
    n_kv_heads: int = key(
        MISSING,
        "key-value heads; fewer than n_heads is grouped-query attention",
        between(1, MOST_HEADS),
    )
    ffn: int = key(MISSING, "width of the feed-forward layer", between(1, 4 * MOST_WIDTH))
    vocab: int = key(MISSING, "size of the vocabulary", between(1, MOST_VOCAB))

    @property
    def head_dim(self) -> int | None:
        """The width of a head, or None if it is dim / n_heads."""
        return None

    @property
    def tied(self) -> bool:
        """Whether embedding and head are one parameter."""
        return False

    @property
    def window(self) -> int:
        """The sliding window of attention in tokens; 0 means no window. See ``window_of``."""
        return 0

    @property
    def full_every(self) -> int:
        """The N of ``is_nth`` for the blocks that have no window; 0: all have it."""
        return 0

    def window_of(self, block: int) -> int:
        """Return the sliding window of a block in tokens, by its number, counted from 0; 0: none.

        Whatever depends on windows asks this, or ``windows``. The number is that of the whole
        model, also in a pipeline stage.
        """
        return 0 if is_nth(block, self.full_every) else self.window

    @property
    def windows(self) -> Counter[int]:
        """The number of blocks of each window, which ``window_of`` gives."""
        return Counter(map(self.window_of, range(self.all_layers)))

    @property
    def qk_norm(self) -> bool:
        """Whether each head's query and key are normalised."""
        return False

    @property
    def has_sinks(self) -> bool:
        """Whether each query head has a sink: a score in its softmax that has no value."""
        return False

    @property
    def norm_eps(self) -> float:
        """The epsilon of norms."""
        return 1e-5

    @property
    def experts(self) -> int:
        """The number of experts of a layer; 0: no layer has experts."""
        return 0

    @property
    def experts_per_token(self) -> int:
        """The number of experts that compute a token."""
        return 1

    @property
    def most_tokens(self) -> int | None:
        """The longest sequence that the model computes, in tokens; None: any."""
        return None

    @property
    def training_fields(self) -> tuple[str, ...]:
        """The fields that training alone reads: a run may change them when it resumes."""
        return ()

    @property
    def expert_width(self) -> int:
        """The width of an expert."""
        return self.ffn

    @property
    def mtp_layers(self) -> int:
        """The depths of multi-token prediction: blocks that predict one token more each."""
        return 0

    @property
    def mtp_loss(self) -> float:
        """The coefficient of the mean of their losses, which training adds to the main one."""
        return 0.0

    @property
    def all_layers(self) -> int:
        """The number of blocks with those of multi-token prediction, which are the last ones."""
        return self.n_layers + self.mtp_layers

    @property
    def without_mtp(self) -> Self:
        """The shape of the model without multi-token prediction, as it generates text."""
        return self

    @property
    def head_width(self) -> int:
        """The width of a head's query and key: ``head_dim``, or dim / n_heads if that is None."""
        return self.head_dim or self.dim // self.n_heads

    @property
    def value_width(self) -> int:
        """The width of a head's value, at most ``head_width``."""
        return self.head_width

    @property
    def latent_width(self) -> int:
        """The numbers of a token from which latent attention makes keys and values; 0: none."""
        return 0

    def sends_latents(self, *, tp: int, cp_method: str, is_float8: bool) -> bool:
        """Return whether ranks of cp send latents, if they are fewer than keys and values.

        Each rank then projects the latents of all tokens up to its heads, in forward and once more
        in backward, and computes its part of their gradients. With Ulysses a rank receives heads,
        each of them once: there is nothing to save. In float8, each rank would round its own part
        of the gradient of a projected row, and the result would depend on cp.

        Args:
            tp: the ranks that share the heads. Each of them sends whole latents.
            cp_method: the recipe's ``parallel.cp_method``.
            is_float8: whether blocks multiply in float8.
        """
        # Values are sent as wide as keys.
        keys_and_values = 2 * self.n_kv_heads * self.head_width // tp
        are_fewer = 0 < self.latent_width < keys_and_values
        return are_fewer and cp_method != "ulysses" and not is_float8
