"""The data of a proof: a small corpus for the real loader, random batches, and the rules that both
must follow.

``corpus_batch`` and ``rate`` are written from the documentation of ``data.Loader`` and of
``optim.learning_rate``. They share no code with either, so that a fault of one shows.
"""

import random
from dataclasses import replace

import numpy as np
import torch

from composer3d.data import Batch, Corpus
from composer3d.data.loader import number_documents
from composer3d.models.contract import IGNORE_INDEX
from composer3d.recipe.schema import Recipe

END = 2  # the token that ends a document of a proof's corpus, where the vocabulary has as many


def shorten_run(recipe: Recipe, steps: int) -> Recipe:
    """The recipe of a run of ``steps`` steps, with nothing left at a value that hides a fault.

    The warmup takes two steps, and the decay ends with the last step, or the third: three steps
    have three learning rates. ``min_lr`` is not 0. The order of the training text has another seed
    than that of validation, which is 0.
    """
    optim = recipe.optim
    total = max(3, steps)
    optim = replace(
        optim,
        warmup=2 if optim.warmup else 0,
        decay=None if optim.decay is None else total,
        decay_steps=None if optim.decay_steps is None else min(2, optim.decay_steps),
        min_lr=optim.lr / 10,
    )
    return replace(
        recipe,
        optim=optim,
        # A decay of its own ends before the run does.
        run=replace(recipe.run, steps=total if optim.decay is None else total + 1),
        data=replace(recipe.data, seed=recipe.data.seed or 1),
        validation=replace(recipe.validation, steps=2),
    )


def has_random_batch(step: int) -> bool:
    """Whether a step has a random batch: every second one. The first is the corpus's, so that every
    proof has one.
    """
    return step % 2 == 1


def reference_max_norm(recipe: Recipe, step: int) -> float:
    """What the gradient norm of a step is clipped to; far above any norm where the batch is random,
    so that clipping is seen to leave smaller gradients alone.
    """
    return recipe.optim.clip * (1e9 if has_random_batch(step) else 1.0)


def reference_learning_rate(recipe: Recipe, step: int) -> float:
    """The learning rate of ``step``, counted from 0, by the text of the keys of ``[optim]``."""
    optim, number = recipe.optim, step + 1
    if number <= optim.warmup:
        return optim.lr * number / optim.warmup
    if optim.schedule == "constant":
        return optim.lr
    end = recipe.run.steps if optim.decay is None else optim.decay
    falling = end - optim.warmup
    if optim.schedule == "wsd":
        tenth = max(1, end // 10)
        falling = min(falling, tenth if optim.decay_steps is None else optim.decay_steps)
    left = min(
        1.0, max(0, end - number) / max(1, falling)
    )  # part of the decay that is still to come
    if optim.schedule == "cosine":
        left = float(np.sin(np.pi / 2 * left)) ** 2
    return optim.min_lr * (1 - left) + optim.lr * left


def make_corpus(recipe: Recipe, split: str) -> Corpus:
    """A text of random tokens in documents of uneven lengths; another one for each ``split``.

    Documents have 1 token to more than two rows. One epoch is half as many samples again as a
    global batch: the second batch begins the second epoch, and two take some samples twice, which
    depend on the seed. The last tokens make no whole sample.
    """
    length, vocab = recipe.data.seq_len, recipe.model.vocab
    generator = random.Random(f"{split} of a proof")
    samples = max(3, recipe.data.global_batch + (recipe.data.global_batch + 1) // 2)
    sizes = (1, 2, 3, length // 3, length - 1, length, length + 1, 2 * length + 1)
    end = min(END, vocab - 1)
    others = [token for token in range(vocab) if token != end] or [end]
    tokens: list[int] = []
    while len(tokens) <= (samples + 1) * length:
        tokens += [*generator.choices(others, k=generator.choice(sizes) - 1), end]
    tokens = tokens[: samples * length + 1 + length // 2]
    # The digest tells checkpoints of other data, of which a proof has none.
    return Corpus(
        np.array(tokens, dtype=np.uint32), end, "", tokens.count(end), f"{split} of a proof"
    )


def corpus_batch(recipe: Recipe, corpus: Corpus, *, seed: int, step: int) -> Batch:
    """The whole global batch that the loaders of all ranks must make of ``corpus`` in ``step``.

    Global sample g is number g % n of epoch g // n, where n samples make an epoch. Sample i holds
    the tokens from i * seq_len on; a label is the token that follows. With packing, positions begin
    anew in each document, and the last token of a document has no label.
    """
    length, rows, split = (
        recipe.data.seq_len,
        recipe.data.global_batch,
        recipe.data.packing == "documents",
    )
    samples = (len(corpus.tokens) - 1) // length
    made: dict[str, list[list[int]]] = {
        "tokens": [],
        "labels": [],
        "positions": [],
        "documents": [],
    }
    for number in range(step * rows, (step + 1) * rows):
        epoch, place = divmod(number, samples)
        order = np.random.Generator(
            np.random.PCG64(np.random.SeedSequence([seed, epoch]))
        ).permutation(samples)
        first = int(order[place]) * length
        for part in made.values():
            part.append([])
        position = document = 0
        for at in range(first, first + length):
            token, following = int(corpus.tokens[at]), int(corpus.tokens[at + 1])
            ends = split and token == corpus.end_of_document
            values = (token, IGNORE_INDEX if ends else following, position, document)
            for part, value in zip(made.values(), values, strict=True):
                part[-1].append(value)
            position, document = (0, document + 1) if ends else (position + 1, document)
    tokens_BT, labels_BT, positions_BT, documents_BT = (
        torch.tensor(part) for part in made.values()
    )
    return Batch(tokens_BT, labels_BT, positions_BT, documents_BT if split else None)


def random_batch(recipe: Recipe, step: int) -> Batch:
    """The global batch of a step: random tokens, and labels of which a different number counts in
    every row.

    None counts in a whole micro-batch, or in half the rows where there is no other micro-batch.
    With packing, a row holds documents of its own, a few or many; one row in four is a single
    document.
    """
    rows, length = recipe.data.global_batch, recipe.data.seq_len
    generator = torch.Generator().manual_seed(7919 * (step + 1))
    tokens_BT = torch.randint(recipe.model.vocab, (rows, length), generator=generator)
    labels_BT = torch.randint(recipe.model.vocab, (rows, length), generator=generator)
    ignored = torch.randint(max(1, length // 2), (rows, 1), generator=generator)
    labels_BT = labels_BT.masked_fill(torch.arange(length) < ignored, IGNORE_INDEX)
    empty = min(recipe.data.micro_batch, rows // 2)
    first = rows // 2 // max(1, empty) * empty
    labels_BT[first : first + empty] = IGNORE_INDEX
    if recipe.data.packing == "none":
        return Batch(tokens_BT, labels_BT, torch.arange(length).repeat(rows, 1))
    chances = torch.tensor([8 / length, 0.4, 2 / length, 0.0])
    ends_BT = torch.rand(rows, length, generator=generator) < chances.repeat(rows)[:rows, None]
    documents_BT, positions_BT = number_documents(ends_BT)
    labels_BT = labels_BT.masked_fill(ends_BT, IGNORE_INDEX)
    if (labels_BT == IGNORE_INDEX).all():  # of samples of one token: a loss needs a label
        labels_BT[-1, -1] = tokens_BT[-1, -1]
    return Batch(tokens_BT, labels_BT, positions_BT, documents_BT)
