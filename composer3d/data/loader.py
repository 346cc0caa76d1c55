"""Batches in an order that is a pure function of (seed, step), whatever the layout.

Samples are counted globally: step s is the global samples s * global_batch ... (s + 1) * global_batch - 1, and batch
rank r of n takes the r-th of n contiguous slices. What a step trains on never depends on how many ranks share it.
"""

import warnings
from collections.abc import Iterator, Sequence
from dataclasses import KW_ONLY, dataclass
from functools import lru_cache
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch.utils.data import Dataset
from torchdata.stateful_dataloader import StatefulDataLoader

from composer3d.data.tokens import Corpus
from composer3d.models.contract import IGNORE_INDEX
from composer3d.spec.errors import DataError

# What the order of samples depends on: a checkpoint that was made with another one cannot be continued. With another
# packing it can: the samples go on as they were, and a later stage of a training may well change it.
_ORDER = ("seq_len", "global_batch", "seed")


class Batch(NamedTuple):
    """What one rank trains on in one step. All int64 on the CPU; (rows, T / cp), but documents (rows, T).

    ``labels_BT[b, t]`` is the token that follows ``tokens_BT[b, t]``, or shape.IGNORE_INDEX where that is of another
    document; ``positions_BT`` count from the start of the document within the row; ``documents_BT`` number the row's
    documents from 0. Where rows are not split into documents it is None, and each row is one sequence.
    """

    tokens_BT: torch.Tensor  # noqa: N815
    labels_BT: torch.Tensor  # noqa: N815
    positions_BT: torch.Tensor  # noqa: N815
    documents_BT: torch.Tensor | None = None  # noqa: N815


@lru_cache(maxsize=2)  # a batch may reach from one epoch into the next
def _permutation(n_samples: int, seed: int, epoch: int) -> np.ndarray:
    generator = np.random.Generator(np.random.PCG64(np.random.SeedSequence([seed, epoch])))
    return generator.permutation(n_samples)


def sample_order(n_samples: int, seed: int, first: int, count: int) -> np.ndarray:
    """The corpus samples behind the global samples ``first`` ... ``first + count - 1``: int64, shape (count,).

    Global sample g belongs to epoch g // n_samples, each epoch a permutation of its own. ``seed`` is at least 0.
    """
    epochs, places = np.divmod(np.arange(first, first + count), n_samples)
    out = np.empty(count, dtype=np.int64)
    for epoch in np.unique(epochs):
        out[epochs == epoch] = _permutation(n_samples, seed, int(epoch))[places[epochs == epoch]]
    return out


def number_documents(ends_BT: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(documents, positions), int64 like a ``Batch``'s, of rows whose documents end where ``ends_BT`` is true."""
    starts_BT = ends_BT.roll(1, dims=1)
    starts_BT[:, 0] = (
        False  # the row's own start: position 0 of document 0, whether or not a document starts there
    )
    places_T = torch.arange(ends_BT.shape[1])
    return starts_BT.cumsum(1), places_T - torch.where(starts_BT, places_T, 0).cummax(1).values


@dataclass(eq=False)
class Loader(Dataset[Batch]):
    """An iterator without end: one ``Batch`` of global_batch / batch_ranks rows a step.

    ``loader[step]`` is the batch of any step, of this rank's rows alone, and of the tokens of them that it holds. With
    ``packing`` "documents" rows are split where a token ends a document, of which a rank reads the whole row; the
    samples are the same.
    The state counts steps of the global batch, so that it continues exactly under any number of batch ranks.

    ``batch_ranks`` divides ``global_batch``. Raises DataError where the corpus is too small for one sample.
    """

    corpus: Corpus
    _: KW_ONLY
    seq_len: int
    global_batch: int
    seed: int
    batch_rank: int
    batch_ranks: int
    packing: Literal["none", "documents"] = "none"
    held: Sequence[tuple[int, int]] | None = (
        None  # (first, count) of a row's tokens, by turns; None: all
    )
    next_step: int = 0

    def __post_init__(self) -> None:
        self._rows, rest = divmod(self.global_batch, self.batch_ranks)
        assert rest == 0  # a rule of recipes
        n_tokens = len(self.corpus.tokens)
        if n_tokens <= self.seq_len:
            raise DataError(
                f"corpus {self.corpus.name} has {n_tokens} tokens: too few for data.seq_len = {self.seq_len}, "
                f"which needs {self.seq_len + 1}; shorten data.seq_len or give more text"
            )
        # A view: sample i is row i, tokens[i * seq_len : i * seq_len + seq_len + 1].
        windows = np.lib.stride_tricks.sliding_window_view(self.corpus.tokens, self.seq_len + 1)
        self._samples = windows[:: self.seq_len]
        # A DataLoader draws a seed for workers when it starts: a generator of its own leaves torch's global one alone.
        with warnings.catch_warnings():
            # torchdata 0.11 calls it in every constructor; torch 2.13 warns and does nothing.
            warnings.filterwarnings(
                "ignore", message="'set_vital' is deprecated", category=UserWarning
            )
            loader: StatefulDataLoader[Batch] = StatefulDataLoader(
                self, batch_size=None, sampler=self._steps(), generator=torch.Generator()
            )
        self._batches: Iterator[Batch] = iter(loader)

    def _steps(self) -> Iterator[int]:
        while True:
            self.next_step += 1
            yield self.next_step - 1

    def __getitem__(self, step: int) -> Batch:
        first = step * self.global_batch + self.batch_rank * self._rows
        numbers = sample_order(len(self._samples), self.seed, first, self._rows)
        places = np.concatenate(
            [np.arange(first, first + count) for first, count in self.held or [(0, self.seq_len)]]
        )
        tokens_BT, labels_BT = (
            torch.from_numpy(self._samples[numbers[:, None], places + shift].astype(np.int64))
            for shift in (0, 1)
        )
        if self.packing == "none":
            return Batch(tokens_BT, labels_BT, torch.from_numpy(places).repeat(self._rows, 1))
        ends_BT = torch.from_numpy(self._samples[numbers, :-1] == self.corpus.end_of_document)
        documents_BT, positions_BT = number_documents(ends_BT)
        labels_BT = labels_BT.masked_fill_(ends_BT[:, places], IGNORE_INDEX)
        return Batch(tokens_BT, labels_BT, positions_BT[:, places], documents_BT)

    def __iter__(self) -> "Loader":
        return self

    def __next__(self) -> Batch:
        return next(self._batches)

    def state_dict(self) -> dict[str, Any]:
        """``next_step``, the step of the next batch, ``digest`` of the corpus, and the keys that decide the order."""
        order = {key: getattr(self, key) for key in _ORDER}
        return {"next_step": self.next_step, "digest": self.corpus.digest, **order}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continues where ``state`` was taken. Raises DataError where that was over other tokens or another order."""
        if state["digest"] != self.corpus.digest:
            raise DataError(
                f"corpus {self.corpus.name} has digest {self.corpus.digest}, the checkpoint's was {state['digest']}: "
                "the data has changed since; restore it, or start anew under another run.name"
            )
        changed = [
            f"data.{key} = {getattr(self, key)}, but the checkpoint was made with {state[key]}: samples would be "
            "skipped or seen twice; set it back, or start anew under another run.name"
            for key in _ORDER
            if state[key] != getattr(self, key)
        ]
        if changed:
            raise DataError(changed)
        # Without workers the sampler is exactly as far as the batches that were handed out: its state is the loader's.
        self.next_step = state["next_step"]
