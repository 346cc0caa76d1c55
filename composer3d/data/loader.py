"""Serve batches in an order that is a pure function of (seed, step) on every layout.

Samples are counted globally. Step s trains on the global samples s * global_batch to (s + 1) *
global_batch - 1, and batch rank r of n takes the r-th of n contiguous slices. So what a step
trains on never depends on the number of ranks that share it.
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

# The order of samples depends on these fields. A checkpoint cannot be resumed with other values.
# It can be resumed with another packing: the samples are the same, and a later stage of training
# may well change it.
_ORDER_FIELDS = ("seq_len", "global_batch", "seed")


class Batch(NamedTuple):
    """What one rank trains on in one step.

    All tensors are int64 on the CPU. Their shape is (rows, T / cp), but ``documents_BT`` has
    (rows, T).

    Attributes:
        tokens_BT: the inputs.
        labels_BT: the token that follows each input, or ``IGNORE_INDEX`` if that token belongs to
            another document.
        positions_BT: the position of each input in its document, from the document's start within
            the row.
        documents_BT: the number of each token's document within the row, from 0. None if rows are
            not split into documents: then each row is one sequence.
    """

    tokens_BT: torch.Tensor
    labels_BT: torch.Tensor
    positions_BT: torch.Tensor
    documents_BT: torch.Tensor | None = None


@lru_cache(maxsize=2)  # a batch may reach from one epoch into the next
def _permutation(n_samples: int, seed: int, epoch: int) -> np.ndarray:
    generator = np.random.Generator(np.random.PCG64(np.random.SeedSequence([seed, epoch])))
    return generator.permutation(n_samples)


def sample_order(n_samples: int, seed: int, first: int, count: int) -> np.ndarray:
    """Return the corpus samples behind the global samples ``first`` to ``first + count - 1``.

    Global sample g belongs to epoch g // n_samples. Each epoch has its own permutation of the
    corpus.

    Args:
        n_samples: samples in the corpus.
        seed: at least 0.
        first: the first global sample.
        count: how many samples.

    Returns:
        Indices of corpus samples: int64, shape (count,).
    """
    epochs, places = np.divmod(np.arange(first, first + count), n_samples)
    order = np.empty(count, dtype=np.int64)
    for epoch in np.unique(epochs):
        in_epoch = epochs == epoch
        order[in_epoch] = _permutation(n_samples, seed, int(epoch))[places[in_epoch]]
    return order


def number_documents(ends_BT: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Number the documents of each row, and the positions in each document.

    Args:
        ends_BT: bool, true at the last token of each document.

    Returns:
        The documents and the positions, as ``Batch`` has them: int64, of the shape of ``ends_BT``.
    """
    starts_BT = ends_BT.roll(1, dims=1)
    # A row starts with position 0 of document 0, whether or not a document starts there.
    starts_BT[:, 0] = False
    places_T = torch.arange(ends_BT.shape[1])
    start_places_BT = torch.where(starts_BT, places_T, 0).cummax(1).values
    return starts_BT.cumsum(1), places_T - start_places_BT


