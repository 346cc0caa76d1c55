"""The loss of a checkpoint's model on a whole folder of token files, on any layout.

The model is composed as for training, and a batch is evaluated as in its validations. So all
layouts compute the same loss.
"""

import math
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from composer3d.convert.start import read_shards
from composer3d.data import Batch, Corpus
from composer3d.data.loader import number_documents
from composer3d.data.tokens import ShardedTokens, open_tokens, read_together
from composer3d.facts.errors import CheckpointError, DataError
from composer3d.facts.ranges import MOST_TOKENS
from composer3d.facts.remote import place_of
from composer3d.facts.token_manifest import TOKENIZER, TokenManifest, read_manifest
from composer3d.facts.tokenizer_file import is_same
from composer3d.facts.toml import TomlError, parse_toml
from composer3d.generate.load import Checkpoint, open_checkpoint
from composer3d.models.contract import IGNORE_INDEX, Constant, ShardingPlan
from composer3d.recipe.schema import Recipe
from composer3d.recipe.tokenizers import tokenizer_of
from composer3d.runtime import log, process_group
from composer3d.runtime.mesh import Mesh
from composer3d.training.batches import owned_ranges_of
from composer3d.training.build import build_stages
from composer3d.training.validation import evaluate_batch

Packing = Literal["none", "documents"]

_USUAL_SEQ_LEN = 2048
_PROGRESS_S = 30.0
_BLOCK_TOKENS = 1 << 20


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """What ``evaluate`` has computed.

    Attributes:
        loss: the mean over all predicted tokens, in nats.
        perplexity: exp(loss); None if it is too large for a float.
        tokens: the number of predicted tokens.
        windows: the number of sequences.
        seconds: the time of the calls of the model, without loading.
        tokens_per_s: the speed of all ranks together. As in training, all tokens of the sequences
            count: also those that fill the last one up, and those whose next one is not predicted.
    """

    loss: float
    perplexity: float | None
    tokens: int
    windows: int
    seconds: float
    tokens_per_s: float

    def as_values(self) -> dict[str, Any]:
        """Return the fields as values that JSON can represent."""
        return asdict(self)


@dataclass(frozen=True, kw_only=True)
class Windows:
    """How the tokens are cut into sequences.

    Attributes:
        seq_len: the length of a sequence.
        packing: "documents": attention and positions restart at each document, and the first token
            of a document is not predicted; "none": a sequence is one text.
    """

    seq_len: int
    packing: Packing


def default_windows(checkpoint: Checkpoint) -> Windows:
    """Return the windows with which the model was trained, or 2048 tokens if its files do not say.

    The recipe in a manifest is untrusted: only these two values are taken from it.
    """
    seq_len, packing = min(_USUAL_SEQ_LEN, checkpoint.longest or _USUAL_SEQ_LEN), "none"
    try:
        data = parse_toml(checkpoint.source.manifest.recipe).get("data")
    except TomlError:
        data = None
    if isinstance(data, dict):
        trained, most = data.get("seq_len"), checkpoint.longest or MOST_TOKENS
        if type(trained) is int and 0 < trained <= most:
            seq_len = trained
        if data.get("packing") in ("documents", "whole_documents"):
            packing = "documents"
    return Windows(seq_len=seq_len, packing="documents" if packing == "documents" else "none")


def check_data(checkpoint: Checkpoint, folder: str, windows: Windows) -> list[str]:
    """Check that the model can read a folder of token files.

    Returns:
        Notes for the user, one line each: whether another tokenizer made the tokens.

    Raises:
        DataError: the folder cannot be used, or has tokens that the model does not have; or its
            windows are longer than the model's longest sequence.
    """
    manifest = read_manifest(folder)
    vocab, longest = checkpoint.shape.vocab, checkpoint.longest
    if manifest.vocab > vocab:
        raise DataError(
            f"{folder} has a vocabulary of {manifest.vocab} tokens, more than the {vocab} of the "
            "model; prepare the text with the tokenizer of the model"
        )
    if longest is not None and windows.seq_len > longest:
        raise DataError(
            f"--seq-len {windows.seq_len}: the longest sequence of the model has {longest} tokens; "
            "use a smaller number"
        )
    if manifest.tokens < 2:
        raise DataError(f"{folder} has {manifest.tokens} token: nothing follows it to predict")
    return _notes_on_tokenizer(checkpoint, manifest)


