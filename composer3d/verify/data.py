"""The data of a proof: a small corpus for the real loader, random batches, and reference rules.

``corpus_batch`` and ``reference_learning_rate`` follow the documentation of ``data.Loader`` and
``training.optim.learning_rate``. They share no code with these two, so that a fault in either of
them shows as a difference.
"""

import hashlib
import random
from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction

import numpy as np
import torch

from composer3d.data import Batch, Blend, Corpus
from composer3d.data.loader import number_documents
from composer3d.models.contract import IGNORE_INDEX
from composer3d.recipe.schema import Recipe

# The token that ends a document of a proof's corpus. In a smaller vocabulary, the last token does.
_END_OF_DOCUMENT = 2
_ATTEMPTS = 100  # to draw a text that can be validated on


def shorten_run(recipe: Recipe, steps: int) -> Recipe:
    """Return the recipe of a run of ``steps`` steps, at least 3, in which no value hides a fault.

    - A warmup takes two steps. The decay ends in the last of the steps, so three steps already show
      the schedule. If the recipe sets ``optim.decay``, the run has one more step after the decay.
    - ``min_lr`` is not 0, but a tenth of ``lr``.
    - ``data.seed`` is not 0, because 0 is the seed of validation. Validation takes two batches.
    """
    optim = recipe.optim
    total_steps = max(3, steps)
    short_optim = replace(
        optim,
        warmup=2 if optim.warmup else 0,
        decay=None if optim.decay is None else total_steps,
        decay_steps=None if optim.decay_steps is None else min(2, optim.decay_steps),
        min_lr=optim.lr / 10,
    )
    # If the recipe sets the end of the decay, the proof must tell this end from that of the run.
    run_steps = total_steps if optim.decay is None else total_steps + 1
    return replace(
        recipe,
        optim=short_optim,
        run=replace(recipe.run, steps=run_steps),
        data=replace(recipe.data, seed=recipe.data.seed or 1),
        validation=replace(recipe.validation, steps=2),
    )


def has_random_batch(step: int) -> bool:
    """Return whether ``step``, counted from 0, trains on a random batch instead of the corpus.

    Every second step does. The first step does not, so every proof has a batch of the corpus.
    """
    return step % 2 == 1


def reference_max_norm(recipe: Recipe, step: int) -> float:
    """Return the largest gradient norm after clipping in a step; 0 if the recipe does not clip.

    For a random batch it is far above the norm of any gradient. Such a step shows that clipping
    leaves smaller gradients unchanged.
    """
    return recipe.optim.clip * (1e9 if has_random_batch(step) else 1.0)