@dataclass(eq=False)
class Loader(Dataset[Batch]):
    """An endless iterator over the batches of one rank.

    Each step has global_batch / batch_ranks rows for a rank. ``loader[step]`` is the batch of any
    step. It reads only this rank's rows, and only the tokens of them that this rank holds. With
    packing "documents", it reads whole rows and splits them after each token that ends a document;
    the samples are the same.

    The state counts steps of the global batch, so training continues exactly with any number of
    batch ranks.

    Attributes:
        corpus: the tokens.
        seq_len: tokens in a row.
        global_batch: rows in a step, over all ranks; a multiple of ``batch_ranks``.
        seed: of the order of samples, at least 0.
        batch_rank: this rank's number among the ranks with different rows.
        batch_ranks: how many such ranks there are.
        packing: whether rows are split into documents.
        owned_ranges: this rank's ranges of each row's tokens, each as (first, count), in order.
            None: whole rows.
        next_step: the step of the next batch.

    Raises:
        DataError: the corpus is too small for one sample.
    """

    corpus: Corpus
    _: KW_ONLY
    seq_len: int
    global_batch: int
    seed: int
    batch_rank: int
    batch_ranks: int
    packing: Literal["none", "documents"] = "none"
    owned_ranges: Sequence[tuple[int, int]] | None = None
    next_step: int = 0

    def __post_init__(self) -> None:
        self._rows, remainder = divmod(self.global_batch, self.batch_ranks)
        assert remainder == 0  # a rule of recipes
        n_tokens = len(self.corpus.tokens)
        if n_tokens <= self.seq_len:
            raise DataError(
                f"corpus {self.corpus.name} has {n_tokens} tokens: too few for data.seq_len = "
                f"{self.seq_len}, which needs {self.seq_len + 1}; shorten data.seq_len or give "
                "more text"
            )
        # A view: sample i is row i, tokens[i * seq_len : i * seq_len + seq_len + 1].
        windows = np.lib.stride_tricks.sliding_window_view(self.corpus.tokens, self.seq_len + 1)
        self._samples = windows[:: self.seq_len]

        # A DataLoader draws a seed for workers when it starts. With a generator of its own, it
        # leaves torch's global one alone.
        generator = torch.Generator()
        with warnings.catch_warnings():
            # torchdata 0.11 calls set_vital in every constructor; torch 2.13 warns and does
            # nothing.
            warnings.filterwarnings(
                "ignore", message="'set_vital' is deprecated", category=UserWarning
            )
            loader: StatefulDataLoader[Batch] = StatefulDataLoader(
                self, batch_size=None, sampler=self._steps(), generator=generator
            )
        self._batches: Iterator[Batch] = iter(loader)

    def _steps(self) -> Iterator[int]:
        while True:
            self.next_step += 1
            yield self.next_step - 1

    def __getitem__(self, step: int) -> Batch:
        first_sample = step * self.global_batch + self.batch_rank * self._rows
        samples = sample_order(len(self._samples), self.seed, first_sample, self._rows)

        ranges = self.owned_ranges or [(0, self.seq_len)]
        places = np.concatenate([np.arange(first, first + count) for first, count in ranges])
        tokens_BT = self._gather(samples, places)
        labels_BT = self._gather(samples, places + 1)
        if self.packing == "none":
            return Batch(tokens_BT, labels_BT, torch.from_numpy(places).repeat(self._rows, 1))

        whole_rows = self._samples[samples, :-1]
        ends_BT = torch.from_numpy(whole_rows == self.corpus.end_of_document)
        documents_BT, positions_BT = number_documents(ends_BT)
        labels_BT = labels_BT.masked_fill_(ends_BT[:, places], IGNORE_INDEX)
        return Batch(tokens_BT, labels_BT, positions_BT[:, places], documents_BT)

    def _gather(self, samples: np.ndarray, places: np.ndarray) -> torch.Tensor:
        """Copy the tokens at ``places`` of the given corpus samples: int64, (samples, places)."""
        return torch.from_numpy(self._samples[samples[:, None], places].astype(np.int64))

    def __iter__(self) -> "Loader":
        return self

    def __next__(self) -> Batch:
        return next(self._batches)

    def state_dict(self) -> dict[str, Any]:
        """Return what a resumed run needs: ``next_step``, the corpus's ``digest``, and the order.

        The order is given by ``seq_len``, ``global_batch`` and ``seed``.
        """
        order = {name: getattr(self, name) for name in _ORDER_FIELDS}
        return {"next_step": self.next_step, "digest": self.corpus.digest, **order}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from ``state``. Raises DataError if it was saved with other tokens or order."""
        if state["digest"] != self.corpus.digest:
            raise DataError(
                f"corpus {self.corpus.name} has digest {self.corpus.digest}, but the checkpoint "
                f"was made with {state['digest']}: the data has changed since; restore it, "
                "or start a new run under another run.name"
            )
        changed = [
            f"data.{name} = {getattr(self, name)}, but the checkpoint was made with {state[name]}: "
            "samples would be skipped or seen twice; set it back, or start a new run under another "
            "run.name"
            for name in _ORDER_FIELDS
            if state[name] != getattr(self, name)
        ]
        if changed:
            raise DataError(changed)
        # There are no workers, so the sampler is exactly as far as the batches that were returned:
        # its state is the loader's.
        self.next_step = state["next_step"]