def _notes_on_tokenizer(checkpoint: Checkpoint, manifest: TokenManifest) -> list[str]:
    own = checkpoint.source.carried.get(TOKENIZER)
    if own is None:
        return []
    if is_same(tokenizer_of(manifest), own):
        return []
    return [
        f"{manifest.folder} was made with {manifest.tokenizer_name}, whose content is not that of "
        f"the {TOKENIZER} in {checkpoint.source.path}: a loss of other tokens says nothing"
    ]


def evaluate(recipe: Recipe, device: torch.device, src: str, own: Recipe | None) -> Evaluation:
    """Evaluate all tokens of ``data.path`` once, as one rank. Collective over all ranks.

    Args:
        recipe: gives the layout, and in [data] the tokens, the windows and the batch.
        device: the device of this rank.
        src, own: the checkpoint and the recipe for ``open_checkpoint``.

    Returns:
        The result, the same on all ranks.

    Raises:
        UserError: the checkpoint or the data cannot be used.
        DataError: no token is learned.
        CheckpointError: the loss is not finite.
    """
    mesh = Mesh.build(recipe.mesh, device)
    checkpoint = process_group.on_all("SRC", lambda: open_checkpoint(Path(src), own))
    # Two ranks could have loaded two commits from the Hub, each into a folder of its name.
    process_group.check_same("SRC", {"folder": Path(src).name})
    folder = place_of(str(recipe.data.path))
    corpus = process_group.on_all("DATA", lambda: open_tokens(folder, name=str(folder)))
    process_group.check_same("DATA", {"digest": corpus.digest})
    stages = build_stages(recipe, mesh, change_plan=_without_random_weights)
    parameters = dict(stages.named_parameters())
    process_group.on_all("the weights", lambda: read_shards(checkpoint.source, parameters))

    batches = _Batches(recipe, mesh, corpus)
    expected = batches.predicted_tokens()
    if expected == 0:
        raise DataError(f"{folder} has no token that is learned after another one; give other text")
    started_s = shown_s = time.perf_counter()
    loss = torch.zeros((), dtype=torch.float64, device=device)
    valid = torch.zeros((), dtype=torch.int64, device=device)
    for number in range(len(batches)):
        local_loss, local_valid = evaluate_batch(stages, batches[number])
        loss += local_loss
        valid += local_valid
        if mesh.rank == 0 and time.perf_counter() - shown_s > _PROGRESS_S:
            shown_s = time.perf_counter()
            log.get().info(f"{number + 1} of {len(batches)} batches")
    total, count = mesh.sum_over_world(loss, valid)
    seconds = time.perf_counter() - started_s

    tokens = round(count)
    if tokens != expected:
        raise AssertionError(f"{tokens} tokens are predicted instead of {expected}")
    mean = total / tokens
    if not math.isfinite(mean):
        raise CheckpointError(
            "the loss is not finite; the weights are damaged, or --dtype cannot hold the model's "
            "numbers: use float32"
        )
    return Evaluation(
        loss=mean,
        perplexity=math.exp(mean) if mean < 700 else None,
        tokens=tokens,
        windows=batches.windows,
        seconds=seconds,
        tokens_per_s=batches.windows * recipe.data.seq_len / seconds,
    )


def _without_random_weights(plan: ShardingPlan) -> ShardingPlan:
    """Return the plan with zeros as initial weights, which are replaced and take no time."""
    return replace(plan, init={"*": Constant(0.0)})