def reference_learning_rate(recipe: Recipe, step: int) -> float:
    """Return the learning rate of ``step``, counted from 0, by the documented rule of training."""
    optim, number = recipe.optim, step + 1
    if number <= optim.warmup:
        return optim.lr * number / optim.warmup
    if optim.schedule == "constant":
        return optim.lr

    end = recipe.run.steps if optim.decay is None else optim.decay
    decay_steps = end - optim.warmup
    if optim.schedule == "wsd":
        tenth = max(1, end // 10)
        decay_steps = min(decay_steps, tenth if optim.decay_steps is None else optim.decay_steps)

    remaining = min(1.0, max(0, end - number) / max(1, decay_steps))  # fraction of the decay
    if optim.schedule == "cosine":
        remaining = float(np.sin(np.pi / 2 * remaining)) ** 2
    return optim.min_lr * (1 - remaining) + optim.lr * remaining


def make_training_data(recipe: Recipe) -> Corpus | Blend:
    """Make the text that a proof trains on: a blend of several, if the recipe has data.sources.

    Token files may say which tokens are learned. So with ``data.source = "tokens"``, the text has a
    mask, and of a blend every second one. The text of the validation has none.
    """
    sources = recipe.data.sources
    corpora = [make_corpus(recipe, "train")]
    for number in range(1, len(sources or (None,))):
        corpora.append(_draw_corpus(recipe, "train", f"source {number} of a proof"))
    if recipe.data.source == "tokens":
        generator = np.random.default_rng(5)
        corpora[::2] = [
            replace(corpus, mask=(generator.random(len(corpus.tokens)) < 0.75).astype(np.uint8))
            for corpus in corpora[::2]
        ]
    if sources is None:
        return corpora[0]
    return Blend(tuple(corpora), tuple(source.weight for source in sources))


def make_corpus(recipe: Recipe, split: str) -> Corpus:
    """Make a text of random tokens, in documents of uneven lengths.

    A document has up to 2.5 times seq_len tokens. An epoch has 1.5 times as many samples as a
    global batch (rounded up), but at least 3. So with a global batch above 1, the second batch
    reaches into the second epoch. Which samples the two batches share depends on the seed. The last
    tokens of the text do not fill a sample. Samples of whole documents are more, as some are not
    full. At least one token of the validation has a label: without any, training refuses the text.

    Args:
        recipe: its tables ``[data]`` and ``[validation]`` and ``model.vocab`` are used.
        split: "train" or "validation". Each split has a text of its own.
    """
    corpus = _draw_corpus(recipe, split, f"{split} of a proof")
    for attempt in range(2, _ATTEMPTS):
        # In short samples, each token can be the last one of its document.
        if split == "train" or _validates(recipe, corpus):
            break
        corpus = _draw_corpus(recipe, split, f"{split} of a proof, attempt {attempt}")
    return corpus


def _validates(recipe: Recipe, corpus: Corpus) -> bool:
    """Return whether a token of the batches of a validation has a label."""
    return any(
        bool((corpus_batch(recipe, corpus, seed=0, step=step).labels_BT != IGNORE_INDEX).any())
        for step in range(recipe.validation.steps)
    )


def _draw_corpus(recipe: Recipe, split: str, seed: str) -> Corpus:
    """Make the text of ``make_corpus`` from the random numbers of one seed."""
    length, vocab = recipe.data.seq_len, recipe.model.vocab
    generator = random.Random(seed)
    samples = max(3, recipe.data.global_batch + (recipe.data.global_batch + 1) // 2)
    sizes: tuple[int, ...] = (1, 2, 3, length // 3, length - 1, length, length + 1, 2 * length + 1)
    if recipe.data.packing == "whole_documents":
        # None is short enough to fill the space that the others leave in a sample.
        half = length // 2 + 1
        sizes = (length // 3, half, half, length, 2 * length + half)
    end = min(_END_OF_DOCUMENT, vocab - 1)
    others = [token for token in range(vocab) if token != end] or [end]

    tokens: list[int] = []
    while len(tokens) <= (samples + 1) * length:
        tokens += [*generator.choices(others, k=generator.choice(sizes) - 1), end]
    tokens = tokens[: samples * length + 1 + length // 2]
    return Corpus(
        tokens=np.array(tokens, dtype=np.uint32),
        end_of_document=end,
        digest="",  # only checkpoints compare digests, and a proof has no checkpoint
        n_documents=tokens.count(end),
        name=f"{split} of a proof",
    )


def corpus_batch(recipe: Recipe, data: Corpus | Blend, *, seed: int, step: int) -> Batch:
    """Make the global batch of a step that the loaders of all ranks together must draw.

    An epoch has n samples. Sample g that is taken of a corpus is sample g % n in the order of epoch
    g // n, that of ``sample_at``. Sample i of the corpus starts at token i * seq_len, or is that of
    ``whole_document_samples``; a label is the token that follows, if the corpus learns it. With
    packing, positions start from 0 in each document, and the last token of a document has no label.
    What fills a sample up is a document of end-of-document tokens without labels.

    The next sample of a blend is taken of the corpus with the smallest (2 n + 1) / weight, where n
    samples of it were taken before; of several such corpora, of the first.

    Args:
        recipe: its table ``[data]`` is used.
        data: the tokens.
        seed: the seed of the order of samples.
        step: the step, counted from 0.

    Returns:
        All tensors are int64 of shape (global_batch, seq_len), on the CPU. ``documents_BT`` is None
        without packing.
    """
    length, rows = recipe.data.seq_len, recipe.data.global_batch
    is_packed = recipe.data.packing != "none"
    corpora: Sequence[Corpus]
    if isinstance(data, Blend):
        corpora, weights = data.corpora, [Fraction(str(weight)) for weight in data.weights]
    else:
        corpora, weights = [data], [Fraction(1)]
    spans_of = [_samples(recipe, corpus) for corpus in corpora]
    taken = [0] * len(corpora)
    all_tokens, all_labels, all_positions, all_documents = [], [], [], []

    for global_sample in range((step + 1) * rows):
        times = [(2 * count + 1) / weight for count, weight in zip(taken, weights, strict=True)]
        source = times.index(min(times))
        corpus, spans = corpora[source], spans_of[source]
        epoch, place = divmod(taken[source], len(spans))
        taken[source] += 1
        if global_sample < step * rows:
            continue
        span = spans[sample_at(place, len(spans), seed, epoch)]

        tokens, labels, positions, documents = [], [], [], []
        position = document = 0
        for index in span:
            token = int(corpus.tokens[index])
            ends_document = is_packed and token == corpus.end_of_document
            tokens.append(token)
            is_learned = corpus.mask is None or corpus.mask[index + 1] == 1
            has_label = is_learned and not ends_document
            labels.append(int(corpus.tokens[index + 1]) if has_label else IGNORE_INDEX)
            positions.append(position)
            documents.append(document)
            if ends_document:
                position, document = 0, document + 1
            else:
                position += 1
        n_filling = length - len(span)
        tokens += [data.end_of_document] * n_filling
        labels += [IGNORE_INDEX] * n_filling
        positions += range(n_filling)
        documents += [document] * n_filling

        all_tokens.append(tokens)
        all_labels.append(labels)
        all_positions.append(positions)
        all_documents.append(documents)

    return _with_tokens_ahead(
        Batch(
            tokens_BT=torch.tensor(all_tokens),
            labels_BT=torch.tensor(all_labels),
            positions_BT=torch.tensor(all_positions),
            documents_BT=torch.tensor(all_documents) if is_packed else None,
        ),
        recipe,
    )


def _samples(recipe: Recipe, corpus: Corpus) -> list[list[int]]:
    """Return the tokens of each sample of a corpus, as indices of the corpus."""
    length = recipe.data.seq_len
    if recipe.data.packing == "whole_documents":
        return whole_document_samples(corpus, length)
    n_samples = (len(corpus.tokens) - 1) // length
    return [list(range(sample * length, (sample + 1) * length)) for sample in range(n_samples)]


def _with_tokens_ahead(batch: Batch, recipe: Recipe) -> Batch:
    """Add what multi-token prediction reads: for depth k, the token and the label k further on.

    They count only within the document of a position. Elsewhere the token is 0, without a label.
    """
    depths = recipe.model.mtp_layers
    if not depths:
        return batch
    rows, length = batch.tokens_BT.shape
    ahead = torch.zeros(rows, 2, depths, length, dtype=torch.int64)
    ahead[:, 1] = IGNORE_INDEX
    documents = batch.documents_BT
    for row in range(rows):
        for depth in range(depths):
            for place in range(length - depth - 1):
                further = place + depth + 1
                if documents is None or documents[row, place] == documents[row, further]:
                    ahead[row, 0, depth, place] = batch.tokens_BT[row, further]
                    ahead[row, 1, depth, place] = batch.labels_BT[row, further]
    return batch._replace(ahead_B2KT=ahead)


def whole_document_samples(corpus: Corpus, length: int) -> list[list[int]]:
    """Return the tokens of each sample of whole documents, as indices of the corpus.

    Documents are cut every ``length`` tokens if they are longer. The pieces are taken from the
    longest to the shortest, and in the order of the corpus if they are equal. Each is added to the
    sample with the least space that has enough of it, the first of them if there are several, or
    else to a new one. Tokens after the last end of a document are in no sample.
    """
    pieces, last_end = [], -1
    first = 0
    for index in range(len(corpus.tokens)):
        is_end = int(corpus.tokens[index]) == corpus.end_of_document
        if is_end:
            last_end = index
        if is_end or index + 1 - first == length:
            pieces.append(range(first, index + 1))
            first = index + 1
    pieces = [piece for piece in pieces if piece[-1] <= last_end]

    samples: list[list[int]] = []
    for piece in sorted(pieces, key=len, reverse=True):
        fitting = [sample for sample in samples if len(sample) + len(piece) <= length]
        if fitting:
            max(fitting, key=len).extend(piece)
        else:
            samples.append(list(piece))
    return [sorted(sample) for sample in samples]


def sample_at(place: int, samples: int, seed: int, epoch: int) -> int:
    """Return the sample of the corpus at one place of an epoch, as ``data.order`` defines it.

    A Feistel network of eight rounds permutes the numbers of as many bits as ``samples - 1`` has,
    at least 2. A result that is no sample enters it again. The function of a round is splitmix64
    of one half plus the round's key, which is 8 bytes of BLAKE2b of "SEED/EPOCH".
    """
    digest = hashlib.blake2b(f"{seed}/{epoch}".encode(), digest_size=64).digest()
    bits = max(2, len(f"{samples - 1:b}"))
    halves = [bits - bits // 2, bits // 2]  # the bits of the high half, and of the low one
    number = place
    while True:
        values = [number >> halves[1], number % 2 ** halves[1]]
        for round_number in range(8):
            changed = (round_number + 1) % 2
            mixed = values[1 - changed]
            mixed += int.from_bytes(digest[8 * round_number : 8 * round_number + 8], "little")
            for shift, multiplier in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
                mixed %= 2**64
                mixed = (mixed ^ (mixed >> shift)) * multiplier
            mixed %= 2**64
            values[changed] ^= (mixed ^ (mixed >> 31)) % 2 ** halves[changed]
        number = (values[0] << halves[1]) | values[1]
        if number < samples:
            return number


def random_batch(recipe: Recipe, step: int) -> Batch:
    """Make the random global batch of a step, with a random number of labels in each row.

    One whole micro-batch has no label, or half of the rows if there is only one micro-batch. With
    packing, the numbers of documents differ between rows; one row in four is a single document.

    Args:
        recipe: its ``model.vocab`` and its table ``[data]`` are used.
        step: the step, counted from 0. It seeds the batch.

    Returns:
        All tensors are int64 of shape (global_batch, seq_len), on the CPU. ``documents_BT`` is None
        without packing.
    """
    rows, length = recipe.data.global_batch, recipe.data.seq_len
    generator = torch.Generator().manual_seed(7919 * (step + 1))
    tokens_BT = torch.randint(recipe.model.vocab, (rows, length), generator=generator)
    labels_BT = torch.randint(recipe.model.vocab, (rows, length), generator=generator)

    # The first tokens of each row have no label.
    ignored = torch.randint(max(1, length // 2), (rows, 1), generator=generator)
    labels_BT = labels_BT.masked_fill(torch.arange(length) < ignored, IGNORE_INDEX)
    # Nor has any token of one micro-batch in the middle.
    empty = min(recipe.data.micro_batch, rows // 2)
    first = rows // 2 // max(1, empty) * empty
    labels_BT[first : first + empty] = IGNORE_INDEX
    if recipe.data.packing == "none":
        positions_BT = torch.arange(length).repeat(rows, 1)
        return _with_tokens_ahead(Batch(tokens_BT, labels_BT, positions_BT), recipe)

    # The probability that a token ends a document; rows take the four values in turn.
    chances = torch.tensor([8 / length, 0.4, 2 / length, 0.0])
    ends_BT = torch.rand(rows, length, generator=generator) < chances.repeat(rows)[:rows, None]
    documents_BT, positions_BT = number_documents(ends_BT)
    labels_BT = labels_BT.masked_fill(ends_BT, IGNORE_INDEX)
    if (labels_BT == IGNORE_INDEX).all():
        # Short samples can lose all their labels to the ends of documents, but a loss needs one.
        labels_BT[-1, -1] = tokens_BT[-1, -1]
    batch = Batch(tokens_BT, labels_BT, positions_BT, documents_BT)
    return _with_tokens_ahead(batch, recipe)
