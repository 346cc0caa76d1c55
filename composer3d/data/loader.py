"""Serve batches in an order that is a pure function of (seed, step) on every layout.

Samples are counted globally. Step s trains on the global samples s * global_batch to (s + 1) *
global_batch - 1. Batch rank r of n takes the r-th of n contiguous slices of them. So the samples
of a step do not depend on the number of ranks.
"""

import warnings
from collections.abc import Iterator, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any, Literal, NamedTuple, cast

import numpy as np
import torch
from torch.utils.data import Dataset
from torchdata.stateful_dataloader import StatefulDataLoader

from composer3d.data.blend import Blend, whole_weights
from composer3d.data.order import (
    ORDERS,
    Order,
    sample_order,
    samples_before,
    sources_of,
)
from composer3d.data.rows import FILLING, EvenRows, Rows, WholeDocumentRows
from composer3d.data.tokens import Corpus, read_together
from composer3d.facts.errors import DataError
from composer3d.facts.text import short_json
from composer3d.models.contract import IGNORE_INDEX

Packing = Literal["none", "documents", "whole_documents"]

# The order of samples depends on these fields, so a checkpoint cannot be resumed with other values.
# It can be resumed with packing "documents" in place of "none" or the reverse, which does not
# change the samples: a later stage of training may do so on purpose.
_ORDER_FIELDS = ("seq_len", "global_batch", "seed")

# The name of the seed in a state that has the field "order". A composer3d that knows no orders
# would otherwise go on with the samples of "shuffle"; so it finds no seed and refuses the state.
_ORDER_SEED = "order_seed"

# What follows the name of the order in a state of samples of whole documents. A composer3d that
# knows no such samples knows no such order either, and refuses the state.
_OF_WHOLE_DOCUMENTS = " of whole documents"


class Batch(NamedTuple):
    """The samples on which one rank trains in one step. A row is one sample of ``seq_len`` tokens.

    All tensors are int64 on the CPU. The shape is (rows, seq_len / cp), except that of
    ``documents_BT``, which is (rows, seq_len).

    Attributes:
        tokens_BT: the inputs.
        labels_BT: the token that follows each input, or ``IGNORE_INDEX`` where the mask of the
            corpus says that this token is not learned. If rows are split into documents, the last
            token of a document has the label ``IGNORE_INDEX`` too. So has each token that fills a
            row up.
        positions_BT: the position of each input in its row; if rows are split into documents, in
            the part of its document that lies in the row. It starts at 0.
        documents_BT: the number of each token's document within the row, from 0. It covers whole
            rows on every cp rank. None: rows are not split, and each row is one sequence.
        ahead_B2KT: for multi-token prediction (``tokens_ahead``), of the shape (rows, 2, depths,
            seq_len / cp). None: there is none.
    """

    tokens_BT: torch.Tensor
    labels_BT: torch.Tensor
    positions_BT: torch.Tensor
    documents_BT: torch.Tensor | None = None
    ahead_B2KT: torch.Tensor | None = None


class _Pick(NamedTuple):
    """The rows of a batch that come from one corpus.

    Attributes:
        corpus: the corpus.
        rows: the numbers of the rows in the batch.
        places: the place of each token in the corpus, or ``FILLING``: int64, (rows, seq_len).
    """

    corpus: Corpus
    rows: np.ndarray
    places: np.ndarray


class Epochs(NamedTuple):
    """How often the samples of a corpus are all seen.

    Attributes:
        name: the name of the corpus.
        digest: that of the corpus.
        n_samples: the number of its samples.
        epochs: how often they are seen.
        filled: the part of the samples that documents fill, or None if nothing else does.
        n_cut: the number of documents that are cut although samples hold whole documents.
    """

    name: str
    digest: str
    n_samples: int
    epochs: float
    filled: float | None = None
    n_cut: int = 0