class _Batches:
    """The batches of one rank: all windows of a corpus, in order, each once.

    The last window and the last batch are filled up with tokens whose labels are left out.
    """

    def __init__(self, recipe: Recipe, mesh: Mesh, corpus: Corpus) -> None:
        self._corpus, self._data = corpus, recipe.data
        self.windows = -(-(len(corpus.tokens) - 1) // recipe.data.seq_len)
        self._rows = recipe.data.global_batch // mesh.batch_ranks
        self._first_row = mesh.batch_rank * self._rows
        ranges = owned_ranges_of(recipe, mesh)
        self._places = torch.cat([torch.arange(first, first + count) for first, count in ranges])

    def __len__(self) -> int:
        return -(-self.windows // self._data.global_batch)

    def __getitem__(self, number: int) -> Batch:
        first = number * self._data.global_batch + self._first_row
        rows = self._windows(range(first, first + self._rows))
        tokens_BT = torch.stack([torch.from_numpy(tokens) for tokens, _ in rows])
        labels_BT = torch.stack([torch.from_numpy(labels) for _, labels in rows])
        if self._data.packing == "none":
            positions_BT = self._places.repeat(self._rows, 1)
            return Batch(tokens_BT[:, self._places], labels_BT[:, self._places], positions_BT)
        ends_BT = tokens_BT == self._corpus.end_of_document
        documents_BT, positions_BT = number_documents(ends_BT)
        labels_BT = labels_BT.masked_fill(ends_BT, IGNORE_INDEX)
        return Batch(
            tokens_BT[:, self._places],
            labels_BT[:, self._places],
            positions_BT[:, self._places],
            documents_BT,
        )

    def _windows(self, indices: Iterable[int]) -> list[tuple[np.ndarray, np.ndarray]]:
        """Return the tokens and the labels of windows, each int64 of ``seq_len``."""
        corpus, seq_len = self._corpus, self._data.seq_len
        filling = (
            corpus.end_of_document - 1 if corpus.end_of_document else 1
        )  # no end of a document
        begins = [index * seq_len for index in indices]
        # All are read at once: a request to a store may take long.
        bounds = [(begin, min(begin + seq_len + 1, len(corpus.tokens))) for begin in begins]
        places = [np.arange(begin, stop) for begin, stop in bounds]
        requests = [(corpus.tokens, each) for each in places]
        if corpus.mask is not None:
            requests += [(corpus.mask, each) for each in places]
        read = read_together(requests)

        windows = []
        for number, part in enumerate(read[: len(places)]):
            tokens = np.full(seq_len, filling, dtype=np.int64)
            labels = np.full(seq_len, IGNORE_INDEX, dtype=np.int64)
            count = max(len(part) - 1, 0)
            tokens[:count], labels[:count] = part[:count], part[1 : count + 1]
            if corpus.mask is not None:
                is_learned = read[len(places) + number][1 : count + 1] == 1
                labels[:count][~is_learned] = IGNORE_INDEX
            windows.append((tokens, labels))
        return windows

    def predicted_tokens(self) -> int:
        """Return how many labels all windows together have."""
        inputs = len(self._corpus.tokens) - 1
        if self._corpus.mask is not None:
            return self._learned_tokens(self._corpus.mask)
        if self._data.packing == "none":
            return inputs
        # Nothing is predicted after the end of a document; the last token is one.
        return inputs - (self._corpus.n_documents - 1)

    def _learned_tokens(self, mask: np.ndarray | ShardedTokens) -> int:
        """Count the labels that the mask leaves, a block of tokens at a time."""
        count = 0
        for first in range(1, len(self._corpus.tokens), _BLOCK_TOKENS):
            places = np.arange(first, min(first + _BLOCK_TOKENS, len(self._corpus.tokens)))
            is_learned = mask[places] == 1
            if self._data.packing == "documents":
                is_learned &= self._corpus.tokens[places - 1] != self._corpus.end_of_document
            count += int(is_learned.sum())
        return count
