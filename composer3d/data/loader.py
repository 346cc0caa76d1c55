"""Batches in an order that is a pure function of (seed, step), whatever the layout.

Samples are counted globally: step s is the global samples s * global_batch ... (s + 1) * global_batch - 1, and batch
rank r of n takes the r-th of n contiguous slices. What a step trains on never depends on how many ranks share it.
"""

import warnings
from collections.abc import Iterator
from functools import lru_cache
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch.utils.data import Dataset
from torchdata.stateful_dataloader import StatefulDataLoader

from composer3d.data.corpus import Corpus
from composer3d.errors import DataError
from composer3d.shape import IGNORE_INDEX


class Batch(NamedTuple):
    """What one batch rank trains on in one step. All int64 on the CPU, of shape (rows, seq_len).

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
    order = generator.permutation(n_samples)
    order.flags.writeable = False
    return order


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
    starts_BT[:, 0] = False  # the row's own start: position 0 of document 0, whether or not a document starts there
    places_T = torch.arange(ends_BT.shape[1])
    return starts_BT.cumsum(1), places_T - torch.where(starts_BT, places_T, 0).cummax(1).values


def count_samples(corpus: Corpus, seq_len: int) -> int:
    """Samples of ``seq_len`` tokens, each with the one token that follows it. Raises DataError where there is none."""
    n_samples = (len(corpus.tokens) - 1) // seq_len
    if n_samples < 1:
        raise DataError(
            f"corpus {corpus.name} has {len(corpus.tokens)} tokens: too few for data.seq_len = {seq_len}, "
            f"which needs {seq_len + 1}; shorten data.seq_len or give more text"
        )
    return n_samples


class Loader(Dataset[Batch]):
    """An iterator without end: one ``Batch`` of global_batch / batch_ranks rows a step, from ``first_step`` on.

    ``loader[step]`` is the batch of any step; only this rank's own rows are ever gathered. With ``packing`` "documents"
    rows are split where a token ends a document; the samples are the same.
    The state counts steps of the global batch, so that it continues exactly under any number of batch ranks.

    Raises DataError where the corpus is too small for one sample or the ranks cannot share the batch evenly.
    """

    def __init__(
        self,
        corpus: Corpus,
        *,
        seq_len: int,
        global_batch: int,
        seed: int,
        batch_rank: int,
        batch_ranks: int,
        packing: Literal["none", "documents"] = "none",
        first_step: int = 0,
    ) -> None:
        if global_batch % batch_ranks:
            raise DataError(
                f"data.global_batch = {global_batch} must be a multiple of the {batch_ranks} ranks that hold different "
                "samples (dp_replicate x dp_shard)"
            )
        if not 0 <= batch_rank < batch_ranks:
            raise ValueError(f"batch_rank = {batch_rank} is outside 0 ... {batch_ranks - 1}")
        self._corpus, self._n_samples = corpus, count_samples(corpus, seq_len)
        # A view: sample i is row i, tokens[i * seq_len : i * seq_len + seq_len + 1].
        self._samples = np.lib.stride_tricks.sliding_window_view(corpus.tokens, seq_len + 1)[::seq_len]
        # What the order of samples depends on: a checkpoint that was made with another one cannot be continued. With
        # another packing it can: the samples go on as they were, and a later stage of a training may well change it.
        self._order = {"seq_len": seq_len, "global_batch": global_batch, "seed": seed}
        self._rows = global_batch // batch_ranks
        self._first_row = batch_rank * self._rows
        self._end = corpus.end_of_document if packing == "documents" else None
        self._next_step = first_step
        # A DataLoader draws a seed for workers when it starts: a generator of its own leaves torch's global one alone.
        with warnings.catch_warnings():
            # torchdata 0.11 calls it in every constructor; torch 2.13 warns and does nothing.
            warnings.filterwarnings("ignore", message="'set_vital' is deprecated", category=UserWarning)
            loader: StatefulDataLoader[Batch] = StatefulDataLoader(
                self, batch_size=None, sampler=self._steps(), generator=torch.Generator()
            )
        self._batches: Iterator[Batch] = iter(loader)

    def _steps(self) -> Iterator[int]:
        while True:
            self._next_step += 1
            yield self._next_step - 1

    def __getitem__(self, step: int) -> Batch:
        first = step * self._order["global_batch"] + self._first_row
        numbers = sample_order(self._n_samples, self._order["seed"], first, self._rows)
        window_BT = torch.from_numpy(self._samples[numbers].astype(np.int64))
        tokens_BT, labels_BT = window_BT[:, :-1].contiguous(), window_BT[:, 1:].contiguous()
        if self._end is None:
            return Batch(tokens_BT, labels_BT, torch.arange(tokens_BT.shape[1]).repeat(self._rows, 1))
        ends_BT = tokens_BT == self._end
        documents_BT, positions_BT = number_documents(ends_BT)
        # Not in place: of one row, tokens and labels are two views of one memory.
        return Batch(tokens_BT, labels_BT.masked_fill(ends_BT, IGNORE_INDEX), positions_BT, documents_BT)

    def __iter__(self) -> "Loader":
        return self

    def __next__(self) -> Batch:
        return next(self._batches)

    def state_dict(self) -> dict[str, Any]:
        """``next_step``, the step of the next batch, ``digest`` of the corpus, and the keys that decide the order."""
        return {"next_step": self._next_step, "digest": self._corpus.digest, **self._order}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continues where ``state`` was taken. Raises DataError where that was over other tokens or another order."""
        if state["digest"] != self._corpus.digest:
            raise DataError(
                f"corpus {self._corpus.name} has digest {self._corpus.digest}, the checkpoint's was {state['digest']}: "
                "the data has changed since; restore it, or start anew under another run.name"
            )
        changed = [
            f"data.{key} = {value}, but the checkpoint was made with {state[key]}: samples would be skipped "
            "or seen twice; set it back, or start anew under another run.name"
            for key, value in self._order.items()
            if state[key] != value
        ]
        if changed:
            raise DataError(changed)
        # Without workers the sampler is exactly as far as the batches that were handed out: its state is the loader's.
        self._next_step = state["next_step"]