def number_documents(ends_BT: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Number the documents of each row, and the positions in each document.

    Args:
        ends_BT: bool, shape (rows, T), true at the last token of each document.

    Returns:
        The documents and the positions, as in ``Batch``: both int64, shape (rows, T).
    """
    starts_BT = ends_BT.roll(1, dims=1)
    # A row starts with position 0 of document 0, whether or not a document starts there.
    starts_BT[:, 0] = False
    places_T = torch.arange(ends_BT.shape[1])
    start_places_BT = torch.where(starts_BT, places_T, 0).cummax(1).values
    return starts_BT.cumsum(1), places_T - start_places_BT


def tokens_ahead(batch: Batch, depths: int) -> torch.Tensor:
    """Return what multi-token prediction reads and predicts besides, of whole rows.

    Depth k = 1, 2 ... reads the token k further on, and predicts the one after it. That token has
    the label k further on: ``IGNORE_INDEX`` if it is not learned. Where the document or the row of
    a position ends before, the token is 0 and the label ``IGNORE_INDEX``. No position whose label
    counts sees such a token, as they are the last ones of a document.

    Args:
        batch: whole rows.
        depths: the number of depths.

    Returns:
        int64, (rows, 2, depths, seq_len): the tokens, and the labels.
    """
    tokens_BT, labels_BT = batch.tokens_BT, batch.labels_BT
    documents_BT = torch.zeros_like(tokens_BT) if batch.documents_BT is None else batch.documents_BT
    ahead_B2KT = tokens_BT.new_zeros((len(tokens_BT), 2, depths, tokens_BT.shape[1]))
    ahead_B2KT[:, 1] = IGNORE_INDEX
    for depth in range(1, min(depths, tokens_BT.shape[1] - 1) + 1):
        here, further = slice(None, -depth), slice(depth, None)
        is_other_BT = documents_BT[:, here] != documents_BT[:, further]
        tokens, labels = ahead_B2KT[:, :, depth - 1, here].unbind(1)
        tokens.copy_(tokens_BT[:, further].masked_fill(is_other_BT, 0))
        labels.copy_(labels_BT[:, further].masked_fill(is_other_BT, IGNORE_INDEX))
    return ahead_B2KT


def _places_and_next(pick: _Pick) -> np.ndarray:
    """Return the places of a pick's rows, and that of the token behind each row.

    All are places in the corpus. The token behind a row is only needed if the row ends within a
    document.

    Returns:
        int64, (rows, seq_len + 1).
    """
    # A row does not begin with what fills it up. Its first token is read in any case.
    places = np.where(pick.places == FILLING, pick.places[:, :1], pick.places)
    behind = np.minimum(places[:, -1:] + 1, len(pick.corpus.tokens) - 1)
    return np.concatenate([places, behind], axis=1)


@dataclass(eq=False)
class Loader(Dataset[Batch]):
    """An endless iterator over the batches of one rank.

    A rank gets global_batch / batch_ranks rows in each step. ``loader[step]`` is the batch of any
    step. The loader reads only this rank's rows, and of each row only this rank's tokens. With
    packing "documents", it reads whole rows and splits them after each token that ends a document.
    The samples are the same. With packing "whole_documents", it splits rows too, but they are cut
    otherwise, and filled up with a last document that has no labels (see ``rows``). There are no
    collectives.

    The state counts steps of the global batch, so training continues exactly with any number of
    batch ranks.

    Attributes:
        corpus: the tokens. The samples of a blend come from its corpora in turn (see ``blend``),
            and each corpus has epochs of its own.
        seq_len: tokens in a row.
        global_batch: rows in a step, over all ranks; a multiple of ``batch_ranks``.
        seed: the seed of the order of samples, at least 0.
        batch_rank: this rank's index among the ranks that hold different rows.
        batch_ranks: the number of ranks that hold different rows.
        packing: "documents" splits rows into documents, and so does "whole_documents", whose rows
            cut none that fits; "none" does not.
        owned_ranges: the ranges of each row's tokens that this rank holds with context
            parallelism, each as (first, count), in order. None: whole rows.
        mtp_layers: the depths of multi-token prediction. With any, the loader reads whole rows.
        next_step: the step of the next batch.
        order: the kind of permutation of the samples. ``load_state_dict`` sets it to that of the
            checkpoint.

    Raises:
        DataError: a corpus is too small for one sample; or with packing "whole_documents", a file
            of documents cannot be read.
    """

    corpus: Corpus | Blend
    _: KW_ONLY
    seq_len: int
    global_batch: int
    seed: int
    batch_rank: int
    batch_ranks: int
    packing: Packing = "none"
    owned_ranges: Sequence[tuple[int, int]] | None = None
    mtp_layers: int = 0
    next_step: int = 0
    order: Order = "feistel"

    def __post_init__(self) -> None:
        self._rows, remainder = divmod(self.global_batch, self.batch_ranks)
        assert remainder == 0  # a rule of recipes
        blend = self.corpus if isinstance(self.corpus, Blend) else Blend((self.corpus,), (1.0,))
        self._corpora, self._weights = blend.corpora, whole_weights(blend.weights)
        self._cuts = [self._cut(corpus) for corpus in self._corpora]
        self._n_samples = [len(cut) for cut in self._cuts]

        # A DataLoader draws a seed for its workers when it starts. With a generator of its own, it
        # does not change the state of torch's global generator.
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

    def _cut(self, corpus: Corpus) -> Rows:
        """Return how a corpus is cut into samples. Raises DataError if it has none."""
        if self.packing == "whole_documents":
            whole = WholeDocumentRows.of(corpus, self.seq_len)
            if len(whole) == 0:
                raise DataError(
                    f"corpus {corpus.name} has no whole document, which data.packing = "
                    "whole_documents needs; give more text"
                )
            return whole
        if len(corpus.tokens) <= self.seq_len:
            raise DataError(
                f"corpus {corpus.name} has {len(corpus.tokens)} tokens: too few for "
                f"data.seq_len = {self.seq_len}, which needs {self.seq_len + 1}; shorten "
                "data.seq_len or give more text"
            )
        return EvenRows.of(corpus, self.seq_len)

    def _steps(self) -> Iterator[int]:
        while True:
            self.next_step += 1
            yield self.next_step - 1

    def __getitem__(self, step: int) -> Batch:
        first_sample = step * self.global_batch + self.batch_rank * self._rows
        picks = self._pick(first_sample)
        ranges = self.owned_ranges or [(0, self.seq_len)]
        columns = np.concatenate([np.arange(first, first + count) for first, count in ranges])
        if not self.mtp_layers:
            return self._batch(picks, columns)
        # Tokens further on may be those of another rank of cp: shift whole rows, and then cut them.
        whole = self._batch(picks, np.arange(self.seq_len))
        return Batch(
            whole.tokens_BT[:, columns],
            whole.labels_BT[:, columns],
            whole.positions_BT[:, columns],
            whole.documents_BT,
            tokens_ahead(whole, self.mtp_layers)[..., columns],
        )

    def _batch(self, picks: list[_Pick], columns: np.ndarray) -> Batch:
        """Return some columns of the rows, without tokens further on."""
        # All tokens are read at once, each one once: a request to a store may take long.
        if self.packing == "none":
            wide = np.union1d(columns, columns + 1)
        else:
            wide = np.arange(self.seq_len + 1)
        inputs, next_ones = np.searchsorted(wide, columns), np.searchsorted(wide, columns + 1)
        tokens_BN, learned_BN = self._read(picks, wide)
        tokens_BT, labels_BT = tokens_BN[:, inputs], tokens_BN[:, next_ones]
        if learned_BN is not None:
            labels_BT.masked_fill_(~learned_BN[:, next_ones], IGNORE_INDEX)
        if self.packing == "none":
            return Batch(tokens_BT, labels_BT, torch.from_numpy(columns).repeat(self._rows, 1))

        ends_BT = tokens_BN[:, : self.seq_len] == self.corpus.end_of_document
        if self.packing == "documents":
            documents_BT, positions_BT = number_documents(ends_BT)
            labels_BT = labels_BT.masked_fill_(ends_BT[:, columns], IGNORE_INDEX)
            return Batch(tokens_BT, labels_BT, positions_BT[:, columns], documents_BT)

        is_filling_BT = self._is_filling(picks)
        # What fills a row up is one document. Its tokens are ends of a document, which never have a
        # label.
        documents_BT, positions_BT = number_documents(ends_BT & ~is_filling_BT)
        has_no_label_BT = (ends_BT | is_filling_BT)[:, columns]
        tokens_BT = tokens_BT.masked_fill_(is_filling_BT[:, columns], self.corpus.end_of_document)
        labels_BT = labels_BT.masked_fill_(has_no_label_BT, IGNORE_INDEX)
        return Batch(tokens_BT, labels_BT, positions_BT[:, columns], documents_BT)

    def _pick(self, first_sample: int) -> list[_Pick]:
        """Return the samples of this rank's rows, of which ``first_sample`` is the first."""
        owners = sources_of(self._weights, first_sample, self._rows)
        before = samples_before(self._weights, first_sample)
        picks = []
        for number in np.unique(owners):
            rows = np.flatnonzero(owners == number)
            samples = sample_order(
                self._n_samples[number], self.seed, before[number], len(rows), self.order
            )
            places = self._cuts[number].places(samples)
            picks.append(_Pick(self._corpora[number], rows, places))
        return picks

    def _read(
        self, picks: list[_Pick], columns: np.ndarray
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Copy the tokens of some columns of the rows, and whether they are learned.

        Column ``seq_len`` has the tokens behind the rows.

        Returns:
            int64 and bool, both (rows, columns). Where ``_is_filling``, any tokens. No second
            tensor means that all are learned.
        """
        places = [_places_and_next(pick)[:, columns] for pick in picks]
        with_mask = [number for number, pick in enumerate(picks) if pick.corpus.mask is not None]
        requests = [(pick.corpus.tokens, at) for pick, at in zip(picks, places, strict=True)]
        for number in with_mask:
            mask = picks[number].corpus.mask
            assert mask is not None
            requests.append((mask, places[number]))
        found = iter(read_together(requests))

        tokens_BN = np.empty((self._rows, len(columns)), dtype=np.int64)
        for pick in picks:
            tokens_BN[pick.rows] = next(found).reshape(len(pick.rows), -1)
        if not with_mask:
            return torch.from_numpy(tokens_BN), None
        learned_BN = np.ones(tokens_BN.shape, dtype=np.bool_)
        for number in with_mask:
            rows = picks[number].rows
            learned_BN[rows] = next(found).reshape(len(rows), -1)
        return torch.from_numpy(tokens_BN), torch.from_numpy(learned_BN)

    def _is_filling(self, picks: list[_Pick]) -> torch.Tensor:
        """Return which tokens of the rows fill them up: bool, (rows, seq_len)."""
        is_filling_BT = np.empty((self._rows, self.seq_len), dtype=np.bool_)
        for pick in picks:
            is_filling_BT[pick.rows] = pick.places == FILLING
        return torch.from_numpy(is_filling_BT)

    @property
    def reads_store(self) -> bool:
        """Whether a corpus is in an object store."""
        manifests = [corpus.manifest for corpus in self._corpora]
        return any(manifest is not None and manifest.is_remote for manifest in manifests)

    def epochs_in(self, n_steps: int) -> list[Epochs]:
        """Return how often each corpus is seen in the first ``n_steps`` steps, in its order."""
        counts = samples_before(self._weights, n_steps * self.global_batch)
        epochs = []
        for corpus, cut, count in zip(self._corpora, self._cuts, counts, strict=True):
            entry = Epochs(corpus.name, corpus.digest, len(cut), count / len(cut))
            if isinstance(cut, WholeDocumentRows):
                entry = entry._replace(filled=cut.filled, n_cut=cut.n_cut)
            epochs.append(entry)
        return epochs

    def epochs_begun(self, step: int) -> list[tuple[str, int]]:
        """Return the corpora of which ``step`` begins another epoch, with its number from 0.

        Epochs of less than ten steps are left out.
        """
        bounds = [step * self.global_batch, (step + 1) * self.global_batch]
        first, last = (samples_before(self._weights, bound) for bound in bounds)
        begun = []
        for number, (start, stop) in enumerate(zip(first, last, strict=True)):
            n_samples = self._n_samples[number]
            per_ten_steps = 10 * self.global_batch * self._weights[number] / sum(self._weights)
            epoch = (stop - 1) // n_samples
            is_begun = start > 0 and epoch > (start - 1) // n_samples
            if is_begun and n_samples >= per_ten_steps:
                begun.append((self._corpora[number].name, epoch))
        return begun

    def __iter__(self) -> "Loader":
        return self

    def __next__(self) -> Batch:
        return next(self._batches)

    def state_dict(self) -> dict[str, Any]:
        """Return the state that a resumed run needs.

        It has the keys ``next_step`` and ``digest`` (of the corpus), and what determines the order
        of samples: ``seq_len``, ``global_batch``, ``order`` and ``order_seed``. With the order
        "shuffle" it has ``seed`` in place of the last two, as it had before there were others.
        With packing "whole_documents", ``order`` says so.
        """
        fields = {name: getattr(self, name) for name in _ORDER_FIELDS}
        if self.packing == "whole_documents":
            fields["order"] = self.order + _OF_WHOLE_DOCUMENTS
        elif self.order != "shuffle":
            fields["order"] = self.order
        if "order" in fields:
            fields[_ORDER_SEED] = fields.pop("seed")
        return {"next_step": self.next_step, "digest": self.corpus.digest, **fields}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from the state that ``state_dict`` returned, on any number of batch ranks.

        The loader takes on the kind of order that the state names; none means "shuffle".

        Raises:
            DataError: it was saved with other tokens, or with another order of samples.
            KeyError: an entry is missing.
        """
        name = str(state.get("order", "shuffle"))
        order = name.removesuffix(_OF_WHOLE_DOCUMENTS)
        if order not in ORDERS:
            raise DataError(
                f"the checkpoint was made with the order of samples {short_json(order)}, and this "
                f"composer3d knows {' and '.join(ORDERS)}; use a newer composer3d"
            )
        if "order" in state:
            state = {**state, "seed": state[_ORDER_SEED]}
        if state["digest"] not in (self.corpus.digest, self.corpus.older_digest):
            raise DataError(
                f"corpus {self.corpus.name} has digest {self.corpus.digest}, but the checkpoint "
                f"was made with {state['digest']}: the data has changed since, or the weights or "
                "order of data.sources; restore it, or start a new run under another run.name"
            )
        changed = [
            f"data.{name} = {getattr(self, name)}, but the checkpoint was made with {state[name]}: "
            "samples would be skipped or seen twice; set it back, or start a new run under another "
            "run.name"
            for name in _ORDER_FIELDS
            if state[name] != getattr(self, name)
        ]
        if (name != order) != (self.packing == "whole_documents"):
            changed.append(
                f"data.packing = {self.packing}, but the checkpoint was made with "
                f"{'whole_documents' if name != order else 'documents or none'}, whose samples are "
                "others; set it back, or start a new run under another run.name"
            )
        if changed:
            raise DataError(changed)
        # Without workers, the DataLoader takes one step of the sampler for each batch and never
        # reads ahead. So the sampler's next step is the whole state.
        self.next_step = state["next_step"]
        self.order = cast(Order, order)
